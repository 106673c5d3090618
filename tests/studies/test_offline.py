"""Training from logs: the same rounds as a simulation, and each objective right where it should be."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from builders import random_text
from known_worlds import exact_regret

from fedbandit.assembly.experiment import build_experiment
from fedbandit.config import Config
from fedbandit.core.errors import ConfigError, DataError
from fedbandit.core.prediction import Prediction
from fedbandit.core.process import Stopwatch
from fedbandit.core.ragged import Ragged
from fedbandit.data.dataset import Log
from fedbandit.data.embedded import realizable
from fedbandit.engines import ThreadEngine
from fedbandit.federated.round import run_round
from fedbandit.objectives import CrossEntropy, DoublyRobust, WeightedRegression
from fedbandit.policies import Greedy
from fedbandit.simulation import simulate
from fedbandit.studies.offline import train_from_logs
from fedbandit.studies.tuning import collect_logs


@dataclass(frozen=True)
class InverselyWeighted(WeightedRegression):
    """A user's own objective, which is weighted whatever it is called."""


@dataclass(frozen=True)
class OwnLogistic(CrossEntropy):
    """A user's own objective, whose rewards must lie in [0, 1] as well."""


WORLD = realizable(seed=3, clients=60, examples=40, features=4, actions=3)


def _config(**values):
    base = {
        "scenario": "scratch",
        "rounds": 40,
        "deploy_every": 40,
        "clients_per_round": 20,
        "policy": {"name": "epsilon-greedy", "epsilon": 0.5},
        "client": {"learning_rate": 0.1},
        "server": {"learning_rate": 0.03},
    }
    return Config.build({**base, **values})


def _logs(rounds=40, **values):
    experiment = build_experiment(_config(**values), WORLD.dataset)
    return experiment, collect_logs(
        experiment, experiment.bandit.start(experiment.initial_weights()), rounds
    )


def test_doubly_robust_targets_by_hand():
    targets = DoublyRobust().targets(
        Prediction(np.array([[0.5, 0.2], [0.1, 0.9]])),
        np.array([1, 0]),
        np.array([1.0, 0.0]),
        np.array([0.25, 0.5]),
    )
    np.testing.assert_allclose(targets, [[0.5, 0.2 + 0.8 * 4], [0.1 - 0.1 * 2, 0.9]], rtol=1e-6)
    capped = DoublyRobust(limit=1.0).targets(
        Prediction(np.zeros((1, 2))), np.array([0]), np.array([1.0]), np.array([0.1])
    )
    np.testing.assert_allclose(capped, [[1.0, 0.0]])


def test_doubly_robust_targets_are_right_on_average_whatever_is_predicted():
    rng = np.random.default_rng(0)
    n, truth = 200_000, np.array([0.2, 0.5, 0.9])
    logging = np.array([0.7, 0.2, 0.1])
    actions = rng.choice(3, n, p=logging)
    rewards = (rng.random(n) < truth[actions]).astype(float)
    targets = DoublyRobust().targets(
        Prediction(np.tile([0.9, 0.0, 0.4], (n, 1))), actions, rewards, logging[actions]
    )
    error = targets.std(axis=0) / np.sqrt(n)
    assert (np.abs(targets.mean(axis=0) - truth) < 3 * error).all()


def test_collected_logs_are_what_the_clients_logged():
    experiment, dataset = _logs(rounds=5)
    state, engine = experiment.bandit.start(experiment.initial_weights()), ThreadEngine(1)
    total = events = 0.0
    for _ in range(5):
        state, metrics = run_round(experiment.bandit, state, engine, Stopwatch())
        total, events = total + metrics["reward"] * metrics["events"], events + metrics["events"]
    log = dataset.train.log
    assert len(log.rewards) == events
    assert log.rewards.mean() == pytest.approx(total / events)
    assert dataset.header.logged
    with pytest.raises(ValueError, match="beyond"):
        collect_logs(experiment, experiment.bandit.start(experiment.initial_weights()), 41)


@pytest.mark.parametrize(
    "objective", ["regression", "weighted-regression", "doubly-robust", "cross-entropy"]
)
def test_every_objective_learns_from_logs(objective):
    _, dataset = _logs()
    config = _config(rounds=60, objective={"name": objective}, client={"learning_rate": 0.3})
    trained = train_from_logs(config, dataset, engine=ThreadEngine(1))
    predictor = trained.experiment.bandit.work.predictor
    regret = {}
    for name, weights in (
        ("before", trained.experiment.initial_weights()),
        ("after", trained.weights),
    ):
        scores = lambda rows, w=weights: predictor.predict(w, WORLD.dataset.train.contexts(rows))  # noqa: E731
        regret[name] = exact_regret(
            WORLD.dataset.train, WORLD.mean_rewards, range(60), Greedy(), scores
        ).value
    assert regret["after"] < 0.35 * regret["before"]
    assert len(trained.rounds) == 60


