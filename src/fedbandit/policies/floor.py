"""A floor under the probabilities of any rule: what keeps every action alive when the world changes."""

from dataclasses import dataclass

import numpy as np

from fedbandit.core.prediction import Prediction, Progress
from fedbandit.policies.rules import EpsilonGreedy, Greedy, Policy, Uniform, ask


@dataclass(frozen=True)
class Floored:
    """Another rule with uniform exploration mixed in: (1 - floor) * rule + floor * uniform over what is available."""

    rule: Policy
    floor: float

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= 1:
            raise ValueError(f"floor must be between 0 and 1, not {self.floor}")

    def at(self, progress: Progress) -> Policy:
        """The floor under the rule of that version."""
        at = getattr(self.rule, "at", None)
        return self if at is None else Floored(at(progress), self.floor)

    def probabilities(
        self,
        prediction: Prediction,
        available: np.ndarray | None = None,
        contexts: object = None,
    ) -> np.ndarray:
        explored = Uniform().probabilities(prediction, available)
        exploited = ask(self.rule, prediction, available, contexts)
        return (1 - self.floor) * exploited + self.floor * explored

    def importance_scale(self, num_actions: int) -> float:
        """The smallest probability that is ever logged under rules that are greedy at times; otherwise the rule's."""
        if isinstance(self.rule, Greedy | EpsilonGreedy):
            explored = (1 - self.floor) * getattr(self.rule, "epsilon", 0.0) + self.floor
            return explored / num_actions if explored > 0 else 1.0
        own = getattr(self.rule, "importance_scale", None)
        return 1.0 if own is None else float(own(num_actions))
