"""Correlated noise of rounds (independent, tree, banded, buffered), with its sensitivity and error.

Knows matrices only: C says in which rounds' noise a round's sum is hidden, C⁻¹ makes the noise.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from fedbandit.core.errors import refuse

Memory = Mapping[int, np.ndarray]
"""Earlier rounds as a strategy remembers them, by round or by buffer. As secret as the noise itself."""


class Strategy(ABC):
    """C by columns, and C⁻¹Z one round at a time. Rounds count from 1."""

    @abstractmethod
    def column(self, number: int, rounds: int) -> tuple[np.ndarray, np.ndarray]:
        """The rows (rounds, from 1 to `rounds`) in which a round's sum appears, and with what weight."""

    @abstractmethod
    def step(self, number: int, fresh: np.ndarray, memory: Memory) -> tuple[np.ndarray, Memory]:
        """The noise of a round from its own fresh normals and the memory that the round before left."""

    def since(self, number: int) -> int:
        """The first round whose normals a round's noise can depend on."""
        return 1


@dataclass(frozen=True)
class Independent(Strategy):
    """C = I: the noise of DP-FedAvg, independent from round to round."""

    def column(self, number: int, rounds: int) -> tuple[np.ndarray, np.ndarray]:
        return np.array([number]), np.ones(1)

    def step(self, number: int, fresh: np.ndarray, memory: Memory) -> tuple[np.ndarray, Memory]:
        return fresh, {}

    def since(self, number: int) -> int:
        return number


@dataclass(frozen=True)
class Tree(Strategy):
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


@dataclass(frozen=True)
class Banded(Strategy):
    """A banded Toeplitz C: a round's sum appears in its own row and in those of the next `len(coefficients) - 1`."""

    coefficients: tuple[float, ...]

    def __post_init__(self) -> None:
        refuse(
            (
                not self.coefficients or not self.coefficients[0] > 0 or min(self.coefficients) < 0,
                "coefficients must not be negative, and the first must be positive",
            ),
            error=ValueError,
        )

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


@dataclass(frozen=True)
class Blt(Strategy):
    """A buffered linear Toeplitz C (arXiv 2404.16706): `first`·(1, Σs, Σs·d, Σs·d², ...) in every column.

    Its noise needs one vector for each buffer, however many rounds it reaches back.
    """

    decays: tuple[float, ...]
    scales: tuple[float, ...]
    first: float = 1.0

    def __post_init__(self) -> None:
        refuse(
            (
                len(self.decays) != len(self.scales) or not self.decays,
                "decays and scales: one of each for every buffer, and at least one buffer",
            ),
            (
                not (self.first > 0 and all(0 <= decay < 1 for decay in self.decays)),
                "decays must lie between 0 and 1, and the first coefficient above 0",
            ),
            error=ValueError,
        )

    @property
    def buffers(self) -> int:
        return len(self.decays)

    def coefficients(self, rounds: int) -> np.ndarray:
        """The first `rounds` entries of C's first column."""
        powers = np.asarray(self.decays) ** np.arange(rounds - 1)[:, None]
        return self.first * np.concatenate([[1.0], powers @ np.asarray(self.scales)])

    def column(self, number: int, rounds: int) -> tuple[np.ndarray, np.ndarray]:
        return np.arange(number, rounds + 1), self.coefficients(rounds - number + 1)

    def step(self, number: int, fresh: np.ndarray, memory: Memory) -> tuple[np.ndarray, Memory]:
        dtype = fresh.dtype.type
        noise = dtype(1 / self.first) * fresh
        for index, scale in enumerate(self.scales):
            if index in memory:
                noise -= dtype(scale) * memory[index]
        kept = {
            index: dtype(decay) * memory[index] + noise if index in memory else noise.copy()
            for index, decay in enumerate(self.decays)
        }
        return noise, kept


@dataclass(frozen=True)
class Restarted(Strategy):
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


DEFAULT_BANDS = (
    32  # the server remembers one vector as long as the model for each, and more of them buy little
)
DEFAULT_BUFFERS = 3  # a fourth lowers the error by less than one per cent up to ten thousand rounds


def mechanism_name(strategy: Strategy) -> str:
    """The name of a strategy as configurations have it, with what tells two of one name apart."""
    if isinstance(strategy, Restarted):
        return f"{mechanism_name(strategy.strategy)}, restarted every {strategy.period} rounds"
    if isinstance(strategy, Banded):
        return f"banded-mf with {strategy.bands} bands"
    if isinstance(strategy, Blt):
        return f"blt with {strategy.buffers} buffers"
    names = {Independent: "dp-fedavg", Tree: "dp-ftrl"}
    return names.get(type(strategy), type(strategy).__name__)


