"""FALCON's schedule, the floor, and rules as names and parameters: what a deployed version ships with."""

import json
from dataclasses import dataclass
from math import log, sqrt

import numpy as np
import pytest
from core_samples import config, played, text

from fedbandit.assembly.experiment import build_experiment
from fedbandit.core.errors import ConfigError
from fedbandit.core.prediction import Prediction, Progress
from fedbandit.deploy import Agent, DeviceModel
from fedbandit.deploy.device.model_in_use import open_model
from fedbandit.policies import (
    BUILT_IN,
    EpsilonGreedy,
    Falcon,
    FalconSchedule,
    Floored,
    Greedy,
    Softmax,
    Uniform,
    describe,
    importance_scale,
    make_policy,
    rule_at,
)

MEAN = np.array([[0.1, 0.9, 0.3, 0.2], [5.0, 5.0, -5.0, 0.0]])
SCORES = Prediction(MEAN, heads=np.stack([MEAN, -MEAN], axis=1), width=np.ones_like(MEAN))


def test_falcon_follows_its_published_schedule():
    policy = FalconSchedule(c=2.0, delta=0.1, complexity=7.0)
    assert rule_at(policy, Progress(0, 0, 0, 4)) == Uniform()
    rule = rule_at(policy, Progress(version=3, rounds=60, events=5000, actions=4))
    assert rule == Falcon(mu=None, gamma=2 * sqrt(4 * 5000 / (7 + log(5000 / 0.1))))
    unset = rule_at(FalconSchedule(), Progress(1, 20, 5000, 4))
    assert unset.gamma == pytest.approx(sqrt(4 * 5000 / (4 + log(5000 / 0.05))))


def test_a_run_acts_with_the_rule_of_its_version():
    rounds, simulation = played(config(policy__name="falcon-schedule", rounds=6), text())
    work, actions = (
        simulation.experiment.bandit.work,
        simulation.experiment.dataset.header.num_actions,
    )
    assert rounds[0]["propensity"] == pytest.approx(1 / actions)
    assert rounds[-1]["propensity"] > 1 / actions
    newest = simulation.state.deployed[max(simulation.state.deployed)]
    logged = sum(line["events"] for line in rounds)
    assert newest.progress == Progress(version=3, rounds=6, events=logged, actions=actions)
    assert simulation.state.events == logged
    assert work.rule(newest) == FalconSchedule().at(newest.progress)


def test_under_privacy_the_planned_events_count():
    private = {
        "privacy__mechanism": "dp-fedavg",
        "privacy__noise_multiplier": 0.5,
        "clipping__norm": 0.5,
    }
    with pytest.raises(
        ConfigError, match=r"client.max_examples: missing; the schedule of falcon-schedule"
    ):
        played(config(policy__name="falcon-schedule", **private), text())
    _, simulation = played(
        config(policy__name="falcon-schedule", client__max_examples=5, **private), text()
    )
    newest = simulation.state.deployed[max(simulation.state.deployed)]
    assert newest.progress.events == newest.progress.rounds * 6 * 5


def test_weighted_events_take_the_scale_of_the_rule_that_made_them():
    """Half of the events by uniform exploration, half by a rule with a scale of its own."""

    class Two:
        def at(self, progress):
            return Uniform() if progress.version == 0 else EpsilonGreedy(0.4)

        def probabilities(self, prediction, available=None):
            return Uniform().probabilities(prediction, available)

    from dataclasses import replace

    from fedbandit.assembly.experiment import build_experiment
    from fedbandit.federated.state import Version

    chosen = config(
        mode="population",
        population__events_per_period=4,
        population__cache_size=8,
        objective__name="weighted-regression",
    )
    experiment = build_experiment(chosen, text())
    work = replace(experiment.bandit.work, policy=Two(), per_version_importance=True)
    weights = experiment.initial_weights()
    k = work.num_actions
    state = experiment.bandit.start(weights)
    deployed = {v: Version(weights, Progress(version=v, actions=k)) for v in range(3)}
    sent = work.broadcast(replace(state, round=3, deployed=deployed))
    events = work.act(np.arange(6), sent)
    assert set(events.versions.tolist()) == {0, 1}
    scales = np.where(events.versions == 0, 1.0, 0.4 / k)
    np.testing.assert_array_equal(events.weights, scales)
    headed = replace(work, heads=3).act(np.arange(6), sent)
    counts = headed.weights / scales[:, None]
    np.testing.assert_allclose(
        counts, counts.round(), atol=1e-6
    )  # Poisson counts, each times the scale
    assert counts.max() > 1


@pytest.mark.parametrize("name", sorted(BUILT_IN))
@pytest.mark.parametrize("available", [None, np.array([True, False, True, True])])
def test_the_floor_is_under_every_rule_and_exact(name, available):
    plain, floored = make_policy(name, {}), make_policy(name, {"floor": 0.2})
    assert isinstance(floored, Floored)
    p, q = (policy.probabilities(SCORES, available) for policy in (plain, floored))
    uniform = Uniform().probabilities(SCORES, available)
    np.testing.assert_allclose(q, 0.8 * p + 0.2 * uniform, atol=1e-15)
    assert q[uniform > 0].min() >= 0.2 / 4 - 1e-15
    np.testing.assert_array_equal(q[uniform == 0], 0)


