"""A private deployment: noise that is drawn once, kept secretly over a restart, and accounted for."""

import json
import stat
from itertools import pairwise

import numpy as np
import pytest
from network_builders import Network, a_deployment, coordinator, devices, settle, values

from fedbandit.core.errors import ConfigError
from fedbandit.core.files import read_object
from fedbandit.deploy.device.device_identity import read_card
from fedbandit.deploy.server.database import Mark
from fedbandit.deploy.server.gathering import rests, select
from fedbandit.deploy.server.store import Store
from fedbandit.federated.state import Version


def private(tmp_path, rounds=4, population=100, clients=2, deploy_every=2, more=None, **privacy):
    given = {"mechanism": "dp-fedavg", "noise_multiplier": 1.0, **privacy}
    chosen = {
        "rounds": rounds,
        "clients_per_round": clients,
        "deploy_every": deploy_every,
        "privacy": given,
    }
    rules = {"min_reach": 0.0, **(more or {})}  # few devices stand for many
    return a_deployment(tmp_path, values(population=population, **rules) | chosen)


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
        tmp_path,
        rounds=8,
        mechanism="dp-ftrl",
        sampling="fixed",
        population=2,
        noise_multiplier=1000.0,
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
    deployment = private(
        tmp_path, mechanism="dp-ftrl", sampling="min-separation", separation=3, population=6
    )
    network = network_of(tmp_path, deployment)
    server = coordinator(deployment, network)
    assert [server.attempt()["clients"] for _ in range(4)] == [2, 0, 0, 2]


def test_a_device_that_missed_its_turn_waits_for_the_next(tmp_path):
    deployment = private(
        tmp_path, 9, mechanism="dp-ftrl", sampling="min-separation", separation=3, population=6
    )
    network = network_of(tmp_path, deployment)
    server = coordinator(deployment, network)
    clients = []
    for number in range(1, 8):
        network.unreachable = {min(network.participants)} if number == 4 else set()
        clients.append(server.attempt()["clients"])
    assert clients == [2, 0, 0, 1, 0, 0, 2]


def test_a_device_with_nothing_to_train_on_has_had_its_turn_all_the_same(tmp_path):
    """Otherwise having data would change who can be drawn in the rounds to come."""
    asked = []
    for name in ("with data", "without"):
        folder = tmp_path / name
        deployment = private(
            folder, 7, mechanism="dp-ftrl", sampling="min-separation", separation=3, population=6
        )
        network = network_of(folder, deployment)
        if name == "without":
            empty = devices(folder / "empty", 1)[100]
            empty.agent.install(deployment.device_model(Version(deployment.initial), 0))
            network.participants[101] = empty
        server = coordinator(deployment, network)
        asked.append([server.attempt()["asked"] for _ in range(7)])
        turns = [
            read_card(part.agent.folder / "device.json").private
            for part in network.participants.values()
        ]
        assert [(turn.taken, turn.last) for turn in turns] == [(3, 7), (3, 7)]
    assert asked == [[2, 0, 0, 2, 0, 0, 2]] * 2


def turns_allowed(deployment):
    """All the ways in which a device can take part, one round of its own after the other."""

    def after(turns):
        yield turns
        mark = Mark(turn=turns[-1] if turns else None)
        for number in range(turns[-1] + 1 if turns else 1, deployment.rounds + 1):
            if not rests(deployment, mark, number):
                yield from after((*turns, number))

    return after(())


@pytest.mark.parametrize("mechanism", ["dp-ftrl", "banded-mf"])
@pytest.mark.parametrize(
    ("rounds", "separation", "restarts"), [(30, 15, False), (20, 5, False), (24, 4, True)]
)
def test_no_device_can_move_more_than_is_accounted_for(
    tmp_path, mechanism, rounds, separation, restarts
):
    """After every round, over all turns that a device is let have: how far it moves C·x, against the plan."""
    deployment = private(
        tmp_path,
        rounds=rounds,
        mechanism=mechanism,
        sampling="min-separation",
        separation=separation,
        deploy_every=7,
        restart_at_deployments=restarts,
    )
    plan = deployment.ledger.plan
    columns = np.zeros((rounds + 1, rounds + 1))  # of C, by round
    for number in range(1, rounds + 1):
        rows, weights = plan.strategy.column(number, rounds)
        columns[number, rows] = weights
    moved = np.zeros(rounds + 1)
    for turns in turns_allowed(deployment):
        last = max(turns, default=0)
        moved[last] = max(moved[last], np.square(columns[list(turns)].sum(0)).sum())
    np.testing.assert_allclose(np.maximum.accumulate(moved), plan.squared_sensitivities, rtol=1e-12)


def test_a_device_under_another_node_is_refused_while_it_rests(tmp_path, caplog):
    deployment = private(
        tmp_path, mechanism="dp-ftrl", sampling="min-separation", separation=3, population=6
    )
    network = network_of(tmp_path, deployment)
    server = coordinator(deployment, network)
    server.attempt()
    for part in network.participants.values():  # such as remember nothing of their turns themselves
        (card := part.agent.folder / "device.json").write_text(
            json.dumps({**read_object(card), "private": None})
        )
    network.participants = {node + 50: part for node, part in network.participants.items()}
    assert server.attempt()["refused"] == {"not its turn": 2}
    assert "took part in round 1" in caplog.text


def test_a_budget_ends_the_rounds(tmp_path):
    deployment = private(tmp_path, rounds=50, population=4, epsilon=8.0)
    assert 0 < deployment.rounds < 50
    assert (
        deployment.ledger.epsilon(deployment.rounds)
        <= 8.0
        < deployment.ledger.epsilon(deployment.rounds + 1)
    )


def test_a_report_goal_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="push another out"):
        private(tmp_path, more={"report_goal": 1})
