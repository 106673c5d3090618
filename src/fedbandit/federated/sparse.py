"""Linear models on sparse text: kernels that touch only the words a client has, and never make anything dense.

A chunk's words get compact slots and its rows of the matrix one working copy. Clients train on the copy in turn; after
each, the touched entries are added to the chunk's sum, clipped, and put back.
"""

from dataclasses import dataclass
from typing import ClassVar

import numba
import numpy as np

from fedbandit.data.dataset import Contexts
from fedbandit.data.ragged import Ragged
from fedbandit.events import Events
from fedbandit.federated.learners import ClientSettings
from fedbandit.federated.updates import RowSum, UpdateSum
from fedbandit.models.base import Layout
from fedbandit.objectives import Pointwise


@dataclass(frozen=True)
class SparseLinearLearner:
    """Scores and trains `weight [words, K]` and `bias [K]` on rows of (word, value)."""

    layout: Layout
    objective: Pointwise
    settings: ClientSettings
    chunk_events: ClassVar[int] = 1024

    def scores(self, weights: np.ndarray, contexts: Contexts) -> np.ndarray:
        assert isinstance(contexts, Ragged)
        params = self.layout.split(weights)
        out = np.empty((len(contexts), len(params["bias"])), weights.dtype)
        _scores(params["weight"], params["bias"], contexts.offsets, contexts.ids, contexts.values, out)
        return out

    def train(self, weights: np.ndarray, events: Events, clip_norm: float) -> tuple[UpdateSum, np.ndarray]:
        assert isinstance(events.contexts, Ragged)
        params = self.layout.split(weights)
        words, k = params["weight"].shape
        contexts, dtype, size = events.contexts, weights.dtype, self.settings.batch_size
        slots, rows = _compact(contexts.ids, words)
        base = np.take(params["weight"], rows, axis=0)
        total, total_bias = np.zeros_like(base), np.zeros(k, dtype)
        norms = np.zeros(len(events.bounds) - 1)
        # For each number of events in a batch: lr times the constant in front of weight · error.
        factors = [0.0, *(self.objective.factor(events, k) for events in range(1, size + 1))]
        steps = self.settings.learning_rate * np.array(factors)
        kernel, feedback = _train_chosen, (events.actions, events.rewards.astype(dtype))
        if self.objective.supervised:
            assert events.targets is not None
            kernel, feedback = _train_all, (events.targets.astype(dtype), np.zeros(0, dtype))
        kernel(
            contexts.offsets,
            slots,
            contexts.values.astype(dtype),  # type: ignore[union-attr]
            events.bounds,
            *feedback,
            self.objective.weights(events.propensities.astype(dtype)),
            self.objective.logistic,
            steps.astype(dtype),
            size,
            self.settings.epochs,
            float(clip_norm),
            base,
            params["bias"],
            total,
            total_bias,
            norms,
        )
        return RowSum(rows, total, total_bias), norms


@numba.njit(nogil=True, cache=True)
def _scores(weight, bias, offsets, ids, values, out):  # type: ignore[no-untyped-def]
    k = weight.shape[1]
    for i in range(len(offsets) - 1):
        for a in range(k):
            out[i, a] = bias[a]
        for j in range(offsets[i], offsets[i + 1]):
            row, value = ids[j], weight.dtype.type(values[j])
            for a in range(k):
                out[i, a] += value * weight[row, a]


@numba.njit(nogil=True, cache=True)
def _compact(ids, words):  # type: ignore[no-untyped-def]
    """For each entry the slot of its word, and for each slot its word; slots in order of first appearance."""
    slot_of_word = np.full(words, -1, np.int32)
    slots = np.empty(len(ids), np.int32)
    rows = np.empty(min(words, len(ids)), np.int32)
    used = 0
    for j in range(len(ids)):
        slot = slot_of_word[ids[j]]
        if slot < 0:
            slot = used
            slot_of_word[ids[j]] = slot
            rows[slot] = ids[j]
            used += 1
        slots[j] = slot
    return slots, rows[:used].copy()


@numba.njit(nogil=True, cache=True)
def add_rows(rows, values, total):  # type: ignore[no-untyped-def]
    """Add each row of values to its row of the total."""
    for i in range(len(rows)):
        of, to = values[i], total[rows[i]]
        for a in range(len(of)):
            to[a] += of[a]


@numba.njit(nogil=True, cache=True, inline="always")
def _error(score, reward, logistic):  # type: ignore[no-untyped-def]
    if logistic:
        score = 1 / (1 + np.exp(-score))
    return score - reward