def stays_whole(strategy: Strategy) -> bool:
    """Whether the noise of whole numbers is whole numbers: C and C⁻¹ have no other entries."""
    if isinstance(strategy, Restarted):
        return stays_whole(strategy.strategy)
    return isinstance(strategy, Independent | Tree)


def largest_column(strategy: Strategy, rounds: int) -> float:
    """The largest norm of a column of C: how far one update of norm 1 moves what is noised."""
    return max(
        float(np.linalg.norm(strategy.column(number, rounds)[1])) for number in range(1, rounds + 1)
    )


def never_rises(coefficients: np.ndarray) -> bool:
    """Whether Toeplitz coefficients are at least 0 and never rise.

    Only then is a client's worst case under a minimum separation to come every `separation` rounds from the first
    (arXiv 2405.13763, theorem 2); otherwise a longer rest may line its columns up with larger entries.
    """
    return bool((coefficients >= 0).all() and (np.diff(coefficients) <= 0).all())


def squared_sensitivities(strategy: Strategy, rounds: int, separation: int) -> np.ndarray:
    """[rounds + 1]: how far C·x can move, squared, after each round, if one client's clipped updates are taken away.

    A client takes part at most in every `separation`-th round, counted from any first one, each time with an update of
    norm 1. C has no negative entries, so the worst client sends the same update every time.
    """
    result = np.zeros(rounds + 1)
    for first in range(1, min(separation, rounds) + 1):
        moved, square = np.zeros(rounds + 1), 0.0
        for number in range(first, rounds + 1, separation):
            rows, weights = strategy.column(number, rounds)
            square += float((2 * moved[rows] + weights) @ weights)
            moved[rows] += weights
            result[number] = square
    return np.asarray(np.maximum.accumulate(result))


_AT_ONCE = 256  # columns of C⁻¹: memory stays small however many rounds there are


def noise_of_rounds(strategy: Strategy, rounds: int, momentum: float = 0.0) -> np.ndarray:
    """[2, rounds]: variance of the noise of each round, and of the weights after it.

    For normals of variance 1. Without momentum weights are prefix sums of the rounds. With it they
    are those of the running mean m ← momentum·m + (1 - momentum)·round.
    """
    toeplitz = isinstance(strategy, Independent | Banded | Blt)
    found = np.zeros((2, rounds))
    for start in range(0, 1 if toeplitz else rounds, _AT_ONCE):
        columns = 1 if toeplitz else min(_AT_ONCE, rounds - start)
        mean, weights = np.zeros(columns), np.zeros(columns)
        memory: Memory = {}
        for index in range(rounds):
            fresh = np.eye(1, columns, index - start)[0]
            noise, memory = strategy.step(index + 1, fresh, memory)
            mean = momentum * mean + (1 - momentum) * noise
            weights = weights + mean
            found[:, index] += float(noise @ noise), float(weights @ weights)
    return np.cumsum(found, axis=1) if toeplitz else found


def honaker_variances(rounds: int) -> np.ndarray:
    """[rounds]: variance of a tree's prefix sums by Honaker's estimator, where `Tree` has one for every binary digit.

    A node's sum is estimated from the node and from its two halves: v ← 2v/(2v + 1) from one level to the next. The
    sensitivity is that of the tree with all its nodes.
    """
    of_level = [1.0]
    while 2 ** len(of_level) <= rounds:
        of_level.append(2 * of_level[-1] / (2 * of_level[-1] + 1))
    numbers = np.arange(1, rounds + 1)
    digits = [((numbers >> level) & 1) * each for level, each in enumerate(of_level)]
    return np.asarray(np.sum(digits, axis=0))


@lru_cache(maxsize=64)
def best_banded(rounds: int, bands: int, momentum: float = 0.0) -> Banded:
    """The banded Toeplitz strategy with the least error for clients that are at least `bands` rounds apart.

    Its columns have norm 1. Columns of one client do not overlap then, so how often it takes part does not matter here.
    """
    from scipy.optimize import minimize

    bands = min(bands, rounds)
    if bands == 1:
        return Banded((1.0,))
    # The optimum without a limit on the bands is the series of 1/sqrt(1 - x); the search begins there.
    start = np.cumprod((np.arange(1, bands) - 0.5) / np.arange(1, bands))
    found = minimize(
        _log_error,
        start,
        args=(rounds, momentum),
        jac=True,
        method="L-BFGS-B",
        bounds=[(0, None)] * (bands - 1),
    )
    coefficients = np.concatenate([[1.0], found.x])
    coefficients /= np.linalg.norm(coefficients)
    return Banded(tuple(float(value) for value in coefficients))


