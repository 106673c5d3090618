"""Rounds over devices in one process: what is learned, deployed, kept, taken up again and gone back to."""

import json

import numpy as np
import pytest
from network_builders import Network, a_deployment, coordinator, devices, live, settle, values

from fedbandit.core.errors import ConfigError, DataError
from fedbandit.deploy.server.operator import ask_rollback
from fedbandit.deploy.server.store import Store


@pytest.fixture
def deployment(tmp_path):
    return a_deployment(tmp_path)


@pytest.fixture
def network(tmp_path, deployment):
    network = Network(devices(tmp_path, 3))
    settle(deployment, network.participants)
    return network


def metrics_of(deployment):
    return [
        json.loads(line) for line in (deployment.folder / "metrics.jsonl").read_text().splitlines()
    ]


def test_rounds_train_and_deploy(deployment, network):
    server = coordinator(deployment, network)
    state = server.run()
    assert state.round == 4
    assert sorted(state.deployed) == [0, 1, 2]
    assert not np.array_equal(state.weights, deployment.initial)
    np.testing.assert_array_equal(state.deployed[2].weights, state.weights)
    lines = metrics_of(deployment)
    assert [line["round"] for line in lines] == [1, 2, 3, 4]
    assert [line["model_version"] for line in lines] == [0, 0, 1, 1]
    assert {participant.agent.model_version for participant in network.participants.values()} == {1}
    assert all(line["clients"] == 3 and line["refused"] == {} for line in lines)


def test_each_reward_is_counted_in_one_round(deployment, network):
    server = coordinator(deployment, network)
    server.run(attempts=2)
    live(network.participants[101], events=5, seed=9)
    server.run()
    assert [line["events"] for line in metrics_of(deployment)] == [18, 0, 5, 0]


def test_a_device_that_comes_back_under_another_node_is_told_and_nothing_counts_twice(
    deployment, network, caplog
):
    server = coordinator(deployment, network)
    server.run(attempts=1)
    network.participants = {
        node + 50: participant for node, participant in network.participants.items()
    }
    live(network.participants[150], events=4, seed=3)
    server.run(attempts=2)
    assert [line["events"] for line in metrics_of(deployment)] == [18, 0, 4]
    assert "rewards that were counted before" in caplog.text


def test_nothing_to_train_on(deployment, tmp_path):
    network = Network(devices(tmp_path, 2))
    server = coordinator(deployment, network)
    assert server.attempt() is None
    assert server.state.round == 0
    live(network.participants[100])
    metrics = server.attempt()
    assert (metrics["clients"], metrics["idle"], metrics["asked"]) == (1, 1, 2)


def test_a_round_ends_at_its_report_goal(tmp_path):
    deployment = a_deployment(tmp_path, values(report_goal=2, round_seconds=1000))
    network = Network(devices(tmp_path, 3))
    settle(deployment, network.participants)
    network.slow = {102: 500.0}
    server = coordinator(deployment, network)
    assert server.attempt()["clients"] == 2
    assert network.time() < 10


def test_a_round_ends_at_its_time_limit_and_the_late_are_named(deployment, network, caplog):
    network.slow = {101: 130.0}
    server = coordinator(deployment, network)
    assert server.attempt()["clients"] == 2
    assert network.time() == pytest.approx(deployment.rules.round_seconds, abs=1)
    assert "round 1: node 101 has not answered in time" in caplog.text
    network.slow = {102: 20.0}
    assert server.attempt()["clients"] == 3
    assert "round 1: node 101 answered late; not counted" in caplog.text


def test_too_few_reports_make_no_round(tmp_path):
    deployment = a_deployment(tmp_path, values(min_reports=3))
    network = Network(devices(tmp_path, 3))
    settle(deployment, network.participants)
    network.slow = {101: 1e6}
    server = coordinator(deployment, network)
    assert server.attempt() is None
    network.slow = {}
    assert server.attempt()["round"] == 1
    assert len(metrics_of(deployment)) == 1


