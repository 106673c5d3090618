"""The server's folder when its bytes are wrong: checksums, two generations, a ledger, and refusals in one line."""

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from network_builders import Network, a_deployment, coordinator, devices, live, settle, values
from test_private_deployment import private

from fedbandit.core import files
from fedbandit.core.errors import ConfigError, DataError
from fedbandit.deploy.server.database import Database, Generation, Mark, create
from fedbandit.deploy.server.operator import ask_rollback
from fedbandit.deploy.server.status import in_lines, read_status
from fedbandit.deploy.server.store import Store, read_ledger
from fedbandit.federated.pipeline import norm_or_reason
from fedbandit.privacy.strategies import Banded


def rounds(deployment, network, attempts):
    """Run some rounds and close the folder; the server as it was then."""
    store = Store(deployment.folder)
    try:
        server = coordinator(deployment, network, store)
        server.run(attempts=attempts)
    finally:
        store.close()
    return server


def world(tmp_path, given=None, number=3):
    deployment = given or a_deployment(tmp_path)
    network = Network(devices(tmp_path, number))
    settle(deployment, network.participants)
    return deployment, network


def metrics_of(deployment):
    return [
        json.loads(line) for line in (deployment.folder / "metrics.jsonl").read_text().splitlines()
    ]


def newest(deployment, kind="state"):
    number = Database(deployment.folder / "server.sqlite").generations()[0].number
    return deployment.folder / f"{kind}-{number}.safetensors"


def flip(path, position=-3):
    payload = bytearray(path.read_bytes())
    payload[position] ^= 4
    path.write_bytes(payload)


def contents(folder):
    return {
        path.name: path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "lock"
    }


def one_line(raised):
    assert "\n" not in str(raised.value)
    return str(raised.value)


# ---- two generations


def test_two_generations_are_kept_and_nothing_else(tmp_path):
    deployment, network = world(tmp_path)
    rounds(deployment, network, 4)
    names = sorted(path.name for path in deployment.folder.glob("*.safetensors"))
    assert names == ["state-4.safetensors", "state-5.safetensors"]


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_state_falls_back_and_the_round_stays_counted(tmp_path, caplog, damage):
    deployment, network = world(tmp_path)
    before = rounds(deployment, network, 2).state.weights
    live(network.participants[101], events=5, seed=9)
    rounds(deployment, network, 1)
    path = newest(deployment)
    {"flip": flip, "cut": lambda p: p.write_bytes(p.read_bytes()[:100]), "gone": os.unlink}[damage](
        path
    )
    store = Store(deployment.folder)
    server = coordinator(deployment, network, store)
    assert server.state.round == 3
    np.testing.assert_array_equal(server.state.weights, before)
    said = [record.message for record in caplog.records if "falling back" in record.message]
    assert len(said) == 1
    assert path.name in said[0]
    assert "the step of round 3 is lost" in said[0]
    server.attempt()
    assert [line["events"] for line in metrics_of(deployment)] == [
        18,
        0,
        5,
        0,
    ]  # nothing twice, nothing lost
    store.close()
    damaged = deployment.folder / f"damaged-{path.name}"
    assert damaged.exists() == (damage != "gone")  # set aside, not deleted


def test_a_model_that_was_lost_with_its_state_is_replaced_under_a_new_number(tmp_path):
    deployment, network = world(tmp_path)
    rounds(deployment, network, 2)  # the second deploys model 1, which devices may hold
    flip(newest(deployment))
    store = Store(deployment.folder)
    server = coordinator(deployment, network, store)
    assert sorted(server.state.deployed) == [0, 2]
    np.testing.assert_array_equal(server.state.deployed[2].weights, deployment.initial)
    assert [entry["version"] for entry in server.state.extra["versions"]] == [0, 1, 2]
    server.attempt()
    assert {part.agent.model_version for part in network.participants.values()} == {2}
    store.close()


def test_two_damaged_generations_are_refused(tmp_path):
    deployment, network = world(tmp_path)
    rounds(deployment, network, 2)
    for path in deployment.folder.glob("state-*.safetensors"):
        flip(path)
    kept = contents(deployment.folder)
    with pytest.raises(DataError, match="restore one of them from a copy") as raised:
        coordinator(deployment, network)
    assert "state-3" in one_line(raised)
    assert contents(deployment.folder) == kept


