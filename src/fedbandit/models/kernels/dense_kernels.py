"""The compiled loops of linear models and MLPs on dense features, for losses on the chosen action.

Scoring actions takes one row of weights an action, its bias last. All release the interpreter lock.
"""

import numba
import numpy as np

import fedbandit.core.kernels  # noqa: F401 - loads numba without scipy


@numba.njit(nogil=True, cache=True, fastmath={"reassoc", "contract"})
def _dot(x, w):  # type: ignore[no-untyped-def]
    """Over the shorter of the two; summed in vectors of the machine's width, as matrix products are."""
    total = x[0] * w[0]
    for j in range(1, min(len(x), len(w))):
        total += x[j] * w[j]
    return total


@numba.njit(nogil=True, cache=True)
def scores(x, weight, bias, out):  # type: ignore[no-untyped-def]
    """Bias and products of contexts [n, features] and weights, in the order of the features; four at a time."""
    features, k = weight.shape
    for i in range(len(x)):
        values, row = x[i], out[i]
        for a in range(k):
            row[a] = bias[a]
        j = 0
        while j + 4 <= features:
            v0, v1, v2, v3 = values[j], values[j + 1], values[j + 2], values[j + 3]
            w0, w1, w2, w3 = weight[j], weight[j + 1], weight[j + 2], weight[j + 3]
            for a in range(k):
                row[a] = (((row[a] + v0 * w0[a]) + v1 * w1[a]) + v2 * w2[a]) + v3 * w3[a]
            j += 4
        while j < features:
            v, w = values[j], weight[j]
            for a in range(k):
                row[a] += v * w[a]
            j += 1


@numba.njit(nogil=True, cache=True)
def add_outer(x, moves, weight):  # type: ignore[no-untyped-def]
    """Add to a layer's weights the contexts [n, features], each times its moves [n, K], in their order."""
    for j in range(len(weight)):
        row = weight[j]
        for i in range(len(x)):
            v, move = x[i, j], moves[i]
            for a in range(len(row)):
                row[a] += v * move[a]


@numba.njit(nogil=True, cache=True)
def _gather(actions, rows, work, columns, slot_of):  # type: ignore[no-untyped-def]
    """A working copy of the rows of some actions; how many there are."""
    used = 0
    for action in actions:
        if slot_of[action] < 0:
            slot_of[action] = used
            columns[used] = action
            work[used] = rows[action]
            used += 1
    return used


@numba.njit(nogil=True, cache=True)
def _moves(features, actions, rewards, importance, logistic, step, work, slot_of, moves):  # type: ignore[no-untyped-def]
    """The learning rate times the derivative of the loss by each event's score."""
    width = work.shape[1] - 1
    for i in range(len(actions)):
        own = work[slot_of[actions[i]]]
        score = _dot(features[i], own[:width]) + own[width]
        if logistic:
            score = 1 / (1 + np.exp(-score))
        moves[i] = step * importance[i] * (score - rewards[i])


@numba.njit(nogil=True, cache=True)
def _step(features, actions, moves, pull, rows, used, work, columns, slot_of):  # type: ignore[no-untyped-def]
    """Pull the working copy towards what was received, then move the chosen actions along their features."""
    width = work.shape[1] - 1
    if pull:
        for slot in range(used):
            own, base = work[slot], rows[columns[slot]]
            for j in range(width + 1):
                own[j] -= pull * (own[j] - base[j])
    for i in range(len(actions)):
        own, move, x = work[slot_of[actions[i]]], moves[i], features[i]
        for j in range(width):
            own[j] -= move * x[j]
        own[width] -= move


@numba.njit(nogil=True, cache=True)
def _finish(rows, used, work, columns, slot_of):  # type: ignore[no-untyped-def]
    """From weights to their change; its squared norm."""
    square = 0.0
    for slot in range(used):
        own, base = work[slot], rows[columns[slot]]
        for j in range(len(own)):
            own[j] -= base[j]
        square += np.float64(_dot(own, own))
        slot_of[columns[slot]] = -1
    return square


