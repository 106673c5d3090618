"""The compiled draw against the plain one that devices use: the same actions and propensities, bit for bit."""

import numpy as np
import numpy_loops
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbandit.core import kernels as drawing
from fedbandit.core.contexts import Contexts
from fedbandit.events import Events


def assert_same(probabilities, uniforms):
    expected_actions, expected_propensities = numpy_loops.draw_actions(probabilities, uniforms)
    actions, propensities = drawing.draw_actions(probabilities, uniforms)
    np.testing.assert_array_equal(actions, expected_actions)
    assert propensities.dtype == expected_propensities.dtype
    np.testing.assert_array_equal(propensities, expected_propensities)
    return actions, propensities


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@given(
    rows=st.integers(0, 40),
    actions=st.integers(1, 70),
    zeros=st.floats(0, 0.95),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_same_draws(dtype, rows, actions, zeros, seed):
    rng = np.random.default_rng(seed)
    p = rng.random((rows, actions)) * (rng.random((rows, actions)) >= zeros)
    p[:, rng.integers(actions)] += 0.1  # at least one action can be drawn
    p = (p / p.sum(axis=1, keepdims=True)).astype(dtype)
    _, propensities = assert_same(p, rng.random(rows))
    assert (propensities > 0).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_thresholds_on_the_edge(dtype):
    p = np.array([[0.5, 0.5, 0.0], [0.0, 0.25, 0.75], [1.0, 0.0, 0.0], [0.3, 0.7, 0.0]], dtype)
    for uniform in (0.0, 0.25, 0.5, np.nextafter(1.0, 0)):  # the last becomes 1 in single precision
        _, propensities = assert_same(p, np.full(len(p), uniform))
        assert (propensities > 0).all()


def test_probabilities_that_do_not_lie_in_order():
    p = np.asfortranarray(np.random.default_rng(0).dirichlet(np.ones(5), 30))
    assert_same(p, np.random.default_rng(1).random(30))


def test_fresh_sums_leave_out_what_was_counted_before():
    bounds, fresh = np.array([0, 2, 2, 5]), np.array([True, False, True, True, False])
    rewards = np.array([1, 2, 4, 8, 16], np.float32)
    propensities = np.array([0.5, 0.5, 0.25, 0.125, 1.0], np.float32)
    blank = np.zeros(5, np.int64)
    events = Events(bounds, Contexts(blank), blank, rewards, propensities, blank, fresh)
    counts, reward_sums = events.sum_fresh(), events.sum_fresh(rewards)
    propensity_sums = events.sum_fresh(propensities)
    np.testing.assert_array_equal(counts, [1, 0, 2])
    np.testing.assert_array_equal(reward_sums, [1, 0, 12])
    np.testing.assert_array_equal(propensity_sums, [0.5, 0, 0.375])
