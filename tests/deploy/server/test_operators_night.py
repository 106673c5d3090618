"""What an operator meets at night: ghosts, pending decisions, stale reach, slips of the pen, files that are none."""

import json
import os
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from network_builders import Network, a_deployment, coordinator, devices, live, settle, values

from fedbandit.core.errors import DataError, FedbanditError
from fedbandit.deploy.server import operator
from fedbandit.deploy.server.server_status import Watch, facts_of, noting_the_end, read_live
from fedbandit.deploy.server.status import (
    PrometheusCollector,
    full_status,
    nodes_table,
    read_status,
    status_lines,
)
from fedbandit.deploy.server.store import Store

ROOT = Path(__file__).parents[3]


@pytest.fixture
def night(tmp_path):
    """A deployment of three devices that deploys every round, watched, after three rounds."""
    deployment = a_deployment(tmp_path, values() | {"rounds": 50, "deploy_every": 1})
    network = Network(devices(tmp_path, 3))
    settle(deployment, network.participants)
    store = Store(deployment.folder)
    watch = Watch(deployment.folder, facts_of(deployment))
    server = coordinator(deployment, network, store, watch=watch)
    for number in range(3):
        server.attempt()
        for participant in network.participants.values():
            live(participant, events=2, seed=number)
    yield deployment, network, server
    store.close()


def families(folder):
    pytest.importorskip("prometheus_client")
    found = {}
    for family in PrometheusCollector(folder).collect():
        for sample in family.samples:
            found[sample.name, *sample.labels.values()] = sample.value
    return found


def test_devices_that_start_again_leave_no_ghosts(night):
    """Without keys each start is another node: five devices were 20 rows."""
    deployment, network, server = night
    for start in range(1, 5):
        network.participants = {
            1000 * start + node % 100: participant
            for node, participant in network.participants.items()
        }
        server.attempt()
    assert len(nodes_table(deployment.folder)) == 1 + 3
    network.participants[7777] = network.participants.pop(4000)
    network.unreachable = {4001, 4002}
    server.attempt()
    rows = nodes_table(deployment.folder)[1:]
    assert sorted(row.split()[-1] for row in rows) == ["away", "away", "reach"]


def test_a_rollback_that_waits_is_shown_and_unpin_gives_it_up(night):
    deployment, _, server = night
    folder = deployment.folder
    operator.ask_rollback(folder, 1)
    assert read_status(folder)["pending"] == ["going back to model 1, at the next round"]
    assert operator.pin(folder, 2)
    found = full_status(folder)
    assert found["pending"] == ["going back to model 2, at the next round"]
    assert "pending        going back to model 2, at the next round" in status_lines(found)
    assert families(folder)["fedbandit_pending_decisions",] == 1.0
    assert operator.unpin(folder) == 2
    assert (read_status(folder)["pending"], read_status(folder)["rollback_asked"]) == ([], None)
    version = server.version
    server.attempt()
    assert server.version == version + 1
    assert read_status(folder)["versions"][-1]["why"] == "trained"


def test_a_pin_of_the_model_in_use_gives_up_a_rollback(night):
    deployment, _, server = night
    operator.ask_rollback(deployment.folder, 1)
    assert not operator.pin(deployment.folder, server.version)
    assert read_status(deployment.folder)["pending"] == []


def test_a_rollback_of_the_operators_own_outlives_an_unpin(night):
    deployment, _, _ = night
    operator.ask_rollback(deployment.folder, 1)
    assert operator.unpin(deployment.folder) is None
    assert read_status(deployment.folder)["rollback_asked"] == 1


def test_nobody_is_in_reach_of_a_server_that_was_stopped(night):
    deployment, _, server = night
    with noting_the_end(deployment.folder):
        server.attempt()
    view = read_live(deployment.folder)
    found = full_status(deployment.folder, view["since"] + 900)
    assert found["live"]["in_reach"] == 0
    assert not any(node["in_reach"] for node in found["live"]["nodes"])
    assert found["warnings"]["stopped"].startswith("the server was stopped 15 min ago")
    assert families(deployment.folder)["fedbandit_nodes_in_reach",] == 0.0


def test_an_unknown_node_is_not_revoked(night):
    deployment, _, server = night
    for unknown in ("12345", "nobody"):
        with pytest.raises(DataError, match=f"no node or device {unknown} is known"):
            operator.revoke(deployment.folder, unknown)
    operator.revoke(deployment.folder, "101")
    operator.revoke(deployment.folder, server._gathering.devices[102])
    assert server.attempt()["clients"] == 1
    with pytest.raises(DataError, match="100 is not revoked; revoked are 101"):
        operator.revoke(deployment.folder, "100", undo=True)
    operator.revoke(deployment.folder, "101", undo=True)
    assert server.attempt()["clients"] == 2