@numba.njit(nogil=True, cache=True)
def train_linear(  # type: ignore[no-untyped-def]
    x, bounds, actions, rewards, importance, logistic, steps, batch_size, epochs, clip_norm, pull,
    rows, total, work, columns, slot_of, norms,
):  # fmt: skip
    """Every client's epochs; its update is clipped and added to the total."""
    moves = np.empty(batch_size, x.dtype)
    for client in range(len(bounds) - 1):
        first, last = bounds[client], bounds[client + 1]
        used = _gather(actions[first:last], rows, work, columns, slot_of)
        for _ in range(epochs):
            for begin in range(first, last, batch_size):
                end = min(begin + batch_size, last)
                own, step = actions[begin:end], steps[end - begin]
                _moves(
                    x[begin:end],
                    own,
                    rewards[begin:end],
                    importance[begin:end],
                    logistic,
                    step,
                    work,
                    slot_of,
                    moves,
                )
                _step(x[begin:end], own, moves, pull, rows, used, work, columns, slot_of)
        norms[client] = norm = np.sqrt(_finish(rows, used, work, columns, slot_of))
        if not np.isfinite(norm):
            continue
        factor = x.dtype.type(clip_norm / norm if norm > clip_norm else 1.0)
        for slot in range(used):
            sums, change = total[columns[slot]], work[slot]
            for j in range(len(sums)):
                sums[j] += factor * change[j]


@numba.njit(nogil=True, cache=True)
def train_hidden(  # type: ignore[no-untyped-def]
    pairs, received, moved, actions, rewards, importance, logistic, steps, batch_size, epochs, pull,
    rows, total, work, columns, slot_of,
):  # fmt: skip
    """One client's epochs: how many actions it reached, and the squared norm of what moved above the hidden layer."""
    units = received.shape[1]
    hidden, moves = (
        np.empty((batch_size, units), received.dtype),
        np.empty(batch_size, received.dtype),
    )
    used, seen = _gather(actions, rows, work, columns, slot_of), 0
    for _ in range(epochs):
        for begin in range(0, len(actions), batch_size):
            end = min(begin + batch_size, len(actions))
            for i in range(begin, end):
                _units(received[i], pairs[i], moved, seen, hidden[i - begin])
            own, batch = actions[begin:end], hidden[: end - begin]
            step = steps[end - begin]
            _moves(
                batch,
                own,
                rewards[begin:end],
                importance[begin:end],
                logistic,
                step,
                work,
                slot_of,
                moves,
            )
            if pull:
                moved[:seen] *= 1 - pull
            for i in range(begin, end):
                above, move, unit, row = (
                    work[slot_of[actions[i]]],
                    moves[i - begin],
                    hidden[i - begin],
                    moved[i],
                )
                for u in range(units):
                    if unit[u] > 0:
                        row[u] += move * above[u]
            seen = max(seen, end)
            _step(batch, own, moves, pull, rows, used, work, columns, slot_of)
    return used, _finish(rows, used, work, columns, slot_of)


@numba.njit(nogil=True, cache=True)
def _units(received, pairs, moved, seen, out):  # type: ignore[no-untyped-def]
    """The hidden units of one context: as received, less what the steps so far have moved; four steps at a time."""
    units, j = len(out), 0
    for u in range(units):
        out[u] = received[u]
    while j + 4 <= seen:
        c0, c1, c2, c3 = pairs[j], pairs[j + 1], pairs[j + 2], pairs[j + 3]
        m0, m1, m2, m3 = moved[j], moved[j + 1], moved[j + 2], moved[j + 3]
        for u in range(units):
            out[u] -= ((c0 * m0[u] + c1 * m1[u]) + c2 * m2[u]) + c3 * m3[u]
        j += 4
    while j < seen:
        for u in range(units):
            out[u] -= pairs[j] * moved[j, u]
        j += 1
    for u in range(units):
        out[u] = max(out[u], 0)
