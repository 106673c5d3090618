"""Training on a device in plain numpy: the built-in linear model, on dense features or text, with built-in objectives.

Agrees with the simulator's learners, which need numba and torch. Works on what one device has logged, a few hundred
events, and touches only the weights that its words and actions reach.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import ClassVar, Protocol

import numpy as np

from fedbandit.acting.predictors import unit_features
from fedbandit.core.errors import DataError, needing
from fedbandit.core.ragged import Ragged
from fedbandit.events import Events
from fedbandit.federated.learners.base import ClientSettings, Drift, Learner
from fedbandit.federated.learners.make_learner import Trainable
from fedbandit.federated.pipeline import DenseSum, UpdateSum, clip_factor
from fedbandit.models import Freezing, Layout
from fedbandit.objectives import Objective, Pointwise


def device_learner(
    name: str,
    trainable: Trainable,
    objective: Objective,
    settings: ClientSettings,
    freezing: Freezing | None = None,
) -> Learner:
    """Numpy for the model `linear` and built-in objectives; torch for anything else."""
    if getattr(objective, "supervised", False):
        raise DataError(
            f"{type(objective).__name__} needs rewards of actions that devices do not log"
        )
    if name == "linear" and isinstance(objective, Pointwise) and freezing is None:
        return LinearLearner(trainable.layout, objective, settings)
    with needing(f"training {name} with {type(objective).__name__}"):
        import_module("torch")
    return trainable.learner(objective, settings, freezing=freezing)


@dataclass(frozen=True)
class LinearLearner:
    """Trains `weight [features, K]` and `bias [K]`."""

    layout: Layout
    objective: Pointwise
    settings: ClientSettings
    chunk_events: ClassVar[int] = 2048

    def train(
        self, weights: np.ndarray, events: Events, clip_norm: float, pull: float = 0.0
    ) -> tuple[UpdateSum, np.ndarray]:
        total, norms = np.zeros_like(weights), np.zeros(events.num_clients)
        for client, moved in enumerate(self._moves(weights, events, pull)):
            if moved is None:
                continue
            norms[client] = moved.norm
            if np.isfinite(moved.norm):
                moved.add_to(self.layout.split(total), clip_factor(moved.norm, clip_norm))
        return DenseSum(total), norms

    def updates(
        self, weights: np.ndarray, events: Events, pull: float = 0.0, drift: Drift | None = None
    ) -> Iterator[np.ndarray | None]:
        if drift is not None:
            raise DataError("devices do not add a drift to their gradients yet")
        for moved in self._moves(weights, events, pull):
            if moved is None:
                yield None
                continue
            update = np.zeros_like(weights)
            moved.add_to(self.layout.split(update), 1.0)
            yield update

    def _moves(
        self, weights: np.ndarray, events: Events, pull: float
    ) -> Iterator["LinearUpdate | None"]:
        for first, last in zip(events.bounds[:-1], events.bounds[1:], strict=True):
            rows = slice(int(first), int(last))
            parts = (self.layout, weights, events, rows, self.objective, self.settings)
            yield client_moves(*parts, pull) if first < last else None


@dataclass(frozen=True)
class LinearUpdate:
    """By how much one client's training has moved the weights that it reaches, and the bias."""

    reached: "_Reached"
    values: np.ndarray  # like `reached.work`
    bias: np.ndarray  # [K]

    @property
    def norm(self) -> float:
        """The L2 norm of the update, summed in float64."""
        with np.errstate(over="ignore", invalid="ignore"):
            return float(
                np.sqrt(
                    sum(
                        np.square(part, dtype=np.float64).sum() for part in (self.values, self.bias)
                    )
                )
            )

    def add_to(self, total: dict[str, np.ndarray], factor: float) -> None:
        """Add the update times the factor to weight [features, K] and bias [K]."""
        scale = self.bias.dtype.type(factor)
        self.reached.add_to(total["weight"], scale * self.values)
        total["bias"] += scale * self.bias


