"""Linear models on dense features, in compiled loops: what automatic differentiation gives, in less time.

A loss on the chosen action moves one column of the weights, so a client works on the columns of its actions alone.
Needs no torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedbandit.acting.predictors import unit_features
from fedbandit.events import Events
from fedbandit.federated.learners.base import ClientSettings, Drift, drift_of
from fedbandit.federated.pipeline import DenseSum, UpdateSum, clip_factor
from fedbandit.models.base import Layout
from fedbandit.models.kernels import dense_kernels as kernels
from fedbandit.objectives import Pointwise


@dataclass(frozen=True)
class DenseLinearLearner:
    """Trains `weight [features, K]` and `bias [K]` on contexts of length one."""

    layout: Layout
    objective: Pointwise
    settings: ClientSettings
    chunk_events: ClassVar[int] = 256

    def train(
        self, weights: np.ndarray, events: Events, clip_norm: float, pull: float = 0.0
    ) -> tuple[UpdateSum, np.ndarray]:
        norms = np.zeros(events.num_clients)
        if not self.objective.supervised:
            top = Top(self.layout, weights)
            x = unit_features(events.contexts.shared, weights.dtype)
            logged = logged_of(events, self.objective, weights.dtype)
            how = how_of(self.objective, self.settings, self._num_actions, weights.dtype)
            pulled = weights.dtype.type(self.settings.learning_rate * pull)
            kernels.train_linear(
                x, events.bounds, *logged, *how, clip_norm, pulled, *top.arrays, norms
            )
            return DenseSum(top.total()), norms
        total = np.zeros_like(weights)
        for client, update in enumerate(self.updates(weights, events, pull)):
            if update is None:
                continue
            with np.errstate(over="ignore"):
                norms[client] = norm = np.sqrt(np.square(update, dtype=np.float64).sum())
            if np.isfinite(norm):
                total += update.dtype.type(clip_factor(norm, clip_norm)) * update
        return DenseSum(total), norms

    def updates(
        self, weights: np.ndarray, events: Events, pull: float = 0.0, drift: Drift | None = None
    ) -> Iterator[np.ndarray | None]:
        dtype, size = weights.dtype, self.settings.batch_size
        rate, pulled = (dtype.type(self.settings.learning_rate * factor) for factor in (1.0, pull))
        x = unit_features(events.contexts.shared, dtype)
        importance = self.objective.weights(np.asarray(events.propensities, dtype), events.weights)
        for client in range(events.num_clients):
            first, last = int(events.bounds[client]), int(events.bounds[client + 1])
            if first == last:
                yield None
                continue
            own, added = weights.copy(), drift_of(drift, client)
            params = self.layout.split(own)
            with np.errstate(over="ignore", invalid="ignore"):  # who diverges is left out later
                for _ in range(self.settings.epochs):
                    for begin in range(first, last, size):
                        rows = slice(begin, min(begin + size, last))
                        scores = np.empty((rows.stop - begin, self._num_actions), dtype)
                        kernels.scores(x[rows], params["weight"], params["bias"], scores)
                        moves = self._errors(scores, events, rows, importance) * -rate
                        back = pulled * (own - weights) if pull else None
                        kernels.add_outer(x[rows], moves, params["weight"])
                        params["bias"] += moves.sum(axis=0)
                        if back is not None:
                            own -= back
                        if added is not None:
                            own -= rate * added
                yield own - weights

    @property
    def _num_actions(self) -> int:
        return dict(self.layout.shapes)["bias"][0]

    def _errors(
        self, scores: np.ndarray, events: Events, rows: slice, importance: np.ndarray
    ) -> np.ndarray:
        """The derivative of the loss by the scores: [b, K]."""
        objective, number = self.objective, np.arange(len(scores))
        if objective.supervised:
            assert events.targets is not None
            answers, rewards = scores, np.asarray(events.targets[rows], scores.dtype)
        else:
            answers = scores[number, events.actions[rows]][:, None]
            rewards = np.asarray(events.rewards[rows], scores.dtype)[:, None]
        if objective.logistic:
            answers = 1 / (1 + np.exp(-answers))
        errors: np.ndarray = (answers - rewards) * importance[rows, None]
        errors *= scores.dtype.type(objective.factor(len(scores), scores.shape[1]))
        if objective.supervised:
            return errors
        whole = np.zeros_like(scores)
        whole[number, events.actions[rows]] = errors[:, 0]
        return whole


def logged_of(
    events: Events, objective: Pointwise, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Actions, rewards, and how much each event counts: what the kernels read of a log."""
    importance = objective.weights(np.asarray(events.propensities, dtype), events.weights)
    return events.actions, np.asarray(events.rewards, dtype), importance


def how_of(
    objective: Pointwise, settings: ClientSettings, num_actions: int, dtype: np.dtype
) -> tuple[bool, np.ndarray, int, int]:
    """Whether the loss is logistic, the step by number of events in a batch, batch size and epochs."""
    size = settings.batch_size
    factors = [objective.factor(events, num_actions) for events in range(1, size + 1)]
    steps = settings.learning_rate * np.array([0.0, *factors])
    return objective.logistic, steps.astype(dtype), size, settings.epochs


class Top:
    """The layer that scores actions: a row an action with its bias last, the sum of updates, a client's copy."""

    def __init__(self, layout: Layout, weights: np.ndarray) -> None:
        self._layout = layout
        *_, weight, bias = layout.split(weights).values()
        self._rows = np.ascontiguousarray(np.concatenate([weight, bias[None]]).T)  # [K, width + 1]
        self._total = np.zeros_like(self._rows)
        self._work, self._columns = np.empty_like(self._rows), np.empty(len(bias), np.int64)
        slot_of = np.full(len(bias), -1, np.int64)
        self.arrays = (self._rows, self._total, self._work, self._columns, slot_of)

    def add(self, used: int, factor: float) -> None:
        """Add a client's update, times a factor, to the sum."""
        self._total[self._columns[:used]] += self._total.dtype.type(factor) * self._work[:used]

    def total(self) -> np.ndarray:
        """The sum as a flat vector of the whole model, the other layers zero."""
        summed = np.zeros(self._layout.size, self._total.dtype)
        *_, weight, bias = self._layout.split(summed).values()
        weight[:], bias[:] = self._total[:, :-1].T, self._total[:, -1]
        return summed
