"""Linear models on sparse rows (words, columns of a table): work that touches only what a client's rows reach.

What a client reaches is gathered into a compact working copy that stays in the core's cache.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import ClassVar

import numpy as np

from fedbandit.acting.predictors import sparse_loops
from fedbandit.core.ragged import Ragged
from fedbandit.events import Events
from fedbandit.federated.learners.base import ClientSettings, Drift
from fedbandit.federated.pipeline import EntrySum, JoinedSum, RowSum, UpdateSum
from fedbandit.models.base import Layout
from fedbandit.objectives import Pointwise


@dataclass(frozen=True)
class SparseLinearLearner:
    """Trains `weight [words, K]` and `bias [K]` on rows of (word, value)."""

    layout: Layout
    objective: Pointwise
    settings: ClientSettings
    chunk_events: ClassVar[int] = 2048

    def train(
        self, weights: np.ndarray, events: Events, clip_norm: float | np.ndarray, pull: float = 0.0
    ) -> tuple[UpdateSum, np.ndarray]:
        """As every learner does; `clip_norm` may also be an array, a norm for each client."""
        return self._train(weights, events, clip_norm, pull, None)

    def updates(
        self, weights: np.ndarray, events: Events, pull: float = 0.0, drift: Drift | None = None
    ) -> Iterator[np.ndarray | None]:
        for client in range(events.num_clients):
            own = events.of_client(client)
            if not len(own):
                yield None
                continue
            added = None if drift is None else drift(client)
            total = np.zeros_like(weights)
            update, (norm,) = self._train(weights, own, inf, pull, added)
            update.add_to(total)
            if added is not None:
                total += self._untouched(update, added, len(own), pull)
            yield total if np.isfinite(norm) else np.full_like(total, np.nan)

    def _train(
        self,
        weights: np.ndarray,
        events: Events,
        clip_norm: float | np.ndarray,
        pull: float,
        drift: np.ndarray | None,
    ) -> tuple[UpdateSum, np.ndarray]:
        norms = np.zeros(events.num_clients)
        clip_norms = np.full(norms.shape, clip_norm, np.float64)
        train = self._train_all if self.objective.supervised else self._train_chosen
        return train(weights, events, clip_norms, pull, drift, norms), norms

    def _train_chosen(
        self,
        weights: np.ndarray,
        events: Events,
        clip_norms: np.ndarray,
        pull: float,
        drift: np.ndarray | None,
        norms: np.ndarray,
    ) -> UpdateSum:
        """A loss on the chosen action reaches one entry of each word's row: work on those entries alone."""
        params, contexts, dtype = self.layout.split(weights), events.contexts.shared, weights.dtype
        assert isinstance(contexts, Ragged)
        entries, moves = np.empty(len(contexts.ids), np.int64), np.empty(len(contexts.ids), dtype)
        total_bias = np.zeros_like(params["bias"])
        found = sparse_loops.train_chosen(
            contexts.offsets, contexts.ids, np.asarray(contexts.values, dtype), events.bounds, events.actions,
            np.asarray(events.rewards, dtype), *self._how(events, dtype), clip_norms,
            *self._correction(pull, dtype), np.empty(0, dtype) if drift is None else drift,
            params["weight"].reshape(-1), params["bias"], entries, moves, total_bias, norms,
        )  # fmt: skip
        return EntrySum(entries[:found], moves[:found], total_bias)

    def _train_all(
        self,
        weights: np.ndarray,
        events: Events,
        clip_norms: np.ndarray,
        pull: float,
        drift: np.ndarray | None,
        norms: np.ndarray,
    ) -> UpdateSum:
        """A loss on all actions reaches whole rows: the chunk's are gathered once, and clients take turns on them."""
        params, contexts, dtype = self.layout.split(weights), events.contexts.shared, weights.dtype
        assert isinstance(contexts, Ragged)
        assert events.targets is not None
        slots, rows = sparse_loops.number_rows(contexts.ids, len(params["weight"]))
        base = np.take(params["weight"], rows, axis=0)
        total, total_bias = np.zeros_like(base), np.zeros_like(params["bias"])
        added = np.empty((0, len(total_bias)), dtype)
        if drift is not None:
            own = self.layout.split(drift)
            added = np.concatenate([np.take(own["weight"], rows, axis=0), own["bias"][None]])
        sparse_loops.train_all(
            contexts.offsets, slots, np.asarray(contexts.values, dtype), events.bounds,
            np.asarray(events.targets, dtype), *self._how(events, dtype), clip_norms,
            *self._correction(pull, dtype), added,
            base, params["bias"], total, total_bias, norms,
        )  # fmt: skip
        return RowSum(rows, total, total_bias)

    def _untouched(
        self, update: UpdateSum, drift: np.ndarray, events: int, pull: float
    ) -> np.ndarray:
        """Where the drift alone has moved the entries that no word of the client reaches, after all its steps."""
        moved: np.ndarray = drift * drift.dtype.type(self.settings.drifted(events, pull))
        views = self.layout.split(moved)
        views["bias"][:] = 0
        if isinstance(update, EntrySum):
            views["weight"].reshape(-1)[update.entries] = 0
        else:
            assert isinstance(update, RowSum)
            views["weight"][update.rows] = 0
        return moved

    def _how(
        self, events: Events, dtype: np.dtype
    ) -> tuple[np.ndarray, bool, np.ndarray, int, int]:
        """What the kernels have to know of objective and settings."""
        weights = self.objective.weights(np.asarray(events.propensities, dtype), events.weights)
        return (
            weights,
            self.objective.logistic,
            self._steps.astype(dtype),
            self.settings.batch_size,
            self.settings.epochs,
        )

    def _correction(self, pull: float, dtype: np.dtype) -> tuple[np.generic, np.generic]:
        return dtype.type(self.settings.learning_rate), dtype.type(pull)

    @cached_property
    def _steps(self) -> np.ndarray:
        """For each number of events in a batch: the learning rate times the constant in front of weight · error."""
        num_actions = dict(self.layout.shapes)["bias"][0]
        factors = [
            self.objective.factor(events, num_actions)
            for events in range(1, self.settings.batch_size + 1)
        ]
        return self.settings.learning_rate * np.array([0.0, *factors])


