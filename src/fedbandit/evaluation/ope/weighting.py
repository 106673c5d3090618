"""What is done to importance weights before they are used: nothing, a ceiling, or shrinkage. Bias against variance."""

from dataclasses import dataclass
from math import inf, sqrt
from typing import Protocol

import numpy as np


class Weighting(Protocol):
    """Turns importance weights into the weights that an estimator uses."""

    def __call__(self, importance: np.ndarray) -> np.ndarray: ...

    def largest(self, importance: float) -> float:
        """The largest weight that can come out when no importance weight exceeds the given one."""
        ...


@dataclass(frozen=True)
class Plain:
    """The importance weights as they are: unbiased, and of any size."""

    def __call__(self, importance: np.ndarray) -> np.ndarray:
        return importance

    def largest(self, importance: float) -> float:
        return importance


@dataclass(frozen=True)
class Clipped:
    """No weight above `limit`. Where rewards are not negative, IPS then errs downwards."""

    limit: float

    def __post_init__(self) -> None:
        _positive("limit", self.limit)

    def __call__(self, importance: np.ndarray) -> np.ndarray:
        return np.minimum(importance, self.limit)

    def largest(self, importance: float) -> float:
        return min(importance, self.limit)


@dataclass(frozen=True)
class Shrunk:
    """Optimistic shrinkage (Su et al., 2020): `strength·w / (w² + strength)`; no weight above sqrt(strength) / 2."""

    strength: float

    def __post_init__(self) -> None:
        _positive("strength", self.strength)

    def __call__(self, importance: np.ndarray) -> np.ndarray:
        return self.strength * importance / (importance**2 + self.strength)

    def largest(self, importance: float) -> float:
        peak = sqrt(self.strength)
        return peak / 2 if importance >= peak else float(self(np.asarray(importance)))


def _positive(name: str, value: float) -> None:
    if not 0 < value < inf:
        raise ValueError(f"{name} must be positive and finite, not {value}")
