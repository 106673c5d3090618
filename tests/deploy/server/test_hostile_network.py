"""Devices and networks that do everything wrong: the server goes on, counts nothing twice, and names each event."""

import json
import time

import numpy as np
import pytest
from network_builders import (
    Network,
    a_deployment,
    changed,
    coordinator,
    devices,
    live,
    settle,
    values,
    with_update,
)

from fedbandit.deploy import Agent
from fedbandit.deploy.device.participant import Participant
from fedbandit.deploy.messages import Reply
from fedbandit.federated.state import Version

BAD = 101


def from_an_earlier_round():
    """Answers each request with what it answered first."""
    first = []

    def fault(request, reply):
        first.append(reply)
        return [Reply(reply.ticket, first[0].facts, first[0].arrays)]

    return fault


def not_a_number(update):
    update = update.copy()
    update[3] = np.nan
    return update


FAULTS = {
    "drops out": (lambda request, reply: [], None, "has not answered in time"),
    "fails": (
        lambda request, reply: [Reply(reply.ticket, error="Flower's error 2")],
        "failed",
        "Flower's error 2",
    ),
    "NaN": (with_update(not_a_number), "not finite", "1 of 24 values are not finite"),
    "infinite": (with_update(lambda update: update + np.float32(np.inf)), "not finite", "24 of 24"),
    "a million times too large": (
        with_update(lambda update: update * np.float32(1e6)),
        "too large",
        "norm",
    ),
    "finite, but no norm": (
        with_update(lambda update: np.full_like(update, 3e38)),
        "too large",
        "norm",
    ),
    "wrong shape": (with_update(lambda update: update[:-1]), "wrong shape or type", r"shape (23,)"),
    "wrong type": (
        with_update(lambda update: update.astype(np.float64)),
        "wrong shape or type",
        "dtype float64",
    ),
    "objects": (
        with_update(lambda update: "garbage"),
        "wrong shape or type",
        "not an array but str",
    ),
    "no facts": (lambda request, reply: [Reply(reply.ticket)], "other round", "another round"),
    "another attempt's token": (changed(token="0" * 16), "other round", "another round"),
    "a device without a name": (changed(device=None), "garbage", "no device named"),
    "a very long name": (changed(device="x" * 10_000), "garbage", "no device named"),
    "counts below zero": (changed(events=-5), "garbage", "events: not a count"),
    "counts that are texts": (changed(upto="many"), "garbage", "upto: not a count"),
    "a count that is a truth": (changed(events=True), "garbage", "events: not a count"),
    "a reward that is no number": (
        changed(reward_sum=float("nan")),
        "garbage",
        "reward_sum: not a finite number",
    ),
    "a count without end": (changed(events=10**400), "garbage", "events: not a count"),
    "a reward without end": (
        changed(reward_sum=-(10**400)),
        "garbage",
        "reward_sum: not a finite number",
    ),
    "figures that contradict": (changed(propensity_sum=1e9), "garbage", "contradict"),
    "more events than a device may report": (
        changed(events=2**62),
        "too many events",
        "where one device reports at most 1000",
    ),
    "rewards that own the metric": (
        changed(reward_sum=1e150),
        "rewards too large",
        "1e+150 over 6 events",
    ),
    "rewards just beyond their bound": (
        changed(reward_sum=-6.1),
        "rewards too large",
        "-6.1 over 6 events",
    ),
    "a bit that is no bit": (changed(unclipped="yes"), "garbage", "unclipped"),
    "more arrays": (
        lambda request, reply: [
            Reply(reply.ticket, reply.facts, {**reply.arrays, "more": reply.arrays["update"]})
        ],
        "garbage",
        "where one update was expected",
    ),
}


def world(tmp_path, number=3, **rules):
    deployment = a_deployment(tmp_path, values(**rules))
    network = Network(devices(tmp_path, number))
    settle(deployment, network.participants)
    return deployment, network


