"""Drift: what the stages pay, and that runs feel the change."""

import numpy as np
import pytest
from builders import random_images, random_text
from core_samples import met_with

from fedbandit.assembly.experiment import build_experiment
from fedbandit.config import Config
from fedbandit.core.errors import ConfigError
from fedbandit.core.ragged import Ragged
from fedbandit.environments import Liked, exact_match
from fedbandit.environments.scenarios import drift
from fedbandit.federated.state import Version
from fedbandit.simulation import simulate

HEADER = random_text().header
K = HEADER.num_actions
ONE_OF_EACH = met_with(Ragged.from_rows([[label] for label in range(K)]), K)


def _config(**values):
    base = {
        "scenario": "drift",
        "rounds": 20,
        "deploy_every": 5,
        "clients_per_round": 6,
        "policy": {"name": "softmax"},
    }
    return Config.build({**base, **values})


def test_permuted_labels_have_one_right_answer_each_and_the_first_stage_is_plain():
    scenario = drift(HEADER, kind="permute", at=(10, 20), fraction=0.5)
    first, second, third = (stage.environment.expected(ONE_OF_EACH) for stage in scenario.stages)
    np.testing.assert_array_equal(first, np.eye(K))
    for matrix in (second, third):
        np.testing.assert_array_equal(matrix.sum(axis=0), 1)
        np.testing.assert_array_equal(matrix.sum(axis=1), 1)
    assert (second.argmax(axis=1) != np.arange(K)).sum() == 3  # half of the six, all of them moved
    assert (third != second).any()
    assert [stage.from_round for stage in scenario.stages] == [1, 10, 20]


def test_actions_appear_and_none_goes():
    scenario = drift(HEADER, kind="appear", at=(10, 20), fraction=0.5, start="init")
    masks = [stage.available for stage in scenario.stages]
    sizes = [int(mask.sum()) for mask in masks]
    assert (sizes[0], sizes[-1]) == (3, 6)
    assert 3 < sizes[1] < 6
    assert not (masks[0] & ~masks[1]).any()
    np.testing.assert_array_equal(
        scenario.pretraining.expected(ONE_OF_EACH), np.diag(masks[0].astype(float))
    )


def test_preferences_rotate_between_groups():
    scenario = drift(HEADER, kind="rotate", at=(10,), groups=3, disliked=0.25)
    before, after = (stage.environment for stage in scenario.stages)
    for worth in before.worth:
        assert sorted(worth) == [0.25] * 4 + [1.0] * 2
    for group in range(3):  # each takes over the next one's likings
        np.testing.assert_array_equal(after.worth[group], before.worth[(group + 1) % 3])


def test_grouped_rewards_pay_each_client_by_its_group():
    worth = np.array([[1, 1, 1], [0.5, 0.0, 0.2], [0, 0, 0]], np.float32)
    rewards = Liked(exact_match(3), worth, seed=4)
    clients = np.arange(4000)
    groups = rewards.groups(clients)
    np.testing.assert_allclose(
        np.bincount(groups) / 4000, [0.5, 0.25, 0.25], atol=3 * np.sqrt(0.25 / 4000)
    )
    labels = Ragged.from_rows([[i % 3] for i in range(4000)])
    met = met_with(labels, 3, clients)
    matrix = rewards.expected(met)
    expected = np.array([worth[group, i % 3] for i, group in enumerate(groups)], np.float32)
    np.testing.assert_array_equal(matrix[np.arange(4000), np.arange(4000) % 3], expected)
    actions = np.random.default_rng(0).integers(0, 3, 4000)
    np.testing.assert_array_equal(rewards.rewards(met, actions), matrix[np.arange(4000), actions])
    assert rewards.highest == 1


@pytest.mark.parametrize("kind", ["permute", "appear", "rotate"])
@pytest.mark.parametrize("dataset", [random_text(), random_images()], ids=["text", "images"])
def test_runs_are_the_same_until_the_change_and_not_after(kind, dataset):
    def rewards(at):
        config = _config(drift={"kind": kind, "at": [at], "fraction": 1.0})
        return simulate(config, dataset).collect()["reward"]

    early, late = rewards(11), rewards(20)
    np.testing.assert_array_equal(early[:10], late[:10])
    assert (early[10:19] != late[10:19]).any()


def test_actions_that_do_not_exist_yet_are_never_taken():
    experiment = build_experiment(_config(drift={"kind": "appear", "at": [11]}), random_text())
    from fedbandit.federated.clients import Broadcast

    phase = experiment.bandit
    stage = phase.scenario.stage(1)
    weights = experiment.initial_weights()
    sent = Broadcast(1, {"weights": weights}, {0: Version(weights)}, 1.0)
    events = phase.work.act(np.arange(12), sent)
    assert stage.available[events.actions].all()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "drift.at"),
        ({"drift": {"at": [30, 20]}}, "ascend"),
        ({"drift": {"at": [10], "kind": "rotate", "groups": 50}}, "groups"),
    ],
)
def test_impossible_drifts_are_refused_by_the_name_of_the_key(values, message):
    with pytest.raises(ConfigError, match=message):
        build_experiment(_config(**values), random_text())
