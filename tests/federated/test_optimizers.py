"""Server optimisers against steps worked out by hand and against their formulas over several steps."""

import numpy as np
import pytest

from fedbandit.federated.server import BUILT_IN, Adagrad, Adam, Sgd, Yogi, sgd_momentum

UPDATES = [np.array([1.0, -2.0, 0.0]), np.array([0.5, 0.5, 0.0]), np.array([-1.0, 3.0, 0.1])]
START = np.array([1.0, 1.0, 1.0])


def steps(optimizer, updates=UPDATES, start=START):
    """The weights after each step."""
    state, weights, path = optimizer.init(start), start, []
    for update in updates:
        state, weights = optimizer.step(state, weights, update)
        path.append(weights)
    return np.array(path)


def test_sgd_by_hand():
    np.testing.assert_allclose(steps(Sgd(0.5)), [[1.5, 0, 1], [1.75, 0.25, 1], [1.25, 1.75, 1.05]])


def test_momentum_by_hand():
    # velocities: (.5, -1, 0), (.25 + .25, -.5 + .25, 0), (.25 - .5, -.125 + 1.5, .05)
    expected = [[1.5, 0, 1], [2, -0.25, 1], [1.75, 1.125, 1.05]]
    np.testing.assert_allclose(steps(sgd_momentum(0.5, 0.5)), expected)
    np.testing.assert_allclose(steps(Sgd(0.5, 0.5)), expected)


def test_the_first_step_of_adam_has_the_length_of_the_learning_rate():
    # sqrt(1 - .999)/(1 - .9) · (.1 Δ) / (sqrt(.001) |Δ| + 1e-7): the sign of Δ, but for epsilon
    np.testing.assert_allclose(steps(Adam(0.01))[0], [1.01, 0.99, 1], atol=1e-7)


def test_adam_over_several_steps():
    lr, b1, b2, eps = 0.1, 0.9, 0.999, 1e-7
    weights = START.copy()
    path = steps(Adam(lr))
    for t in range(1, len(UPDATES) + 1):
        m = sum((1 - b1) * b1 ** (t - i) * UPDATES[i - 1] for i in range(1, t + 1))
        v = sum((1 - b2) * b2 ** (t - i) * UPDATES[i - 1] ** 2 for i in range(1, t + 1))
        weights = weights + lr * np.sqrt(1 - b2**t) / (1 - b1**t) * m / (np.sqrt(v) + eps)
        np.testing.assert_allclose(path[t - 1], weights, rtol=0, atol=1e-14)


def test_adagrad_over_several_steps():
    lr, eps = 0.1, 1e-7
    weights = START.copy()
    path = steps(Adagrad(lr))
    for t in range(1, len(UPDATES) + 1):
        total = 0.1 + sum(update**2 for update in UPDATES[:t])
        weights = weights + lr * UPDATES[t - 1] / (np.sqrt(total) + eps)
        np.testing.assert_allclose(path[t - 1], weights, rtol=0, atol=1e-14)


def test_yogi_by_hand():
    # m = .1 Δ; v = 1e-6 + .01 Δ², since Δ² is above v, and unchanged where Δ is 0
    expected = 1 + 0.1 * 0.1 * UPDATES[0] / (np.sqrt(1e-6 + 0.01 * UPDATES[0] ** 2) + 1e-3)
    np.testing.assert_allclose(steps(Yogi(0.1))[0], expected, atol=1e-14)


def test_the_second_moment_of_yogi_falls_by_no_more_than_a_share_of_the_update():
    optimizer = Yogi(0.1)
    state, _ = optimizer.step(optimizer.init(START), START, np.full(3, 10.0))
    after, _ = optimizer.step(state, START, np.full(3, 0.5))
    np.testing.assert_allclose(state["v"] - after["v"], 0.01 * 0.25)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", BUILT_IN)
def test_steps_are_pure_and_keep_the_precision(name, dtype):
    optimizer = BUILT_IN[name](learning_rate=0.1)
    weights, update = START.astype(dtype), UPDATES[0].astype(dtype)
    state, _ = optimizer.step(optimizer.init(weights), weights, update)
    kept = {key: value.copy() for key, value in state.items()}
    first, moved = optimizer.step(state, weights, update)
    second, again = optimizer.step(state, weights, update)
    assert moved.dtype == dtype
    np.testing.assert_array_equal(moved, again)
    np.testing.assert_array_equal(weights, START)
    np.testing.assert_array_equal(update, UPDATES[0])
    for key, value in kept.items():
        np.testing.assert_array_equal(state[key], value)
        np.testing.assert_array_equal(first[key], second[key])
        assert value.dtype in (dtype, np.int64)


@pytest.mark.parametrize("name", BUILT_IN)
def test_no_update_is_no_move(name):
    path = steps(BUILT_IN[name](learning_rate=0.1), [np.zeros(3)] * 3)
    np.testing.assert_array_equal(path, np.ones((3, 3)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sgd(0.0), "learning_rate must be positive"),
        (lambda: Sgd(0.1, 1.0), "momentum must be at least 0 and below 1"),
        (lambda: Adam(float("inf")), "learning_rate must be positive"),
        (lambda: Adam(0.1, beta_2=1.0), "beta_2 must be"),
        (lambda: Adam(0.1, epsilon=0.0), "epsilon must be positive"),
        (
            lambda: Adagrad(0.1, initial_accumulator=-1.0),
            "initial_accumulator must be at least 0",
        ),
        (lambda: Yogi(0.1, beta_1=-0.1), "beta_1 must be"),
    ],
)
def test_bad_parameters_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
