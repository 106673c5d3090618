"""What one device can do to figures and to others' names: no more than an honest device does."""

from dataclasses import replace

import numpy as np
import pytest
from network_builders import Network, a_deployment, coordinator, devices, live, settle, values

from fedbandit.deploy.server.gathering import bounded_mean, usual_weights
from fedbandit.deploy.server.operator import ROSTER
from fedbandit.deploy.server.server_status import Watch, facts_of, read_live, warnings_of
from fedbandit.deploy.server.store import Store

LIAR = 104


def claims(events, reward=1.0, name=None):
    """A device that claims so many events; `name` makes its name in each round."""
    rounds = []

    def fault(request, reply):
        rounds.append(1)
        facts = {
            **reply.facts,
            "events": events,
            "reward_sum": reward * events,
            "propensity_sum": 0.5 * events,
            "upto": reply.facts["since"] + events,
            "by_version": [[0, events, reward * events]],
        }
        if name is not None:
            facts["device"] = name(len(rounds))
        return [replace(reply, facts=facts)]

    return fault


def five(folder, fault=None, rounds=4, store=None):
    """Rounds over five devices that all act before each of them; the server, and its last metrics."""
    deployment = a_deployment(folder, values() | {"rounds": rounds})
    network = Network(devices(folder, 5))
    settle(deployment, network.participants)
    network.faults = {} if fault is None else {LIAR: fault}
    watch = Watch(deployment.folder, facts_of(deployment))
    server = coordinator(deployment, network, store, watch=watch)
    for number in range(rounds):
        metrics = server.attempt()
        for i, participant in enumerate(network.participants.values()):
            live(participant, seed=10 * number + i + 7)
    return server, metrics


@pytest.mark.parametrize(
    "fault",
    [
        claims(1000, name=lambda number: f"new name {number}"),
        claims(1000),
        claims(12),
        claims(6),
        claims(1000, reward=-1.0),
    ],
    ids=["new names", "one name", "twice the usual", "the usual", "bad rewards"],
)
def test_a_liar_among_five_moves_the_headline_by_less_than_a_tenth(tmp_path, fault):
    honest, _ = five(tmp_path / "honest")
    server, metrics = five(tmp_path / "lied", fault)
    assert abs(server.state.running_reward - honest.state.running_reward) < 0.1
    assert abs(metrics["reward_median"] - honest.state.running_reward) < 0.35
    credited = metrics["rewards_by_version"]["0" if "0" in metrics["rewards_by_version"] else "1"]
    assert abs(credited[1]) <= credited[0]


def test_a_device_that_brings_more_than_a_fifth_of_the_events_is_warned_of(tmp_path):
    server, metrics = five(tmp_path, claims(1000), rounds=1)
    assert metrics["largest_share"] == pytest.approx(1000 / 1024)
    view = read_live(server.deployment.folder)
    said = warnings_of(view, view["time"])["one device"]
    assert said == "one device has reported 98% of the 1024 events of round 1"
    server, _ = five(tmp_path / "honest", rounds=1)
    assert "one device" not in warnings_of(read_live(server.deployment.folder), view["time"])


def test_honest_figures_of_few_devices_are_exact(tmp_path):
    deployment = a_deployment(tmp_path)
    network = Network(devices(tmp_path, 3))
    settle(deployment, network.participants)
    metrics = coordinator(deployment, network).attempt()
    rewards = [p.agent.events().events.rewards for p in network.participants.values()]
    assert metrics["reward"] == float(np.concatenate(rewards).sum()) / 18
    assert metrics["reward_median"] == pytest.approx(np.median([r.mean() for r in rewards]))


def test_rare_rewards_keep_their_mean():
    """Most devices have none; the mean is not cut down to what is usual among devices."""
    rng = np.random.default_rng(0)
    events = rng.integers(5, 15, 400).astype(float)
    rewards = rng.binomial(events.astype(int), 0.02).astype(float)
    mean = bounded_mean(events, rewards, usual_weights(events))
    assert mean == pytest.approx(rewards.sum() / events.sum(), abs=0.002)


def hijacks(network, victim):
    """Answers under a neighbour's name, with a mark that the neighbour never reaches."""
    device = network.participants[victim].answer(
        "ready", {"token": "t", "round": 1, "space": network.participants[victim].agent.model.space}, {}
    )[0]["device"]  # fmt: skip

    def fault(request, reply):
        return [replace(reply, facts={**reply.facts, "device": device, "upto": 2**60})]

    return fault


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("hijacker", [100, 102])
def test_a_hijacker_silences_nobody(tmp_path, hijacker, leaves):
    """Whether it is asked before its neighbour or after, whether it stays or goes."""
    victim = 101
    deployment = a_deployment(tmp_path, values() | {"rounds": 20})
    network = Network(devices(tmp_path, 3))
    settle(deployment, network.participants)
    network.faults = {hijacker: hijacks(network, victim)}
    network.unreachable = {victim}
    store = Store(deployment.folder)
    server = coordinator(deployment, network, store)
    own = sum(server.attempt()["events"] for _ in range(1))  # the name is taken before it is used
    network.unreachable = {hijacker} if leaves else set()
    store.close()
    store = Store(deployment.folder)
    server = coordinator(deployment, network, store)
    total, reports = own, 0
    for number in range(5):
        live(network.participants[victim], events=3, seed=number)
        metrics = server.attempt()
        total, reports = total + metrics["events"], reports + (metrics["clients"] >= 2)
    store.close()
    assert reports >= 4
    last = network.sent[-1 if leaves or hijacker == 100 else -2]
    told = [r for r in network.sent if r.kind == "train" and r.node == victim][-1]
    assert told.facts["counted"] < 2**50
    assert last.kind == "train"
    # All of the victim's rewards but those of the running period are in the figures by now.
    logged = len(network.participants[victim].agent.events())
    assert told.facts["counted"] >= logged - 6


def test_a_device_that_starts_again_while_its_old_node_lingers_is_counted_once(tmp_path):
    deployment = a_deployment(tmp_path, values() | {"rounds": 20})
    network = Network(devices(tmp_path, 3))
    settle(deployment, network.participants)
    server = coordinator(deployment, network)
    events = server.attempt()["events"]
    network.participants[150] = network.participants[101]  # its old node is still in reach
    network.faults = {101: lambda request, reply: []}
    made = 18
    for number in range(6):
        if number == 3:
            network.unreachable = {101}
        live(network.participants[150], events=2, seed=number)
        made += 2
        events += server.attempt()["events"]
    events += server.attempt()["events"]
    assert events == made


def test_a_registered_nodes_name_is_not_taken_over(tmp_path):
    deployment = a_deployment(tmp_path, values() | {"rounds": 20})
    network = Network(devices(tmp_path, 3))
    settle(deployment, network.participants)
    store = Store(deployment.folder)
    server = coordinator(deployment, network, store)
    server.attempt()
    (deployment.folder / ROSTER).write_text("ssh-ed25519 AAAA node 1 node=101\n")
    device = server._gathering.devices[101]
    network.faults = {102: hijacks(network, 101)}
    network.unreachable = {101}
    server.attempt()
    assert store.marks([device])[device].owner == 101
    assert store.marks([device])[device].counted == 6
    store.close()
