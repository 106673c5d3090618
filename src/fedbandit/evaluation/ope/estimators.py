"""Off-policy estimators: what each event of a log says of another policy, and how its weight is kept in bounds."""

from dataclasses import dataclass, replace
from math import inf, sqrt
from typing import Protocol

import numpy as np

from fedbandit.core.errors import DataError


@dataclass(frozen=True)
class Records:
    """Logged events of some clients, in float64; client i owns rows bounds[i]:bounds[i + 1].

    `predicted` and `expected` come from a reward model, which the direct method and the doubly robust estimator need.
    """

    clients: (
        np.ndarray
    )  # int64 [clients]: a number that is each client's own, to address its bootstrap draws
    bounds: np.ndarray  # int64 [clients + 1]
    rewards: np.ndarray  # [n]
    propensities: np.ndarray  # [n]: with which the logging policy took the action
    target: np.ndarray  # [n]: with which the evaluated policy takes it
    predicted: np.ndarray | None = None  # [n]: the modelled reward of the action taken
    expected: np.ndarray | None = (
        None  # [n]: the modelled reward of the evaluated policy, over its actions
    )

    def __post_init__(self) -> None:
        for name in ("rewards", "propensities", "target", "predicted", "expected"):
            column = getattr(self, name)
            if column is None:
                continue
            if len(column) != self.bounds[-1]:
                raise DataError(f"{name}: {len(column)} values for {self.bounds[-1]} events")
            if not np.isfinite(column).all():
                raise DataError(
                    f"{name}: event {int(np.flatnonzero(~np.isfinite(column))[0])} is not finite"
                )
        if len(self.propensities) and not (
            self.propensities.min() > 0 and self.propensities.max() <= 1
        ):
            raise DataError("propensities: must be above 0 and at most 1")
        if len(self.target) and not (self.target.min() >= 0 and self.target.max() <= 1 + 1e-6):
            raise DataError("target: probabilities must lie between 0 and 1")

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def num_clients(self) -> int:
        return len(self.bounds) - 1

    @property
    def importance(self) -> np.ndarray:
        """How much more often the evaluated policy does what was done: [n]."""
        weights: np.ndarray = self.target / self.propensities
        return weights

    def client(self, position: int) -> "Records":
        """The records of one client, as it would hold them."""
        rows = slice(self.bounds[position], self.bounds[position + 1])

        def part(column: np.ndarray | None) -> np.ndarray | None:
            return None if column is None else column[rows]

        return replace(
            self,
            clients=self.clients[position : position + 1],
            bounds=np.array([0, rows.stop - rows.start]),
            rewards=self.rewards[rows],
            propensities=self.propensities[rows],
            target=self.target[rows],
            predicted=part(self.predicted),
            expected=part(self.expected),
        )


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
        clipped: np.ndarray = np.minimum(importance, self.limit)
        return clipped

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


Terms = tuple[np.ndarray, np.ndarray]


class Estimator(Protocol):
    """The estimate is the sum of `terms(...)[0]` over the sum of `terms(...)[1]`, over all events of all clients."""

    def used(self, weights: np.ndarray) -> np.ndarray:
        """The weights that the estimator uses of those it is given."""
        ...

    def terms(self, records: Records, weights: np.ndarray) -> Terms: ...

    def limits(
        self, value: float, weight: float, low: float, high: float
    ) -> tuple[float, float] | None:
        """Between which an event's residual (first term - value·second) lies, for rewards in [low, high].

        None where residuals do not show how wrong the estimate is.
        """
        ...

    def unseen(self, value: float, low: float, high: float) -> tuple[float, float]:
        """How far the truth may lie from the value, down and up, where the estimate sees nothing of the policy."""
        ...


@dataclass(frozen=True)
class IPS:
    """Inverse propensity scoring: mean of w·r. Unbiased where the log explores whatever the policy does."""

    def used(self, weights: np.ndarray) -> np.ndarray:
        return weights

    def terms(self, records: Records, weights: np.ndarray) -> Terms:
        return weights * records.rewards, np.ones(len(records))

    def limits(
        self, value: float, weight: float, low: float, high: float
    ) -> tuple[float, float] | None:
        return weight * min(low, 0.0) - value, weight * max(high, 0.0) - value

    def unseen(self, value: float, low: float, high: float) -> tuple[float, float]:
        return low, high


@dataclass(frozen=True)
class SelfNormalisedIPS:
    """Sum of w·r over sum of w: a little bias for much less variance, and never outside the range of the rewards."""

    def used(self, weights: np.ndarray) -> np.ndarray:
        return weights

    def terms(self, records: Records, weights: np.ndarray) -> Terms:
        return weights * records.rewards, weights

    def limits(
        self, value: float, weight: float, low: float, high: float
    ) -> tuple[float, float] | None:
        return weight * (low - value), weight * (high - value)

    def unseen(self, value: float, low: float, high: float) -> tuple[float, float]:
        return low - value, high - value


@dataclass(frozen=True)
class DirectMethod:
    """What the reward model expects of the policy: no variance from weights, and all the bias of the model."""

    def used(self, weights: np.ndarray) -> np.ndarray:
        return weights

    def terms(self, records: Records, weights: np.ndarray) -> Terms:
        _, expected = _model(records)
        return expected, np.ones(len(records))

    def limits(
        self, value: float, weight: float, low: float, high: float
    ) -> tuple[float, float] | None:
        return None

    def unseen(self, value: float, low: float, high: float) -> tuple[float, float]:
        return low - high, high - low


@dataclass(frozen=True)
class DoublyRobustEstimator:
    """The direct method, corrected by w·(r - predicted): unbiased if either the propensities or the model are right."""

    def used(self, weights: np.ndarray) -> np.ndarray:
        return weights

    def terms(self, records: Records, weights: np.ndarray) -> Terms:
        predicted, expected = _model(records)
        return expected + weights * (records.rewards - predicted), np.ones(len(records))

    def limits(
        self, value: float, weight: float, low: float, high: float
    ) -> tuple[float, float] | None:
        return low - weight * (high - low) - value, high + weight * (high - low) - value

    def unseen(self, value: float, low: float, high: float) -> tuple[float, float]:
        return low - high, high - low


@dataclass(frozen=True)
class Switch(DoublyRobustEstimator):
    """SWITCH (Wang et al., 2017): the doubly robust correction where weights are at most `limit`, elsewhere the model.

    Its interval allows for a model that is wrong wherever it is relied on.
    """

    limit: float = 10.0

    def __post_init__(self) -> None:
        _positive("limit", self.limit)

    def used(self, weights: np.ndarray) -> np.ndarray:
        return np.where(weights <= self.limit, weights, 0.0)


BUILT_IN: dict[str, Estimator] = {
    "ips": IPS(),
    "snips": SelfNormalisedIPS(),
    "dm": DirectMethod(),
    "dr": DoublyRobustEstimator(),
    "switch": Switch(),
}
NEEDS_MODEL = ("dm", "dr", "switch")


def _model(records: Records) -> tuple[np.ndarray, np.ndarray]:
    if records.predicted is None or records.expected is None:
        raise DataError("the direct method and the doubly robust estimator need a reward model")
    return records.predicted, records.expected
