"""Correlated noise: what the strategies claim about C, C⁻¹, sensitivity and error, in exact arithmetic."""

import itertools

import numpy as np
import pytest
from noise_matrices import noise_matrix, prefix_error
from scipy.optimize import check_grad

from fedbandit.privacy.strategies import (
    Banded,
    Blt,
    Independent,
    Restarted,
    Tree,
    _log_error,
    best_banded,
    best_blt,
    honaker_variances,
    largest_column,
    never_rises,
    noise_of_rounds,
    squared_sensitivities,
)

STRATEGIES = [
    Independent(),
    Tree(),
    Banded((1.0, 0.5, 0.3)),
    best_banded(40, 8),
    Restarted(Tree(), 7),
    Restarted(Banded((0.9, 0.4)), 5),
    Blt((0.9, 0.5), (0.2, 0.3), 0.7),
    Restarted(best_blt(40, 8, 2), 6),
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
    for momentum in (0.0, 0.9):
        value, gradient = (
            lambda x, m=momentum, part=part: _log_error(x, 50, m)[part] for part in (0, 1)
        )
        off = check_grad(value, gradient, tail)
        assert off < 1e-5


@pytest.mark.parametrize(
    ("rounds", "separation"), [(1600, 31), (800, 53), (700, 39), (400, 400), (64, 8)]
)
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
    for decays, scales in (((), ()), ((0.5,), (0.1, 0.1)), ((1.0,), (0.1,))):
        with pytest.raises(ValueError, match="decays"):
            Blt(decays, scales)


def test_the_published_errors_at_one_noise_multiplier():
    """1,600 rounds, a client once: two buffers beat 32 bands, and Honaker's estimator mends a third of the tree."""
    rounds = 1600
    assert prefix_error(best_blt(rounds, rounds, 2), rounds, rounds) == pytest.approx(
        3.24, abs=0.005
    )
    assert prefix_error(best_banded(rounds, 32), rounds, rounds) == pytest.approx(5.91, abs=0.005)
    assert prefix_error(Tree(), rounds, rounds) == pytest.approx(7.54, abs=0.005)
    sensitivity = squared_sensitivities(Tree(), rounds, rounds)[-1]
    assert np.sqrt(honaker_variances(rounds).mean() * sensitivity) == pytest.approx(5.73, abs=0.005)


def test_honakers_estimator_is_the_best_linear_one_from_the_nodes_below():
    """Against weighted least squares on the nodes inside each node of a prefix, for a small tree."""
    found = honaker_variances(16)
    for height in range(5):
        leaves = 2**height
        nodes = [
            np.isin(np.arange(leaves), range(start, start + size))
            for size in (2**level for level in range(height + 1))
            for start in range(0, leaves, size)
        ]
        design = np.array(nodes, float)
        covariance = np.linalg.inv(design.T @ design)  # of the leaves, by least squares
        assert found[leaves - 1] == pytest.approx(covariance.sum())
    np.testing.assert_allclose(found[6], found[3] + found[1] + found[0])


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_the_noise_of_the_weights_is_that_of_the_matrix(strategy, momentum):
    rounds = 30
    lags = np.subtract.outer(np.arange(rounds), np.arange(rounds))
    mean = np.where(lags >= 0, (1 - momentum) * momentum ** np.maximum(lags, 0.0), 0.0)
    weights = np.tri(rounds) @ mean @ noise_matrix(strategy, rounds)
    np.testing.assert_allclose(
        noise_of_rounds(strategy, rounds, momentum)[1], (weights**2).sum(axis=1), rtol=1e-9
    )


def test_strategies_made_for_momentum_have_less_error_under_it():
    for make in (lambda m: best_banded(300, 16, m), lambda m: best_blt(300, 300, 2, m)):
        aware, unaware = make(0.9), make(0.0)
        assert prefix_error(aware, 300, 300, 0.9) < 0.98 * prefix_error(unaware, 300, 300, 0.9)
        assert prefix_error(unaware, 300, 300) < 0.98 * prefix_error(aware, 300, 300)


@pytest.mark.parametrize("separation", [20, 60, 300])
def test_buffers_are_optimised_for_the_separation(separation):
    made = best_blt(300, separation, 2)
    assert never_rises(made.coefficients(300))
    assert np.linalg.norm(made.coefficients(300)) == pytest.approx(1)
    assert largest_column(made, 300) == pytest.approx(1)
    error = prefix_error(made, 300, separation)
    assert error <= prefix_error(best_blt(300, 150, 2), 300, separation) + 1e-6
    assert error < prefix_error(Tree(), 300, separation)
    assert (
        len(made.step(2, np.zeros(3), made.step(1, np.zeros(3), {})[1])[1]) == 2
    )  # all that it remembers


def test_a_longer_rest_can_be_worse_where_coefficients_rise():
    """Why a plan refuses them: the worst turns are not every `separation` rounds then."""
    rising = Blt((0.9, 0.3), (0.8, -0.75))
    assert not never_rises(rising.coefficients(12))
    c, falling = encoder(rising, 12), encoder(best_blt(12, 2, 2), 12)

    def moved(matrix, later):
        return float((matrix[:, [0, later]].sum(axis=1) ** 2).sum())

    assert moved(c, 2) > moved(c, 1)
    assert all(moved(falling, 1) >= moved(falling, later) for later in range(2, 12))
