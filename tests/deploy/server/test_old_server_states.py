"""States that 0.1 and the format after it have written: migrated once, whatever is killed meanwhile, and continued.

`old_states` holds what those versions wrote after three rounds of `DEPLOYMENTS` with three devices.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest
from network_builders import Network, a_deployment, devices, settle, values
from server_faults import Faults, Killed, serve

from fedbandit.core.errors import DataError
from fedbandit.deploy.server.database import Mark
from fedbandit.deploy.server.ledger import read_ledger
from fedbandit.deploy.server.store import Store, read_status
from fedbandit.federated.state import DamagedState, load_state

OLD = Path(__file__).parent / "old_states"
BASE = {"rounds": 6, "server": {"optimizer": "adam", "learning_rate": 0.05}}
BANDED = {"mechanism": "banded-mf", "epsilon": 50.0, "separation": 3, "delta": 1e-5}
TREE = {"mechanism": "dp-ftrl", "noise_multiplier": 1.0, "separation": 2}
DEPLOYMENTS = {
    "plain": {**values(), **BASE},
    "banded": {**values(population=6), **BASE, "clients_per_round": 2, "privacy": BANDED},
    "tree": {**values(population=6), **BASE, "clients_per_round": 2, "privacy": TREE},
}
ALL = [(name, version) for name in DEPLOYMENTS for version in ("0.1", "0.2")]


def with_old_state(folder, name, version):
    deployment = a_deployment(folder, DEPLOYMENTS[name])
    deployment.folder.mkdir(parents=True)
    shutil.copy(OLD / f"{name}-{version}.safetensors", deployment.folder / "state.safetensors")
    return deployment


def network_of(folder, deployment):
    network = Network(devices(folder, 2))
    settle(deployment, network.participants)
    return network


def loaded(deployment):
    store = Store(deployment.folder)
    try:
        kept = store.load()
        names = load_state(OLD / "plain-0.1.safetensors").extra["counted"]
        return kept, store.marks(names)
    finally:
        store.close()


@pytest.mark.parametrize(("name", "version"), ALL)
def test_an_old_state_is_migrated_whole(tmp_path, name, version):
    deployment = with_old_state(tmp_path, name, version)
    old = load_state(deployment.folder / "state.safetensors")
    seen = read_status(deployment.folder)  # before anything is migrated
    store = Store(deployment.folder)
    kept = store.load()
    marks = store.marks(old.extra["last_turn"])
    store.close()
    assert (kept.state.round, kept.state.events, sorted(kept.state.deployed)) == (
        3,
        old.events,
        [0, 1],
    )
    np.testing.assert_array_equal(kept.state.weights, old.weights)
    noise = {
        int(k.removeprefix("noise/")): v for k, v in old.kept.items() if k.startswith("noise/")
    }
    assert set(kept.memory) == set(noise)
    assert all(np.array_equal(kept.memory[at], noise[at]) for at in noise)
    assert bool(noise) == (name != "plain")
    for key, value in kept.state.kept.items():
        np.testing.assert_array_equal(value, old.kept[key])
    turns, counted = old.extra["last_turn"], old.extra["counted"]
    assert marks == {device: Mark(counted[device], turns[device]) for device in turns}
    assert read_status(deployment.folder) == seen
    assert seen["devices"] == (3 if name == "plain" else None)
    spent = read_ledger(deployment.folder / "ledger.jsonl")
    assert spent is None if name == "plain" else (spent.charged, spent.released) == (3, 3)


@pytest.mark.parametrize(("name", "version"), ALL)
def test_an_old_deployment_goes_on(tmp_path, name, version):
    deployment = with_old_state(tmp_path, name, version)
    server, _ = serve(deployment, network_of(tmp_path, deployment), Faults(deployment.folder))
    assert server.state.round == server.deployment.rounds == 6
    assert server.state.extra["versions"][-1]["version"] == 3


def test_an_older_fedbandit_refuses_what_was_migrated(tmp_path):
    deployment = with_old_state(tmp_path, "plain", "0.1")
    loaded(deployment)
    with pytest.raises(
        DamagedState
    ):  # which is what older versions say of any file that they cannot read
        load_state(deployment.folder / "state.safetensors")
    kept = deployment.folder / "migrated-state.safetensors"
    assert kept.read_bytes() == (OLD / "plain-0.1.safetensors").read_bytes()


def test_an_old_state_beside_a_new_one_is_refused(tmp_path):
    deployment = with_old_state(tmp_path, "plain", "0.1")
    loaded(deployment)
    shutil.copy(OLD / "plain-0.2.safetensors", deployment.folder / "state.safetensors")
    with pytest.raises(DataError, match="another state than the one that was migrated"):
        loaded(deployment)


def test_a_migrated_folder_without_its_database_is_refused(tmp_path):
    deployment = with_old_state(tmp_path, "plain", "0.1")
    loaded(deployment)
    (deployment.folder / "server.sqlite").unlink()
    with pytest.raises(DataError, match=r"server.sqlite is missing, but state.safetensors is here"):
        loaded(deployment)


def test_a_damaged_old_state_is_refused_and_stays(tmp_path):
    deployment = with_old_state(tmp_path, "plain", "0.2")
    path = deployment.folder / "state.safetensors"
    payload = bytearray(path.read_bytes())
    payload[-1] ^= 1
    path.write_bytes(payload)
    with pytest.raises(DataError, match="damaged checkpoint"):
        loaded(deployment)
    assert path.read_bytes() == bytes(payload)
    assert not (deployment.folder / "server.sqlite").exists()


@pytest.mark.parametrize("kind", ["kill", "error"])
@pytest.mark.parametrize("name", ["plain", "banded"])
def test_a_migration_is_killed_at_every_operation(tmp_path, name, kind):
    expected, at = None, 0
    while True:
        folder = tmp_path / f"{at}"
        deployment = with_old_state(folder, name, "0.1")
        faults = Faults(deployment.folder, at or None, kind)
        failed = False
        with faults.installed():
            try:
                loaded(deployment)
            except (Killed, OSError, DataError):
                failed = True
                faults.dead = False
            kept, marks = loaded(deployment)
        assert failed == bool(at)
        spent = read_ledger(deployment.folder / "ledger.jsonl")
        found = (kept.state.weights.tobytes(), kept.state.extra, sorted(kept.memory), marks, spent)
        expected = expected or found
        assert found == expected, (at, kind, faults.log[at - 1])
        assert (deployment.folder / "migrated-state.safetensors").exists()
        assert at > 0 or faults.count > 20
        shutil.rmtree(folder)
        last = first_load(tmp_path, name)
        if at == last:
            break
        at += 1


def first_load(tmp_path, name):
    """How many operations a migration takes."""
    folder = tmp_path / "counted"
    if not folder.exists():
        deployment = with_old_state(folder, name, "0.1")
        with Faults(deployment.folder).installed() as faults:
            loaded(deployment)
        (folder / "operations").write_text(str(faults.count))
    return int((folder / "operations").read_text())