def test_what_cannot_be_read_is_neither_damaged_nor_deleted(tmp_path, monkeypatch):
    deployment, network = world(tmp_path)
    rounds(deployment, network, 2)
    path, kept = newest(deployment), contents(deployment.folder)
    read = files.open_regular

    def out_of_descriptors(self, append=False):
        if self == path:
            raise OSError(24, "Too many open files")
        return read(self, append)

    with monkeypatch.context() as patch:
        patch.setattr(files, "open_regular", out_of_descriptors)
        with pytest.raises(DataError, match="cannot be read: Too many open files"):
            rounds(deployment, network, 1)
    assert contents(deployment.folder) == kept
    assert rounds(deployment, network, 1).state.round == 3


def test_every_bit_of_the_database_that_is_read_is_checked(tmp_path):
    """Whatever is flipped in it: the same state, or one line."""
    deployment, network = world(tmp_path)
    server = rounds(deployment, network, 2)
    path = deployment.folder / "server.sqlite"
    whole = path.read_bytes()
    outcomes = set()
    for position in range(0, len(whole), 151):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        store = Store(deployment.folder)
        try:
            found = store.load().state
            names = {part.answer("ready", {"token": "t", "round": 1, "space": deployment.space}, {})[0]["device"]
                     for part in network.participants.values()}  # fmt: skip
            marks = store.marks(names)
        except DataError as problem:
            outcomes.add("refused" if "\n" not in str(problem) else "refused in many lines")
        else:
            np.testing.assert_array_equal(found.weights, server.state.weights)
            assert found.extra == server.state.extra
            assert all(
                mark.damaged or (mark.counted, mark.turn) == (6, 2) for mark in marks.values()
            )
            outcomes.add("same")
        finally:
            store.close()
    assert outcomes == {"same", "refused"}


def test_a_device_whose_mark_is_damaged_is_named_and_left_out(tmp_path, caplog):
    deployment, network = world(tmp_path)
    rounds(deployment, network, 1)
    with closing(sqlite3.connect(deployment.folder / "server.sqlite")) as db, db:
        (name,) = db.execute("SELECT name FROM devices ORDER BY name LIMIT 1").fetchone()
        db.execute("UPDATE devices SET counted = counted + 64 WHERE name = ?", (name,))
    server = rounds(deployment, network, 1)
    assert server.state.round == 2
    assert metrics_of(deployment)[-1]["refused"] == {"damaged mark": 1}
    assert name in caplog.text


# ---- folders that are not whole


@pytest.mark.parametrize("left", ["metrics.jsonl", "models", "state-3.safetensors"])
def test_a_folder_without_its_database_does_not_start_at_round_0(tmp_path, left):
    deployment, network = world(tmp_path)
    rounds(deployment, network, 2)
    for path in list(deployment.folder.iterdir()):
        if path.is_file() and path.name not in (left, "lock"):
            path.unlink()
    if left != "models":
        for path in (deployment.folder / "models").iterdir():
            path.unlink()
    with pytest.raises(
        DataError, match=r"server.sqlite is missing, but .* this deployment has run before"
    ) as raised:
        coordinator(deployment, network)
    one_line(raised)


def test_a_server_killed_while_it_made_a_new_folder_starts_again(tmp_path, monkeypatch):
    deployment, network = world(tmp_path)
    store = Store(deployment.folder)
    with monkeypatch.context() as patch:
        patch.setattr("fedbandit.deploy.server.database.create", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            coordinator(deployment, network, store)
    store.close()
    assert (deployment.folder / "state-1.safetensors").exists()
    assert rounds(deployment, network, 1).state.round == 1


@pytest.mark.parametrize(
    "line", ["garbage", "[]", '{"round": "x"}', '{"round": 1e999}', "{}", "[" * 100_000]
)
def test_a_garbage_last_line_of_metrics_is_refused_in_one_line(tmp_path, line):
    deployment, network = world(tmp_path)
    rounds(deployment, network, 2)
    path = deployment.folder / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole.splitlines(keepends=True)[0] + line.encode() + b"\n")
    with pytest.raises(DataError, match="its last line is not that of a round") as raised:
        rounds(deployment, network, 1)
    assert len(one_line(raised)) < 400
    with pytest.raises(DataError, match="not that of a round"):
        read_status(deployment.folder)
    path.write_bytes(whole.splitlines(keepends=True)[0])  # as the message says
    rounds(deployment, network, 0)
    assert path.read_bytes() == whole


