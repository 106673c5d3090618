"""Algorithm 3, one round of federated optimisation: clients train on their logs, their updates are
clipped and averaged, and the server takes one step with the average as pseudo-gradient. Knows
nothing of exploration.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from fedbandit.reference.inference import Event
from fedbandit.reference.models import ReferenceModel, Weights


@dataclass(frozen=True)
class Loss:
    """Squared error or binary cross-entropy, of the chosen action or of all, weighted by scale/ρ or
    not.
    """

    cross_entropy: bool = False
    all_actions: bool = False
    scale: float | None = None  # None: every event weighs 1
    reduction: str = "mean"

    def derivative(self, scores: np.ndarray, event: Event) -> np.ndarray:
        """∂loss/∂score [K] of one event, before the reduction over the batch."""
        predictions = 1 / (1 + np.exp(-scores)) if self.cross_entropy else scores
        if self.all_actions:
            return np.asarray(predictions - event.all_rewards)
        weight = 1.0 if self.scale is None else self.scale / event.propensity
        errors = np.zeros(len(scores))
        errors[event.action] = weight * (predictions[event.action] - event.reward)
        return errors

    def reduction_factor(self, batch: int, actions: int) -> float:
        """`half-sum`: Σ ½ error², as Algorithm 3 prints it. `mean`: the mean of error², without the
        ½.
        """
        if self.reduction == "half-sum":
            return 1.0
        terms = batch * actions if self.all_actions else batch
        return 1 / terms if self.cross_entropy else 2 / terms


@dataclass(frozen=True)
class DoublyRobust(Loss):
    """Squared error over all actions, against what the acting model predicted, corrected by (r -
    predicted)/ρ where the log knows better; 1/ρ at most `limit`.
    """

    all_actions: bool = True
    limit: float | None = None

    def derivative(self, scores: np.ndarray, event: Event) -> np.ndarray:
        weight = 1 / event.propensity
        if self.limit is not None:
            weight = min(weight, self.limit)
        targets = event.scores.copy()
        targets[event.action] += weight * (event.reward - targets[event.action])
        return np.asarray(scores - targets)


OBJECTIVES = (
    "regression",
    "weighted-regression",
    "cross-entropy",
    "weighted-cross-entropy",
    "doubly-robust",
)


def client_update(
    model: ReferenceModel,
    omega_0: Weights,
    log: list[Event],
    loss: Loss,
    learning_rate: float,
    batch_size: int,
    epochs: int,
) -> Weights:
    """ClientUpdate: SGD over the log in order, the last mini-batch perhaps smaller; returns ω^N -
    ω^0.
    """
    omega = {name: w.copy() for name, w in omega_0.items()}
    for _ in range(epochs):
        for begin in range(0, len(log), batch_size):
            batch = log[begin : begin + batch_size]
            gradient = {name: np.zeros_like(w) for name, w in omega.items()}
            for event in batch:
                scores = model.scores(omega, event.context)
                errors = loss.reduction_factor(len(batch), len(scores)) * loss.derivative(
                    scores, event
                )
                for name, g in model.gradient(omega, event.context, errors).items():
                    gradient[name] += g
            for name in omega:
                omega[name] -= learning_rate * gradient[name]
    return {name: omega[name] - omega_0[name] for name in omega}


def norm_of(update: Weights) -> float:
    """The Euclidean norm over all weights of a model."""
    return float(np.sqrt(sum(np.sum(u * u) for u in update.values())))


def aggregate(updates: list[Weights], clip_norm: float) -> Weights:
    """The unweighted mean of the updates, each scaled down to the clip norm if it is longer."""
    mean = {name: np.zeros_like(u) for name, u in updates[0].items()}
    for update in updates:
        norm = norm_of(update)
        factor = clip_norm / norm if norm > clip_norm else 1.0
        for name in mean:
            mean[name] += factor * update[name] / len(updates)
    return mean


def next_clip_norm(clip_norm: float, norms: list[float], quantile: float, rate: float) -> float:
    """Adaptive clipping: the norm moves until the asked fraction of the clients is not clipped."""
    unclipped = np.mean([norm <= clip_norm for norm in norms])
    return float(clip_norm * np.exp(-rate * (unclipped - quantile)))


class Sgd:
    """w + lr · Δ; with momentum a step keeps most of the step before it."""

    def __init__(self, learning_rate: float, momentum: float = 0.0) -> None:
        self.learning_rate, self.momentum = learning_rate, momentum
        self.velocity = np.zeros(())

    def step(self, w: np.ndarray, delta: np.ndarray) -> np.ndarray:
        self.velocity = self.momentum * self.velocity + self.learning_rate * delta
        return w + self.velocity


class Adam:
    """Adam in the Keras form, with the bias correction in the rate."""

    def __init__(
        self,
        learning_rate: float,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
    ) -> None:
        self.learning_rate, self.beta_1, self.beta_2, self.epsilon = (
            learning_rate,
            beta_1,
            beta_2,
            epsilon,
        )
        self.t, self.m, self.v = 0, np.zeros(()), np.zeros(())

    def step(self, w: np.ndarray, delta: np.ndarray) -> np.ndarray:
        self.t += 1
        self.m = self.beta_1 * self.m + (1 - self.beta_1) * delta
        self.v = self.beta_2 * self.v + (1 - self.beta_2) * delta**2
        rate = self.learning_rate * np.sqrt(1 - self.beta_2**self.t) / (1 - self.beta_1**self.t)
        return np.asarray(w + rate * self.m / (np.sqrt(self.v) + self.epsilon))


class Adagrad:
    """Each weight's steps shrink with the sum of its squared updates so far."""

    def __init__(
        self, learning_rate: float, initial_accumulator: float = 0.1, epsilon: float = 1e-7
    ) -> None:
        self.learning_rate, self.epsilon = learning_rate, epsilon
        self.total = np.array(initial_accumulator)

    def step(self, w: np.ndarray, delta: np.ndarray) -> np.ndarray:
        self.total = self.total + delta**2
        return np.asarray(w + self.learning_rate * delta / (np.sqrt(self.total) + self.epsilon))


class Yogi:
    """Adam whose second moment moves towards Δ² by an amount that does not depend on how far away
    it is.
    """

    def __init__(
        self, learning_rate: float, beta_1: float = 0.9, beta_2: float = 0.99, epsilon: float = 1e-3
    ) -> None:
        self.learning_rate, self.beta_1, self.beta_2, self.epsilon = (
            learning_rate,
            beta_1,
            beta_2,
            epsilon,
        )
        self.m, self.v = np.zeros(()), np.array(epsilon**2)

    def step(self, w: np.ndarray, delta: np.ndarray) -> np.ndarray:
        self.m = self.beta_1 * self.m + (1 - self.beta_1) * delta
        self.v = self.v - (1 - self.beta_2) * delta**2 * np.sign(self.v - delta**2)
        return np.asarray(w + self.learning_rate * self.m / (np.sqrt(self.v) + self.epsilon))


ServerOptimizer = Sgd | Adam | Adagrad | Yogi
OPTIMIZERS: dict[str, Callable[..., ServerOptimizer]] = {
    "sgd": Sgd,
    "momentum": partial(Sgd, momentum=0.9),
    "adam": Adam,
    "adagrad": Adagrad,
    "yogi": Yogi,
}
