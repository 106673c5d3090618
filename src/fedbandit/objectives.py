"""Objectives: logged events in, a loss out. Knows nothing of policies, and of models only their
scores.

The built-in ones share one form, which the fast kernels use as it stands: the derivative of the
loss with respect to a score is `factor · weight · (link(score) - reward)`.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from fedbandit.core.parts import require
from fedbandit.core.prediction import Prediction

if TYPE_CHECKING:
    import torch

Reduction = Literal["mean", "half-sum"]
"""`mean` over the mini-batch without 1/2 (what the published learning rates belong to); `half-sum` as in Alg. 3."""


@dataclass(frozen=True)
class Batch:
    """One mini-batch as an objective sees it; tensors of the scores' dtype and device."""

    actions: "torch.Tensor"  # int64 [b]
    rewards: "torch.Tensor"  # [b]
    propensities: "torch.Tensor"  # [b]
    targets: "torch.Tensor | None" = None  # [b, K], by supervision or the objective's `targets`
    weights: "torch.Tensor | None" = (
        None  # [b]: how much each event counts beside all else; None: 1
    )


class Objective(Protocol):
    """Anything with `loss`, differentiable by torch: your own objective needs this one method."""

    def loss(self, scores: "torch.Tensor", batch: Batch) -> "torch.Tensor":
        """A scalar for scores [b, K]."""
        ...


class TargetObjective(Objective, Protocol):
    """An objective over all actions, which estimates their rewards when an event is logged.

    Whatever `targets` returns is `batch.targets` when the event is trained on.
    """

    def targets(
        self,
        prediction: Prediction,
        actions: np.ndarray,
        rewards: np.ndarray,
        propensities: np.ndarray,
    ) -> np.ndarray:
        """A reward for every action, [n, K], from the acting model's prediction and n logged
        events.
        """
        ...


@dataclass(frozen=True)
class Pointwise:
    """Base of the built-in objectives: a squared or logistic loss, weighted or not, on one
    action or on all.
    """

    reduction: Reduction = "mean"

    logistic = False  # cross-entropy on logits in place of squared error
    supervised = False  # over all actions in place of the chosen one

    @property
    def importance(self) -> float | None:
        """An event weighs importance/ρ; None: every event weighs 1."""
        return None

    @property
    def largest(self) -> float | None:
        """The largest weight that an event may have; None: any."""
        return None

    def weights(self, propensities: np.ndarray, counts: np.ndarray | None = None) -> np.ndarray:
        """The weight of each event: [n] for propensities [n]; `counts` [n] says how much each
        counts beside that.
        """
        weights = np.ones_like(propensities)
        if self.importance is not None:
            weights = np.asarray(self.importance / propensities, propensities.dtype)
            if self.largest is not None:
                weights = np.minimum(weights, weights.dtype.type(self.largest))
        return weights if counts is None else weights * counts.astype(weights.dtype)

    def factor(self, batch_size: int, num_actions: int) -> float:
        """The constant in front of `weight · (link(score) - reward)`."""
        terms = batch_size * (num_actions if self.supervised else 1)
        if self.reduction == "half-sum":
            return 1.0
        return (1.0 if self.logistic else 2.0) / terms

    def loss(self, scores: "torch.Tensor", batch: Batch) -> "torch.Tensor":
        """The loss itself, for training by automatic differentiation."""
        import torch

        if self.supervised:
            assert batch.targets is not None
            rewards = batch.targets
        else:
            scores = scores.gather(1, batch.actions[:, None])[:, 0]
            rewards = batch.rewards
        softplus = torch.nn.functional.softplus
        loss = softplus(scores) - rewards * scores if self.logistic else (scores - rewards) ** 2 / 2
        if self.importance is not None:
            weights = self.importance / batch.propensities
            if self.largest is not None:
                weights = weights.clamp(max=self.largest)
            loss = loss * weights
        if batch.weights is not None:
            loss = loss * (batch.weights[:, None] if self.supervised else batch.weights)
        total = loss.sum()
        if self.reduction == "half-sum":
            return total
        return total * ((1 if self.logistic else 2) / scores.numel())


@dataclass(frozen=True)
class Regression(Pointwise):
    """Squared error of the chosen action's score against its reward (eq. 5)."""


@dataclass(frozen=True)
class WeightedRegression(Pointwise):
    """Squared error weighted by scale/ρ (eq. 6): right on average whatever the rule that logged.

    `scale` None stands for what the policy says (ε/K for ε-greedy, else 1). `limit` caps 1/ρ, for
    less variance and some bias (Bottou et al., 2013; Ionides, 2008): a rare event then counts at
    most `limit` times as much as a certain one.
    """

    scale: float | None = None
    limit: float | None = None

    def __post_init__(self) -> None:
        require(self, scale="positive", limit="positive")

    @property
    def importance(self) -> float:
        return 1.0 if self.scale is None else self.scale

    @property
    def largest(self) -> float | None:
        return None if self.limit is None else self.importance * self.limit


@dataclass(frozen=True)
class CrossEntropy(Pointwise):
    """Binary cross-entropy of the chosen action's logit against its reward; rewards must lie in [0,
    1].
    """

    logistic = True


@dataclass(frozen=True)
class WeightedCrossEntropy(WeightedRegression):
    """Binary cross-entropy weighted by scale/ρ; rewards must lie in [0, 1]."""

    logistic = True


@dataclass(frozen=True)
class FullInformation(Pointwise):
    """Squared error over all actions, for supervised pre-training."""

    supervised = True


@dataclass(frozen=True)
class FullInformationCrossEntropy(Pointwise):
    """Binary cross-entropy over all actions, for supervised pre-training; rewards must lie in [0,
    1].
    """

    supervised = True
    logistic = True


@dataclass(frozen=True)
class DoublyRobust(Pointwise):
    """Squared error over all actions, against doubly robust rewards (Dudík et al., 2014).

    They are what a reward model predicts, corrected by (r - predicted)/ρ where the log knows
    better. `limit` caps 1/ρ, for less variance and some bias. In a simulation the deployed model's
    scores are the predictions: they owe nothing to the draw of the action.
    """

    limit: float | None = None

    supervised = True

    def __post_init__(self) -> None:
        require(self, limit="positive")

    def targets(
        self,
        prediction: Prediction,
        actions: np.ndarray,
        rewards: np.ndarray,
        propensities: np.ndarray,
    ) -> np.ndarray:
        """A reward for every action, [n, K], right on average for each."""
        targets = prediction.mean.copy()
        rows = np.arange(len(actions))
        weights = (
            1 / propensities if self.limit is None else np.minimum(1 / propensities, self.limit)
        )
        targets[rows, actions] += (weights * (rewards - targets[rows, actions])).astype(
            targets.dtype
        )
        return targets


BUILT_IN = {
    "regression": Regression,
    "weighted-regression": WeightedRegression,
    "cross-entropy": CrossEntropy,
    "weighted-cross-entropy": WeightedCrossEntropy,
    "doubly-robust": DoublyRobust,
}
SUPERVISED = {
    "full-information": FullInformation,
    "full-information-cross-entropy": FullInformationCrossEntropy,
}