def test_a_state_older_than_its_metrics_is_refused(tmp_path):
    deployment, network = world(tmp_path)
    rounds(deployment, network, 1)
    kept = contents(deployment.folder)
    rounds(deployment, network, 2)
    for name, payload in kept.items():
        if name.startswith("s"):
            (deployment.folder / name).write_bytes(payload)
    with pytest.raises(DataError, match="goes to round 3, the state only to round 1"):
        rounds(deployment, network, 1)


@pytest.mark.parametrize(
    "text", ['{"version": 1e999}', '{"version": "x"}', "[]", "", "{", '{"version": NaN}']
)
def test_a_damaged_request_for_a_rollback_is_named_once_and_set_aside(tmp_path, caplog, text):
    deployment, network = world(tmp_path)
    rounds(deployment, network, 1)
    (deployment.folder / "rollback.json").write_text(text)
    with pytest.raises(DataError, match="ask for the rollback again"):
        read_status(deployment.folder)
    rounds(deployment, network, 2)
    assert caplog.text.count("ask for the rollback again") == 1
    assert (deployment.folder / "rollback-refused.json").read_text() == text


def test_a_published_model_whose_bytes_changed_is_written_again(tmp_path):
    deployment, network = world(tmp_path)
    rounds(deployment, network, 2)
    path = deployment.folder / "models" / "model-1.safetensors"
    whole = path.read_bytes()
    flip(path)
    rounds(deployment, network, 0)
    assert path.read_bytes() == whole


def test_a_newer_format_is_refused_by_name(tmp_path):
    deployment, network = world(tmp_path)
    rounds(deployment, network, 1)
    with closing(sqlite3.connect(deployment.folder / "server.sqlite")) as db:
        db.execute("PRAGMA user_version = 7")
    kept = contents(deployment.folder)
    for use in (lambda: rounds(deployment, network, 1), lambda: read_status(deployment.folder)):
        with pytest.raises(
            DataError, match="made by a newer fedbandit, format 7; this one reads formats up to 3"
        ):
            use()
    assert contents(deployment.folder) == kept


# ---- private deployments


def a_private(tmp_path, **more):
    deployment = private(tmp_path, rounds=8, **{"population": 4, "sampling": "fixed", **more})
    return world(tmp_path, deployment, number=2)


def test_each_private_round_is_charged_before_it_is_released(tmp_path, monkeypatch):
    deployment, network = a_private(tmp_path)
    rounds(deployment, network, 2)
    assert (
        read_ledger(deployment.folder / "ledger.jsonl").charged,
        metrics_of(deployment)[-1]["round"],
    ) == (2, 2)
    with monkeypatch.context() as patch:
        patch.setattr("fedbandit.deploy.server.database.commit", lambda db: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            rounds(deployment, network, 1)
    spent = read_ledger(deployment.folder / "ledger.jsonl")
    assert (spent.charged, spent.released) == (3, 2)
    assert len(metrics_of(deployment)) == 2
    rounds(deployment, network, 1)
    spent = read_ledger(deployment.folder / "ledger.jsonl")
    assert (spent.charged, spent.released) == (3, 3)


@pytest.mark.parametrize("mechanism", ["dp-fedavg", "dp-ftrl"])
def test_a_private_server_falls_back_where_noise_and_ledger_are_whole(tmp_path, mechanism):
    deployment, network = a_private(tmp_path, mechanism=mechanism)
    rounds(deployment, network, 3)
    flip(newest(deployment))
    server = rounds(deployment, network, 1)
    assert (
        server.state.round == 4
    )  # the lost round stays charged, and the next one is charged as well
    assert metrics_of(deployment)[-1]["epsilon"] == pytest.approx(deployment.ledger.epsilon(4))
    assert read_ledger(deployment.folder / "ledger.jsonl").released == 4


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("noise", "no round is as private as promised"),
        ("ledger", "is gone, and with it what 3 private rounds have spent"),
        ("ledger's line", "line 2: damaged"),
        ("ledger's end", "ends at round 2, the state is of round 3"),
    ],
)
def test_a_private_server_refuses_where_they_are_not(tmp_path, lost, message):
    deployment, network = a_private(tmp_path, mechanism="dp-ftrl")
    rounds(deployment, network, 3)
    flip(newest(deployment))
    ledger = deployment.folder / "ledger.jsonl"
    if lost == "noise":
        flip(newest(deployment, "noise"))
    elif lost == "ledger":
        ledger.unlink()
    elif lost == "ledger's line":
        flip(ledger, position=110)
    else:
        ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:4]))
    kept = contents(deployment.folder)
    with pytest.raises(DataError, match=message) as raised:
        rounds(deployment, network, 1)
    one_line(raised)
    assert contents(deployment.folder) == kept


