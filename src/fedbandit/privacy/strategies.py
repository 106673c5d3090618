"""How the noise of one round depends on that of the others: three strategies, all of one form.

A strategy is a lower-triangular matrix C with non-negative entries, one row and one column a round. What is protected
is C·x + z·clip·Z with independent normals Z, for the rounds' sums x; multiplied by C⁻¹ that is x + z·clip·C⁻¹Z, so C⁻¹Z
is the noise to add. For C = I it is independent noise. Knows nothing of clients, clip norms or epsilon.
"""

from collections.abc import Mapping
from dataclasses import dataclass
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
