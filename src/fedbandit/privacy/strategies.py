"""How the noise of different rounds is correlated (independent, tree, banded), with its sensitivity and error."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

Memory = Mapping[int, np.ndarray]
"""What a strategy remembers of earlier rounds, by round. As secret as the noise itself."""


class Strategy(Protocol):
    """C by columns, and C⁻¹Z one round at a time. Rounds count from 1."""

    def column(self, number: int, rounds: int) -> tuple[np.ndarray, np.ndarray]:
        """The rows (rounds, from 1 to `rounds`) in which a round's sum appears, and with what weight."""
        ...

    def step(self, number: int, fresh: np.ndarray, memory: Memory) -> tuple[np.ndarray, Memory]:
        """The noise of a round from its own fresh normals and the memory that the round before left."""
        ...

    def since(self, number: int) -> int:
        """The first round whose normals a round's noise can depend on."""
        ...


@dataclass(frozen=True)
class Independent:
    """C = I: the noise of DP-FedAvg, independent from round to round."""

    def column(self, number: int, rounds: int) -> tuple[np.ndarray, np.ndarray]:
        return np.array([number]), np.ones(1)

    def step(self, number: int, fresh: np.ndarray, memory: Memory) -> tuple[np.ndarray, Memory]:
        return fresh, {}

    def since(self, number: int) -> int:
        return number


@dataclass(frozen=True)
class Tree:
    """Tree aggregation (DP-FTRL): the sum over the first t rounds carries the noise of at most log₂(t) + 1 nodes.

    Only the nodes that an online prefix sum is made of are ever computed. There is one for every round: it ends with
    the round and is as long as the largest power of two that divides the round's number.
    """

    def column(self, number: int, rounds: int) -> tuple[np.ndarray, np.ndarray]:
        nodes = []
        while number <= rounds:
            nodes.append(number)
            number += number & -number
        return np.array(nodes, np.int64), np.ones(len(nodes))

    def step(self, number: int, fresh: np.ndarray, memory: Memory) -> tuple[np.ndarray, Memory]:
        noise = fresh.copy()
        kept = dict(memory)
        length = 1
        while number % (2 * length) == 0:  # the nodes that the new, longer one takes the place of
            noise -= kept.pop(number - length)
            length *= 2
        kept[number] = fresh
        return noise, kept

    def since(self, number: int) -> int:
        return 1


@dataclass(frozen=True)
class Banded:
    """A banded Toeplitz C: a round's sum appears in its own row and in those of the next `len(coefficients) - 1`."""

    coefficients: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.coefficients or not self.coefficients[0] > 0 or min(self.coefficients) < 0:
            raise ValueError("coefficients must not be negative, and the first must be positive")

    @property
    def bands(self) -> int:
        return len(self.coefficients)

    def column(self, number: int, rounds: int) -> tuple[np.ndarray, np.ndarray]:
        rows = np.arange(number, min(number + self.bands, rounds + 1))
        return rows, np.asarray(self.coefficients[: len(rows)])

    def step(self, number: int, fresh: np.ndarray, memory: Memory) -> tuple[np.ndarray, Memory]:
        noise = fresh.copy()
        for lag, weight in enumerate(self.coefficients[1:], start=1):
            if number - lag in memory:
                noise -= noise.dtype.type(weight) * memory[number - lag]
        noise *= noise.dtype.type(1 / self.coefficients[0])
        kept = {round_: past for round_, past in memory.items() if round_ > number - self.bands + 1}
        return noise, {**kept, number: noise} if self.bands > 1 else {}

    def since(self, number: int) -> int:
        return 1


@dataclass(frozen=True)
class Restarted:
    """Another strategy begun afresh every `period` rounds, so that the noise of a period ends with it."""

    strategy: Strategy
    period: int

    def column(self, number: int, rounds: int) -> tuple[np.ndarray, np.ndarray]:
        start = (number - 1) // self.period * self.period
        rows, weights = self.strategy.column(number - start, min(self.period, rounds - start))
        return start + rows, weights

    def step(self, number: int, fresh: np.ndarray, memory: Memory) -> tuple[np.ndarray, Memory]:
        within = (number - 1) % self.period + 1
        return self.strategy.step(within, fresh, memory if within > 1 else {})

    def since(self, number: int) -> int:
        start = (number - 1) // self.period * self.period
        return start + self.strategy.since(number - start)


def with_coefficients(strategy: Strategy, coefficients: tuple[float, ...]) -> Strategy:
    """A banded strategy, restarted or not, with these coefficients in place of its own; any other as it is."""
    if isinstance(strategy, Restarted):
        return Restarted(with_coefficients(strategy.strategy, coefficients), strategy.period)
    same = isinstance(strategy, Banded) and strategy.bands == len(coefficients)
    return Banded(coefficients) if same else strategy


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
