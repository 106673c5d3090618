"""Linear models in compiled loops: what automatic differentiation gives, in less time.

On sparse rows (words, columns of a table) what a client's rows reach is gathered into a compact
working copy that stays in the core's cache. On dense features a loss on the chosen action moves one
column of the weights, so a client works on the columns of its actions alone. Needs no torch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any, ClassVar

import numpy as np

from fedbandit.core.contexts import unit_rows
from fedbandit.core.ragged import Ragged, SparseVector
from fedbandit.events import Events
from fedbandit.federated.learners.base import (
    Batches,
    GradientOffset,
    KernelLearner,
    Local,
    how_of,
    logged_of,
    offset_of,
)
from fedbandit.federated.pipeline import (
    DenseSum,
    EntrySum,
    JoinedSum,
    RowSum,
    UpdateSum,
    clip_factor,
)
from fedbandit.models.base import Layout
from fedbandit.models.kernels import sparse_loops

_Trained = tuple[EntrySum | RowSum, np.ndarray]  # the sum of updates, and their norms
_Training = Callable[[np.ndarray, float | np.ndarray, np.ndarray | None], _Trained]


@dataclass(frozen=True)
class SparseLinearLearner(KernelLearner):
    """Trains `weight [words, K]` and `bias [K]` on rows of (word, value)."""

    chunk_events: ClassVar[int] = 2048

    def train(
        self,
        weights: np.ndarray,
        events: Events,
        clip_norm: float | np.ndarray,
        proximal: float = 0.0,
    ) -> tuple[UpdateSum, np.ndarray]:
        """As every learner does; `clip_norm` may also be an array, a norm for each client."""
        return self._training(weights, events, proximal)(events.bounds, clip_norm, None)

    def updates(
        self,
        weights: np.ndarray,
        events: Events,
        proximal: float = 0.0,
        gradient_offset: GradientOffset | None = None,
    ) -> Iterator[np.ndarray | SparseVector | None]:
        train, room = self._training(weights, events, proximal), np.empty(0)
        for client, size in enumerate(np.diff(events.bounds).tolist()):
            if not size:
                yield None
                continue
            own, added = events.bounds[client : client + 2], None
            if gradient_offset is not None:
                added = gradient_offset(client)
            # An offset moves words that the client lacks, too.
            moved = weights.dtype.type(self.settings.moved_by_offset(size, proximal))
            if isinstance(added, SparseVector):
                room = room if len(room) else np.zeros_like(weights)
                room[added.entries] = added.values  # where the loop looks the offset up
                update, (norm,) = train(own, inf, room)
                room[added.entries] = 0
                yield _sparse_sum(update, added * moved, norm)
                continue
            update, (norm,) = train(own, inf, added)
            total = np.zeros_like(weights)
            if added is not None:
                total += added * moved
                total[update.flat_entries()] = total[-len(update.bias) :] = 0
            update.add_to(total)
            yield total if np.isfinite(norm) else np.full_like(total, np.nan)

    def _training(self, weights: np.ndarray, events: Events, proximal: float) -> _Training:
        """The training of clients of a chunk, given their bounds, clip norms and offset [P].

        Its sum is over the entries or the rows that they reach, and lies in arrays of the next.
        """
        params, contexts, dtype = self.layout.split(weights), events.contexts.shared, weights.dtype
        assert isinstance(contexts, Ragged)
        values, bias = np.asarray(contexts.values, dtype), params["bias"]
        actions, rewards, importance = logged_of(events, self.objective, dtype)
        how = (importance, *how_of(self.objective, self.settings, len(bias), dtype))
        rates = dtype.type(self.settings.learning_rate), dtype.type(proximal)
        entries, moves = np.empty(len(values), np.int64), np.empty(len(values), dtype)

        def chosen(bounds: np.ndarray, clip_norm: Any, added: np.ndarray | None) -> _Trained:
            """A loss on the chosen action reaches one entry of each word's row."""
            total_bias, norms = np.zeros_like(bias), np.zeros(len(bounds) - 1)
            found = sparse_loops.train_chosen(
                contexts.offsets, contexts.ids, values, bounds, actions, rewards, *how,
                np.full(norms.shape, clip_norm, np.float64), *rates,
                moves[:0] if added is None else added,
                params["weight"].reshape(-1), bias, entries, moves, total_bias, norms,
            )  # fmt: skip
            return EntrySum(entries[:found], moves[:found], total_bias), norms

        def every(bounds: np.ndarray, clip_norm: Any, added: np.ndarray | None) -> _Trained:
            """A loss on all actions reaches rows: gathered once, and clients take turns on them."""
            from fedbandit.models.kernels import sparse_kernels

            assert events.targets is not None
            total_bias, norms = np.zeros_like(bias), np.zeros(len(bounds) - 1)
            first, last = contexts.offsets[bounds[[0, -1]]]
            slots, rows = sparse_kernels.number_rows(
                contexts.ids[first:last], len(params["weight"])
            )
            base = np.take(params["weight"], rows, axis=0)
            total, offset = np.zeros_like(base), np.empty((0, len(bias)), dtype)
            if added is not None:
                own = self.layout.split(added)
                offset = np.concatenate([np.take(own["weight"], rows, axis=0), own["bias"][None]])
            sparse_kernels.train_all(
                contexts.offsets - first, slots, values[first:last], bounds,
                np.asarray(events.targets, dtype), *how,
                np.full(norms.shape, clip_norm, np.float64), *rates,
                offset, base, bias, total, total_bias, norms,
            )  # fmt: skip
            return RowSum(rows, total, total_bias), norms

        return every if self.objective.supervised else chosen


