"""The deployment gate: good models pass, bad ones do not, a refusal keeps the old weights under the new number."""

from dataclasses import replace

import numpy as np
import pytest

from fedbandit.assembly.experiment import build_experiment
from fedbandit.config import Config
from fedbandit.core.errors import ConfigError
from fedbandit.core.process import Stopwatch
from fedbandit.data.embedded import realizable
from fedbandit.engines import ThreadEngine
from fedbandit.evaluation.gate import Gate
from fedbandit.evaluation.metrics import expected_rewards, policy_value
from fedbandit.federated.clients import Broadcast
from fedbandit.federated.round import run_round
from fedbandit.federated.state import Version, load_state, save_state
from fedbandit.simulation import simulate

WORLD = realizable(seed=2, clients=120, examples=30, features=4, actions=3)


def _config(**values):
    base = {
        "scenario": "scratch",
        "rounds": 20,
        "deploy_every": 5,
        "clients_per_round": 10,
        "policy": {"name": "epsilon-greedy", "epsilon": 0.3},
        "client": {"learning_rate": 0.1, "max_examples": 20},
        "server": {"learning_rate": 0.02},
    }
    return Config.build({**base, **values})


def _judge(gate, deployed, candidate, round_number=1):
    experiment = build_experiment(_config(), WORLD.dataset)
    broadcast = Broadcast(round_number, {"weights": deployed}, {0: Version(deployed)}, 1.0)
    return gate.judge(experiment.bandit.work, broadcast, Version(candidate), np.arange(10))


GOOD = np.asarray(WORLD.true_weights(), np.float32)
BAD = -GOOD
CHANCE = np.zeros_like(GOOD)


@pytest.mark.parametrize("estimator", ["ips", "dr"])
def test_better_models_pass_and_worse_ones_do_not(estimator):
    gate = Gate(range(120), seed=0, confidence=0.95, estimator=estimator, clients=80)
    assert _judge(gate, BAD, GOOD).passes
    worse = _judge(gate, GOOD, BAD)
    assert not worse.passes
    assert worse.gain < 0


def test_the_same_model_is_not_worse_than_itself():
    verdict = _judge(Gate(range(120), seed=0, confidence=0.99), CHANCE, CHANCE.copy())
    assert verdict.passes
    assert verdict.gain == 0


@pytest.mark.parametrize("estimator", ["ips", "dr"])
def test_the_gain_is_estimated_without_bias(estimator):
    experiment = build_experiment(_config(), WORLD.dataset)
    work = experiment.bandit.work

    rewards = expected_rewards(work.split, work.world, work.num_actions)

    def value(model):
        scores = lambda rows: work.predictor.predict(model, work.split.contexts(rows))  # noqa: E731
        return policy_value(work.split, range(10, 120), work.policy, scores, rewards)

    truth = value(GOOD) - value(BAD)
    gate = Gate(range(120), seed=0, estimator=estimator, clients=110)
    gains = [
        _judge(gate, BAD, GOOD, round_number=period).gain for period in range(1, 5)
    ]  # fresh draws each round
    error = _judge(gate, BAD, GOOD).standard_error / np.sqrt(len(gains))
    assert abs(np.mean(gains) - truth) < 3 * error


def test_more_confidence_asks_for_more():
    lower = [_judge(Gate(range(120), 0, c), CHANCE, GOOD).lower for c in (0.5, 0.8, 0.99)]
    assert lower == sorted(lower, reverse=True)
    strict = Gate(range(120), seed=0, confidence=0.999, clients=5)
    moved = GOOD + np.random.default_rng(0).normal(0, 0.1, len(GOOD)).astype(np.float32)
    assert not _judge(strict, GOOD, moved).passes
    assert _judge(replace(strict, margin=1.0), GOOD, moved).passes


def test_other_clients_are_asked_than_those_that_trained():
    gate = Gate(range(5, 40), seed=1, clients=20)
    asked = gate._asked(3, np.arange(5, 20))
    assert len(asked) == len(set(asked)) == 20
    assert set(asked) == set(range(20, 40))
    assert (gate._asked(4, np.arange(5, 10)) != gate._asked(3, np.arange(5, 10))).any()


def test_a_refused_model_leaves_the_old_weights_under_the_new_number(tmp_path):
    config = _config(gate={"confidence": 0.9, "clients": 40})
    experiment = build_experiment(config, WORLD.dataset)
    # Start from the truth and train with a rate that ruins it: nothing may be deployed.
    work = experiment.bandit.work
    spoiled = replace(
        work.algorithm, optimizer=replace(work.algorithm.optimizer, learning_rate=1.0)
    )
    phase = replace(experiment.bandit, work=replace(work, algorithm=spoiled))
    state, engine = phase.start(GOOD), ThreadEngine(1)
    seen = []
    for _ in range(10):
        state, metrics = run_round(phase, state, engine, Stopwatch())
        seen.append(metrics)
    verdicts = [metrics["gate"] for metrics in seen if "gate" in metrics]
    assert [metrics["round"] for metrics in seen if "gate" in metrics] == [5, 10]
    assert not any(verdict["passes"] for verdict in verdicts)
    assert list(state.deployed) == [2]
    np.testing.assert_array_equal(state.deployed[2].weights, GOOD)
    assert (state.weights != GOOD).any()
    assert seen[-1]["model_version"] == 1
    save_state(state, tmp_path / "state.safetensors")
    np.testing.assert_array_equal(
        load_state(tmp_path / "state.safetensors").deployed[2].weights, GOOD
    )


def test_population_mode_keeps_every_version_that_clients_may_hold():
    config = _config(
        mode="population",
        gate={"confidence": 0.9999, "clients": 3},  # next to nothing passes
        population={
            "events_per_period": 10,
            "cache_size": 20,
            "pull_probability": 0.5,
            "longest_lag": 2,
        },
    )
    simulation = simulate(config, WORLD.dataset)
    rounds = list(simulation)
    assert [metrics["gate"]["passes"] for metrics in rounds if "gate" in metrics].count(False) >= 3
    newest = max(simulation.state.deployed)
    assert newest == 4
    assert sorted(simulation.state.deployed) == list(
        range(min(simulation.state.deployed), newest + 1)
    )


def test_without_a_gate_nothing_changes_and_an_idle_gate_changes_no_result():
    plain = list(simulate(_config(), WORLD.dataset))
    lenient = list(simulate(_config(gate={"confidence": 0.5, "margin": 100.0}), WORLD.dataset))
    assert all("gate" not in metrics for metrics in plain)
    assert [{k: v for k, v in metrics.items() if k != "gate"} for metrics in lenient] == plain


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"policy": {"name": "greedy"}}, "never explores"),
        ({"policy": {"name": "epsilon-greedy", "epsilon": 0}}, "never explores"),
        (
            {
                "privacy": {"mechanism": "dp-fedavg", "noise_multiplier": 1.0},
                "clipping": {"norm": 0.1},
            },
            "epsilon",
        ),
    ],
)
def test_gates_that_cannot_work_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        build_experiment(_config(gate={"confidence": 0.9}, **values), WORLD.dataset)