def _log_error(tail: np.ndarray, rounds: int, momentum: float = 0.0) -> tuple[float, np.ndarray]:
    """Logarithm of (squared column norm · squared error) for coefficients (1, *tail), and its gradient."""
    from scipy.signal import lfilter

    c = np.concatenate([[1.0], tail])
    inverse = lfilter([1.0], c, np.eye(1, rounds)[0])
    weights = _in_weights(inverse, momentum)
    times = rounds - np.arange(rounds)  # in the weights of how many rounds each entry appears
    error, norm = float(times @ weights**2), float(c @ c)
    by_inverse = _in_weights((2 * times * weights)[::-1], momentum)[::-1]
    # d(1/c) = -(1/c)·(1/c)·dc, as power series.
    twice = lfilter([1.0], c, inverse)
    by_tail = np.array([-(by_inverse[lag:] @ twice[: rounds - lag]) for lag in range(1, len(c))])
    return float(np.log(error) + np.log(norm)), by_tail / error + 2 * c[1:] / norm


@lru_cache(maxsize=64)
def best_blt(
    rounds: int, separation: int, buffers: int = DEFAULT_BUFFERS, momentum: float = 0.0
) -> Blt:
    """The buffered strategy with the least error for clients that come every `separation` rounds, in columns of norm 1.

    Decays lie between 0 and 1, scales are positive and sum to less than 1: so coefficients never rise.
    """
    from scipy.optimize import minimize

    def strategy(free: np.ndarray) -> Blt:
        decays = 1 - np.exp(-np.logaddexp(0, np.minimum(free[:buffers], 20.0)))
        shares = np.exp(free[buffers:] - np.logaddexp.reduce(np.append(free[buffers:], 0.0)))
        return Blt(tuple(map(float, decays)), tuple(map(float, (1 - 1e-9) * shares)))

    def log_error(free: np.ndarray) -> float:
        return _log_buffered_error(strategy(free), rounds, separation, momentum)

    # Time constants between a few rounds and all of them; together the first step back weighs about a half.
    spans = (
        np.geomspace(3, max(4.0, rounds / 2), buffers + 2)[1:-1]
        if buffers > 1
        else np.array([2 + rounds**0.5])
    )
    start = np.concatenate([np.log(spans - 1), np.full(buffers, -np.log(buffers))])
    found = minimize(
        log_error, start, method="L-BFGS-B", options={"maxiter": 2000, "maxfun": 20000}
    )
    found = minimize(
        log_error,
        found.x,
        method="Nelder-Mead",
        options={"maxiter": 4000, "fatol": 1e-9, "xatol": 1e-6},
    )
    chosen = strategy(found.x)
    return replace(chosen, first=float(1 / np.linalg.norm(chosen.coefficients(rounds))))


def _log_buffered_error(strategy: Blt, rounds: int, separation: int, momentum: float) -> float:
    from scipy.signal import lfilter

    denominator = np.poly(strategy.decays)  # of c(x) = 1 + x·Σ s/(1 - d·x), in rising powers of x
    rest = np.zeros(strategy.buffers + 1)
    for index, scale in enumerate(strategy.scales):
        others = np.delete(strategy.decays, index)
        rest[1:] += scale * np.poly(others)
    inverse = lfilter(denominator, denominator + rest, np.eye(1, rounds)[0])
    weights = _in_weights(inverse, momentum)
    error = float((rounds - np.arange(rounds)) @ weights**2)
    padded = np.zeros(-(-rounds // separation) * separation)
    padded[:rounds] = strategy.coefficients(rounds)
    moved = padded.reshape(-1, separation).cumsum(axis=0).reshape(-1)[:rounds]
    return float(np.log(error) + np.log(moved @ moved))


def _in_weights(noise: np.ndarray, momentum: float) -> np.ndarray:
    """Rounds as they add up in the weights: prefix sums, of a running mean where there is momentum."""
    from scipy.signal import lfilter

    summed: np.ndarray = np.cumsum(noise)
    return summed if momentum == 0 else np.asarray(lfilter([1 - momentum], [1, -momentum], summed))
