"""The server's side of a round: from the sum of clipped updates to a mean, to the next weights and
the next clip norm.

The simulator and the deployment both call it, so that they cannot come to differ. Knows nothing of
clients.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any, ClassVar, Protocol

import numpy as np

from fedbandit.core import loops
from fedbandit.core.errors import Diverged
from fedbandit.core.parts import require
from fedbandit.federated.algorithm import Algorithm, RoundFacts
from fedbandit.federated.pipeline import (
    Clipping,
    Sends,
    UpdateSum,
    Vectors,
    described,
    zeros_to_send,
)

OptimizerState = dict[str, np.ndarray]
_FRACTION = "at least 0 and below 1"


class ServerOptimizer(Protocol):
    """Anything with `init` and `step`."""

    def init(self, weights: np.ndarray) -> OptimizerState: ...

    def step(
        self, state: OptimizerState, weights: np.ndarray, update: np.ndarray
    ) -> tuple[OptimizerState, np.ndarray]: ...


@dataclass(frozen=True)
class Sgd:
    """w + lr · Δ, with Keras momentum if asked for."""

    learning_rate: float = 1.0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        require(self, learning_rate="positive", momentum=_FRACTION)

    def init(self, weights: np.ndarray) -> OptimizerState:
        return {"velocity": np.zeros_like(weights)} if self.momentum else {}

    def step(
        self, state: OptimizerState, weights: np.ndarray, update: np.ndarray
    ) -> tuple[OptimizerState, np.ndarray]:
        move = _typed(weights, self.learning_rate) * update
        if not self.momentum:
            return {}, weights + move
        velocity = _typed(weights, self.momentum) * state["velocity"] + move
        return {"velocity": velocity}, weights + velocity


@dataclass(frozen=True)
class Adam:
    """Adam in the Keras form: lr·sqrt(1-β₂ᵗ)/(1-β₁ᵗ) · m / (sqrt(v) + ε)."""

    learning_rate: float = 0.001
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7

    def __post_init__(self) -> None:
        require(self, learning_rate="positive", epsilon="positive")
        require(self, beta_1=_FRACTION, beta_2=_FRACTION)

    def init(self, weights: np.ndarray) -> OptimizerState:
        return {
            "step": np.zeros(1, np.int64),
            "m": np.zeros_like(weights),
            "v": np.zeros_like(weights),
        }

    def step(
        self, state: OptimizerState, weights: np.ndarray, update: np.ndarray
    ) -> tuple[OptimizerState, np.ndarray]:
        t = int(state["step"][0]) + 1
        rate = self.learning_rate * sqrt(1 - self.beta_2**t) / (1 - self.beta_1**t)
        constants = _constants(weights, rate, self.beta_1, self.beta_2, self.epsilon)
        m, v, moved = np.empty_like(weights), np.empty_like(weights), np.empty_like(weights)
        # One pass over the vectors: these steps are bound by memory, not by arithmetic.
        loops.adam_moments(state["m"], state["v"], weights, update, constants, m, v, moved)
        return {"step": np.array([t]), "m": m, "v": v}, moved


@dataclass(frozen=True)
class Yogi:
    """Yogi as in Reddi et al. (2021): like Adam, but v moves towards Δ² by a bounded amount; no
    bias correction.
    """

    learning_rate: float = 0.001
    beta_1: float = 0.9
    beta_2: float = 0.99
    epsilon: float = 1e-3

    def __post_init__(self) -> None:
        require(self, learning_rate="positive", epsilon="positive")
        require(self, beta_1=_FRACTION, beta_2=_FRACTION)

    def init(self, weights: np.ndarray) -> OptimizerState:
        return {"m": np.zeros_like(weights), "v": np.full_like(weights, self.epsilon**2)}

    def step(
        self, state: OptimizerState, weights: np.ndarray, update: np.ndarray
    ) -> tuple[OptimizerState, np.ndarray]:
        rate, beta_1, beta_2, epsilon = _constants(
            weights, self.learning_rate, self.beta_1, self.beta_2, self.epsilon
        )
        one, squared = weights.dtype.type(1), update * update
        m = beta_1 * state["m"] + (one - beta_1) * update
        v = state["v"] - (one - beta_2) * squared * np.sign(state["v"] - squared)
        return {"m": m, "v": v}, weights + rate * m / (np.sqrt(v) + epsilon)


@dataclass(frozen=True)
class Adagrad:
    """Adagrad in the Keras form: lr · Δ / (sqrt(ΣΔ²) + ε), the sum starting at
    `initial_accumulator`.
    """

    learning_rate: float = 0.001
    initial_accumulator: float = 0.1
    epsilon: float = 1e-7

    def __post_init__(self) -> None:
        require(self, learning_rate="positive", epsilon="positive")
        require(self, initial_accumulator="at least 0")

    def init(self, weights: np.ndarray) -> OptimizerState:
        return {"sum": np.full_like(weights, self.initial_accumulator)}

    def step(
        self, state: OptimizerState, weights: np.ndarray, update: np.ndarray
    ) -> tuple[OptimizerState, np.ndarray]:
        total = state["sum"] + update * update
        rate, epsilon = _typed(weights, self.learning_rate), _typed(weights, self.epsilon)
        return {"sum": total}, weights + rate * update / (np.sqrt(total) + epsilon)


@dataclass(frozen=True)
class NoOpOptimizer:
    """Leaves the weights where they are: for a model that is not trained."""

    def init(self, weights: np.ndarray) -> OptimizerState:
        return {}

    def step(
        self, state: OptimizerState, weights: np.ndarray, update: np.ndarray
    ) -> tuple[OptimizerState, np.ndarray]:
        return state, weights


def sgd_momentum(learning_rate: float = 1.0, momentum: float = 0.9) -> Sgd:
    """SGD with momentum under a name of its own, as configurations have it."""
    return Sgd(learning_rate, momentum)


BUILT_IN: dict[str, Callable[..., ServerOptimizer]] = {
    "adam": Adam,
    "sgd": Sgd,
    "momentum": sgd_momentum,
    "adagrad": Adagrad,
    "yogi": Yogi,
}


def _typed(like: np.ndarray, value: float) -> np.generic:
    typed: np.generic = like.dtype.type(value)
    return typed


def _constants(like: np.ndarray, *values: float) -> np.ndarray:
    return np.array(values, like.dtype)


class Accumulator(Protocol):
    """Takes in what the clients of one round send, chunk after chunk."""

    def add(self, sums: Mapping[str, UpdateSum], accepted: int) -> None:
        """Add a chunk with this many accepted clients; `ValueError` where it does not fit."""
        ...

    def totals(self) -> Vectors:
        """The sums that the server's step starts from, once all chunks have been added."""
        ...


