"""A private deployment: noise that is drawn once, kept secretly over a restart, and accounted for."""

import stat
from itertools import pairwise

import numpy as np
import pytest
from network_builders import Network, a_deployment, coordinator, devices, settle, values

from fedbandit.deploy.flower.selection import select
from fedbandit.deploy.flower.store import Store
from fedbandit.errors import ConfigError


def private(tmp_path, rounds=4, population=100, clients=2, more=None, **privacy):
    given = {"mechanism": "dp-fedavg", "noise_multiplier": 1.0, **privacy}
    base = {**values(population=population, **(more or {})), "rounds": rounds, "clients_per_round": clients}
    return a_deployment(tmp_path, {**base, "privacy": given})


def network_of(tmp_path, deployment, number=2):
    network = Network(devices(tmp_path, number))
    settle(deployment, network.participants)
    return network


def test_noise_is_added_and_accounted_for(tmp_path):
    deployment = private(tmp_path)
    server = coordinator(deployment, network_of(tmp_path, deployment))
    metrics = [server.attempt() for _ in range(4)]
    assert all(later["epsilon"] > earlier["epsilon"] for earlier, later in pairwise(metrics))
    assert metrics[0]["epsilon"] == pytest.approx(deployment.ledger.epsilon(1))
    # two updates of norm at most 1 against 24 normals of deviation 1, all divided by 2
    assert metrics[0]["update_norm"] > np.sqrt(24) / 4


def test_two_deployments_have_different_noise(tmp_path):
    weights = []
    for name in ("a", "b"):
        deployment = private(tmp_path / name)
        server = coordinator(deployment, network_of(tmp_path / name, deployment))
        server.attempt()
        weights.append(server.state.weights)
    assert np.abs(weights[0] - weights[1]).max() > 0.01


def test_correlated_noise_goes_on_after_a_restart(tmp_path):
    """The sum over all rounds of a tree's noise is that of one node only if its memory has survived."""
    deployment = private(
        tmp_path, rounds=8, mechanism="dp-ftrl", sampling="fixed", population=2, noise_multiplier=1000.0
    )
    network = network_of(tmp_path, deployment)
    total = np.zeros_like(deployment.initial, dtype=np.float64)
    for _ in range(8):
        store = Store(deployment.folder)
        server = coordinator(deployment, network, store)
        before = server.state.weights
        server.attempt()
        total += 2 * (server.state.weights - before)
        store.close()
    # eight independent rounds would have a deviation of 1000 * sqrt(8); the tree's root has 1000
    assert total.std() / 1000 == pytest.approx(1.0, rel=0.5)
    assert stat.S_IMODE(deployment.folder.stat().st_mode) == 0o700


def test_a_private_round_happens_whoever_answers(tmp_path):
    deployment = private(tmp_path)
    network = network_of(tmp_path, deployment)
    network.faults = dict.fromkeys(network.participants, lambda request, reply: [])
    metrics = coordinator(deployment, network).attempt()
    assert (metrics["round"], metrics["clients"]) == (1, 0)
    assert metrics["update_norm"] > 0


def test_poisson_sampling_asks_each_node_with_the_accounted_probability(tmp_path):
    deployment = private(tmp_path, population=1000, clients=250)
    asked = [len(select(deployment, range(400), number)) for number in range(100)]
    assert np.mean(asked) == pytest.approx(100, abs=4 * np.sqrt(400 * 0.25 * 0.75 / 100))
    assert len(set(asked)) > 5


def test_devices_rest_between_their_turns(tmp_path):
    deployment = private(tmp_path, mechanism="dp-ftrl", sampling="min-separation", separation=3, population=6)
    network = network_of(tmp_path, deployment)
    server = coordinator(deployment, network)
    assert [server.attempt()["clients"] for _ in range(4)] == [2, 0, 0, 2]


def test_a_device_under_another_node_is_refused_while_it_rests(tmp_path, caplog):
    deployment = private(tmp_path, mechanism="dp-ftrl", sampling="min-separation", separation=3, population=6)
    network = network_of(tmp_path, deployment)
    server = coordinator(deployment, network)
    server.attempt()
    network.participants = {node + 50: part for node, part in network.participants.items()}
    assert server.attempt()["refused"] == {"too soon": 2}
    assert "took part in round 1" in caplog.text


def test_a_budget_ends_the_rounds(tmp_path):
    deployment = private(tmp_path, rounds=50, population=4, epsilon=8.0)
    assert 0 < deployment.rounds < 50
    assert deployment.ledger.epsilon(deployment.rounds) <= 8.0 < deployment.ledger.epsilon(deployment.rounds + 1)


def test_a_report_goal_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="push another out"):
        private(tmp_path, more={"report_goal": 1})