def test_rewards_beyond_the_bounds_wait_or_are_cut_off_on_the_device(tmp_path):
    deployment, network = world(tmp_path, number=1, max_events=4, max_reward=0.5)
    server = coordinator(deployment, network)
    first, second = server.attempt(), server.attempt()
    assert (first["events"], second["events"]) == (4, 2)
    assert (first["refused"], second["refused"]) == ({}, {})
    (participant,) = network.participants.values()
    rewards = participant.agent.events().events.rewards
    assert first["reward"] * 4 + second["reward"] * 2 == pytest.approx(
        np.minimum(rewards, 0.5).sum()
    )


@pytest.mark.parametrize("name", FAULTS)
def test_one_bad_device_is_named_and_left_out(tmp_path, caplog, name):
    fault, kind, message = FAULTS[name]
    deployment, network = world(tmp_path)
    network.faults = {BAD: fault}
    metrics = coordinator(deployment, network).attempt()
    assert metrics["clients"] == 2
    assert metrics["refused"] == ({} if kind is None else {kind: 1})
    assert f"round 1: node {BAD}" in caplog.text
    assert message in caplog.text

    honest = a_deployment(tmp_path / "honest")
    others = Network({node: part for node, part in network.participants.items() if node != BAD})
    server = coordinator(honest, others)
    assert server.attempt()["reward"] == metrics["reward"]
    kept = json.loads((deployment.folder / "metrics.jsonl").read_text())
    assert kept["update_norm"] == pytest.approx(
        float(np.linalg.norm(server.state.weights - honest.initial)), rel=1e-5
    )


def test_the_same_answer_delivered_twice(tmp_path, caplog):
    deployment, network = world(tmp_path)
    network.faults = {
        BAD: lambda request, reply: [reply, Reply(reply.ticket, reply.facts, reply.arrays)]
    }
    metrics = coordinator(deployment, network).attempt()
    assert (metrics["clients"], metrics["events"]) == (3, 18)
    assert "an answer came twice; not counted" in caplog.text


def test_one_device_behind_two_nodes_counts_once(tmp_path, caplog):
    deployment, network = world(tmp_path, number=2)
    network.participants[200] = Participant(Agent(network.participants[100].agent.folder))
    metrics = coordinator(deployment, network).attempt()
    assert (metrics["clients"], metrics["events"], metrics["refused"]) == (2, 12, {"twice": 1})
    assert "has already reported in this round" in caplog.text


def test_answers_repeated_from_an_earlier_round(tmp_path):
    deployment, network = world(tmp_path)
    network.faults = {BAD: from_an_earlier_round()}
    server = coordinator(deployment, network)
    assert server.attempt()["refused"] == {}
    assert server.attempt()["refused"] == {"other round": 1}


def test_a_device_with_a_model_for_something_else(tmp_path, caplog):
    deployment, network = world(tmp_path)
    other = a_deployment(
        tmp_path / "other", {**values(), "deployment": {**values()["deployment"], "shape": [9]}}
    )
    stray = Agent(tmp_path / "stray")
    stray.install(
        other.device_model(Version(other.initial), 50)
    )  # newer, so that the server's is left alone
    network.participants[BAD] = Participant(stray)
    metrics = coordinator(deployment, network).attempt()
    assert (metrics["clients"], metrics["refused"]) == (2, {"could not train": 1})
    assert "other actions or features" in caplog.text
    assert "node 101 has not installed it: it holds 50" in caplog.text


def test_a_device_that_is_behind_still_takes_part(tmp_path):
    """As the paper describes: events of older models are trained on with the propensities they were drawn with."""
    deployment, network = world(tmp_path)
    server = coordinator(deployment, network)
    server.run(attempts=2)
    stubborn = network.participants[BAD].agent
    stubborn.install = lambda payload: False
    metrics = server.attempt()
    assert metrics["model_versions"] == {"0": 1, "1": 2}
    assert metrics["clients"] == 3


def test_a_node_that_never_installs_holds_up_one_round_only(tmp_path):
    deployment, network = world(tmp_path)
    network.deaf = {BAD}
    server = coordinator(deployment, network)
    server.attempt()
    assert network.time() == pytest.approx(deployment.rules.install_seconds, abs=1)
    server.attempt()
    assert network.time() == pytest.approx(deployment.rules.install_seconds, abs=1)
    assert server.state.round == 2