@dataclass(frozen=True)
class RunningSums:
    """The sums of all that is sent, added to zeros in the order of the chunks."""

    sums: Vectors

    def add(self, sums: Mapping[str, UpdateSum], accepted: int) -> None:
        for name, total in self.sums.items():
            sums[name].add_to(total)

    def totals(self) -> Vectors:
        return self.sums


@dataclass(frozen=True)
class PlainMean:
    """From what the clients of a round send to what the server learns from it: the exact mean.

    Every aggregation is one of these with something changed; private ones add noise to the sum,
    robust ones combine single updates.
    """

    keep_individual_updates: ClassVar[bool] = False  # chunks must not add up what clients send

    def accumulator(self, zeros: Vectors) -> Accumulator:
        """An empty accumulator for a round; `zeros` has the shapes and types, and may be
        overwritten.
        """
        return RunningSums(zeros)

    def mean(self, total: np.ndarray, accepted: int, number: int, clip_norm: float) -> np.ndarray:
        """The update of the round's model from the sum over the accepted clients, which may be
        overwritten.
        """
        total /= max(1, accepted)
        return total

    def unclipped(self, below: int, accepted: int, number: int) -> float | None:
        """The share of clients whose update was not clipped, to move the clip norm by; None: leave
        it.
        """
        return below / accepted if accepted else None

    def denominator(self, accepted: int) -> int:
        """The number of clients in the mean: those accepted, or those expected."""
        return accepted

    def metrics(self, number: int, deploys: bool) -> dict[str, Any]:
        """Entries for the round's metrics."""
        return {}