def test_the_floor_in_a_run_and_in_a_device_file(tmp_path):
    rounds, simulation = played(config(policy__name="greedy", policy__floor=0.5), text())
    assert rounds[-1]["propensity"] < 1
    model = DeviceModel.of_experiment(simulation.experiment, simulation.state.weights, 3)
    assert model.policy == {"name": "greedy", "floor": 0.5}
    with Agent(tmp_path) as agent:
        agent.install(model)
        assert agent.policy == simulation.experiment.bandit.work.policy
    with pytest.raises(ConfigError, match=r"policy.floor must be from 0 to 1"):
        played(config(policy__floor=1.5), text())


def test_a_device_file_holds_the_rule_of_its_version(tmp_path):
    _, simulation = played(config(policy__name="falcon-schedule", policy__floor=0.1), text())
    newest = simulation.state.deployed[max(simulation.state.deployed)]
    model = DeviceModel.of_experiment(simulation.experiment, newest.weights, 2, newest.progress)
    rule = simulation.experiment.bandit.work.rule(newest)
    assert model.policy == {
        "name": "falcon",
        "mu": rule.rule.mu,
        "gamma": rule.rule.gamma,
        "floor": 0.1,
    }
    with Agent(tmp_path) as agent:
        agent.install(model.to_bytes())
        assert agent.policy == rule


@pytest.mark.parametrize(
    "policy", [Softmax(0.3), EpsilonGreedy(0.1), Floored(Falcon(3.0, 5.0), 0.2), Uniform()]
)
def test_rules_are_written_down_and_made_again(policy):
    described = json.loads(json.dumps(describe(policy)))
    assert make_policy(described.pop("name"), described) == policy


@pytest.mark.parametrize("kind", ["text", "images"])
def test_heads_explore_by_their_disagreement_on_devices_as_in_simulations(kind, tmp_path):
    from core_samples import images

    data = {"text": text, "images": images}[kind]()
    chosen = config(model__name="linear-heads", model__heads=4, dtype="float32")
    _, simulation = played(chosen, data)
    work, weights = simulation.experiment.bandit.work, simulation.state.weights
    rows = np.arange(5)
    expected = work.predictor.predict(weights, data.train.contexts(rows))
    assert expected.heads.std(axis=1).max() > 1e-4
    used = open_model(DeviceModel.of_experiment(simulation.experiment, weights, 1), None, ())
    for row in rows:
        context = data.train.shared(np.array([row]))
        given = (context.ids, context.values) if kind == "text" else context[0]
        np.testing.assert_allclose(
            used.actor.predict(used.encode(given)).heads[0], expected.heads[row], atol=1e-6
        )


def test_the_scale_of_a_floor_is_that_of_the_rule_it_makes():
    for epsilon in (0.0, 0.2):
        same = importance_scale(Floored(EpsilonGreedy(epsilon), 0.5), 10)
        assert same == pytest.approx(importance_scale(EpsilonGreedy(0.5 * epsilon + 0.5), 10))
    assert importance_scale(Floored(Greedy(), 0.05), 50) == pytest.approx(
        importance_scale(EpsilonGreedy(0.05), 50)
    )
    assert importance_scale(Floored(Softmax(), 0.05), 50) == 1.0


@dataclass(frozen=True)
class Always:
    """Looks neither at scores nor at what is available."""

    action: int = 0

    def probabilities(self, prediction, available=None):
        return np.eye(prediction.num_actions)[np.full(len(prediction), self.action)]


def test_a_floor_goes_under_a_policy_of_ones_own_and_comes_back_from_a_file():
    policy = make_policy(f"{__name__}:Always", {"action": 2, "floor": 0.3})
    assert isinstance(policy, Floored)
    described = describe(policy)
    assert make_policy(described.pop("name"), described) == policy


def test_a_policy_that_takes_what_is_not_there_is_named_in_that_round():
    missing = {
        "scenario": "drift",
        "drift__kind": "appear",
        "drift__at": [4],
        "drift__fraction": 0.5,
    }
    exist = build_experiment(config(**missing), text()).bandit.scenario.stage(1).available
    absent = int(np.flatnonzero(~exist)[0])
    with pytest.raises(ConfigError, match=r"policy.name: Always gave .* not available, in round 1"):
        played(config(**missing, policy__name=f"{__name__}:Always", policy__action=absent), text())


def test_a_gate_needs_exploration_below_the_floor_too():
    from fedbandit.evaluation.gate import why_impossible

    assert why_impossible(Floored(Greedy(), 0.0), private=False) is not None
    assert why_impossible(Floored(Greedy(), 0.1), private=False) is None
