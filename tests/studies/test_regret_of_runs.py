"""The regret of runs: full-information training comes near the best, and what held a run back does not hold it."""

from contextlib import closing

import numpy as np
import pytest
from known_worlds import exact_regret

from fedbandit.assembly.experiment import build_experiment
from fedbandit.config import Config
from fedbandit.data.embedded import features_of, realizable
from fedbandit.engines import ThreadEngine
from fedbandit.evaluation.logs import LinearSums, linear_sums
from fedbandit.policies import Greedy, Uniform
from fedbandit.studies.regret import best_in_class, estimated_regret, excess_error, measure

WORLD = realizable(seed=1, clients=30, examples=40, features=4, actions=3)


def _config(**values):
    base = {
        "scenario": "scratch",
        "rounds": 60,
        "deploy_every": 10,
        "clients_per_round": 10,
        "policy": {"name": "epsilon-greedy", "epsilon": 0.1},
        "client": {"learning_rate": 0.1, "max_examples": 20},
        "server": {"learning_rate": 0.02},
    }
    return Config.build({**base, **values})


def test_full_information_training_finds_nearly_the_best():
    experiment = build_experiment(_config(), WORLD.dataset)
    engine = ThreadEngine(1)
    best = best_in_class(experiment, engine, rounds=60, client_learning_rate=0.5)

    def scores(rows):
        return experiment.bandit.work.predictor.predict(best, WORLD.dataset.train.contexts(rows))

    chance = exact_regret(
        WORLD.dataset.train, WORLD.mean_rewards, range(30), Uniform(), scores
    ).value
    # Not nearer: 1,200 examples carry noise of their own, and the best is chosen by what they paid.
    assert (
        exact_regret(WORLD.dataset.train, WORLD.mean_rewards, range(30), Greedy(), scores).value
        < chance / 10
    )
    untrained = estimated_regret(experiment, experiment.initial_weights(), best)
    assert untrained.value > 0.05
    itself = estimated_regret(experiment, best, best)
    assert 0 <= itself.value < untrained.value


def _best(config, round_number=1):
    experiment = build_experiment(config, WORLD.dataset)
    with closing(ThreadEngine(1)) as engine:
        best = best_in_class(
            experiment, engine, rounds=60, round_number=round_number, client_learning_rate=0.5
        )
    return best, estimated_regret(experiment, experiment.initial_weights(), best, round_number).best


def test_after_a_change_the_best_of_the_class_is_the_best_of_the_changed_world():
    """Labels that trade places leave the task as hard as it was, whenever they do."""
    drift = {"kind": "permute", "at": [31], "fraction": 1.0}
    config = _config(scenario="drift", drift=drift)
    _, still = _best(_config())
    for round_number in (30, 31):
        _, found = _best(config, round_number)
        assert found == pytest.approx(still, abs=0.01)


def test_actions_that_do_not_exist_are_not_the_best_of_any_class():
    config = _config(scenario="drift", drift={"kind": "appear", "at": [31], "fraction": 0.7})
    (_, before), (_, after) = (_best(config, round_number) for round_number in (30, 31))
    experiment = build_experiment(config, WORLD.dataset)
    lone = int(np.flatnonzero(experiment.bandit.scenario.stage(30).available)[0])
    assert before == pytest.approx(
        WORLD.dataset.header.action_counts[lone] / WORLD.dataset.train.num_examples
    )
    assert after > before + 0.1


@pytest.mark.parametrize(
    "held_back",
    [
        {
            "privacy": {"mechanism": "dp-fedavg", "noise_multiplier": 5.0},
            "clipping": {"norm": 0.01},
            "rounds": 6,
        },
        {"privacy": {"sampling": "poisson"}},
        {"gate": {"confidence": 0.9}},
    ],
    ids=["private", "poisson", "gate"],
)
def test_the_best_of_the_class_knows_nothing_of_what_held_the_run_back(held_back):
    free, _ = _best(_config())
    found, _ = _best(_config(**held_back))
    np.testing.assert_array_equal(found, free)


def test_regret_is_never_negative_and_says_when_the_reference_was_beaten():
    experiment = build_experiment(_config(policy={"name": "greedy"}), WORLD.dataset)
    good = np.asarray(WORLD.true_weights(), np.float32)
    found = estimated_regret(experiment, good, experiment.initial_weights())
    assert found.value == 0
    assert found.reference_beaten


def test_deploying_more_often_loses_less():
    engine = ThreadEngine(1)
    often, once = (measure(_config(deploy_every=every), WORLD, engine) for every in (5, 60))
    assert often.regret < once.regret
    assert once.regret == pytest.approx(once.last_regret)  # one model all the way
    assert (often.periods, often.samples) == (12, 1000)
    assert often.optimization_error > 0


def test_the_least_squares_fit_has_no_excess_and_the_truth_little():
    rng = np.random.default_rng(0)
    x = features_of(WORLD.dataset.train.shared(np.arange(600)))
    actions = rng.integers(0, 3, 600)
    rewards = rng.random(600)
    experiment = build_experiment(_config(), WORLD.dataset)
    design = np.column_stack([x, np.ones(600)])
    first, rest = slice(250), slice(250, None)
    log = sum(
        (linear_sums(design[part], actions[part], rewards[part], 3) for part in (first, rest)),
        LinearSums.empty(3, design.shape[1]),
    )
    solved = np.stack(
        [
            np.linalg.lstsq(design[actions == a], rewards[actions == a], rcond=None)[0]
            for a in range(3)
        ]
    )
    flat = np.concatenate([solved[:, :-1].T.reshape(-1), solved[:, -1]])
    assert excess_error(log, experiment.layout, flat) == pytest.approx(0, abs=1e-9)
    moved = flat.copy()
    moved[-1] += 0.3  # the bias of the last action
    assert excess_error(log, experiment.layout, moved) == pytest.approx(
        0.09 * (actions == 2).mean(), rel=1e-6
    )
    fitted, shifted = (
        ((rewards - (design * model[actions]).sum(axis=1)) ** 2).mean()
        for model in (solved, np.column_stack([moved[:-3].reshape(-1, 3).T, moved[-3:]]))
    )
    assert excess_error(log, experiment.layout, moved) == pytest.approx(shifted - fitted)
