"""What each event of a log says of one model in place of another, and how much it can say at most.

The gate of simulations and real devices share it. Knows nothing of who asks, and nothing of sums or verdicts.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedbandit.events import Events
from fedbandit.policies import Policy


@dataclass(frozen=True)
class GainEstimator:
    """How an event is weighed: inverse propensities, or doubly robust with the old model's scores for rewards."""

    kind: Literal["ips", "dr"] = "dr"
    limit: float | None = None  # 1/ρ is cut at this
    most: float | None = None  # the size at which rewards, and what stands for them, are cut

    def terms(
        self,
        events: Events,
        policy: Policy,
        old_scores: np.ndarray,
        new_scores: np.ndarray,
        available: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """For scores [n, K] how much more the new ones earn, unbiased without limits, and importance: float64 [n] each.

        `available` [K] or [n, K] is what could be chosen; without it, everything.
        """
        old, new = (policy.probabilities(scores.astype(np.float64), available) for scores in (old_scores, new_scores))
        predicted = self._cut(old_scores) if self.kind == "dr" else np.zeros_like(old_scores)
        change = new - old
        inverse = 1 / events.propensities if self.limit is None else np.minimum(1 / events.propensities, self.limit)
        weights = _taken(change, events.actions) * inverse
        surprise = self._cut(events.rewards) - _taken(predicted, events.actions)
        return (change * predicted).sum(axis=1) + weights * surprise, _taken(new, events.actions) / events.propensities

    @property
    def largest(self) -> float:
        """What one event's gain cannot exceed in size; infinite unless both limits are set."""
        if self.limit is None or self.most is None:
            return np.inf
        # No probability changes by more than 1, and all changes together move the prediction by no more than its range.
        return self.limit * self.most if self.kind == "ips" else 2 * self.most * (1 + self.limit)

    def _cut(self, rewards: np.ndarray) -> np.ndarray:
        return rewards if self.most is None else np.clip(rewards, -self.most, self.most, dtype=float)


def _taken(values: np.ndarray, actions: np.ndarray) -> np.ndarray:
    return np.take_along_axis(values, actions[:, None], axis=1)[:, 0].astype(np.float64)
