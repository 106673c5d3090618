"""The norm to which each client's update is clipped: fixed, or following a quantile of the norms it sees."""

from dataclasses import dataclass
from math import exp, inf
from typing import Protocol


class Clipping(Protocol):
    """Where the clip norm starts and how it moves after a round."""

    @property
    def initial(self) -> float: ...

    def following(self, clip_norm: float, unclipped: float) -> float:
        """The next round's norm, given this one's and the fraction of clients whose update was not clipped."""
        ...


@dataclass(frozen=True)
class FixedClipping:
    """One norm for all rounds; infinity for no clipping."""

    norm: float = inf

    def __post_init__(self) -> None:
        if not self.norm > 0:
            raise ValueError(f"norm must be positive, not {self.norm}")

    @property
    def initial(self) -> float:
        return self.norm

    def following(self, clip_norm: float, unclipped: float) -> float:
        return clip_norm


@dataclass(frozen=True)
class AdaptiveClipping:
    """Moves the norm towards the given quantile of the update norms (Andrew et al.), here without noise."""

    quantile: float = 0.8
    initial: float = 1.0
    rate: float = 0.2

    def __post_init__(self) -> None:
        for name in ("initial", "rate"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        if not 0 < self.quantile < 1:
            raise ValueError(f"quantile must be between 0 and 1, not {self.quantile}")

    def following(self, clip_norm: float, unclipped: float) -> float:
        return clip_norm * exp(-self.rate * (unclipped - self.quantile))
