"""The simulator and the deployment agree: the same population, seeds and rounds give the same models."""

from dataclasses import replace

import numpy as np
import pytest
from network_builders import Network, coordinator
from simulated_devices import (
    CLIENTS,
    SECURE_TRAINING,
    deployment_values,
    experiment,
    live_a_period,
    open_agent,
)

from fedbandit.core.process import Stopwatch
from fedbandit.deploy.device.participant import Participant
from fedbandit.deploy.server.deployment import build_deployment
from fedbandit.engines import ThreadEngine
from fedbandit.federated.round import run_round


class Everybody:
    """The cohort that the deployment asks, in its order."""

    def __init__(self, clients=CLIENTS):
        self.clients, self.pool = clients, range(len(clients))

    def draw(self, round_number):
        return np.array(self.clients)


def simulated_states(rounds, clients=CLIENTS):
    """The simulator's state after every round."""
    phase = replace(experiment(rounds).bandit, cohorts=Everybody(clients))
    state = phase.start(experiment(rounds).initial_weights())
    for _ in range(rounds):
        state, _ = run_round(phase, state, ThreadEngine(1), Stopwatch())
        yield state


def simulated_round(state, rounds, clients=CLIENTS, **changed):
    """The simulator's state one round after a deployment's."""
    phase = replace(experiment(rounds, **changed).bandit, cohorts=Everybody(clients))
    return run_round(phase, state, ThreadEngine(1), Stopwatch())[0]


def test_a_deployment_learns_what_the_simulator_learns(tmp_path):
    rounds = 8
    values, words = deployment_values(rounds, "server")
    (tmp_path / "words.txt").write_text("\n".join(words))
    deployment, simulated = build_deployment(values, tmp_path), experiment(rounds)
    np.testing.assert_array_equal(deployment.initial, simulated.initial_weights())
    participants = {}
    for node, client in enumerate(CLIENTS):
        participants[node] = Participant(
            open_agent(tmp_path / f"device-{client}", client),
            after_install=lambda agent, client=client: live_a_period(agent, client, simulated),
        )
    server = coordinator(deployment, Network(participants))
    for expected in simulated_states(rounds):
        metrics = server.attempt()
        assert metrics["clients"] == len(CLIENTS)
        assert server.state.round == expected.round
        np.testing.assert_allclose(server.state.weights, expected.weights, atol=1e-6, rtol=0)
        assert server.state.clip_norm == pytest.approx(expected.clip_norm, rel=1e-6)
        assert max(server.state.deployed) == max(expected.deployed)
    assert np.abs(server.state.weights - deployment.initial).max() > 0.01


def test_with_secure_aggregation_each_round_is_the_simulators_up_to_rounding(tmp_path):
    """Each round of the simulator starts from the deployment's state, so that the bound is that of one round."""
    pytest.importorskip("flwr")
    from secure_builders import SECURE, RecordingGrid, a_server

    from fedbandit.deploy.flower.client_app import make_client_app
    from fedbandit.deploy.secure_sums import update_error

    rounds = 4
    values, words = deployment_values(rounds, "server", SECURE, **SECURE_TRAINING)
    (tmp_path / "words.txt").write_text("\n".join(words))
    deployment, simulated = (
        build_deployment(values, tmp_path),
        experiment(rounds, **SECURE_TRAINING),
    )
    app = make_client_app(
        open_agent=lambda context: open_agent(
            context.node_config["agent-dir"], context.node_config["client"]
        ),
        after_install=lambda agent, context: live_a_period(
            agent, context.node_config["client"], simulated
        ),
        secure_aggregation=True,
    )
    configs = [
        {"agent-dir": str(tmp_path / f"device-{client}"), "client": client, "unsigned-keys": True}
        for client in CLIENTS
    ]
    server = a_server(deployment, RecordingGrid(app, configs))
    for _ in range(rounds):
        before = server.state
        assert server.attempt()["clients"] == len(CLIENTS)
        expected = simulated_round(before, rounds, **SECURE_TRAINING)
        bound = update_error(len(CLIENTS), before.clip_norm) / len(CLIENTS) + 1e-6
        np.testing.assert_allclose(server.state.weights, expected.weights, atol=bound, rtol=0)
        assert server.state.clip_norm == pytest.approx(expected.clip_norm, rel=1e-9)
    assert np.abs(server.state.weights - deployment.initial).max() > 0.01