def test_everybody_fails_and_comes_back(tmp_path, caplog):
    deployment, network = world(tmp_path)
    server = coordinator(deployment, network)
    network.faults = dict.fromkeys(network.participants, lambda request, reply: [])
    assert server.attempt() is None
    network.faults, network.unreachable = {}, set(network.participants)
    assert server.attempt() is None
    network.unreachable = set()
    assert server.attempt()["round"] == 1
    assert "0 reports, 1 needed; it is run again" in caplog.text
    assert caplog.text.count("answered late") == 0  # they never answered


def test_a_report_goal_is_not_met_by_garbage(tmp_path):
    deployment, network = world(tmp_path, report_goal=2)
    network.faults = {BAD: with_update(not_a_number)}
    network.slow = {102: 30.0}
    metrics = coordinator(deployment, network).attempt()
    assert (metrics["clients"], metrics["refused"]) == (2, {"not finite": 1})


def test_a_full_disk_at_the_device(tmp_path, caplog, monkeypatch):
    """Its new model cannot be written: it keeps the old one, and gets the new one when there is room."""
    deployment, network = world(tmp_path)
    server = coordinator(deployment, network)
    server.run(attempts=2)

    import fedbandit.deploy.device.device_identity as card_module
    import fedbandit.deploy.device.model_files as model_files

    def no_room(path, write):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(model_files, "write_bytes", no_room)
        patch.setattr(card_module, "write_json", no_room)
        metrics = server.attempt()
    assert (metrics["clients"], metrics["model_versions"]) == (3, {"0": 3})
    assert "No space left on device" in caplog.text
    before = [line["events"] for line in _lines(deployment)]
    assert server.attempt()["model_versions"] == {"1": 3}
    assert [*before, 0] == [18, 0, 0, 0]


def test_a_device_without_room_for_its_name_does_not_take_part(tmp_path, monkeypatch):
    deployment, network = world(tmp_path)

    import fedbandit.deploy.device.device_identity as card_module

    def no_room(path, write):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(card_module, "write_json", no_room)
        assert coordinator(deployment, network).attempt() is None


def test_wall_clocks_that_jump(tmp_path, monkeypatch):
    """Nothing in a round reads the wall clock: hours forwards or backwards change neither deadlines nor events."""
    deployment, network = world(tmp_path)
    server = coordinator(deployment, network)
    now = time.time()
    for jump in (-1e8, 1e8, 0.0):
        monkeypatch.setattr(time, "time", lambda jump=jump: now + jump)
        live(network.participants[100], events=2)
        assert server.attempt()["clients"] == 3
    assert [line["events"] for line in _lines(deployment)] == [20, 2, 2]


def test_a_storm_of_faults_loses_and_doubles_nothing(tmp_path):
    """Forty rounds of random faults and restarts; at the end every reward was counted exactly once."""
    from fedbandit.deploy.server.store import Store

    deployment = a_deployment(tmp_path, {**values(round_seconds=10), "rounds": 60})
    network = Network(devices(tmp_path, 6))
    settle(deployment, network.participants)
    rng = np.random.default_rng(4)
    faults = [fault for fault, *_ in FAULTS.values()]
    store = Store(deployment.folder)
    server = coordinator(deployment, network, store)
    made = 6 * 6
    for _ in range(40):
        nodes = list(network.participants)
        chosen = rng.choice(nodes, 3, replace=False)
        network.faults = {int(node): faults[rng.integers(len(faults))] for node in chosen[:2]}
        network.slow = {int(chosen[2]): float(rng.choice([0.0, 15.0]))}
        live(network.participants[nodes[0]], events=2, seed=int(rng.integers(1000)))
        made += 2
        server.attempt()
        if rng.random() < 0.2:
            store.close()
            store = Store(deployment.folder)
            server = coordinator(deployment, network, store)
    network.faults, network.slow = {}, {}
    server.attempt()
    lines = _lines(deployment)
    assert [line["round"] for line in lines] == list(range(1, len(lines) + 1))
    assert sum(line["events"] for line in lines) == made
    assert np.isfinite(server.state.weights).all()


def _lines(deployment):
    return [
        json.loads(line) for line in (deployment.folder / "metrics.jsonl").read_text().splitlines()
    ]