@dataclass(frozen=True)
class Step:
    """The outcome of a round's updates."""

    server_state: Vectors
    weights: np.ndarray  # the model that would be deployed now
    clip_norm: float
    update: np.ndarray  # the mean change of the weights that clients sent


@dataclass(frozen=True)
class Server:
    """The server's learning from sums."""

    algorithm: Algorithm
    clipping: Clipping
    aggregation: PlainMean

    def step(
        self,
        facts: RoundFacts,
        server_state: Vectors,
        clip_norm: float,
        totals: Vectors,
        accepted: int,
        below: int,
    ) -> Step:
        """The round's step from the sums over `accepted` clients, `below` of which were not
        clipped.
        """
        joined, scales = _joined(totals, self.algorithm.sends)
        mean = self.aggregation.mean(joined, accepted, facts.round, clip_norm)
        means = _split(mean, totals, scales)
        moved = self.algorithm.step(server_state, means, facts)
        weights = self.algorithm.model(moved)
        if not np.isfinite(weights).all():
            raise Diverged(f"diverged at round {facts.round}: the model's weights are not finite")
        learned = self.aggregation.unclipped(below, accepted, facts.round)
        following = clip_norm if learned is None else self.clipping.following(clip_norm, learned)
        return Step(moved, weights, following, means.get("weights", mean))


def join_sent(totals: Vectors, sends: Sends) -> np.ndarray:
    """All that is sent as one vector, whose length is the joint norm: it gets the noise."""
    return _joined(totals, sends)[0]


def split_sent(vector: np.ndarray, sends: Sends, weights: np.ndarray) -> Vectors:
    """The parts of what `join_sent` made, or of sums of it, for training of these weights."""
    zeros = zeros_to_send(sends, weights)
    scales = {name: one.scale or 1.0 for name, one in described(sends).items()}
    if vector.dtype.kind == "i":  # whole steps stay scaled until their mean is taken
        zeros = {name: np.zeros(zero.shape, vector.dtype) for name, zero in zeros.items()}
        scales = dict.fromkeys(scales, 1.0)
    return _split(vector, zeros, scales)


def _joined(totals: Vectors, sends: Sends) -> tuple[np.ndarray, dict[str, float]]:
    """All sums as one vector, each scaled as in the joint norm: what noise is added to.

    Sums of whole steps have been scaled by the clients.
    """
    scales = {name: one.scale or 1.0 for name, one in described(sends).items()}
    flat = [
        total.reshape(-1)
        if scales[name] == 1 or total.dtype.kind == "i"
        else total.dtype.type(scales[name]) * total.reshape(-1)
        for name, total in totals.items()
    ]
    return (flat[0] if len(flat) == 1 else np.concatenate(flat)), scales


def _split(mean: np.ndarray, like: Vectors, scales: Mapping[str, float]) -> Vectors:
    """The joined vector by name again, in the shapes that were sent."""
    parts, start = {}, 0
    for name, total in like.items():
        part = mean[start : start + total.size].reshape(total.shape)
        if scales[name] != 1:
            part = part / part.dtype.type(scales[name])
        # A sum of whole numbers comes back as a mean in the weights' type, whatever it was.
        parts[name] = part if total.dtype.kind != "f" else part.astype(total.dtype, copy=False)
        start += total.size
    return parts
