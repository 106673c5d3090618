"""Linear models on sparse text: scores and training that touch only what a client's words reach, nothing dense.

What a client reaches is gathered into a compact working copy that stays in the core's cache.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from fedbandit.core.ragged import Ragged
from fedbandit.data.dataset import Contexts
from fedbandit.events import Events
from fedbandit.federated.learners import sparse_kernels as kernels
from fedbandit.federated.learners.base import ClientSettings
from fedbandit.federated.pipeline import EntrySum, RowSum, UpdateSum
from fedbandit.models.base import Layout
from fedbandit.objectives import Pointwise


@dataclass(frozen=True)
class SparseLinearLearner:
    """Scores and trains `weight [words, K]` and `bias [K]` on rows of (word, value)."""

    layout: Layout
    objective: Pointwise
    settings: ClientSettings
    chunk_events: ClassVar[int] = 2048

    def scores(self, weights: np.ndarray, contexts: Contexts) -> np.ndarray:
        assert isinstance(contexts, Ragged)
        params = self.layout.split(weights)
        out = np.empty((len(contexts), len(params["bias"])), weights.dtype)
        values = np.asarray(contexts.values, weights.dtype)
        kernels.scores(params["weight"], params["bias"], contexts.offsets, contexts.ids, values, out)
        return out

    def train(self, weights: np.ndarray, events: Events, clip_norm: float) -> tuple[UpdateSum, np.ndarray]:
        norms = np.zeros(len(events.bounds) - 1)
        train = self._train_all if self.objective.supervised else self._train_chosen
        return train(weights, events, float(clip_norm), norms), norms

    def _train_chosen(self, weights: np.ndarray, events: Events, clip_norm: float, norms: np.ndarray) -> UpdateSum:
        """A loss on the chosen action reaches one entry of each word's row: work on those entries alone."""
        params, contexts, dtype = self.layout.split(weights), events.contexts, weights.dtype
        assert isinstance(contexts, Ragged)
        entries, moves = np.empty(len(contexts.ids), np.int64), np.empty(len(contexts.ids), dtype)
        total_bias = np.zeros_like(params["bias"])
        found = kernels.train_chosen(
            contexts.offsets, contexts.ids, np.asarray(contexts.values, dtype), events.bounds, events.actions,
            np.asarray(events.rewards, dtype), *self._how(events, dtype), clip_norm,
            params["weight"].reshape(-1), params["bias"], entries, moves, total_bias, norms,
        )  # fmt: skip
        return EntrySum(entries[:found], moves[:found], total_bias)

    def _train_all(self, weights: np.ndarray, events: Events, clip_norm: float, norms: np.ndarray) -> UpdateSum:
        """A loss on all actions reaches whole rows: the chunk's are gathered once, and clients take turns on them."""
        params, contexts, dtype = self.layout.split(weights), events.contexts, weights.dtype
        assert isinstance(contexts, Ragged)
        assert events.targets is not None
        slots, rows = kernels.number_rows(contexts.ids, len(params["weight"]))
        base = np.take(params["weight"], rows, axis=0)
        total, total_bias = np.zeros_like(base), np.zeros_like(params["bias"])
        kernels.train_all(
            contexts.offsets, slots, np.asarray(contexts.values, dtype), events.bounds,
            np.asarray(events.targets, dtype), *self._how(events, dtype), clip_norm,
            base, params["bias"], total, total_bias, norms,
        )  # fmt: skip
        return RowSum(rows, total, total_bias)

    def _how(self, events: Events, dtype: np.dtype) -> tuple[np.ndarray, bool, np.ndarray, int, int]:
        """What the kernels have to know of objective and settings."""
        weights = self.objective.weights(np.asarray(events.propensities, dtype))
        return (
            weights,
            self.objective.logistic,
            self._steps.astype(dtype),
            self.settings.batch_size,
            self.settings.epochs,
        )

    @cached_property
    def _steps(self) -> np.ndarray:
        """For each number of events in a batch: the learning rate times the constant in front of weight · error."""
        num_actions = dict(self.layout.shapes)["bias"][0]
        factors = [self.objective.factor(events, num_actions) for events in range(1, self.settings.batch_size + 1)]
        return self.settings.learning_rate * np.array([0.0, *factors])
