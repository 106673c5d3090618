"""What the server makes of the sum of clipped updates: a mean, and the share of clients that were not clipped.

The plain form is here; the private one is in `fedbandit.privacy`.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


class Aggregation(Protocol):
    """From a round's sums to what the server learns from them."""

    def mean(self, total: np.ndarray, accepted: int, number: int, clip_norm: float) -> np.ndarray:
        """The update of the round's model from the sum over the accepted clients."""
        ...

    def unclipped(self, below: int, accepted: int, number: int) -> float | None:
        """The share of clients whose update was not clipped, to move the clip norm by; None: leave it."""
        ...

    def metrics(self, number: int, deploys: bool) -> dict[str, Any]:
        """What to add to the round's metrics."""
        ...


@dataclass(frozen=True)
class PlainMean:
    """The exact mean over the accepted clients."""

    def mean(self, total: np.ndarray, accepted: int, number: int, clip_norm: float) -> np.ndarray:
        return total / max(1, accepted)

    def unclipped(self, below: int, accepted: int, number: int) -> float | None:
        return below / accepted if accepted else None

    def metrics(self, number: int, deploys: bool) -> dict[str, Any]:
        return {}