def _sparse_sum(update: EntrySum | RowSum, beside: SparseVector, norm: float) -> SparseVector:
    """One client's update as a sparse vector, with the entries of another where it has none."""
    size, k = beside.size, len(update.bias)
    entries = np.concatenate([update.flat_entries(), np.arange(size - k, size)])
    values = np.concatenate([update.values.reshape(-1), update.bias])
    order = np.argsort(entries)
    found = SparseVector(entries[order], values[order], size).over(beside)
    if not np.isfinite(norm):
        found.values[:] = np.nan
    return found


@dataclass(frozen=True)
class SparseHeadsLearner(KernelLearner):
    """An ensemble of linear models on sparse text: each head trains on its own weighting of the
    same events.
    """

    heads: int  # the layout has weight and bias of head 0, then of head 1, ...
    chunk_events: ClassVar[int] = 512

    @cached_property
    def _head(self) -> SparseLinearLearner:
        """One head: all have parameters of the same shapes, one behind the other."""
        (_, weight), (_, bias) = self.layout.shapes[:2]
        return SparseLinearLearner(
            Layout((("weight", weight), ("bias", bias))), self.objective, self.settings
        )

    def train(
        self, weights: np.ndarray, events: Events, clip_norm: float, proximal: float = 0.0
    ) -> tuple[UpdateSum, np.ndarray]:
        parts = self._parts(weights)
        logs = [self._of_head(events, head) for head in range(self.heads)]
        # All heads are clipped together, so their norms have to be known before any of them is.
        found = [
            self._head.train(part, log, inf, proximal)
            for part, log in zip(parts, logs, strict=True)
        ]
        norms = np.stack([own for _, own in found])
        joint = np.sqrt((norms**2).sum(axis=0))
        if (joint > clip_norm).any() or not np.isfinite(joint).all():
            factors = np.where(joint > clip_norm, clip_norm / np.where(joint > 0, joint, 1), 1.0)
            clips = np.where(np.isfinite(joint), factors * norms, 0.0)
            found = [
                self._head.train(*each, proximal) for each in zip(parts, logs, clips, strict=True)
            ]
        return JoinedSum(tuple(update for update, _ in found)), joint

    def updates(
        self,
        weights: np.ndarray,
        events: Events,
        proximal: float = 0.0,
        gradient_offset: GradientOffset | None = None,
    ) -> Iterator[np.ndarray | None]:
        def of_head(head: int) -> GradientOffset | None:
            if gradient_offset is None:
                return None

            def own(client: int) -> np.ndarray | None:
                whole = offset_of(gradient_offset, client)
                return None if whole is None else self._parts(whole)[head]

            return own

        parts = self._parts(weights)
        each = [
            self._head.updates(parts[head], self._of_head(events, head), proximal, of_head(head))
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


@dataclass(frozen=True)
class DenseLinearLearner(KernelLearner):
    """Trains `weight [features, K]` and `bias [K]` on contexts of length one."""

    def train(
        self, weights: np.ndarray, events: Events, clip_norm: float, proximal: float = 0.0
    ) -> tuple[UpdateSum, np.ndarray]:
        from fedbandit.models.kernels import dense_kernels

        norms = np.zeros(events.num_clients)
        if not self.objective.supervised:
            top = Top(self.layout, weights)
            x = unit_rows(events.contexts.shared, weights.dtype)
            logged = logged_of(events, self.objective, weights.dtype)
            how = how_of(self.objective, self.settings, self._num_actions, weights.dtype)
            pulled = weights.dtype.type(self.settings.learning_rate * proximal)
            dense_kernels.train_linear(
                x, events.bounds, *logged, *how, clip_norm, pulled, *top.arrays, norms
            )
            return DenseSum(top.total()), norms
        total = np.zeros_like(weights)
        for client, update in enumerate(self.updates(weights, events, proximal)):
            if update is None:
                continue
            with np.errstate(over="ignore"):
                norms[client] = norm = np.sqrt(np.square(update, dtype=np.float64).sum())
            if np.isfinite(norm):
                total += update.dtype.type(clip_factor(norm, clip_norm)) * update
        return DenseSum(total), norms

    def local(self, weights: np.ndarray, events: Events) -> Local:
        from fedbandit.models.kernels import dense_kernels

        x = unit_rows(events.contexts.shared, weights.dtype)
        importance = logged_of(events, self.objective, weights.dtype)[2]
        rate = weights.dtype.type(self.settings.learning_rate)

        @np.errstate(over="ignore", invalid="ignore")  # who diverges is left out later
        def train(batches: Batches, proximal: float, added: np.ndarray | None) -> np.ndarray:
            pulled = weights.dtype.type(self.settings.learning_rate * proximal)
            own = weights.copy()
            params = self.layout.split(own)
            for rows in (slice(*batch) for batch in batches):
                scores = np.empty((rows.stop - rows.start, self._num_actions), weights.dtype)
                dense_kernels.scores(x[rows], params["weight"], params["bias"], scores)
                moves = self._errors(scores, events, rows, importance) * -rate
                back = pulled * (own - weights) if proximal else None
                dense_kernels.add_outer(x[rows], moves, params["weight"])
                params["bias"] += moves.sum(axis=0)
                if back is not None:
                    own -= back
                if added is not None:
                    own -= rate * added
            moved: np.ndarray = own - weights
            return moved

        return train

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


class Top:
    """The layer that scores actions: a row an action with its bias last, the sum of updates, a
    client's copy.
    """

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