def test_rewards_in_total_and_by_version_and_bytes_are_shown(night):
    deployment, network, _ = night
    found, status = families(deployment.folder), full_status(deployment.folder)
    total = status["reward"]["total"]
    assert total["events"] == found["fedbandit_events_rewarded",] == 18 + 6 + 6
    assert total["rewards"] == pytest.approx(found["fedbandit_reward_total",])
    for version, mean in status["reward"]["by_version"].items():
        if mean is not None:
            assert found["fedbandit_version_reward", str(version)] == pytest.approx(mean)
    sent = sum(sum(a.nbytes for a in request.arrays.values()) for request in network.sent)
    assert found["fedbandit_bytes_sent_total",] == status["live"]["bytes"]["sent"] == sent
    assert found["fedbandit_bytes_received_total",] == 3 * 3 * 24 * 4
    assert found["fedbandit_running_reward",] == pytest.approx(status["reward"]["running"])


def test_the_example_of_a_dashboard_shows_what_is_there(night):
    deployment, _, _ = night
    board = json.loads((ROOT / "examples" / "dashboard" / "grafana.json").read_text())
    shown = set(re.findall(r"fedbandit_\w+", json.dumps([p["targets"] for p in board["panels"]])))
    names = {key[0] for key in families(deployment.folder)}
    names |= {"fedbandit_refused_total", "fedbandit_warning", "fedbandit_epsilon"}
    assert shown <= names
    assert {"fedbandit_running_reward", "fedbandit_version_reward", "fedbandit_warning"} <= shown


@pytest.mark.parametrize(
    ("given", "warned"),
    [
        ({}, True),
        ({"aggregation": {"name": "mean"}}, False),
        ({"aggregation": {"name": "trimmed-mean"}}, False),
        ({"deployment": values(secure_aggregation=True, min_reports=3)["deployment"]}, False),
    ],
)
def test_a_mean_that_anybody_may_join_is_warned_of_until_somebody_decides(
    tmp_path, caplog, given, warned
):
    deployment = a_deployment(tmp_path, values() | given)
    watch = Watch(deployment.folder, facts_of(deployment))
    coordinator(deployment, Network({}), watch=watch).attempt()
    assert ("can plant a backdoor" in caplog.text) == warned
    shown = "\n".join(status_lines(full_status(deployment.folder)))
    assert ("warning        anybody may join" in shown) == warned


def test_registered_nodes_are_not_anybody(tmp_path):
    deployment = a_deployment(tmp_path)
    deployment.folder.mkdir()
    assert operator.is_open(deployment)
    (deployment.folder / operator.ROSTER).write_text("ssh-ed25519 AAAA node 1 node=101\n")
    assert not operator.is_open(deployment)


# ---- rows and files that are not what was written


def rounds(deployment, network, number):
    store = Store(deployment.folder)
    try:
        coordinator(deployment, network, store).run(attempts=number)
    finally:
        store.close()


@pytest.fixture
def stopped(tmp_path):
    deployment = a_deployment(tmp_path, values() | {"rounds": 9})
    network = Network(devices(tmp_path, 3))
    settle(deployment, network.participants)
    rounds(deployment, network, 1)
    return deployment, network


@pytest.mark.parametrize(
    "mutation",
    [
        "DELETE FROM devices",
        "DELETE FROM devices WHERE name = (SELECT max(name) FROM devices)",
        "UPDATE devices SET name = 'another' WHERE name = (SELECT max(name) FROM devices)",
        "UPDATE devices SET name = substr(name, 2) || 'x'",
        "INSERT INTO devices VALUES ('one more', 0, 1, NULL, 0)",
        "DELETE FROM generations",
        "UPDATE generations SET facts = '{}'",
        "DROP TABLE devices",
        "DROP TABLE nodes",
    ],
)
def test_rows_that_go_missing_are_noticed_in_one_line(stopped, mutation):
    """Otherwise their rewards would be counted twice: 18 events became 24 or 36."""
    deployment, network = stopped
    with closing(sqlite3.connect(deployment.folder / "server.sqlite")) as db, db:
        db.execute(mutation)
    with pytest.raises(DataError, match=r"server\.sqlite: damaged") as raised:
        rounds(deployment, network, 1)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("kind", ["folder", "pipe", "endless"])
@pytest.mark.parametrize(
    "name",
    [
        "server.sqlite",
        "state-2.safetensors",
        "metrics.jsonl",
        "models/model-0.safetensors",
        "models",
        "lock",
        "rollback.json",
        "operator.json",
        "roster.pub",
        "live.json",
    ],
)
def test_what_is_no_file_is_one_line_or_does_not_matter(stopped, name, kind):
    deployment, network = stopped
    path = deployment.folder / name
    if path.is_dir():
        for inside in path.iterdir():
            inside.unlink()
        path.rmdir()
    path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    said = []
    uses = (read_status, full_status, operator.pause)
    for use in (lambda _: rounds(deployment, network, 1), *uses):
        try:
            use(deployment.folder)
        except FedbanditError as problem:
            said.append(str(problem))
    assert not any("\n" in line for line in said)
