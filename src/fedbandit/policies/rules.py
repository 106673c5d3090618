"""Exploration rules that look at the mean of a prediction alone.

A policy is a small frozen value. It knows nothing of models, clients or sampling; numpy is all it needs, so the same
code runs in a simulation and on a device.
"""

from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from typing import Protocol

import numpy as np

from fedbandit.core.prediction import Prediction

Drawn = tuple[np.ndarray, np.ndarray] | None
"""Actions int64 [n] and their probabilities [n]; None where only the plain form works."""


class Policy(Protocol):
    """Anything with `probabilities`; a policy of a user is a class with this one method.

    Optional members:

    - `at(progress) -> Policy`: a schedule. Asked once per deployment, it returns the concrete rule
      that ships with that version of the model.
    - `sample_fused(prediction, uniforms) -> (actions, propensities) | None`: the same draws as
      `probabilities` followed by a draw, to the last bit, in fewer passes; None where it cannot.
    - `importance_scale(num_actions) -> float`: multiplies importance weights, 1 without it.
    - a parameter `contexts` of `probabilities`: it is then called with the decisions' `Contexts`.
    """

    def probabilities(
        self, prediction: Prediction, available: np.ndarray | None = None
    ) -> np.ndarray:
        """Probabilities [..., K] for a prediction; where `available` [..., K] is False the probability is 0."""
        ...


def ask(
    policy: Policy, prediction: Prediction, available: np.ndarray | None, contexts: object = None
) -> np.ndarray:
    """A policy's probabilities; one whose `probabilities` takes `contexts` is given them."""
    if takes_contexts(type(policy)):
        return policy.probabilities(prediction, available, contexts=contexts)  # type: ignore[call-arg]
    return policy.probabilities(prediction, available)


@lru_cache(maxsize=64)
def takes_contexts(kind: type[Policy]) -> bool:
    """Whether policies of this class want to see the decisions' contexts."""
    return "contexts" in signature(kind.probabilities).parameters


@dataclass(frozen=True)
class Greedy:
    """Always the action with the best score."""

    def probabilities(
        self, prediction: Prediction, available: np.ndarray | None = None
    ) -> np.ndarray:
        scores, available = _checked(prediction, available)
        return _one_hot(_best(scores, available), scores)

    def sample_fused(self, prediction: Prediction, uniforms: np.ndarray) -> Drawn:
        from fedbandit.policies import fused  # compiled: devices never come here

        return fused.sample_by_best(self.probabilities, prediction, uniforms)


@dataclass(frozen=True)
class Uniform:
    """Every available action, each as likely as the next."""

    def probabilities(
        self, prediction: Prediction, available: np.ndarray | None = None
    ) -> np.ndarray:
        scores, available = _checked(prediction, available)
        return _normalised(
            np.ones_like(scores) if available is None else available.astype(scores.dtype)
        )


@dataclass(frozen=True)
class EpsilonGreedy:
    """The best action, except with probability epsilon: then any action, each as likely as the next."""

    epsilon: float = 0.05

    def __post_init__(self) -> None:
        _require("epsilon", self.epsilon, 0 <= self.epsilon <= 1, "between 0 and 1")

    def probabilities(
        self, prediction: Prediction, available: np.ndarray | None = None
    ) -> np.ndarray:
        scores, available = _checked(prediction, available)
        p = (1 - self.epsilon) * _one_hot(_best(scores, available), scores)
        if available is None:
            p += self.epsilon / scores.shape[-1]
        else:
            p += self.epsilon * available / available.sum(axis=-1, keepdims=True)
        return _normalised(p)

    def importance_scale(self, num_actions: int) -> float:
        """What makes the largest importance weight 1: the smallest probability that is ever logged."""
        return self.epsilon / num_actions if self.epsilon > 0 else 1.0

    def sample_fused(self, prediction: Prediction, uniforms: np.ndarray) -> Drawn:
        from fedbandit.policies import fused  # compiled: devices never come here

        return fused.sample_by_best(self.probabilities, prediction, uniforms)