def test_an_old_copy_of_a_private_state_is_refused(tmp_path):
    deployment, network = a_private(tmp_path)
    rounds(deployment, network, 1)
    kept = contents(deployment.folder)
    rounds(deployment, network, 1)
    for name, payload in kept.items():
        if name.startswith("s") or name == "metrics.jsonl":
            (deployment.folder / name).write_bytes(payload)
    with pytest.raises(DataError, match="round 2 was released, and the state is of round 1"):
        rounds(deployment, network, 1)


@pytest.mark.parametrize(
    "budget", [{"noise_multiplier": 1.0}, {"noise_multiplier": None, "epsilon": 30.0}]
)
def test_a_banded_deployment_resumes_on_another_kind_of_cpu(tmp_path, monkeypatch, budget):
    """There the optimiser comes to slightly different coefficients; the state's own are used."""
    plan = {
        "mechanism": "banded-mf",
        "sampling": "min-separation",
        "separation": 2,
        "clients": 1,
        **budget,
    }
    deployment, network = a_private(tmp_path, **plan)
    first = rounds(deployment, network, 2).deployment.ledger.plan

    def elsewhere(rounds, bands, momentum):
        coefficients = np.array(first.strategy.coefficients) * np.array([1.0, 1.0 + 1e-5])
        return Banded(tuple(coefficients / np.linalg.norm(coefficients)))

    monkeypatch.setattr("fedbandit.assembly.privacy.best_banded", elsewhere)
    other = private(tmp_path, rounds=8, population=4, **plan)
    assert other.ledger.plan != first
    server = rounds(other, network, 2)
    assert server.state.round == 4
    assert server.deployment.ledger.plan == first
    assert metrics_of(deployment)[-1]["epsilon"] == pytest.approx(deployment.ledger.epsilon(4))


@pytest.mark.parametrize(
    "changed", [{"separation": 1}, {"delta": 1e-7}, {"noise_multiplier": 1.001}, {"bands": 1}]
)
def test_another_plan_is_still_refused(tmp_path, changed):
    plan = {"mechanism": "banded-mf", "sampling": "min-separation", "separation": 2, "clients": 1}
    deployment, network = a_private(tmp_path, **plan)
    rounds(deployment, network, 1)
    with pytest.raises(
        ConfigError, match="started with different privacy; use a new folder, which forgets"
    ):
        rounds(private(tmp_path, rounds=8, population=4, **{**plan, **changed}), network, 1)


# ---- many devices


def steps_of(database, use):
    """How many steps SQLite's machine takes, and how many rows change."""
    steps, connect = [], sqlite3.connect
    changes = []

    class Counted(sqlite3.Connection):
        def close(self):
            changes.append(self.total_changes)
            super().close()

    def counting(*args, **kwargs):
        connection = connect(*args, factory=Counted, **kwargs)
        connection.set_progress_handler(lambda: steps.append(1), 1)
        return connection

    sqlite3.connect = counting
    try:
        use(database)
    finally:
        sqlite3.connect = connect
    return len(steps), sum(changes)