@dataclass(frozen=True)
class SparseHeadsLearner:
    """An ensemble of linear models on sparse text: each head trains on its own weighting of the same events."""

    layout: Layout  # weight and bias of head 0, then of head 1, ...
    objective: Pointwise
    settings: ClientSettings
    heads: int
    chunk_events: ClassVar[int] = 512

    @cached_property
    def _head(self) -> SparseLinearLearner:
        """One head: the parameters of all of them have the same shapes, one head behind the other."""
        (_, weight), (_, bias) = self.layout.shapes[:2]
        return SparseLinearLearner(
            Layout((("weight", weight), ("bias", bias))), self.objective, self.settings
        )

    def train(
        self, weights: np.ndarray, events: Events, clip_norm: float, pull: float = 0.0
    ) -> tuple[UpdateSum, np.ndarray]:
        parts = self._parts(weights)
        logs = [self._of_head(events, head) for head in range(self.heads)]
        # All heads are clipped together, so their norms have to be known before any of them is.
        found = [
            self._head.train(part, log, inf, pull) for part, log in zip(parts, logs, strict=True)
        ]
        norms = np.stack([own for _, own in found])
        joint = np.sqrt((norms**2).sum(axis=0))
        if (joint > clip_norm).any() or not np.isfinite(joint).all():
            factors = np.where(joint > clip_norm, clip_norm / np.where(joint > 0, joint, 1), 1.0)
            clips = np.where(np.isfinite(joint), factors * norms, 0.0)
            found = [self._head.train(*each, pull) for each in zip(parts, logs, clips, strict=True)]
        return JoinedSum(tuple(update for update, _ in found)), joint

    def updates(
        self, weights: np.ndarray, events: Events, pull: float = 0.0, drift: Drift | None = None
    ) -> Iterator[np.ndarray | None]:
        def of_head(head: int) -> Drift | None:
            if drift is None:
                return None

            def own(client: int) -> np.ndarray | None:
                whole = drift(client)
                return None if whole is None else self._parts(whole)[head]

            return own

        parts = self._parts(weights)
        each = [
            self._head.updates(parts[head], self._of_head(events, head), pull, of_head(head))
            for head in range(self.heads)
        ]
        for own in zip(*each, strict=True):
            present = [part for part in own if part is not None]
            yield np.concatenate(present) if present else None

    def _parts(self, vector: np.ndarray) -> list[np.ndarray]:
        return np.split(vector, self.heads)

    def _of_head(self, events: Events, head: int) -> Events:
        return (
            events if events.weights is None else replace(events, weights=events.weights[:, head])
        )
