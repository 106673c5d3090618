"""The estimators. Each is a sum over events divided by another, so that a client need only return two numbers.

An estimator knows nothing of clients, intervals or where the records come from.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fedbandit.errors import DataError
from fedbandit.evaluation.ope.records import Records

Terms = tuple[np.ndarray, np.ndarray]


class Estimator(Protocol):
    """The estimate is the sum of `terms(...)[0]` over the sum of `terms(...)[1]`, over all events of all clients."""

    def terms(self, records: Records, weights: np.ndarray) -> Terms: ...

    def span(self, largest_weight: float, low: float, high: float) -> float | None:
        """How far apart two terms can lie, for rewards in [low, high]; None where the estimate is not a mean."""
        ...


@dataclass(frozen=True)
class IPS:
    """Inverse propensity scoring: mean of w·r. Unbiased where the log explores whatever the policy does."""

    def terms(self, records: Records, weights: np.ndarray) -> Terms:
        return weights * records.rewards, np.ones(len(records))

    def span(self, largest_weight: float, low: float, high: float) -> float | None:
        return largest_weight * (max(high, 0) - min(low, 0))


@dataclass(frozen=True)
class SelfNormalisedIPS:
    """Sum of w·r over sum of w: a little bias for much less variance, and never outside the range of the rewards."""

    def terms(self, records: Records, weights: np.ndarray) -> Terms:
        return weights * records.rewards, weights

    def span(self, largest_weight: float, low: float, high: float) -> float | None:
        return None


@dataclass(frozen=True)
class DirectMethod:
    """What the reward model expects of the policy: no variance from weights, and all the bias of the model."""

    def terms(self, records: Records, weights: np.ndarray) -> Terms:
        _, expected = _model(records)
        return expected, np.ones(len(records))

    def span(self, largest_weight: float, low: float, high: float) -> float | None:
        return high - low


@dataclass(frozen=True)
class DoublyRobust:
    """The direct method, corrected by w·(r - predicted): unbiased if either the propensities or the model are right."""

    def terms(self, records: Records, weights: np.ndarray) -> Terms:
        predicted, expected = _model(records)
        return expected + weights * (records.rewards - predicted), np.ones(len(records))

    def span(self, largest_weight: float, low: float, high: float) -> float | None:
        return (high - low) * (1 + 2 * largest_weight)


BUILT_IN: dict[str, Estimator] = {
    "ips": IPS(),
    "snips": SelfNormalisedIPS(),
    "dm": DirectMethod(),
    "dr": DoublyRobust(),
}
NEEDS_MODEL = ("dm", "dr")


def _model(records: Records) -> tuple[np.ndarray, np.ndarray]:
    if records.predicted is None or records.expected is None:
        raise DataError("the direct method and the doubly robust estimator need a reward model")
    return records.predicted, records.expected
