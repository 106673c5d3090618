"""Policies that change from one deployment to the next: `at(progress)` gives the rule that ships with a version."""

from dataclasses import dataclass
from math import log, sqrt

import numpy as np

from fedbandit.core.prediction import Prediction, Progress
from fedbandit.policies.rules import Falcon, Policy, Uniform


@dataclass(frozen=True)
class FalconSchedule:
    """FALCON with its schedule (Simchi-Levi and Xu): epochs are deployments, and nothing is left to tune.

    Version 0 explores uniformly. From then on mu is the number of actions K, and gamma grows with the events n logged
    before the deployment: gamma = c * sqrt(K * n / (ln|F| + ln(n / delta))). `complexity` stands for ln|F|, the
    logarithm of the number of models that training chooses from; unset, it is K.
    """

    c: float = 1.0
    delta: float = 0.05
    complexity: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.c < np.inf:
            raise ValueError(f"c must be positive, not {self.c}")
        if not 0 < self.delta < 1:
            raise ValueError(f"delta must lie between 0 and 1, not {self.delta}")
        if self.complexity is not None and not 0 <= self.complexity < np.inf:
            raise ValueError(f"complexity must not be negative, not {self.complexity}")

    def at(self, progress: Progress) -> Policy:
        """Uniform before anything is known, then inverse-gap weighting with this epoch's gamma."""
        if progress.version == 0 or progress.events == 0:
            return Uniform()
        k, n = progress.actions, progress.events
        complexity = k if self.complexity is None else self.complexity
        return Falcon(mu=float(k), gamma=self.c * sqrt(k * n / (complexity + log(n / self.delta))))

    def probabilities(
        self, prediction: Prediction, available: np.ndarray | None = None
    ) -> np.ndarray:
        """Before any deployment: uniform."""
        return Uniform().probabilities(prediction, available)
