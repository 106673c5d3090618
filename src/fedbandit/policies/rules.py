"""Exploration rules that look at the scores alone, their schedules, and a floor under any rule.

A policy is a small frozen value. It knows nothing of models, clients or sampling; numpy is all
it needs, so the same code runs in a simulation and on a device.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from inspect import signature
from math import log, sqrt
from typing import ClassVar, Protocol, Self

import numpy as np

from fedbandit.core.parts import require
from fedbandit.core.prediction import Drawn, Prediction, Progress


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
        """Probabilities [..., K] for a prediction; 0 where `available` [..., K] is False."""
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
    """Always the action with the best score; the lowest index among equals.

    Never explores: what it has not tried it never learns about. A baseline, and with a `floor` the
    same as epsilon-greedy.
    """

    epsilon: ClassVar[float] = 0.0

    def probabilities(
        self, prediction: Prediction, available: np.ndarray | None = None
    ) -> np.ndarray:
        scores, available = checked(prediction, available)
        return _one_hot(_best(scores, available), scores)

    def sample_fused(self, prediction: Prediction, uniforms: np.ndarray) -> Drawn:
        from fedbandit.policies import fused  # compiled: devices never come here

        return fused.sample_by_best(self.probabilities, prediction, uniforms)


@dataclass(frozen=True)
class Uniform:
    """Every available action, each as likely as the next: for collecting logs."""

    def probabilities(
        self, prediction: Prediction, available: np.ndarray | None = None
    ) -> np.ndarray:
        scores, available = checked(prediction, available)
        return _normalised(
            np.ones_like(scores) if available is None else available.astype(scores.dtype)
        )


@dataclass(frozen=True)
class Constant:
    """Always the same action, whatever the model says: what any model has to beat.

    Uniform over what there is where the action is not available.
    """

    action: int = 0

    def __post_init__(self) -> None:
        require(self, action="at least 0")

    def probabilities(
        self, prediction: Prediction, available: np.ndarray | None = None
    ) -> np.ndarray:
        scores, available = checked(prediction, available)
        chosen = np.zeros_like(scores)
        chosen[..., self.action] = 1
        if available is None:
            return chosen
        can = np.broadcast_to(available, chosen.shape)[..., self.action, None]
        return np.where(can, chosen, Uniform().probabilities(prediction, available))


@dataclass(frozen=True)
class EpsilonGreedy:
    """The best action, except with probability epsilon: then any action, each as likely as the
    next.

    Probabilities are 1 - epsilon + epsilon/K for the best one and epsilon/K for every other. The
    exploration is blind to the scores, and its logs serve any evaluation.
    """

    epsilon: float = 0.05

    def __post_init__(self) -> None:
        require(self, epsilon="from 0 to 1")

    def probabilities(
        self, prediction: Prediction, available: np.ndarray | None = None
    ) -> np.ndarray:
        scores, available = checked(prediction, available)
        p = (1 - self.epsilon) * _one_hot(_best(scores, available), scores)
        if available is None:
            p += self.epsilon / scores.shape[-1]
        else:
            p += self.epsilon * available / available.sum(axis=-1, keepdims=True)
        return _normalised(p)

    def importance_scale(self, num_actions: int) -> float:
        """The smallest probability that is ever logged: it makes the largest weight 1."""
        return self.epsilon / num_actions if self.epsilon > 0 else 1.0

    def sample_fused(self, prediction: Prediction, uniforms: np.ndarray) -> Drawn:
        from fedbandit.policies import fused  # compiled: devices never come here

        return fused.sample_by_best(self.probabilities, prediction, uniforms)


@dataclass(frozen=True)
class Softmax:
    """Probabilities proportional to exp(score / beta): near-greedy for small beta, uniform for
    large.

    Explores close scores and leaves hopeless ones alone. `beta` is in units of the reward.
    """

    beta: float = 0.05

    def __post_init__(self) -> None:
        require(self, beta="positive")

    def probabilities(
        self, prediction: Prediction, available: np.ndarray | None = None
    ) -> np.ndarray:
        scores, available = checked(prediction, available)
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
    """Inverse-gap weighting: 1 / (mu + gamma * gap) for each other action, the rest for the best
    one.

    The rule of FALCON (Simchi-Levi and Xu, 2022) and SquareCB (Foster and Rakhlin, 2020), after Abe
    and Long (1999). `mu` None stands for the number of actions of the decision itself.
    """

    mu: float | None = 100.0
    gamma: float = 1000.0

    def __post_init__(self) -> None:
        require(self, mu="positive", gamma="at least 0")

    def probabilities(
        self, prediction: Prediction, available: np.ndarray | None = None
    ) -> np.ndarray:
        scores, available = checked(prediction, available)
        best = _best(scores, available)[..., None]
        mu: float | np.ndarray = scores.shape[-1] if self.mu is None else self.mu
        if self.mu is None and available is not None:
            mu = available.sum(axis=-1, keepdims=True).astype(scores.dtype)
        # A gap beyond all numbers is one of probability 0, unless gamma is 0.
        with np.errstate(over="ignore"):
            gap = np.take_along_axis(scores, best, axis=-1) - scores
            np.minimum(gap, np.finfo(gap.dtype).max, out=gap)
            if available is not None:
                gap = np.where(available, gap, 0)  # never looked at, and may not be a number
            least = max(mu, _smallest(gap)) if isinstance(mu, int | float) else mu
            p = 1 / (least + self.gamma * gap)
        np.put_along_axis(p, best, 0, axis=-1)
        if available is not None:
            p *= available
        others = p.sum(axis=-1, keepdims=True)
        np.put_along_axis(p, best, np.maximum(1 - others, 0), axis=-1)
        return _normalised(p)  # also rescales the others to 1 where they sum to more

    def sample_fused(self, prediction: Prediction, uniforms: np.ndarray) -> Drawn:
        from fedbandit.policies import fused  # compiled: devices never come here

        mu = prediction.num_actions if self.mu is None else self.mu
        return fused.sample_falcon(mu, self.gamma, prediction, uniforms)


class Schedule:
    """A policy that changes as a run goes on: `at` gives the rule that ships with a version."""

    def at(self, progress: Progress) -> Policy:
        """The rule of a version deployed at this point."""
        raise NotImplementedError

    def probabilities(
        self, prediction: Prediction, available: np.ndarray | None = None
    ) -> np.ndarray:
        """Those of the rule before any deployment."""
        return self.at(Progress()).probabilities(prediction, available)


@dataclass(frozen=True)
class FalconSchedule(Schedule):
    """FALCON with its schedule (Simchi-Levi and Xu, 2022): epochs are deployments, nothing to tune.

    Version 0 explores uniformly. From then on mu is the number of actions K of each decision, and
    gamma grows with the events n logged before the deployment:
    gamma = c * sqrt(K * n / (ln|F| + ln(n / delta))), with the usual K. `complexity` stands for
    ln|F|, the logarithm of the number of models that training chooses from; unset, it is K.
    """

    c: float = 1.0
    delta: float = 0.05
    complexity: float | None = None

    def __post_init__(self) -> None:
        require(self, c="positive", delta="between 0 and 1", complexity="at least 0")

    def at(self, progress: Progress) -> Policy:
        """Uniform before anything is known, then inverse-gap weighting with this epoch's gamma."""
        if progress.version == 0 or progress.events == 0:
            return Uniform()
        k, n = progress.actions, progress.events
        complexity = k if self.complexity is None else self.complexity
        return Falcon(mu=None, gamma=self.c * sqrt(k * n / (complexity + log(n / self.delta))))