@numba.njit(nogil=True, cache=True)
def _train_chosen(  # type: ignore[no-untyped-def]
    offsets, slots, values, bounds, actions, rewards, weights, logistic, steps, size, epochs, clip_norm,
    base, base_bias, total, total_bias, norms,
):  # fmt: skip
    """Every client in turn, with a loss on the chosen action alone."""
    work, bias = base.copy(), base_bias.copy()
    errors = np.empty(size, work.dtype)
    for client in range(len(bounds) - 1):
        first, last = bounds[client], bounds[client + 1]
        for _ in range(epochs):
            for begin in range(first, last, size):
                end = min(begin + size, last)
                step = steps[end - begin]
                for i in range(begin, end):
                    a = actions[i]
                    score = bias[a]
                    for j in range(offsets[i], offsets[i + 1]):
                        score += values[j] * work[slots[j], a]
                    errors[i - begin] = step * weights[i] * _error(score, rewards[i], logistic)
                for i in range(begin, end):
                    a, move = actions[i], errors[i - begin]
                    bias[a] -= move
                    for j in range(offsets[i], offsets[i + 1]):
                        work[slots[j], a] -= move * values[j]
        norms[client] = _collect_chosen(
            offsets[first : last + 1], slots, actions[first:last], clip_norm,
            work, bias, base, base_bias, total, total_bias,
        )  # fmt: skip


@numba.njit(nogil=True, cache=True)
def _collect_chosen(  # type: ignore[no-untyped-def]
    offsets, slots, actions, clip_norm, work, bias, base, base_bias, total, total_bias
):
    """As `_collect`, for a client that touched the chosen actions' entries alone: looks at no others."""
    most = offsets[-1] - offsets[0]
    where, moved = np.empty((most, 2), np.int32), np.empty(most, work.dtype)
    used = 0
    square = 0.0
    for i in range(len(actions)):
        a = actions[i]
        for j in range(offsets[i], offsets[i + 1]):
            slot = slots[j]
            change = work[slot, a] - base[slot, a]
            if change != 0:
                work[slot, a] = base[slot, a]  # put back: an entry that comes again must not count twice
                where[used, 0], where[used, 1], moved[used] = slot, a, change
                square += float(change) ** 2
                used += 1
    for a in range(len(bias)):
        square += float(bias[a] - base_bias[a]) ** 2
    norm = np.sqrt(square)
    factor = work.dtype.type(min(1.0, clip_norm / norm) if norm > 0 else 1.0)
    if np.isfinite(norm):
        for a in range(len(bias)):
            total_bias[a] += factor * (bias[a] - base_bias[a])
        for i in range(used):
            total[where[i, 0], where[i, 1]] += factor * moved[i]
    bias[:] = base_bias
    return norm


@numba.njit(nogil=True, cache=True)
def _train_all(  # type: ignore[no-untyped-def]
    offsets, slots, values, bounds, targets, _, weights, logistic, steps, size, epochs, clip_norm,
    base, base_bias, total, total_bias, norms,
):  # fmt: skip
    """Every client in turn, with a loss on all actions."""
    work, bias = base.copy(), base_bias.copy()
    k = len(bias)
    errors = np.empty((size, k), work.dtype)
    for client in range(len(bounds) - 1):
        first, last = bounds[client], bounds[client + 1]
        for _epoch in range(epochs):
            for begin in range(first, last, size):
                end = min(begin + size, last)
                step = steps[end - begin]
                for i in range(begin, end):
                    error = errors[i - begin]
                    for a in range(k):
                        error[a] = bias[a]
                    for j in range(offsets[i], offsets[i + 1]):
                        slot, value = slots[j], values[j]
                        for a in range(k):
                            error[a] += value * work[slot, a]
                    for a in range(k):
                        error[a] = step * weights[i] * _error(error[a], targets[i, a], logistic)
                for i in range(begin, end):
                    error = errors[i - begin]
                    for a in range(k):
                        bias[a] -= error[a]
                    for j in range(offsets[i], offsets[i + 1]):
                        slot, value = slots[j], values[j]
                        for a in range(k):
                            work[slot, a] -= error[a] * value
        touched = slots[offsets[first] : offsets[last]]
        norms[client] = _collect(touched, clip_norm, work, bias, base, base_bias, total, total_bias)


@numba.njit(nogil=True, cache=True)
def _collect(client_slots, clip_norm, work, bias, base, base_bias, total, total_bias):  # type: ignore[no-untyped-def]
    """Add one client's clipped update to the chunk's sum, put the working copy back, and return the update's norm."""
    k = len(bias)
    touched = np.empty(len(client_slots), np.int32)  # each slot once: a repeated word must not count twice
    seen = np.zeros(len(work), np.bool_)
    used = 0
    for slot in client_slots:
        if not seen[slot]:
            seen[slot] = True
            touched[used] = slot
            used += 1
    square = 0.0
    for a in range(k):
        square += (bias[a] - base_bias[a]) ** 2
    for slot in touched[:used]:
        for a in range(k):
            square += (work[slot, a] - base[slot, a]) ** 2
    norm = np.sqrt(square)
    factor = work.dtype.type(min(1.0, clip_norm / norm) if norm > 0 else 1.0)
    finite = np.isfinite(norm)
    for a in range(k):
        if finite:
            total_bias[a] += factor * (bias[a] - base_bias[a])
        bias[a] = base_bias[a]
    for slot in touched[:used]:
        for a in range(k):
            if finite:
                total[slot, a] += factor * (work[slot, a] - base[slot, a])
            work[slot, a] = base[slot, a]
    return norm
