"""Environments of coba as data sets: contexts, actions, rewards and clients are those of the interactions."""

import numpy as np
import pytest

from fedbandit import simulate
from fedbandit.config import Config
from fedbandit.core.errors import ConfigError, DataError
from fedbandit.environments import BUILT_IN, Met, from_coba

RULES = {"name": "epsilon-greedy", "epsilon": 0.1}


class Interactions:
    """As coba has an environment, with given interactions."""

    params = {"made": "up"}  # noqa: RUF012 - as coba's are

    def __init__(self, *interactions):
        self.interactions = interactions

    def read(self):
        yield from self.interactions


def linear(n=300, actions=3, features=4, own_features=False):
    """A linear world: a weight per action, or one over features that actions bring along."""
    rng = np.random.default_rng(3)
    weights = rng.normal(size=(actions, features))
    for _ in range(n):
        x = rng.normal(size=features)
        shown = [str(a) for a in range(actions)]
        rewards = (weights @ x).tolist()
        if own_features:
            shown = [tuple(row) for row in rng.normal(size=(actions, 2)).round(3).tolist()]
            rewards = [row[0] - row[1] for row in shown]
        yield {"context": tuple(x.tolist()), "actions": shown, "rewards": rewards}


def met(data):
    rows = np.arange(data.train.num_examples)
    return Met.at_rows(data.train, rows, data.header.num_actions)


def config(**more):
    values = {
        "environment": {"name": "stated"}, "scenario": "scratch", "rounds": 12, "deploy_every": 1,
        "clients_per_round": 8, "client": {"max_examples": 8}, "algorithm": {"name": "statistics"},
        "policy": RULES, "threads": 1,
    }  # fmt: skip
    return Config.build({**values, **more})


@pytest.mark.parametrize("own_features", [False, True])
def test_every_interaction_keeps_its_context_and_pays_what_it_says(own_features):
    interactions = list(linear(n=20, own_features=own_features))
    data = from_coba(Interactions(*interactions), clients=7)
    stated = BUILT_IN["stated"](None, data.header)
    place = [at for client in range(7) for at in range(client, 20, 7)]
    contexts = np.array([interactions[at]["context"] for at in place], np.float32)
    np.testing.assert_array_equal(data.train.shared(np.arange(20)), contexts)
    expected = np.array([interactions[at]["rewards"] for at in place], np.float32)
    np.testing.assert_array_equal(stated.expected(met(data)).reshape(20, -1), expected)
    actions = np.arange(20) % 3
    rewards = stated.rewards(met(data), actions)
    np.testing.assert_array_equal(rewards, expected[np.arange(20), actions])
    if own_features:
        shown = data.train.contexts(np.arange(20)).candidates.features
        features = [action for at in place for action in interactions[at]["actions"]]
        np.testing.assert_array_equal(shown, np.array(features, np.float32))
    assert data.header.source == {"coba": {"made": "up"}}


@pytest.mark.parametrize("own_features", [False, True])
def test_a_run_learns_in_it(own_features):
    data = from_coba(Interactions(*linear(own_features=own_features)), clients=20)
    lines = list(simulate(config(), data))
    early, late = (np.mean([one["regret"] for one in part]) for part in (lines[:2], lines[-4:]))
    assert late < early / 2


def test_clients_can_be_named_by_the_interactions_and_rewards_be_functions():
    one = {"context": None, "actions": [1, 2], "rewards": lambda action: action / 2, "user": "zoe"}
    data = from_coba(Interactions(one, {**one, "user": "abe"}, one), clients="user")
    assert [data.train.client_id(client) for client in (0, 1)] == ["abe", "zoe"]
    assert data.train.sizes().tolist() == [1, 2]
    assert data.train.labels.values.tolist() == [0.5, 1.0] * 3


@pytest.mark.parametrize(
    ("interactions", "match"),
    [
        ((), "no interactions"),
        (({"context": (1,), "actions": [], "rewards": []},), "needs actions"),
        (({"context": (1,), "actions": [1, 2], "rewards": [1]},), "one finite reward"),
        (({"context": ("red",), "actions": [1, 2], "rewards": [0, 1]},), "let coba flatten it"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(interactions, match):
    with pytest.raises(DataError, match=match) as caught:
        from_coba(Interactions(*interactions))
    assert "\n" not in str(caught.value)


def test_a_data_set_without_stated_rewards_is_refused():
    from builders import random_text

    data = random_text()
    with pytest.raises(ConfigError, match="states no rewards"):
        BUILT_IN["stated"](None, data.header).expected(met(data))


@pytest.mark.parametrize("action_features", [0, 3])
def test_cobas_own_linear_world(action_features):
    coba = pytest.importorskip("coba", reason="coba is not installed")
    world = coba.environments.LinearSyntheticSimulation(
        200, n_actions=4, n_context_features=5, n_action_features=action_features, seed=2
    )
    data = from_coba(world, clients=1)
    rewards = np.array([one["rewards"] for one in world.read()], np.float32)
    expected = BUILT_IN["stated"](None, data.header).expected(met(data))
    np.testing.assert_array_equal(expected.reshape(200, 4), rewards)
    assert (data.header.items is None) == (action_features == 0)


def test_categories_of_coba_are_flattened_by_coba():
    coba = pytest.importorskip("coba", reason="coba is not installed")
    rows = [(["red", 0.5], "a"), (["blue", 0.1], "b"), (["red", 0.9], "b")]
    rows = [([coba.Categorical(x[0], ["red", "blue"]), x[1]], y) for x, y in rows]
    worlds = coba.Environments.from_supervised(*zip(*rows, strict=True), label_type="c")
    data = from_coba(worlds.repr("onehot", "onehot")[0], clients=1)
    assert data.train.features.shape == (3, 3)
    assert sorted(data.train.labels.values.tolist()) == [0, 0, 0, 1, 1, 1]
