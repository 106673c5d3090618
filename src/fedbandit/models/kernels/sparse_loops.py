"""The loops of `sparse_kernels` that a short run needs, in numpy with the same bits."""

import numpy as np

from fedbandit.core.loops import Kernels

_kernels = Kernels("fedbandit.models.kernels.sparse_kernels")


@_kernels
def scores(
    weight: np.ndarray,
    bias: np.ndarray,
    offsets: np.ndarray,
    ids: np.ndarray,
    values: np.ndarray,
    out: np.ndarray,
) -> None:
    """Bias and values-weighted rows of the words, in the order of the words."""
    out[:] = bias
    lengths = np.diff(offsets)
    for place in range(lengths.max(initial=0)):
        rows = np.flatnonzero(lengths > place)
        at = offsets[rows] + place
        out[rows] += values[at, None] * weight[ids[at]]


@_kernels
def train_chosen(  # type: ignore[no-untyped-def]
    offsets, ids, values, bounds, actions, rewards, weights, logistic, steps, size, epochs, clip_norms,
    rate, pull, drift, weight, base_bias, entries, moves, total_bias, norms,
):  # fmt: skip
    """As the compiled form, without the objectives that short runs rarely have."""
    if logistic:
        return NotImplemented
    found = 0
    for client in range(len(bounds) - 1):
        first, last = bounds[client], bounds[client + 1]
        start, lengths = offsets[first], np.diff(offsets[first : last + 1])
        event = np.repeat(np.arange(first, last), lengths)
        words = slice(start, offsets[last])
        mine, slots = _numbered(ids[words].astype(np.int64) * len(base_bias) + actions[event])
        base, bias = weight[mine], base_bias.copy()
        work = base.copy()
        for begin in list(range(first, last, size)) * epochs:
            end = min(begin + size, last)
            batch, own = slice(begin, end), slice(offsets[begin], offsets[end])
            at, row = (
                slots[own.start - start : own.stop - start],
                event[own.start - start : own.stop - start] - begin,
            )
            score = bias[actions[batch]]
            np.add.at(score, row, values[own] * work[at])
            # single precision is left for the error alone, as the compiled form does it
            errors = (
                (steps[end - begin] * weights[batch]) * (score.astype(np.float64) - rewards[batch])
            ).astype(score.dtype)
            if pull != 0 or len(drift):
                added = (drift[mine], drift[-len(bias) :]) if len(drift) else (0, 0)
                work -= rate * (pull * (work - base) + added[0])
                bias -= rate * (pull * (bias - base_bias) + added[1])
            np.subtract.at(bias, actions[batch], errors)
            np.subtract.at(work, at, errors[row] * values[own])
        moved, moved_bias = work - base, bias - base_bias
        squares = np.concatenate([moved, moved_bias]) ** 2
        norms[client] = norm = np.sqrt(
            np.cumsum(squares, dtype=np.float64)[-1]
        )  # one after the other
        if np.isfinite(norm):
            factor = weight.dtype.type(min(1.0, clip_norms[client] / norm) if norm > 0 else 1.0)
            total_bias += factor * moved_bias
            entries[found : found + len(mine)], moves[found : found + len(mine)] = (
                mine,
                factor * moved,
            )
            found += len(mine)
    return found


@_kernels
def curvature_chosen(  # type: ignore[no-untyped-def]
    offsets, ids, values, bounds, actions, rewards, weights, clip_norm, weight, base_bias,
    entries, moments, biases, norms,
):  # fmt: skip
    """As the compiled form."""
    found = 0
    for client in range(len(bounds) - 1):
        first, last = bounds[client], bounds[client + 1]
        own, words = slice(first, last), slice(offsets[first], offsets[last])
        event = np.repeat(np.arange(last - first), np.diff(offsets[first : last + 1]))
        chosen, x, counts = actions[own], values[words], weights[own]
        mine, slots = _numbered(ids[words].astype(np.int64) * len(base_bias) + chosen[event])
        score = base_bias[chosen]
        np.add.at(score, event, x * weight[mine[slots]])
        errors = counts * (score - rewards[own])
        moment, bias = np.zeros((2, len(mine)), weight.dtype), np.zeros_like(biases)
        for which, (by_event, by_word) in enumerate(((errors, x), (counts, x * x))):
            np.add.at(bias[which], chosen, by_event)
            np.add.at(moment[which], slots, by_event[event] * by_word)
        squares = np.concatenate([moment, bias], axis=1).astype(np.float64) ** 2
        norms[client] = norm = np.sqrt(np.cumsum(squares.sum(axis=0))[-1])
        if np.isfinite(norm):
            factor = weight.dtype.type(min(1.0, clip_norm / norm) if norm > 0 else 1.0)
            biases += factor * bias
            entries[found : found + len(mine)] = mine
            moments[:, found : found + len(mine)] = factor * moment
            found += len(mine)
    return found


def _numbered(entries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The entries without repetitions, in order of first appearance, and for each its place among them."""
    found, first, which = np.unique(entries, return_index=True, return_inverse=True)
    order = np.argsort(first)
    return found[order], np.argsort(order)[which]
