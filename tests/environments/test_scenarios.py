"""Rewards and scenarios: what every action earns, on headers small enough to write the answer down."""

from dataclasses import replace

import numpy as np
import pytest
from core_samples import met_with
from hypothesis import given
from hypothesis import strategies as st

from fedbandit.core.ragged import Ragged
from fedbandit.data.dataset import Header
from fedbandit.environments import (
    RewardTable,
    Scenario,
    Stage,
    exact_match,
    per_label,
    relabelled,
    with_near_miss,
)
from fedbandit.environments.scenarios import BUILT_IN

# digit, A, B, a, b
LETTERS = Header("letters", "dense", (2,), tuple("0ABab"), (5, 4, 3, 2, 1), lower_case={1: 3, 2: 4})
TAGS = Header(
    "tags",
    "sparse",
    (9,),
    tuple("pqrstuvwxy"),
    (40, 5, 80, 10, 1, 0, 2, 20, 16, 10),
    multilabel=True,
)


def rewards(table: RewardTable) -> np.ndarray:
    """[label, action]: what every action earns for an example with that one label."""
    labels = Ragged.from_rows([[label] for label in range(table.num_actions)])
    return table.expected(met_with(labels, table.num_actions))


def bandit(name: str, header: Header) -> np.ndarray:
    (stage,) = BUILT_IN[name](header).stages
    assert stage.available is None
    return rewards(stage.environment)


def pretraining(name: str, header: Header) -> np.ndarray:
    return rewards(BUILT_IN[name](header).pretraining)


@pytest.mark.parametrize("header", [LETTERS, TAGS])
def test_scratch_and_init_pay_for_the_right_label(header):
    identity = np.eye(header.num_actions)
    assert BUILT_IN["scratch"](header).pretraining is None
    np.testing.assert_array_equal(bandit("scratch", header), identity)
    np.testing.assert_array_equal(bandit("init", header), identity)
    np.testing.assert_array_equal(pretraining("init", header), identity)


def test_init_shift_with_case():
    np.testing.assert_array_equal(bandit("init-shift", LETTERS), np.eye(5))
    expected = np.eye(5)
    expected[1, 3] = expected[2, 4] = 0.5  # lower case answered for an upper-case letter
    np.testing.assert_array_equal(pretraining("init-shift", LETTERS), expected)


def test_init_shift_released_with_case():
    expected = np.eye(5)
    expected[3, 1] = expected[4, 2] = 0.5  # upper case answered for a lower-case letter
    np.testing.assert_array_equal(bandit("init-shift-released", LETTERS), expected)
    folded = np.diag([1.0, 1, 1, 0, 0])
    folded[3, 1] = folded[4, 2] = 1
    np.testing.assert_array_equal(pretraining("init-shift-released", LETTERS), folded)


@pytest.mark.parametrize(
    ("name", "seen"), [("init-shift", "rp"), ("init-shift-released", "rpwxsy")]
)
def test_shifts_without_case_see_the_most_frequent_and_pay_for_rarity(name, seen):
    values = [80 / 40, 80 / 5, 1, 80 / 10, 80, 80, 80 / 2, 80 / 20, 80 / 16, 80 / 10]
    np.testing.assert_array_equal(bandit(name, TAGS), np.diag(values).astype(np.float32))
    expected = np.diag([float(action in seen) for action in TAGS.actions])
    np.testing.assert_array_equal(pretraining(name, TAGS), expected)


def test_counts_that_came_with_the_data_set_order_and_rarity():
    """They cover more than the examples at hand, and their order is another one."""
    header = replace(TAGS, published_counts=(100, 200, 50, 40, 30, 25, 20, 10, 5, 4))
    values = [200 / count for count in header.published_counts]
    np.testing.assert_array_equal(bandit("init-shift", header), np.diag(values).astype(np.float32))
    np.testing.assert_array_equal(np.diag(pretraining("init-shift", header)), np.arange(10) < 2)
    np.testing.assert_array_equal(
        np.diag(pretraining("init-shift-released", header)), np.arange(10) < 6
    )


def test_fifty_tags_make_ten_and_thirty_and_equals_keep_their_order():
    header = replace(TAGS, actions=tuple(map(str, range(50))), action_counts=(7,) * 50)
    for name, count in (("init-shift", 10), ("init-shift-released", 30)):
        np.testing.assert_array_equal(np.diag(pretraining(name, header)), np.arange(50) < count)


def test_few_actions_still_leave_one_to_see():
    header = replace(TAGS, actions=("p", "q"), action_counts=(1, 2))
    np.testing.assert_array_equal(pretraining("init-shift", header), np.diag([0, 1]))


def test_several_labels_earn_the_best_of_them_and_none_earns_nothing():
    table = with_near_miss(per_label(np.array([1.0, 3.0, 2.0])), {0: 1, 2: 0}, 0.5)
    met = met_with(Ragged.from_rows([[0, 1], [0, 2], [], [2]]), 3)
    expected = np.array([[1, 3, 0], [1, 0.5, 2], [0, 0, 0], [0.5, 0, 2]], np.float32)
    np.testing.assert_array_equal(table.expected(met), expected)
    for action in range(3):
        np.testing.assert_array_equal(table.rewards(met, np.full(4, action)), expected[:, action])


@given(st.data())
def test_rewards_are_what_is_expected_of_the_chosen_action(data):
    k = data.draw(st.integers(1, 6))
    values = st.lists(st.floats(0, 10, width=32), min_size=k, max_size=k)
    near = data.draw(st.lists(st.integers(-1, k - 1), min_size=k, max_size=k))
    table = RewardTable(
        np.array(data.draw(values), np.float32),
        np.array(near, np.int32),
        np.array(data.draw(values), np.float32),
    )
    rows = data.draw(st.lists(st.lists(st.integers(0, k - 1), unique=True, max_size=k), max_size=5))
    met = met_with(Ragged.from_rows(rows), k)
    matrix = table.expected(met)
    assert matrix.shape == (len(rows), k)
    assert matrix.dtype == np.float32
    assert table.highest >= matrix.max(initial=0)
    for action in range(k):
        ours = table.rewards(met, np.full(len(rows), action))
        assert ours.dtype == np.float32
        np.testing.assert_array_equal(ours, matrix[:, action])


def test_the_highest_reward():
    assert exact_match(3).highest == 1
    assert with_near_miss(exact_match(3), {0: 1}, 1.5).highest == 1.5
    assert relabelled(3, {2: 0}).highest == 1
    assert BUILT_IN["init-shift"](TAGS).stages[0].environment.highest == 80


def test_the_stage_of_a_round():
    stages = tuple(Stage(exact_match(2), from_round=start) for start in (1, 10, 20))
    scenario = Scenario(stages)
    assert [scenario.stage(t).from_round for t in (1, 9, 10, 19, 20, 500)] == [1, 1, 10, 10, 20, 20]
