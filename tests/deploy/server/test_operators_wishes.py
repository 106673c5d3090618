"""Pause, pin, revoke, and the reach that a private round needs: kept in the folder, obeyed at the next round."""

import json
import threading
from dataclasses import replace

import pytest
from network_builders import Network, a_deployment, coordinator, devices, settle, values

from fedbandit.core.errors import ConfigError, DataError
from fedbandit.deploy.server.operator import (
    OperatorRequests,
    ask_rollback,
    change_requests,
    pin,
    read_requests,
)
from fedbandit.deploy.server.status import read_status
from fedbandit.deploy.server.store import Store


@pytest.fixture
def running(tmp_path):
    """A deployment that deploys every round, after its first one."""
    deployment = a_deployment(tmp_path, values() | {"rounds": 20, "deploy_every": 1})
    network = Network(devices(tmp_path, 3))
    settle(deployment, network.participants)
    store = Store(deployment.folder)
    server = coordinator(deployment, network, store)
    server.attempt()
    yield deployment, network, server
    store.close()


def wish(deployment, **wanted):
    return change_requests(deployment.folder, lambda wishes: replace(wishes, **wanted))


def test_a_paused_server_begins_no_round_until_it_is_resumed(running, caplog):
    caplog.set_level("INFO")
    deployment, network, server = running
    wish(deployment, paused=True)
    sent = len(network.sent)
    assert server.attempt() is None
    assert (server.state.round, len(network.sent)) == (1, sent)
    assert "paused by the operator" in caplog.text
    wish(deployment, paused=False)
    assert server.attempt()["round"] == 2


def test_a_pause_survives_a_restart(running):
    deployment, network, server = running
    wish(deployment, paused=True)
    server._store.close()
    again = coordinator(deployment, network)
    assert again.attempt() is None
    again._store.close()


def test_after_a_rollback_a_pinned_model_stays_until_it_is_unpinned(running):
    deployment, _, server = running
    assert server.version == 1
    assert pin(deployment.folder, 0)
    for number in (2, 3):
        metrics = server.attempt()
        assert (metrics["round"], metrics["pinned"], server.version) == (number, 0, 2)
    assert read_status(deployment.folder)["versions"][-1]["why"] == "went back to model 0"
    assert not pin(deployment.folder, 0), "it is in use already, under its new number"
    wish(deployment, pinned=None)
    assert "pinned" not in server.attempt()
    assert server.version == 3


def test_without_a_pin_the_round_after_a_rollback_deploys_a_new_model(running):
    deployment, _, server = running
    ask_rollback(deployment.folder, 0)
    server.attempt()
    assert read_status(deployment.folder)["versions"][-1]["why"] == "trained"


def test_a_pin_during_a_round_holds_for_that_round(running):
    deployment, network, server = running

    def pinned_meanwhile(request, reply):
        pin(deployment.folder, 1)
        return [reply]

    network.faults = {101: pinned_meanwhile}
    assert server.attempt()["pinned"] == 1
    assert server.version == 1


def test_training_goes_on_while_a_model_is_pinned(running):
    deployment, _, server = running
    pin(deployment.folder, 1)
    before = server.state.weights.copy()
    server.attempt()
    assert (server.state.weights != before).any()


def test_only_a_version_that_is_kept_can_be_pinned(running):
    deployment, _, _ = running
    with pytest.raises(DataError, match=r"version 7 is not kept; there are \[0, 1\]"):
        pin(deployment.folder, 7)
    assert read_requests(deployment.folder) == OperatorRequests()


@pytest.mark.parametrize("by", ["node", "device"])
def test_who_is_revoked_is_neither_asked_nor_counted(running, by):
    deployment, network, server = running
    device = server._gathering.devices[101] if by == "device" else "101"
    wish(deployment, revoked=(device,))
    rounds = [server.attempt() for _ in range(2)]
    assert [found["clients"] for found in rounds] == [2, 2]
    asked = [
        request.node
        for request in network.sent
        if request.kind == "train" and request.facts["round"] == 3
    ]
    assert sorted(asked) == [100, 102]
    wish(deployment, revoked=())
    assert server.attempt()["clients"] == 3


def test_a_revoked_device_that_returns_as_another_node_is_refused(running):
    deployment, network, server = running
    wish(deployment, revoked=(server._gathering.devices[101],))
    server.attempt()
    network.participants[205] = network.participants.pop(101)
    metrics = server.attempt()
    assert (metrics["clients"], metrics["refused"]) == (2, {"failed": 1})
    assert server.attempt()["asked"] == 2


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"paused": 1, "pinned": null, "revoked": []}', "{}"]
)
def test_instructions_that_cannot_be_read_pause_the_server(running, content, caplog):
    """They may have said so; going on would be the one thing that cannot be taken back."""
    deployment, _, server = running
    (deployment.folder / "operator.json").write_text(content)
    assert server.attempt() is None
    assert "operator.json" in caplog.text
    (deployment.folder / "operator.json").unlink()
    assert server.attempt()["round"] == 2


def test_commands_at_the_same_time_both_count(running):
    deployment, _, _ = running
    change = [
        threading.Thread(
            target=change_requests,
            args=(
                deployment.folder,
                lambda wishes, n=n: replace(wishes, revoked=(*wishes.revoked, str(n))),
            ),
        )
        for n in range(8)
    ]
    for thread in change:
        thread.start()
    for thread in change:
        thread.join()
    assert sorted(read_requests(deployment.folder).revoked) == [str(n) for n in range(8)]
    assert json.loads((deployment.folder / "operator.json").read_text())["paused"] is False


def test_a_folder_of_no_deployment_is_refused(tmp_path):
    with pytest.raises(DataError, match="not the state folder of a deployment"):
        change_requests(tmp_path, lambda wishes: wishes)
    assert list(tmp_path.iterdir()) == []


def private(tmp_path, population, **rules):
    given = values(population=population, **rules) | {
        "clients_per_round": 1,
        "deploy_every": 1,
        "privacy": {"mechanism": "dp-fedavg", "noise_multiplier": 1.0},
    }
    deployment = a_deployment(tmp_path, given)
    network = Network(devices(tmp_path, 4))
    settle(deployment, network.participants)
    return deployment, network


def test_a_private_round_for_nearly_nobody_is_not_run_and_nothing_is_spent(tmp_path, caplog):
    caplog.set_level("INFO")
    deployment, network = private(tmp_path, population=1000)
    server = coordinator(deployment, network)
    for _ in range(3):
        assert server.attempt() is None
    assert (server.state.round, network.sent) == (0, [])
    assert "4 in reach, 100 needed (deployment.min_reach of a population of 1000" in caplog.text


def test_the_decision_is_made_before_anybody_is_drawn(tmp_path):
    """A round whose draw is empty is part of the mechanism: leaving it out would depend on the draw."""
    deployment, network = private(tmp_path, population=40)
    server = coordinator(deployment, network, select=lambda deployment, nodes, number: [])
    metrics = server.attempt()
    assert (metrics["round"], metrics["asked"], metrics["clients"]) == (1, 0, 0)
    assert metrics["epsilon"] > 0
    drawn = []
    network.unreachable = {100}
    server._select = lambda deployment, nodes, number: drawn.append(number) or []
    assert server.attempt() is None
    assert drawn == []


def test_the_reach_is_a_setting_of_private_deployments(tmp_path):
    deployment, network = private(tmp_path, population=1000, min_reach=0.004)
    assert coordinator(deployment, network).attempt()["round"] == 1
    with pytest.raises(ConfigError, match=r"min_reach: is for private deployments"):
        a_deployment(tmp_path / "other", values(min_reach=0.5))