@dataclass(frozen=True)
class Softmax:
    """Probabilities proportional to exp(score / beta): near-greedy for small beta, uniform for large."""

    beta: float = 0.05

    def __post_init__(self) -> None:
        _require("beta", self.beta, self.beta > 0, "positive")

    def probabilities(
        self, prediction: Prediction, available: np.ndarray | None = None
    ) -> np.ndarray:
        scores, available = _checked(prediction, available)
        if available is not None:
            scores = np.where(available, scores, -np.inf)
        with np.errstate(over="ignore"):  # a gap beyond all numbers is one of probability 0
            p = scores - scores.max(axis=-1, keepdims=True)
            p /= max(self.beta, _smallest(p))
        np.exp(p, out=p)
        return _normalised(p)

    def sample_fused(self, prediction: Prediction, uniforms: np.ndarray) -> Drawn:
        from fedbandit.policies import fused  # compiled: devices never come here

        return fused.sample_softmax(self.beta, prediction, uniforms)


@dataclass(frozen=True)
class Falcon:
    """FALCON's inverse-gap weighting: 1 / (mu + gamma * gap) for each other action, the rest for the best one."""

    mu: float = 100.0
    gamma: float = 1000.0

    def __post_init__(self) -> None:
        _require("mu", self.mu, self.mu > 0, "positive")
        _require("gamma", self.gamma, self.gamma >= 0, "not negative")

    def probabilities(
        self, prediction: Prediction, available: np.ndarray | None = None
    ) -> np.ndarray:
        scores, available = _checked(prediction, available)
        best = _best(scores, available)[..., None]
        with np.errstate(
            over="ignore"
        ):  # a gap beyond all numbers is one of probability 0, unless gamma is 0
            gap = np.take_along_axis(scores, best, axis=-1) - scores
            np.minimum(gap, np.finfo(gap.dtype).max, out=gap)
            if available is not None:
                gap = np.where(available, gap, 0)  # never looked at, and may not be a number
            p = 1 / (max(self.mu, _smallest(gap)) + self.gamma * gap)
        np.put_along_axis(p, best, 0, axis=-1)
        if available is not None:
            p *= available
        others = p.sum(axis=-1, keepdims=True)
        np.put_along_axis(p, best, np.maximum(1 - others, 0), axis=-1)
        return _normalised(p)  # also rescales the others to 1 where they sum to more

    def sample_fused(self, prediction: Prediction, uniforms: np.ndarray) -> Drawn:
        from fedbandit.policies import fused  # compiled: devices never come here

        return fused.sample_falcon(self.mu, self.gamma, prediction, uniforms)


def _require(name: str, value: float, holds: bool, what: str) -> None:
    if not (holds and np.isfinite(value)):
        raise ValueError(f"{name} must be {what}, not {value}")


def _checked(
    prediction: Prediction, available: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray | None]:
    if not isinstance(prediction, Prediction):
        raise TypeError(
            f"a policy takes a Prediction, not {type(prediction).__name__}: Prediction(scores)"
        )
    scores = np.asarray(prediction.mean)
    if scores.dtype.kind != "f":
        scores = scores.astype(np.float64)
    if available is None:
        if not np.isfinite(scores).all():
            raise ValueError("scores must be finite")
        return scores, None
    available = np.broadcast_to(np.asarray(available, bool), scores.shape)
    if not available.any(axis=-1).all():
        raise ValueError("at least one action must be available")
    if not np.isfinite(scores[available]).all():
        raise ValueError("scores must be finite")
    return scores, available


def _best(scores: np.ndarray, available: np.ndarray | None) -> np.ndarray:
    """The best available action, the lowest index among equals: int [...]."""
    return np.asarray(
        np.argmax(scores if available is None else np.where(available, scores, -np.inf), axis=-1)
    )


def _smallest(like: np.ndarray) -> float:
    """The smallest parameter that an array's numbers can still be divided by and summed."""
    return float(np.sqrt(np.finfo(like.dtype).tiny))


def _one_hot(best: np.ndarray, like: np.ndarray) -> np.ndarray:
    p = np.zeros_like(like)
    np.put_along_axis(p, best[..., None], 1, axis=-1)
    return p


def _normalised(p: np.ndarray) -> np.ndarray:
    p /= p.sum(axis=-1, keepdims=True)
    return p