@dataclass(frozen=True)
class SquareCB(Schedule):
    """SquareCB (Foster and Rakhlin, 2020): inverse-gap weighting whose gamma grows with the events
    n.

    gamma = scale * n ** power, as Vowpal Wabbit's `--squarecb` has it, and mu = K. Before any event
    gamma is 0, so every action is equally likely. Rewards of size 1 suit the default `scale`.

    Examples:
        >>> from fedbandit.policies import Progress
        >>> SquareCB(scale=10).at(Progress(version=1, events=400))
        Falcon(mu=None, gamma=200.0)
    """

    scale: float = 10.0
    power: float = 0.5

    def __post_init__(self) -> None:
        require(self, scale="positive", power="from 0 to 1")

    def at(self, progress: Progress) -> Policy:
        """Inverse-gap weighting with the gamma of that many events."""
        return Falcon(
            mu=None, gamma=self.scale * progress.events**self.power * (progress.events > 0)
        )


@dataclass(frozen=True)
class DecayingEpsilon(Schedule):
    """Epsilon-greedy that explores less and less: epsilon = start * (half / (half + n)) ** power.

    n counts the events logged before a deployment. The power 1/3 balances exploring and exploiting
    in epoch-greedy (Langford and Zhang, 2007), 1 is the rate of Auer et al. (2002) for actions
    without contexts. `least` keeps some exploration for a world that changes.

    Examples:
        >>> from fedbandit.policies import Progress
        >>> DecayingEpsilon(start=0.5, half=100, power=1.0).at(Progress(version=1, events=300))
        EpsilonGreedy(epsilon=0.125)
    """

    start: float = 1.0
    half: float = 1000.0
    power: float = 1 / 3
    least: float = 0.0

    def __post_init__(self) -> None:
        ranges = {"half": "positive", "power": "at least 0", "least": "from 0 to 1"}
        require(self, start="from 0 to 1", **ranges)
        if self.least > self.start:
            raise ValueError(f"least must be at most start, not {self.least}")

    def at(self, progress: Progress) -> Policy:
        """Epsilon-greedy with the epsilon of that many events."""
        epsilon = self.start * (self.half / (self.half + progress.events)) ** self.power
        return EpsilonGreedy(max(self.least, epsilon))