def test_biased_logs_mislead_unweighted_regression_and_not_the_others():
    """One action, logged only where it pays: a model without context believes it always does.

    Contexts are a coin; action 1 pays 1 on heads and 0 on tails; the log takes it often on heads and rarely on tails.
    The model sees no context, so the right score of action 1 is its mean over coins, one half.
    """
    from builders import dataset_in_memory

    rng = np.random.default_rng(0)
    clients, each = 40, 50
    n = clients * each
    heads = rng.random(n) < 0.5
    propensity_of_one = np.where(heads, 0.8, 0.2)
    actions = (rng.random(n) < propensity_of_one).astype(np.int32)
    rewards = np.where(actions == 1, heads, 0.3).astype(np.float32)
    propensities = np.where(actions == 1, propensity_of_one, 1 - propensity_of_one).astype(
        np.float32
    )
    wordless = Ragged(np.zeros(n + 1, np.int64), np.zeros(0, np.int32), np.zeros(0, np.float32))
    blind = dataset_in_memory(wordless, [[0]] * n, np.arange(clients + 1) * each, 2, shape=(1,))
    logged = replace(
        blind,
        header=replace(blind.header, logged=True),
        train=replace(blind.train, log=Log(actions, rewards, propensities)),
    )
    rate = {"learning_rate": 0.1}
    found = {}
    for objective in ("regression", "weighted-regression", "doubly-robust"):
        config = _config(
            rounds=150, objective={"name": objective}, client=rate, server={"learning_rate": 0.01}
        )
        trained = train_from_logs(config, logged, engine=ThreadEngine(1))
        found[objective] = trained.weights[-1]
    error = 3 * 0.5 / np.sqrt(n * 0.2)  # three standard errors of a mean over the rarer events
    assert found["regression"] == pytest.approx(0.8, abs=error)
    assert found["weighted-regression"] == pytest.approx(0.5, abs=error)
    assert found["doubly-robust"] == pytest.approx(0.5, abs=error)


def test_a_simulation_can_train_doubly_robustly():
    config = _config(
        objective={"name": "doubly-robust"},
        rounds=30,
        deploy_every=10,
        client={"learning_rate": 0.3},
    )
    rewards = simulate(config, WORLD.dataset).collect()["reward"]
    assert rewards[20:].mean() > rewards[:10].mean() + 0.03


def test_what_cannot_be_trained_is_refused():
    with pytest.raises(DataError, match="labels"):
        train_from_logs(_config(), WORLD.dataset)
    _, dataset = _logs(rounds=2)
    high = replace(
        dataset.train, log=replace(dataset.train.log, rewards=dataset.train.log.rewards * 3)
    )
    for name in ("cross-entropy", "weighted-cross-entropy", f"{__name__}:OwnLogistic"):
        with pytest.raises(ConfigError, match="cross-entropy needs rewards"):
            train_from_logs(_config(objective={"name": name}), replace(dataset, train=high))
    with pytest.raises(ConfigError, match="limit"):
        build_experiment(_config(objective={"name": "doubly-robust", "limit": 0}), random_text())


def test_an_objective_is_known_by_what_it_is_and_not_by_its_name():
    _, dataset = _logs(rounds=2)
    objectives = [
        train_from_logs(
            _config(rounds=1, objective={"name": name}), dataset
        ).experiment.bandit.work.learner.objective
        for name in ("weighted-regression", f"{__name__}:InverselyWeighted")
    ]
    assert {objective.scale for objective in objectives} == {
        float(dataset.train.log.propensities.min())
    }


def test_a_private_plan_covers_no_part_of_the_clients_alone():
    _, dataset = _logs(rounds=2)
    private = {
        "privacy": {"mechanism": "dp-fedavg", "noise_multiplier": 0.5},
        "clipping": {"norm": 0.5},
    }
    config = _config(rounds=2, clients_per_round=5, **private)
    assert len(train_from_logs(config, dataset).rounds) == 2
    with pytest.raises(ConfigError, match=r"privacy\.mechanism"):
        train_from_logs(config, dataset, clients=range(10))
