"""Correlated noise: what the strategies claim about C, C⁻¹, sensitivity and error, in exact arithmetic."""

import itertools

import numpy as np
import pytest
from scipy.optimize import check_grad

from fedbandit.privacy.strategies import (
    Banded,
    Independent,
    Restarted,
    Tree,
    _log_error,
    best_banded,
    noise_matrix,
    prefix_error,
    squared_sensitivities,
)

STRATEGIES = [
    Independent(),
    Tree(),
    Banded((1.0, 0.5, 0.3)),
    best_banded(40, 8),
    Restarted(Tree(), 7),
    Restarted(Banded((0.9, 0.4)), 5),
]


def encoder(strategy, rounds):
    matrix = np.zeros((rounds, rounds))
    for number in range(1, rounds + 1):
        rows, weights = strategy.column(number, rounds)
        matrix[rows - 1, number - 1] = weights
    return matrix


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("rounds", [1, 13, 32])
def test_the_noise_is_the_inverse_of_what_is_accounted_for(strategy, rounds):
    c = encoder(strategy, rounds)
    assert (c >= 0).all()
    assert np.allclose(c, np.tril(c))
    np.testing.assert_allclose(noise_matrix(strategy, rounds) @ c, np.eye(rounds), atol=1e-12)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("separation", [1, 3, 5])
def test_sensitivity_is_that_of_the_worst_client(strategy, separation):
    rounds = 11
    c = encoder(strategy, rounds)
    found = squared_sensitivities(strategy, rounds, separation)
    for after in range(1, rounds + 1):
        worst = 0.0
        for first in range(min(separation, after)):
            turns = range(first, after, separation)
            for count in range(len(turns) + 1):
                for taken in itertools.combinations(turns, count):
                    worst = max(worst, float((c[:, list(taken)].sum(axis=1) ** 2).sum()))
        assert found[after] == pytest.approx(worst)
    # Updates in other directions move it no further: random unit vectors in the plane.
    rng = np.random.default_rng(0)
    turns = list(range(0, rounds, separation))
    for _ in range(200):
        angle = rng.uniform(0, 2 * np.pi, len(turns))
        moved = c[:, turns] @ np.stack([np.cos(angle), np.sin(angle)], axis=1)
        assert (moved**2).sum() <= found[-1] + 1e-9


def test_a_tree_prefix_has_one_node_a_binary_digit():
    prefixes = np.cumsum(noise_matrix(Tree(), 64), axis=0)
    variance = (prefixes**2).sum(axis=1)
    np.testing.assert_allclose(variance, [bin(t).count("1") for t in range(1, 65)])


def test_restarts_keep_periods_apart():
    noise = noise_matrix(Restarted(Tree(), 8), 24)
    for period in range(3):
        outside = np.ones(24, bool)
        outside[8 * period : 8 * period + 8] = False
        assert not noise[8 * period : 8 * period + 8][:, outside].any()


def test_the_gradient_of_the_error_is_right():
    tail = np.array([0.6, 0.3, 0.1, 0.05])
    off = check_grad(lambda x: _log_error(x, 50)[0], lambda x: _log_error(x, 50)[1], tail)
    assert off < 1e-5


@pytest.mark.parametrize(("rounds", "separation"), [(1600, 31), (800, 53), (700, 39), (400, 400), (64, 8)])
def test_banded_noise_beats_the_tree_at_equal_epsilon(rounds, separation):
    """Both errors are at the same overall noise multiplier, so at the same epsilon."""
    banded = best_banded(rounds, min(separation, 32))
    tree_error = prefix_error(Tree(), rounds, separation)
    banded_error = prefix_error(banded, rounds, separation)
    assert banded_error < 0.8 * tree_error
    assert banded_error < prefix_error(Independent(), rounds, separation)


def test_banded_columns_have_norm_one_and_more_bands_help():
    errors = [prefix_error(best_banded(200, bands), 200, 40) for bands in (1, 2, 8, 32)]
    assert errors == sorted(errors, reverse=True)
    assert np.linalg.norm(best_banded(200, 8).coefficients) == pytest.approx(1)
    assert best_banded(200, 1) == Banded((1.0,))
    np.testing.assert_allclose(noise_matrix(best_banded(200, 1), 5), noise_matrix(Independent(), 5))


def test_wrong_coefficients_are_refused():
    for wrong in ((), (0.0, 1.0), (1.0, -0.1)):
        with pytest.raises(ValueError, match="coefficients"):
            Banded(wrong)