@dataclass(frozen=True)
class Around:
    """Another rule with something changed; the schedule of the rule stays in force."""

    rule: Policy

    def at(self, progress: Progress) -> Self:
        """The same around the rule of that version."""
        return replace(self, rule=rule_at(self.rule, progress))

    def importance_scale(self, num_actions: int) -> float:
        """That of the rule."""
        return importance_scale(self.rule, num_actions)


@dataclass(frozen=True)
class Floored(Around):
    """Another rule with uniform exploration mixed in: (1 - floor) * rule + floor * uniform.

    Uniform over what is available. It keeps every action alive when the world changes, and gives
    logs that serve the evaluation of any other rule. Every rule of a configuration takes `floor`.
    """

    floor: float

    def __post_init__(self) -> None:
        require(self, floor="from 0 to 1")

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
        """The smallest probability under rules that are greedy at times; otherwise the rule's."""
        epsilon = getattr(self.rule, "epsilon", None)
        if epsilon is None:
            return super().importance_scale(num_actions)
        return EpsilonGreedy((1 - self.floor) * epsilon + self.floor).importance_scale(num_actions)


def rule_at(policy: Policy, progress: Progress) -> Policy:
    """The rule that ships with a version deployed at this point; the policy itself without a
    schedule.
    """
    at = getattr(policy, "at", None)
    return policy if at is None else at(progress)


def fused_form(policy: Policy) -> Callable[[Prediction, np.ndarray], Drawn] | None:
    """The policy's `sample_fused`; None without, or where a subclass changed `probabilities` alone."""
    for kind in type(policy).__mro__:
        if "sample_fused" in vars(kind):
            found: Callable[[Prediction, np.ndarray], Drawn] = policy.sample_fused  # type: ignore[attr-defined]
            return found
        if "probabilities" in vars(kind):
            return None
    return None


def importance_scale(policy: Policy, num_actions: int) -> float:
    """The factor of importance weights 1/ρ for this policy; 1 unless the policy says otherwise."""
    scale = getattr(policy, "importance_scale", None)
    return 1.0 if scale is None else float(scale(num_actions))


def checked(
    prediction: Prediction, available: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Scores [..., K] as floating-point numbers and what is available in their shape; else an
    error.
    """
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
