"""Exploring and drawing in one go against the plain rule and draw that devices use: the same bits."""

import numpy as np
import numpy_loops
import pytest
from builders import random_text
from hypothesis import given
from hypothesis import strategies as st

from fedbandit.core import kernels
from fedbandit.core.prediction import Prediction
from fedbandit.policies import (
    EpsilonGreedy,
    Falcon,
    FalconSchedule,
    Floored,
    Greedy,
    Softmax,
    Uniform,
    fused_form,
)

RULES = [
    Softmax(0.05),
    Softmax(1e-30),
    Falcon(10, 5000),
    Falcon(1, 0),
    Greedy(),
    EpsilonGreedy(0.05),
    EpsilonGreedy(0),
]


def assert_same(rule, scores, uniforms):
    expected = numpy_loops.draw_actions(rule.probabilities(Prediction(scores.copy())), uniforms)
    found = fused_form(rule)(Prediction(scores), uniforms)
    assert found is not None
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rule", RULES, ids=repr)
@given(
    rows=st.integers(0, 30),
    actions=st.integers(1, 128),
    spread=st.sampled_from([0.0, 1e-6, 0.1, 3.0, 1e30]),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_same_draws(dtype, rule, rows, actions, spread, seed):
    rng = np.random.default_rng(seed)
    scores = (
        (spread * rng.standard_normal((rows, actions))).round(int(rng.integers(1, 9))).astype(dtype)
    )
    assert_same(rule, scores, rng.random(rows))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_a_uniform_on_the_edge_and_scores_far_apart(rule, dtype):
    far = np.finfo(dtype).max
    scores = np.array([[0, 1, 2], [2, 1, 0], [1, 1, 1], [far, -far, 0], [-far, far, far]], dtype)
    for uniform in (0.0, 0.5, 1 - 2.0**-53):
        assert_same(rule, scores, np.full(len(scores), uniform))


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_scores_that_are_not_finite_are_refused(rule, wrong):
    scores = np.zeros((3, 4), np.float32)
    scores[1, 2] = wrong
    with pytest.raises(ValueError, match="scores must be finite"):
        fused_form(rule)(Prediction(scores), np.zeros(3))


@pytest.mark.parametrize("rule", [Uniform(), Floored(Softmax(), 0.01), FalconSchedule()], ids=repr)
def test_other_rules_take_the_plain_way(rule):
    assert fused_form(rule) is None


def test_many_actions_take_the_plain_way():
    assert fused_form(Softmax())(Prediction(np.zeros((2, 129))), np.zeros(2)) is None


def test_a_subclass_that_changes_probabilities_alone_is_not_drawn_by_its_parent():
    class Warm(Softmax):
        def probabilities(self, prediction, available=None):
            return Uniform().probabilities(prediction, available)

    class Renamed(Softmax):
        pass

    assert fused_form(Warm()) is None
    assert fused_form(Renamed()) is not None


# --- held-out labels among the best ---


@pytest.mark.parametrize("loops", [numpy_loops, kernels])
@given(actions=st.integers(1, 12), top=st.sampled_from([1, 5]), seed=st.integers(0, 2**32 - 1))
def test_labels_among_the_best_are_those_of_a_stable_sort(loops, actions, top, seed):
    rng = np.random.default_rng(seed)
    labels = random_text(seed % 5, num_actions=6).train.labels
    scores = rng.integers(-2, 3, (len(labels), max(6, actions))).astype(np.float32)  # many ties
    best = np.argsort(-scores, axis=1, kind="stable")[:, :top]
    hits = (best[labels.row_of_entry()] == labels.ids[:, None]).any(axis=1).sum()
    assert loops.labels_among_best(scores, labels.offsets, labels.ids, top) == hits


@pytest.mark.parametrize("loops", [numpy_loops, kernels])
def test_a_score_that_is_not_a_number_is_not_among_the_best(loops):
    scores = np.array([[np.nan, 1.0, 0.0]])
    one = np.array([0, 1])
    assert [
        loops.labels_among_best(scores, one, np.array([label], np.int32), 1) for label in range(3)
    ] == [0, 1, 0]
