"""The simulator and the deployment agree: the same population, seeds and rounds give the same models."""

from dataclasses import replace

import numpy as np
import pytest
from network_builders import Network, coordinator
from simulated_devices import CLIENTS, deployment_values, experiment, live_a_period, open_agent

from fedbandit.deploy.flower.deployment import build_deployment
from fedbandit.deploy.flower.participant import Participant
from fedbandit.engines import ThreadEngine
from fedbandit.simulation.loop import play_round
from fedbandit.timing import Stopwatch


class Everybody:
    """The cohort that the deployment asks, in its order."""

    def draw(self, round_number):
        return np.array(CLIENTS)


def simulated_states(rounds):
    """The simulator's state after every round."""
    phase = replace(experiment(rounds).bandit, cohorts=Everybody())
    state = phase.start(experiment(rounds).initial_weights())
    for _ in range(rounds):
        state, _ = play_round(phase, state, ThreadEngine(1), Stopwatch())
        yield state


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