def a_round_of_100(database):
    names = [f"device-{17 * i}" for i in range(100)]
    marks = database.marks(names)
    facts = {"devices": 0, "extra": {}}
    last = database.generations()[0].number
    following = {name: Mark(marks[name].counted + 1, 7) for name in names}
    nodes = {17 * i: name for i, name in enumerate(names)}
    database.commit(Generation(last + 1, {}, facts), following, nodes, last, last)


def test_a_rounds_work_does_not_grow_with_the_number_of_devices(tmp_path):
    work = []
    for number in (1_800, 9_000):
        marks = {f"device-{i}": Mark(i, i % 50) for i in range(number)}
        database = create(tmp_path / f"{number}.sqlite", Generation(0, {}, {}))
        database.commit(Generation(1, {}, {"devices": 0}), marks, {}, 0, 1)
        work.append(steps_of(database, a_round_of_100))
    (few_steps, few_rows), (many_steps, many_rows) = work
    assert many_rows == few_rows == 201  # marks, nodes, and one generation
    assert many_steps == few_steps


def test_devices_seen_are_counted_without_counting_rows(tmp_path):
    deployment, network = world(tmp_path)
    rounds(deployment, network, 2)
    assert read_status(deployment.folder)["devices"] == 3


# ---- what is credited to whom


def test_rewards_are_credited_to_the_version_that_made_the_choice(tmp_path):
    deployment, network = world(tmp_path, a_deployment(tmp_path, {**values(), "rounds": 9}))
    server = coordinator(deployment, network)
    server.run(attempts=3)  # model 1 is deployed after round 2, and on the devices in round 3
    earned = sum(
        live(part, events=4, seed=i) for i, part in enumerate(network.participants.values())
    )
    ask_rollback(deployment.folder, 0)
    metrics = server.attempt()  # model 2 is in use by then
    assert metrics["model_version"] == 2
    assert metrics["rewards_by_version"] == {"1": [12, earned]}
    credited = read_status(deployment.folder)["reward"]["by_version"]
    assert credited[1] == pytest.approx(earned / 12)
    assert credited[2] is None
    assert "version 2    after round 3     reward -" in "\n".join(
        in_lines(read_status(deployment.folder))
    )


def test_a_device_that_does_not_say_which_version_chose_is_left_out(tmp_path, caplog):
    deployment, network = world(tmp_path)
    network.faults = {
        node: lambda request, reply: [
            type(reply)(
                reply.ticket,
                {k: v for k, v in reply.facts.items() if k != "by_version"},
                reply.arrays,
            )
        ]
        for node in list(network.participants)[:1]
    }
    metrics = coordinator(deployment, network).attempt()
    assert metrics["rewards_by_version"] == {"0": [12, metrics["reward"] * 12]}
    assert "garbage: by_version: not a list" in caplog.text


def test_each_update_is_measured_once(tmp_path, monkeypatch):
    """However often answers are sorted while the round waits for its goal."""
    deployment = a_deployment(tmp_path, values(report_goal=3, round_seconds=100))
    network = Network(devices(tmp_path, 4))
    settle(deployment, network.participants)
    network.slow = {102: 20.0, 103: 30.0}
    network.faults = {
        101: lambda request, reply: [type(reply)(reply.ticket, {**reply.facts, "token": "old"})]
    }
    measured = []

    def counting(update, like):
        measured.append(1)
        return norm_or_reason(update, like)

    monkeypatch.setattr("fedbandit.deploy.server.gathering.norm_or_reason", counting)
    assert coordinator(deployment, network).attempt()["clients"] == 3
    assert len(measured) == 3


@pytest.mark.slow
def test_the_measurement_in_the_docs_runs():
    script = Path(__file__).parents[3] / "scripts" / "server_marks.py"
    command = [sys.executable, str(script), "--devices", "5000", "--rounds", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == [
        "5,000 devices, 0 MB",
        "a round of 100 reports",
        "opening it, with SQLite's check of the whole file",
    ]
