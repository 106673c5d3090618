"""The compiled loops of linear models on sparse text. Plain arrays in and out; all release the interpreter lock.

Sums are added in a fixed order, none is reassociated: the bits do not depend on the width of a machine's vectors.
"""

import numba
import numpy as np

from fedbandit.core.kernels import prefetch

_AHEAD = 8  # words

_HASH = np.uint64(0x9E3779B97F4A7C15)


@numba.njit(nogil=True, cache=True)
def scores(weight, bias, offsets, ids, values, out):  # type: ignore[no-untyped-def]
    """Bias and values-weighted rows of the words, in the order of the words; four at a time to spare memory traffic."""
    k, flat = weight.shape[1], weight.reshape(-1)
    for i in range(len(offsets) - 1):
        row = out[i]
        j, end = offsets[i], offsets[i + 1]
        for ahead in range(j + _AHEAD, min(end + _AHEAD, len(ids))):
            first = ids[ahead] * k
            prefetch(flat, first)
            prefetch(flat, first + k // 2)
        if j + 4 <= end:
            w0, w1, w2, w3 = (
                weight[ids[j]],
                weight[ids[j + 1]],
                weight[ids[j + 2]],
                weight[ids[j + 3]],
            )
            v0, v1, v2, v3 = values[j], values[j + 1], values[j + 2], values[j + 3]
            for a in range(k):
                row[a] = (((bias[a] + v0 * w0[a]) + v1 * w1[a]) + v2 * w2[a]) + v3 * w3[a]
            j += 4
        else:
            for a in range(k):
                row[a] = bias[a]
        while j + 4 <= end:
            w0, w1, w2, w3 = (
                weight[ids[j]],
                weight[ids[j + 1]],
                weight[ids[j + 2]],
                weight[ids[j + 3]],
            )
            v0, v1, v2, v3 = values[j], values[j + 1], values[j + 2], values[j + 3]
            for a in range(k):
                row[a] = (((row[a] + v0 * w0[a]) + v1 * w1[a]) + v2 * w2[a]) + v3 * w3[a]
            j += 4
        if j + 2 <= end:
            w0, w1, v0, v1 = weight[ids[j]], weight[ids[j + 1]], values[j], values[j + 1]
            for a in range(k):
                row[a] = (row[a] + v0 * w0[a]) + v1 * w1[a]
            j += 2
        if j < end:
            w, v = weight[ids[j]], values[j]
            for a in range(k):
                row[a] += v * w[a]


@numba.njit(nogil=True, cache=True)
def add_rows(offsets, ids, values, moves, rate, weight):  # type: ignore[no-untyped-def]
    """To the rows of a layer's weights at the features of each context: its moves, times their values and the rate."""
    for i in range(len(offsets) - 1):
        move = moves[i]
        for j in range(offsets[i], offsets[i + 1]):
            row, v = weight[ids[j]], rate * values[j]
            for u in range(len(move)):
                row[u] += v * move[u]


@numba.njit(nogil=True, cache=True)
def pairs(offsets, ids, values, features, out):  # type: ignore[no-untyped-def]
    """1 and the inner product of each pair of contexts; a feature that is always 1 stands for the bias."""
    own = np.zeros(features, values.dtype)
    for i in range(len(offsets) - 1):
        for j in range(offsets[i], offsets[i + 1]):
            own[ids[j]] += values[j]
        for other in range(i + 1):
            total = values.dtype.type(1)
            for j in range(offsets[other], offsets[other + 1]):
                total += own[ids[j]] * values[j]
            out[i, other] = out[other, i] = total
        for j in range(offsets[i], offsets[i + 1]):
            own[ids[j]] = 0


@numba.njit(nogil=True, cache=True)
def number_rows(ids, words):  # type: ignore[no-untyped-def]
    """For each word of a text its slot, and for each slot its word; slots in order of first appearance."""
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
def _error(score, reward, logistic):  # type: ignore[no-untyped-def]
    if logistic:
        score = 1 / (1 + np.exp(-score))
    return score - reward


@numba.njit(nogil=True, cache=True)
def _room(offsets, bounds):  # type: ignore[no-untyped-def]
    """A hash table and slots for the words of any one client."""
    most = 0
    for client in range(len(bounds) - 1):
        most = max(most, offsets[bounds[client + 1]] - offsets[bounds[client]])
    return np.empty(max(16, 4 * most), np.int32), np.empty(most, np.int32)


@numba.njit(nogil=True, cache=True)
def _number_entries(offsets, ids, actions, k, table, slots, entries, weight):  # type: ignore[no-untyped-def]
    """For each word of some texts the slot of its (word, chosen action) entry, and for each slot its flat index.

    The entries of `weight` are fetched for who comes next.

    A hash table with open addressing, at most half full: its size follows one client's words, not the vocabulary.
    """
    size, shift = 16, 60
    while size < 2 * (offsets[-1] - offsets[0]):
        size, shift = 2 * size, shift - 1
    table[:size] = -1
    used = 0
    for i in range(len(offsets) - 1):
        for j in range(offsets[i], offsets[i + 1]):
            entry = np.int64(ids[j]) * k + actions[i]
            at = np.int64((np.uint64(entry) * _HASH) >> np.uint64(shift))
            slot = table[at]
            while slot >= 0 and entries[slot] != entry:
                at = (at + 1) & (size - 1)
                slot = table[at]
            if slot < 0:
                slot = used
                table[at] = slot
                entries[slot] = entry
                prefetch(weight, entry)
                used += 1
            slots[j - offsets[0]] = slot
    return used


@numba.njit(nogil=True, cache=True)
def train_chosen(  # type: ignore[no-untyped-def]
    offsets, ids, values, bounds, actions, rewards, weights, logistic, steps, size, epochs, clip_norms,
    rate, pull, drift, weight, base_bias, entries, moves, total_bias, norms,
):  # fmt: skip
    """Every client in turn, with a loss on the chosen action alone: flat entries and by how much each is moved.

    Returns how many there are. An entry that several clients touch stands there once for each of them. Each step also
    moves every entry of the client's by -rate · (pull · (w - received) + drift); an empty drift is none.
    """
    table, slots = _room(offsets, bounds)
    base, work = np.empty(len(slots), weight.dtype), np.empty(len(slots), weight.dtype)
    bias, errors = base_bias.copy(), np.empty(size, weight.dtype)
    zero = weight.dtype.type(0)
    found = 0
    for client in range(len(bounds) - 1):
        first, last = bounds[client], bounds[client + 1]
        mine = entries[found:]
        used = _number_entries(
            offsets[first : last + 1],
            ids,
            actions[first:last],
            len(base_bias),
            table,
            slots,
            mine,
            weight,
        )
        for slot in range(used):
            base[slot] = work[slot] = weight[mine[slot]]
        start = offsets[first]
        for _ in range(epochs):
            for begin in range(first, last, size):
                end = min(begin + size, last)
                step = steps[end - begin]
                for i in range(begin, end):
                    score = bias[actions[i]]
                    for j in range(offsets[i], offsets[i + 1]):
                        score += values[j] * work[slots[j - start]]
                    errors[i - begin] = step * weights[i] * _error(score, rewards[i], logistic)
                if pull != 0 or len(drift):
                    for slot in range(used):
                        added = drift[mine[slot]] if len(drift) else zero
                        work[slot] -= rate * (pull * (work[slot] - base[slot]) + added)
                    for a in range(len(bias)):
                        added = drift[len(drift) - len(bias) + a] if len(drift) else zero
                        bias[a] -= rate * (pull * (bias[a] - base_bias[a]) + added)
                for i in range(begin, end):
                    move = errors[i - begin]
                    bias[actions[i]] -= move
                    for j in range(offsets[i], offsets[i + 1]):
                        work[slots[j - start]] -= move * values[j]
        square = 0.0
        for slot in range(used):
            move = work[slot] - base[slot]
            moves[found + slot] = move
            square += float(move) ** 2
        for a in range(len(bias)):
            square += float(bias[a] - base_bias[a]) ** 2
        norms[client] = norm = np.sqrt(square)
        if np.isfinite(norm):
            factor = weight.dtype.type(min(1.0, clip_norms[client] / norm) if norm > 0 else 1.0)
            for a in range(len(bias)):
                total_bias[a] += factor * (bias[a] - base_bias[a])
            for i in range(found, found + used):
                moves[i] *= factor
            found += used
        for a in range(
            len(bias)
        ):  # an assignment of slices would be compiled with a message about their shapes
            bias[a] = base_bias[a]
    return found


@numba.njit(nogil=True, cache=True)
def curvature_chosen(  # type: ignore[no-untyped-def]
    offsets, ids, values, bounds, actions, rewards, weights, clip_norm, weight, base_bias,
    entries, moments, biases, norms,
):  # fmt: skip
    """Every client in turn, at fixed weights: flat entries with their gradients and curvatures.

    Returns how many there are. `moments` [2, n] has gradients, then curvatures; `biases` [2, K] is
    added to. An entry that several clients touch stands there once for each of them.
    """
    table, slots = _room(offsets, bounds)
    bias = np.zeros_like(biases)
    found = 0
    for client in range(len(bounds) - 1):
        first, last = bounds[client], bounds[client + 1]
        mine, start, k = entries[found:], offsets[first], len(base_bias)
        used = _number_entries(
            offsets[first : last + 1], ids, actions[first:last], k, table, slots, mine, weight
        )
        gradient, curvature = moments[0, found : found + used], moments[1, found : found + used]
        for slot in range(used):
            gradient[slot] = curvature[slot] = 0
        for a in range(k):
            bias[0, a] = bias[1, a] = 0
        for i in range(first, last):
            score = base_bias[actions[i]]
            for j in range(offsets[i], offsets[i + 1]):
                score += values[j] * weight[mine[slots[j - start]]]
            count = weights[i]
            error = count * (score - rewards[i])
            bias[0, actions[i]] += error
            bias[1, actions[i]] += count
            for j in range(offsets[i], offsets[i + 1]):
                slot, x = slots[j - start], values[j]
                gradient[slot] += error * x
                curvature[slot] += count * (x * x)
        square = 0.0
        for slot in range(used):
            square += np.float64(gradient[slot]) ** 2 + np.float64(curvature[slot]) ** 2
        for a in range(k):
            square += np.float64(bias[0, a]) ** 2 + np.float64(bias[1, a]) ** 2
        norms[client] = norm = np.sqrt(square)
        if np.isfinite(norm):
            factor = weight.dtype.type(min(1.0, clip_norm / norm) if norm > 0 else 1.0)
            for slot in range(used):
                gradient[slot] *= factor
                curvature[slot] *= factor
            for a in range(k):
                biases[0, a] += factor * bias[0, a]
                biases[1, a] += factor * bias[1, a]
            found += used
    return found


@numba.njit(nogil=True, cache=True)
def _each_once(slots, size):  # type: ignore[no-untyped-def]
    """The slots without repetitions, in order of first appearance: a repeated word must not count twice."""
    once, seen = np.empty(len(slots), np.int32), np.zeros(size, np.bool_)
    used = 0
    for slot in slots:
        if not seen[slot]:
            seen[slot] = True
            once[used] = slot
            used += 1
    return once[:used]


@numba.njit(nogil=True, cache=True)
def train_all(  # type: ignore[no-untyped-def]
    offsets, slots, values, bounds, targets, weights, logistic, steps, size, epochs, clip_norms,
    rate, pull, drift, base, base_bias, total, total_bias, norms,
):  # fmt: skip
    """Every client in turn, with a loss on all actions; `drift` [slots + 1, K] has the bias in its last row."""
    work, bias = base.copy(), base_bias.copy()
    k = len(bias)
    errors = np.empty((size, k), work.dtype)
    zero = work.dtype.type(0)
    for client in range(len(bounds) - 1):
        first, last = bounds[client], bounds[client + 1]
        touched = _each_once(slots[offsets[first] : offsets[last]], len(work))
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
                if pull != 0 or len(drift):
                    for slot in touched:
                        for a in range(k):
                            added = drift[slot, a] if len(drift) else zero
                            work[slot, a] -= rate * (pull * (work[slot, a] - base[slot, a]) + added)
                    for a in range(k):
                        added = drift[len(drift) - 1, a] if len(drift) else zero
                        bias[a] -= rate * (pull * (bias[a] - base_bias[a]) + added)
                for i in range(begin, end):
                    error = errors[i - begin]
                    for a in range(k):
                        bias[a] -= error[a]
                    for j in range(offsets[i], offsets[i + 1]):
                        slot, value = slots[j], values[j]
                        for a in range(k):
                            work[slot, a] -= error[a] * value
        norms[client] = _collect_rows(
            touched, clip_norms[client], work, bias, base, base_bias, total, total_bias
        )


@numba.njit(nogil=True, cache=True)
def _collect_rows(touched, clip_norm, work, bias, base, base_bias, total, total_bias):  # type: ignore[no-untyped-def]
    """Add one client's clipped update to the chunk's sum, put the working copy back, and return the update's norm."""
    k = len(bias)
    square = 0.0
    for a in range(k):
        square += (bias[a] - base_bias[a]) ** 2
    for slot in touched:
        for a in range(k):
            square += (work[slot, a] - base[slot, a]) ** 2
    norm = np.sqrt(square)
    factor = work.dtype.type(min(1.0, clip_norm / norm) if norm > 0 else 1.0)
    finite = np.isfinite(norm)
    for a in range(k):
        if finite:
            total_bias[a] += factor * (bias[a] - base_bias[a])
        bias[a] = base_bias[a]
    for slot in touched:
        for a in range(k):
            if finite:
                total[slot, a] += factor * (work[slot, a] - base[slot, a])
            work[slot, a] = base[slot, a]
    return norm
