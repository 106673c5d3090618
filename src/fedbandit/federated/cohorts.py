"""Who takes part in a round: cohorts drawn from a pool of clients.

Each round is addressed by the seed alone, or by a secret.

Nothing here knows of data, models or privacy; a privacy plan says which of these its accounting
assumes.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from fedbandit.core.randomness import Purpose, Secret, generator


class Cohorts(Protocol):
    """Draws the clients of a round out of a pool, as indices into the training split."""

    @property
    def pool(self) -> range: ...

    def draw(self, round_number: int) -> np.ndarray: ...


@dataclass(frozen=True)
class FixedCohorts:
    """The same number of clients every round, drawn without replacement within the round."""

    pool: range
    size: int
    seed: int | Secret

    def draw(self, round_number: int) -> np.ndarray:
        rng = generator(self.seed, Purpose.COHORT, round_number)
        return self.pool.start + rng.choice(len(self.pool), self.size, replace=False)


@dataclass(frozen=True)
class PoissonCohorts:
    """Every client takes part in every round with the same probability, independently; a cohort may
    be empty.
    """

    pool: range
    probability: float
    seed: int | Secret

    def draw(self, round_number: int) -> np.ndarray:
        rng = generator(self.seed, Purpose.COHORT, round_number)
        return self.pool.start + np.flatnonzero(rng.random(len(self.pool)) < self.probability)


@dataclass(frozen=True)
class BlockCohorts:
    """Clients are dealt into `separation` blocks whose turns come round, so a client rests at least
    that long.

    Within a block's turn `size` clients are drawn without replacement.
    """

    pool: range
    size: int
    separation: int
    seed: int | Secret

    def draw(self, round_number: int) -> np.ndarray:
        dealt = generator(self.seed, Purpose.COHORT, 0).permutation(
            len(self.pool)
        )  # rounds count from 1
        block = dealt[(round_number - 1) % self.separation :: self.separation]
        rng = generator(self.seed, Purpose.COHORT, round_number)
        return self.pool.start + rng.choice(block, self.size, replace=False)


@dataclass(frozen=True)
class CyclicPoissonCohorts:
    """Clients are dealt into `groups` that take turns; in its group's turn a client takes part by
    chance.

    Who is in which group follows from the pool and the seed alone, not from anybody's data: it may
    be known.
    """

    pool: range
    probability: float
    groups: int
    seed: int | Secret

    def group(self, round_number: int) -> np.ndarray:
        """The clients whose turn a round is."""
        dealt = generator(self.seed, Purpose.COHORT, 0).permutation(
            len(self.pool)
        )  # rounds count from 1
        return self.pool.start + np.sort(dealt[(round_number - 1) % self.groups :: self.groups])

    def draw(self, round_number: int) -> np.ndarray:
        group = self.group(round_number)
        rng = generator(self.seed, Purpose.COHORT, round_number)
        return group[rng.random(len(group)) < self.probability]


Sampling = Literal["poisson", "cyclic-poisson", "fixed", "min-separation"]


def sampled_cohorts(
    sampling: Sampling, pool: range, size: int, separation: int, seed: int | Secret
) -> Cohorts:
    """Cohorts of `size` clients of the pool, exactly or on average."""
    if sampling == "poisson":
        return PoissonCohorts(pool, size / len(pool), seed)
    if sampling == "cyclic-poisson":
        return CyclicPoissonCohorts(pool, size * separation / len(pool), separation, seed)
    if sampling == "min-separation":
        return BlockCohorts(pool, size, separation, seed)
    return FixedCohorts(pool, size, seed)
