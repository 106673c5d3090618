"""Compiled loops: addressed randomness, drawing actions, rewards, ranks, ragged rows, sparse sums, server steps.

`plain` has those that devices and short runs need; a test holds the two together, to the last bit.
"""

import sys
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from fedbandit.core.randomness import GOLDEN, Purpose, bits, scramble


def _load_without_scipy() -> None:
    """Load the part of numba that would import scipy to see whether it has a BLAS.

    No loop of ours multiplies matrices, and scipy takes longer to import than all of fedbandit. Others who compile
    products of matrices in this process get it when they do.
    """
    blas = "scipy.linalg.cython_blas"
    if blas in sys.modules:
        return
    sys.modules[blas] = None  # type: ignore[assignment] # importing it fails, before any of its parents is imported
    try:
        with suppress(ImportError):  # another numba, which is built otherwise
            import numba.np.arraymath  # noqa: F401
    finally:
        del sys.modules[blas]


_load_without_scipy()
_scramble = numba.njit(nogil=True, cache=True)(scramble)


def _prefetch(typing_context, array, index):  # type: ignore[no-untyped-def]
    """Have the processor fetch an entry of a flat array into its cache, where it knows how; changes no result."""

    def code(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        entries = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        entry = builder.bitcast(builder.gep(entries, [arguments[1]]), byte)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        fetch = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        builder.call(
            fetch, [entry, number(0), number(3), number(1)]
        )  # to read, into every level, data
        return context.get_dummy_value()

    return numba.void(array, index), code


prefetch: Any = intrinsic(_prefetch)

_11 = np.uint64(11)


def uniforms(
    seed: int, purpose: Purpose, times: np.ndarray, clients: np.ndarray, positions: np.ndarray
) -> np.ndarray:
    """A float64 in [0, 1) for every (time, client, position): `randomness.uniforms` of the same address."""
    drawn: np.ndarray = _uniforms(_start(seed, purpose), times, clients, positions)
    return drawn


def random_examples(
    seed: int, times: np.ndarray, clients: np.ndarray, offsets: np.ndarray, limit: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each (client, time) a random subset of its examples in random order: (which pair, position, row) per example.

    Client c's examples are rows offsets[c]:offsets[c + 1]. An order is that of the random bits of the examples' places.
    """
    drawn: tuple[np.ndarray, np.ndarray, np.ndarray] = _random_examples(
        _start(seed, Purpose.EXAMPLES), times, clients, offsets, -1 if limit is None else limit
    )
    return drawn


@lru_cache(maxsize=1024)
def _start(seed: int, purpose: Purpose) -> np.uint64:
    """What the addresses of one purpose have in common."""
    return np.uint64(bits(seed, purpose))


@numba.njit(nogil=True, cache=True)
def _extended(state, part):  # type: ignore[no-untyped-def]
    """The state of an address after one part more."""
    return _scramble(state + GOLDEN + np.uint64(part))


@numba.njit(nogil=True, cache=True)
def _uniforms(start, times, clients, positions):  # type: ignore[no-untyped-def]
    out = np.empty(len(times))
    for i in range(len(times)):
        state = _extended(_extended(_extended(start, times[i]), clients[i]), positions[i])
        out[i] = np.float64(state >> _11) * 2.0**-53
    return out


@numba.njit(nogil=True, cache=True)
def _random_examples(start, times, clients, offsets, limit):  # type: ignore[no-untyped-def]
    most, total = 0, 0
    for pair in range(len(clients)):
        size = offsets[clients[pair] + 1] - offsets[clients[pair]]
        most = max(most, size)
        total += size if limit < 0 else min(size, limit)
    owner, positions, rows = (
        np.empty(total, np.int64),
        np.empty(total, np.int64),
        np.empty(total, np.int64),
    )
    keys, order = np.empty(most, np.uint64), np.empty(most, np.int64)
    ends = np.empty(2 * most + 2, np.int64)
    end = 0
    for pair in range(len(clients)):
        client = clients[pair]
        first = offsets[client]
        size = offsets[client + 1] - first
        state = _extended(_extended(start, times[pair]), client)
        for index in range(size):
            keys[index] = _extended(state, index)
        _order(keys[:size], ends, order)
        for position in range(size if limit < 0 else min(size, limit)):
            owner[end], positions[end], rows[end] = pair, position, first + order[position]
            end += 1
    return owner, positions, rows


@numba.njit(nogil=True, cache=True)
def _order(keys, ends, order):  # type: ignore[no-untyped-def]
    """What `np.argsort(keys, kind="stable")` gives, for keys that are random bits.

    Their first bits put about one key into each bucket, and the few that share one are sorted by insertion.
    """
    buckets, shift = 1, 64
    while buckets < len(keys):
        buckets, shift = 2 * buckets, shift - 1
    if shift == 64:  # at most one key
        order[: len(keys)] = 0
        return
    ends[: buckets + 1] = 0
    for key in keys:
        ends[(key >> np.uint64(shift)) + np.uint64(1)] += 1
    for bucket in range(1, buckets + 1):
        ends[bucket] += ends[bucket - 1]
    for i in range(len(keys)):
        bucket = keys[i] >> np.uint64(shift)
        order[ends[bucket]] = i
        ends[bucket] += 1
    for i in range(1, len(keys)):
        mine = order[i]
        place = i
        while place > 0 and keys[order[place - 1]] > keys[mine]:
            order[place] = order[place - 1]
            place -= 1
        order[place] = mine


def draw_actions(probabilities: np.ndarray, uniforms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Actions [n] and their probabilities [n] for probabilities [n, K] and uniforms [n] in [0, 1)."""
    actions = np.empty(len(probabilities), np.int64)
    propensities = np.empty(len(probabilities), probabilities.dtype)
    draw_rows(np.ascontiguousarray(probabilities), uniforms, actions, propensities)
    return actions, propensities


@numba.njit(nogil=True, cache=True)
def draw_rows(probabilities, uniforms, actions, propensities):  # type: ignore[no-untyped-def]
    """Draw one action a row; four rows abreast, since each addition of a running sum waits for the one before."""
    n, k = probabilities.shape
    sums = np.empty((4, k), probabilities.dtype)
    s0, s1, s2, s3 = sums[0], sums[1], sums[2], sums[3]
    for first in range(0, n, 4):
        p0, p1 = probabilities[first], probabilities[min(first + 1, n - 1)]
        p2, p3 = probabilities[min(first + 2, n - 1)], probabilities[min(first + 3, n - 1)]
        t0 = t1 = t2 = t3 = probabilities.dtype.type(0)
        for a in range(k):
            t0, t1, t2, t3 = t0 + p0[a], t1 + p1[a], t2 + p2[a], t3 + p3[a]
            s0[a], s1[a], s2[a], s3[a] = t0, t1, t2, t3
        for i in range(first, min(first + 4, n)):
            actions[i] = chosen = draw_row(probabilities[i], sums[i - first], uniforms[i])
            propensities[i] = probabilities[i, chosen]


@numba.njit(nogil=True, cache=True)
def draw_row(probabilities, cumulative, uniform):  # type: ignore[no-untyped-def]
    """The action that a uniform number falls on, given running sums; counted, since a search mispredicts its end."""
    k = len(cumulative)
    threshold = cumulative.dtype.type(uniform) * cumulative[k - 1]
    chosen = 0
    for a in range(k):
        chosen += cumulative[a] <= threshold
    if chosen == k:  # the threshold was rounded up to the total
        chosen = k - 1
        while chosen > 0 and probabilities[chosen] == 0:
            chosen -= 1
    return chosen


@numba.njit(nogil=True, cache=True)
def all_finite(numbers):  # type: ignore[no-untyped-def]
    """Whether all of a vector are; counted, since a loop that may end early cannot be done in vectors."""
    largest, wrong = np.finfo(numbers.dtype).max, 0
    for i in range(len(numbers)):
        wrong += not abs(numbers[i]) <= largest
    return wrong == 0


@numba.njit(nogil=True, cache=True)
def gathered_offsets(offsets, rows):  # type: ignore[no-untyped-def]
    """Where each of the given rows begins when they stand one after the other, and where the last one ends."""
    target = np.zeros(len(rows) + 1, np.int64)
    for i in range(len(rows)):
        target[i + 1] = target[i] + offsets[rows[i] + 1] - offsets[rows[i]]
    return target


@numba.njit(nogil=True, cache=True)
def gather(offsets, source, rows, target_offsets, target):  # type: ignore[no-untyped-def]
    """Copy the entries of the given rows, one row after the other."""
    for i in range(len(rows)):
        start = offsets[rows[i]]
        base = target_offsets[i]
        for j in range(target_offsets[i + 1] - base):
            target[base + j] = source[start + j]


_pread = numba.types.ExternalFunction(
    "pread", numba.intp(numba.int32, numba.uintp, numba.uintp, numba.int64)
)  # the system's own: an interpreter between thousands of small reads would take longer than they do


@numba.njit(nogil=True, cache=True)
def _filled(handle, position, into, count):  # type: ignore[no-untyped-def]
    """Read the first `count` entries of an array from a file; False if the file ends before."""
    size = count * into.itemsize
    return _pread(handle, into.ctypes.data, size, position) == size


@numba.njit(nogil=True, cache=True)
def read_offsets(handle, begin, starts, stops, bounds, rows, firsts, counts, places, offsets):  # type: ignore[no-untyped-def]
    """Where the entries of each client begin in a file and how many there are, and where each row's are among them.

    Client i has the rows starts[i] to stops[i], of which rows[bounds[i]:bounds[i + 1]] are asked for; `offsets` says
    where these begin when they stand one after the other. False if the file is too short.
    """
    most = 0
    for i in range(len(starts)):
        most = max(most, stops[i] - starts[i])
    own = np.empty(most + 1, np.int64)
    for i in range(len(starts)):
        count = stops[i] - starts[i]
        if not _filled(handle, begin + own.itemsize * starts[i], own, count + 1):
            return False
        firsts[i], counts[i] = own[0], own[count] - own[0]
        for j in range(bounds[i], bounds[i + 1]):
            row = rows[j] - starts[i]
            places[j] = own[row] - own[0]
            offsets[j + 1] = offsets[j] + own[row + 1] - own[row]
    return True


@numba.njit(nogil=True, cache=True)
def read_entries(handle, begin, firsts, counts, bounds, places, offsets, target):  # type: ignore[no-untyped-def]
    """The entries of the rows that `read_offsets` has found, row after row. False if the file is too short."""
    own = np.empty(max(0, counts.max()), target.dtype)
    for i in range(len(firsts)):
        if not _filled(handle, begin + own.itemsize * firsts[i], own, counts[i]):
            return False
        for j in range(bounds[i], bounds[i + 1]):
            place, base = places[j], offsets[j]
            for k in range(offsets[j + 1] - base):
                target[base + k] = own[place + k]
    return True


@numba.njit(nogil=True, cache=True)
def count_rows(offsets, ids, unknown, row_offsets, words, values):  # type: ignore[no-untyped-def]
    """Count each row's sorted ids in place of a hash table; dividing by the sum first would not change the result."""
    end = 0
    for row in range(len(offsets) - 1):
        start = end
        tokens = np.sort(ids[offsets[row] : offsets[row + 1]])
        squares = 0.0
        i = 0
        while i < len(tokens) and tokens[i] < unknown:
            j = i
            while j < len(tokens) and tokens[j] == tokens[i]:
                j += 1
            words[end], values[end] = tokens[i], j - i
            squares += float(j - i) ** 2
            end += 1
            i = j
        for k in range(start, end):
            values[k] = values[k] / np.sqrt(squares)
        row_offsets[row + 1] = end
    return end


@numba.njit(nogil=True, cache=True)
def add_rows(rows, values, total):  # type: ignore[no-untyped-def]
    """Add each row of values to its row of the total."""
    for i in range(len(rows)):
        of, to = values[i], total[rows[i]]
        for a in range(len(of)):
            to[a] += of[a]


@numba.njit(nogil=True, cache=True)
def add_entries(entries, values, total):  # type: ignore[no-untyped-def]
    """Add each value to its entry of the total."""
    for i in range(len(entries)):
        total[entries[i]] += values[i]


@numba.njit(nogil=True, cache=True)
def best_rewards(offsets, labels, actions, exact, near, near_value):  # type: ignore[no-untyped-def]
    """The best of what an example's labels give for its action, at least 0."""
    rewards = np.zeros(len(actions), np.float32)
    for i in range(len(actions)):
        for j in range(offsets[i], offsets[i + 1]):
            label = labels[j]
            if actions[i] == label and exact[label] > rewards[i]:
                rewards[i] = exact[label]
            if actions[i] == near[label] and near_value[label] > rewards[i]:
                rewards[i] = near_value[label]
    return rewards


@numba.njit(nogil=True, cache=True)
def fresh_sums(bounds, fresh, rewards, propensities):  # type: ignore[no-untyped-def]
    """For each client of some events: how many are fresh, and the sums of their rewards and propensities."""
    clients = len(bounds) - 1
    counts, reward_sums, propensity_sums = (
        np.zeros(clients, np.int64),
        np.zeros(clients),
        np.zeros(clients),
    )
    for client in range(clients):
        for i in range(bounds[client], bounds[client + 1]):
            if fresh[i]:
                counts[client] += 1
                reward_sums[client] += rewards[i]
                propensity_sums[client] += propensities[i]
    return counts, reward_sums, propensity_sums


@numba.njit(nogil=True, cache=True)
def labels_among_best(scores, offsets, labels, top):  # type: ignore[no-untyped-def]
    """How many labels are among the best-scored `top` actions of their example; the lower index among equals."""
    hits = 0
    for i in range(len(offsets) - 1):
        row = scores[i]
        for label in labels[offsets[i] : offsets[i + 1]]:
            mine, before = row[label], np.int32(0)
            for a in range(
                len(row)
            ):  # in vectors, since it neither ends early nor depends on the label
                before += np.int32(row[a] > mine)
            if before < top and mine == mine:  # what is not a number is never among the best
                for a in range(label):
                    before += np.int32(row[a] == mine)
                hits += before < top
    return hits


@numba.njit(nogil=True, cache=True, error_model="numpy")
def adam_moments(m0, v0, w0, update, constants, m, v, w):  # type: ignore[no-untyped-def]
    rate, beta_1, beta_2, epsilon = constants
    one = constants.dtype.type(1)
    for i in range(len(w)):
        g = update[i]
        m[i] = beta_1 * m0[i] + (one - beta_1) * g
        v[i] = beta_2 * v0[i] + (one - beta_2) * g * g
        w[i] = w0[i] + rate * m[i] / (np.sqrt(v[i]) + epsilon)


@numba.njit(nogil=True, cache=True, error_model="numpy")
def yogi_moments(m0, v0, w0, update, constants, m, v, w):  # type: ignore[no-untyped-def]
    rate, beta_1, beta_2, epsilon = constants
    one = constants.dtype.type(1)
    for i in range(len(w)):
        g = update[i]
        m[i] = beta_1 * m0[i] + (one - beta_1) * g
        v[i] = v0[i] - (one - beta_2) * g * g * np.sign(v0[i] - g * g)
        w[i] = w0[i] + rate * m[i] / (np.sqrt(v[i]) + epsilon)