def client_moves(
    layout: Layout,
    received: np.ndarray,
    events: Events,
    rows: slice,
    objective: Pointwise,
    settings: ClientSettings,
    pull: float = 0.0,
) -> LinearUpdate:
    """One client's epochs over its events (`rows`): each step follows gradient + pull · (w - received)."""
    params, dtype = layout.split(received), received.dtype
    chosen, rewards = events.actions[rows], np.asarray(events.rewards[rows], dtype)
    counts = None if events.weights is None else events.weights[rows]
    importance = objective.weights(np.asarray(events.propensities[rows], dtype), counts)
    reached: _Reached
    shared = events.contexts.shared
    if isinstance(shared, Ragged):
        reached = _words(params["weight"], shared.slice(rows.start, rows.stop), chosen)
    else:
        reached = _features(params["weight"], shared[rows], chosen)
    base, bias = reached.work.copy(), params["bias"].copy()
    size, rate = settings.batch_size, settings.learning_rate
    with np.errstate(
        over="ignore", invalid="ignore"
    ):  # the caller sees by the norm that training has diverged
        for _ in range(settings.epochs):
            for begin in range(0, len(chosen), size):
                batch = slice(begin, min(begin + size, len(chosen)))
                actions = chosen[batch]
                scores = reached.scores(batch, bias[actions])
                if objective.logistic:
                    scores = 1 / (1 + np.exp(-scores))
                step = dtype.type(rate * objective.factor(len(actions), len(bias)))
                moves = step * importance[batch] * (scores - rewards[batch])
                if pull:
                    reached.work -= dtype.type(rate * pull) * (reached.work - base)
                    bias -= dtype.type(rate * pull) * (bias - params["bias"])
                np.subtract.at(bias, actions, moves)
                reached.step(batch, moves)
        return LinearUpdate(reached, reached.work - base, bias - params["bias"])


class _Reached(Protocol):
    """A working copy of the weights that one client's events reach: `work`."""

    work: np.ndarray

    def scores(self, batch: slice, bias: np.ndarray) -> np.ndarray:
        """The scores of the chosen actions, from their `bias` [b] on: [b]."""
        ...

    def step(self, batch: slice, moves: np.ndarray) -> None:
        """Move the weights behind each score by -move times their context."""
        ...

    def add_to(self, weight: np.ndarray, values: np.ndarray) -> None:
        """Add values like `work` to where they belong in `weight` [features, K]."""
        ...


@dataclass
class _Words:
    """Text: an entry of the weights for each pair of a word and the action chosen for it."""

    work: np.ndarray  # [entries]
    entries: np.ndarray  # int64 [entries]: word · K + action
    slots: np.ndarray  # int64 [words of all texts]: where each stands in `work`
    texts: Ragged
    values: np.ndarray  # of the texts, in the weights' dtype

    def scores(self, batch: slice, bias: np.ndarray) -> np.ndarray:
        words, rows = self._of(batch)
        # Adds in the order of the words, as the simulator's kernel does.
        np.add.at(bias, rows, self.values[words] * self.work[self.slots[words]])
        return bias

    def step(self, batch: slice, moves: np.ndarray) -> None:
        words, rows = self._of(batch)
        np.subtract.at(self.work, self.slots[words], moves[rows] * self.values[words])

    def add_to(self, weight: np.ndarray, values: np.ndarray) -> None:
        weight.reshape(-1)[self.entries] += values  # each entry stands there once

    def _of(self, batch: slice) -> tuple[slice, np.ndarray]:
        """The words of these texts, and for each the text it stands in, counted from the first."""
        offsets = self.texts.offsets[batch.start : batch.stop + 1]
        return slice(offsets[0], offsets[-1]), np.repeat(
            np.arange(len(offsets) - 1), np.diff(offsets)
        )


def _words(weight: np.ndarray, texts: Ragged, chosen: np.ndarray) -> _Words:
    k = weight.shape[1]
    entries, slots = np.unique(
        texts.ids.astype(np.int64) * k + chosen[texts.row_of_entry()], return_inverse=True
    )
    return _Words(
        weight.reshape(-1)[entries], entries, slots, texts, np.asarray(texts.values, weight.dtype)
    )


@dataclass
class _Features:
    """Dense features: a column of the weights for each action that was chosen."""

    work: np.ndarray  # [features, columns]
    columns: np.ndarray  # int64 [columns]: their actions
    of_event: np.ndarray  # int64 [n]: the column of each event
    x: np.ndarray  # [n, features], L2-normalised

    def scores(self, batch: slice, bias: np.ndarray) -> np.ndarray:
        every = self.x[batch] @ self.work
        return np.asarray(
            bias + np.take_along_axis(every, self.of_event[batch, None], axis=1)[:, 0]
        )

    def step(self, batch: slice, moves: np.ndarray) -> None:
        by_column = np.zeros((len(moves), len(self.columns)), self.work.dtype)
        by_column[np.arange(len(moves)), self.of_event[batch]] = moves
        self.work -= self.x[batch].T @ by_column

    def add_to(self, weight: np.ndarray, values: np.ndarray) -> None:
        weight[:, self.columns] += values


def _features(weight: np.ndarray, contexts: np.ndarray, chosen: np.ndarray) -> _Features:
    columns, of_event = np.unique(chosen, return_inverse=True)
    x = unit_features(contexts, weight.dtype)
    return _Features(weight[:, columns], columns, of_event, x)
