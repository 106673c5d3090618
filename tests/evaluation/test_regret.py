"""Regret where the truth is known: exact, and every client counts the same."""

import numpy as np
import pytest
from builders import dataset_in_memory
from known_worlds import exact_regret

from fedbandit.core.prediction import Prediction
from fedbandit.data.embedded import features_of, realizable
from fedbandit.evaluation.metrics import policy_value
from fedbandit.policies import EpsilonGreedy, Greedy, Uniform

WORLD = realizable(seed=1, clients=30, examples=40, features=4, actions=3)


def test_rewards_follow_the_truth():
    split = WORLD.dataset.train
    rows = np.arange(split.num_examples)
    means = WORLD.mean_rewards(rows)
    assert means.min() >= 0.05
    assert means.max() <= 0.95
    labels = split.labels
    earned = np.zeros(means.shape)
    earned[labels.row_of_entry(), labels.ids] = 1
    residual = earned - means
    standard = np.sqrt((means * (1 - means)).sum(axis=0)) / len(rows)
    assert (np.abs(residual.mean(axis=0)) < 3 * standard).all()
    x = features_of(split.shared(rows))
    assert np.abs(x.T @ residual / len(rows)).max() < 3 * 0.5 / np.sqrt(
        len(rows)
    )  # nothing linear is left over


def test_clients_differ():
    split = WORLD.dataset.train
    best = (
        WORLD.mean_rewards(np.arange(split.num_examples))
        .argmax(axis=1)
        .reshape(split.num_clients, -1)
    )
    shares = np.stack([(best == action).mean(axis=1) for action in range(3)])
    assert shares.std(axis=1).max() > 0.2


def test_the_truth_has_no_regret_and_chance_has_much():
    clients = range(30)
    known = lambda rows: Prediction(WORLD.mean_rewards(rows))  # noqa: E731
    truth = exact_regret(WORLD.dataset.train, WORLD.mean_rewards, clients, Greedy(), known)
    assert truth.value == pytest.approx(0, abs=1e-12)
    chance = exact_regret(WORLD.dataset.train, WORLD.mean_rewards, clients, Uniform(), known)
    assert chance.value > 0.1
    explores = exact_regret(
        WORLD.dataset.train, WORLD.mean_rewards, clients, EpsilonGreedy(0.2), known
    )
    assert explores.value == pytest.approx(0.2 * chance.value)


def test_every_client_counts_the_same():
    """A client of three examples weighs as much as one of a single example."""
    features = np.eye(4, dtype=np.float32)
    split = dataset_in_memory(features, [[0], [0], [0], [1]], [0, 3, 3, 4], 2).train
    rewards = lambda rows: np.where(rows[:, None] < 3, [[1.0, 0.0]], [[0.0, 0.0]])  # noqa: E731
    scores = lambda rows: Prediction(np.tile([1.0, 0.0], (len(rows), 1)))  # noqa: E731
    assert policy_value(split, range(3), Greedy(), scores, rewards) == pytest.approx(0.5)
