"""What travels, to whom, how often and how large: models once to each node, updates compressed, memory flat."""

import tracemalloc
from dataclasses import dataclass, field

import numpy as np
import pytest
from network_builders import Network, a_deployment, coordinator, devices, settle, values

from fedbandit.deploy.messages import Reply
from fedbandit.deploy.server.store import Store


def installs(network):
    """(node, version) of each model that was sent."""
    return [(r.node, r.facts["version"]) for r in network.sent if r.kind == "install"]


def small(tmp_path, number=6, asked=2):
    deployment = a_deployment(tmp_path, values() | {"rounds": 30, "clients_per_round": asked})
    network = Network(devices(tmp_path, number))
    settle(deployment, network.participants)
    return deployment, network


def in_turn(deployment, nodes, number):
    """The nodes asked in a round: two, one after the other."""
    first = 2 * number % len(nodes)
    return [nodes[first], nodes[(first + 1) % len(nodes)]]


def test_training_weights_go_to_those_who_are_asked(tmp_path):
    deployment, network = small(tmp_path)
    server = coordinator(deployment, network, select=in_turn)
    server.attempt()
    assert [r.node for r in network.sent if r.kind == "train"] == [102, 103]
    # Those who are asked get the model first; of the others as many as a round asks.
    assert sorted(installs(network)) == [(100, 0), (101, 0), (102, 0), (103, 0)]


def test_a_version_reaches_every_node_once_also_over_restarts(tmp_path):
    deployment, network = small(tmp_path)
    for _ in range(4):
        store = Store(deployment.folder)
        server = coordinator(deployment, network, store, select=in_turn)
        server.run(attempts=2)
        store.close()
    sent = installs(network)
    assert len(sent) == len(set(sent))
    versions = sorted({version for _, version in sent})
    assert versions == [0, 1, 2, 3]
    assert {node for node, version in sent if version == 0} == set(network.participants)


def test_a_device_that_lost_its_model_is_sent_it_again(tmp_path):
    deployment, network = small(tmp_path, number=2)
    server = coordinator(deployment, network)
    server.attempt()
    lost = Network(devices(tmp_path / "new", 1)).participants[100]
    network.participants[100] = lost
    assert server.attempt()["refused"] == {"could not train": 1}
    server.attempt()
    assert lost.agent.model_version == server.version


@dataclass
class Crowd:
    """So many devices that answer with dense updates, made when they are received."""

    number: int
    parameters: int
    facts: dict = field(default_factory=dict)
    asked: dict = field(default_factory=dict)

    def nodes(self):
        return list(range(self.number))

    def send(self, requests):
        tickets = [f"{r.kind}-{r.node}-{r.facts.get('round')}" for r in requests]
        self.asked |= dict(zip(tickets, requests, strict=True))
        return tickets

    def receive(self, tickets):
        some = [ticket for ticket in list(tickets)[:10] if ticket in self.asked]
        return [self._reply(ticket, self.asked.pop(ticket)) for ticket in some]

    def _reply(self, ticket, request):
        if request.kind == "install":
            return Reply(ticket, {"version": request.facts["version"]})
        update = np.full(self.parameters, 1e-4, np.float32)
        update[request.node % self.parameters] = 1e-3
        facts = {
            "token": request.facts["token"], "device": f"d{request.node}", "version": 0,
            "trained": True, "unclipped": True, "since": 0, "upto": 1, "events": 1,
            "reward_sum": 1.0, "propensity_sum": 0.5, "by_version": [[0, 1, 1.0]],
        }  # fmt: skip
        return Reply(ticket, facts, {"update": update})


def peak_of(folder, number, shape):
    given = values(shape=[shape]) | {"clients_per_round": number}
    deployment = a_deployment(folder, given)
    crowd = Crowd(number, deployment.initial.size)
    server = coordinator(deployment, _timed(crowd))
    tracemalloc.start()
    assert server.attempt()["clients"] == number
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak, server.state.weights


def _timed(crowd):
    from network_builders import HandTime

    crowd.time = HandTime()
    return crowd


@pytest.mark.slow
def test_the_servers_memory_does_not_grow_with_the_reports(tmp_path):
    """A thousand reports of 400 kB are 400 MB."""
    few, _ = peak_of(tmp_path / "few", 100, 33_000)
    many, _ = peak_of(tmp_path / "many", 1000, 33_000)
    assert many <= 1.1 * few


def test_updates_that_come_in_any_order_are_added_up_in_the_order_of_asking(tmp_path):
    """Floating point: another order would be other bits."""
    results = []
    for order, slow in (("a", {}), ("b", {100: 20.0, 103: 10.0})):
        deployment = a_deployment(tmp_path / order)
        network = Network(devices(tmp_path / order, 5))
        for i, participant in enumerate(network.participants.values()):
            (participant.agent.folder / "device.json").write_text(
                f'{{"device": "d{i}", "counted": 0}}'
            )
        settle(deployment, network.participants)
        network.slow = slow
        server = coordinator(deployment, network)
        assert server.attempt()["clients"] == 5
        results.append(server.state.weights)
    np.testing.assert_array_equal(*results)


def test_rounds_that_fail_because_everybody_is_slow_get_more_time(tmp_path, caplog):
    deployment = a_deployment(tmp_path, values(min_reports=3, round_seconds=100))
    network = Network(devices(tmp_path, 3))
    settle(deployment, network.participants)
    network.slow = dict.fromkeys(network.participants, 350.0)
    server = coordinator(deployment, network)
    assert [server.attempt() for _ in range(2)] == [None, None]
    assert server.attempt()["clients"] == 3
    assert "deadlines are 4 times as long now" in caplog.text
    network.slow = {}
    for _ in range(3):
        server.attempt()
    assert server._poller.patience == 1.0
