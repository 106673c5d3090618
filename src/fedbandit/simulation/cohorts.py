"""Which clients take part in a round."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fedbandit.randomness import Purpose, generator


class Cohorts(Protocol):
    """Draws the clients of a round, as indices into the training split."""

    def draw(self, round_number: int) -> np.ndarray: ...


@dataclass(frozen=True)
class FixedCohorts:
    """The same number of clients every round, drawn without replacement within the round."""

    pool: range
    size: int
    seed: int

    def draw(self, round_number: int) -> np.ndarray:
        rng = generator(self.seed, Purpose.COHORT, round_number)
        return self.pool.start + rng.choice(len(self.pool), self.size, replace=False)