def test_a_new_server_goes_on_where_the_last_one_was(deployment, network, tmp_path):
    store = Store(deployment.folder)
    coordinator(deployment, network, store).run(attempts=3)
    store.close()
    state = coordinator(deployment, network).run()

    other = a_deployment(tmp_path / "other")
    again = Network(network.participants)
    expected = coordinator(other, again).run()
    np.testing.assert_array_equal(state.weights, expected.weights)
    assert [line["round"] for line in metrics_of(deployment)] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "moment", ["before the checkpoint", "after the checkpoint", "half a line of metrics"]
)
def test_a_server_killed_between_aggregate_and_deploy(deployment, network, monkeypatch, moment):
    """The round either has not happened and is run again, or it has, and its deployment is made good."""
    expected = None
    store = Store(deployment.folder)
    server = coordinator(deployment, network, store)
    server.run(attempts=1)

    class Killed(BaseException):
        pass

    def die(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(store, "checkpoint" if moment == "before the checkpoint" else "publish", die)
        with pytest.raises(Killed):
            server.attempt()
    if moment == "half a line of metrics":
        with open(deployment.folder / "metrics.jsonl", "a") as file:
            file.write('{"round": 2, "rew')
    store.close()
    second = coordinator(deployment, network)
    assert second.state.round == (1 if moment == "before the checkpoint" else 2)
    expected = second.run()
    lines = metrics_of(deployment)
    assert [line["round"] for line in lines] == [1, 2, 3, 4]
    assert [line["events"] for line in lines] == [18, 0, 0, 0]
    assert sorted(expected.deployed) == [0, 1, 2]
    assert sorted(path.name for path in (deployment.folder / "models").iterdir()) == [
        f"model-{version}.safetensors" for version in range(3)
    ]


def test_going_back_to_an_earlier_model(deployment, network):
    server = coordinator(deployment, network)
    server.run(attempts=2)
    assert server.version == 1
    ask_rollback(deployment.folder, 0)
    metrics = server.attempt()
    assert metrics["model_version"] == 2
    np.testing.assert_array_equal(server.state.deployed[2].weights, deployment.initial)
    assert {participant.agent.model_version for participant in network.participants.values()} == {2}
    assert server.state.extra["versions"][-1]["why"] == "went back to model 0"
    server.attempt()
    assert server.version == 3
    with pytest.raises(DataError, match="version 77 is not kept"):
        ask_rollback(deployment.folder, 77)


def test_a_server_killed_while_going_back_goes_back_once(deployment, network, monkeypatch):
    store = Store(deployment.folder)
    server = coordinator(deployment, network, store)
    server.run(attempts=2)
    ask_rollback(deployment.folder, 0)

    class Killed(BaseException):
        pass

    def die():
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(store, "rollback_done", die)
        with pytest.raises(Killed):
            server.attempt()
    store.close()
    second = coordinator(deployment, network)
    second.attempt()
    assert second.version == 2
    assert [entry["why"] for entry in second.state.extra["versions"]].count(
        "went back to model 0"
    ) == 1


def test_old_versions_go(tmp_path):
    deployment = a_deployment(tmp_path, {**values(keep_versions=2), "deploy_every": 1})
    network = Network(devices(tmp_path, 1))
    settle(deployment, network.participants)
    state = coordinator(deployment, network).run()
    assert sorted(state.deployed) == [3, 4]
    assert len(list((deployment.folder / "models").iterdir())) == 2


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"dtype": "float64"}, "dtype"),
        (
            {"deployment": {**values()["deployment"], "actions": ["x", "y", "z"]}},
            "actions and features",
        ),
        (
            {
                "privacy": {"mechanism": "dp-fedavg", "noise_multiplier": 1.0},
                "deployment": values(population=500)["deployment"],
            },
            "privacy",
        ),
    ],
)
def test_promises_are_kept_over_a_restart(deployment, network, tmp_path, changed, what):
    store = Store(deployment.folder)
    coordinator(deployment, network, store).run(attempts=1)
    store.close()
    with pytest.raises(ConfigError, match=f"was started with different {what}"):
        coordinator(a_deployment(tmp_path, {**values(), **changed}), network)


def test_one_server_at_a_time(deployment):
    store = Store(deployment.folder)
    with pytest.raises(ConfigError, match="another server"):
        Store(deployment.folder)
    store.close()
    Store(deployment.folder).close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scenario": "init"}, "scenario: is for simulations"),
        ({"clipping": {"enabled": False}}, "clipping.enabled"),
        ({"objective": {"name": "doubly-robust"}}, "objective.name"),
        (
            {"privacy": {"mechanism": "dp-fedavg", "noise_multiplier": 1.0}},
            "deployment.population: missing",
        ),
        ({"deployment": {"state": "s"}}, "deployment.actions"),
        ({"deployment": {"state": "s", "actions": ["a", "b"]}}, "deployment.shape"),
        ({"deployment": {"state": "s", "actions": "none.txt", "shape": [2]}}, "none.txt"),
        ({"deployment": {**values()["deployment"], "round_secs": 2}}, "deployment.round_secs"),
        ({"deployment": {**values()["deployment"], "report_goal": 101}}, "deployment.report_goal"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, given, message):
    with pytest.raises(ConfigError, match=message):
        a_deployment(tmp_path, {**values(), **given})
