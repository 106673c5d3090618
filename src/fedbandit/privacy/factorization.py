"""What a strategy costs and what it buys: sensitivity, the error of its prefix sums, and the best banded one.

Matrices of noise alone: knows nothing of epsilon, clients or models.
"""

from functools import lru_cache

import numpy as np

from fedbandit.privacy.strategies import Banded, Memory, Strategy

DEFAULT_BANDS = 32  # the server remembers one vector as long as the model for each, and more of them buy little


def squared_sensitivities(strategy: Strategy, rounds: int, separation: int) -> np.ndarray:
    """[rounds + 1]: how far C·x can move, squared, after each round, if one client's clipped updates are taken away.

    A client takes part at most in every `separation`-th round, counted from any first one, each time with an update of
    norm 1. C has no negative entries, so the worst client sends the same update every time.
    """
    moved = np.zeros((separation, rounds + 1))
    squares = np.zeros(separation)
    result = np.zeros(rounds + 1)
    for number in range(1, rounds + 1):
        first = (number - 1) % separation
        rows, weights = strategy.column(number, rounds)
        squares[first] += (2 * moved[first, rows] + weights) @ weights
        moved[first, rows] += weights
        result[number] = squares.max()
    return result


def noise_matrix(strategy: Strategy, rounds: int) -> np.ndarray:
    """C⁻¹ [rounds, rounds], as the strategy itself makes it: row t is the noise of round t in terms of Z."""
    memory: Memory = {}
    result = np.zeros((rounds, rounds))
    for number in range(1, rounds + 1):
        fresh = np.zeros(rounds)
        fresh[number - 1] = 1
        result[number - 1], memory = strategy.step(number, fresh, memory)
    return result


def prefix_error(strategy: Strategy, rounds: int, separation: int) -> float:
    """Root mean square noise of the prefix sums over all rounds, in clip norms, at an overall noise multiplier of 1."""
    prefixes = np.cumsum(noise_matrix(strategy, rounds), axis=0)
    variance = float(np.square(prefixes).sum() / rounds)
    return float(np.sqrt(variance * squared_sensitivities(strategy, rounds, separation)[-1]))


@lru_cache(maxsize=32)
def best_banded(rounds: int, bands: int) -> Banded:
    """The banded Toeplitz strategy with the least prefix-sum error for clients that are at least `bands` rounds apart.

    Its columns have norm 1. Columns of one client do not overlap then, so how often it takes part does not matter here.
    """
    from scipy.optimize import minimize

    bands = min(bands, rounds)
    if bands == 1:
        return Banded((1.0,))
    # The optimum without a limit on the bands is the series of 1/sqrt(1 - x); the search begins there.
    start = np.cumprod((np.arange(1, bands) - 0.5) / np.arange(1, bands))
    found = minimize(_log_error, start, args=(rounds,), jac=True, method="L-BFGS-B", bounds=[(0, None)] * (bands - 1))
    coefficients = np.concatenate([[1.0], found.x])
    coefficients /= np.linalg.norm(coefficients)
    return Banded(tuple(float(value) for value in coefficients))


def _log_error(tail: np.ndarray, rounds: int) -> tuple[float, np.ndarray]:
    """Logarithm of (squared column norm · squared prefix error) for coefficients (1, *tail), and its gradient."""
    from scipy.signal import lfilter

    c = np.concatenate([[1.0], tail])
    impulse = np.zeros(rounds)
    impulse[0] = 1
    inverse = lfilter([1.0], c, impulse)
    prefixes = np.cumsum(inverse)
    times = rounds - np.arange(rounds)  # in how many prefix sums each entry appears
    error, norm = float(times @ prefixes**2), float(c @ c)
    by_inverse = np.cumsum((2 * times * prefixes)[::-1])[::-1]
    # d(1/c) = -(1/c)·(1/c)·dc, as power series.
    twice = lfilter([1.0], c, inverse)
    by_tail = np.array([-(by_inverse[lag:] @ twice[: rounds - lag]) for lag in range(1, len(c))])
    return float(np.log(error) + np.log(norm)), by_tail / error + 2 * c[1:] / norm
