"""Compiled loops: addressed randomness, drawing actions, ragged rows, sums of sparse vectors.

Devices use the plain forms, which need numpy alone; a test holds the two together, to the last bit.
"""

import sys
from contextlib import suppress
from functools import lru_cache

import numba
import numpy as np

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


_11 = np.uint64(11)


def uniforms(seed: int, purpose: Purpose, times: np.ndarray, clients: np.ndarray, positions: np.ndarray) -> np.ndarray:
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
    owner, positions, rows = np.empty(total, np.int64), np.empty(total, np.int64), np.empty(total, np.int64)
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
    _draw(np.ascontiguousarray(probabilities), uniforms, actions, propensities)
    return actions, propensities


@numba.njit(nogil=True, cache=True)
def _draw(probabilities, uniforms, actions, propensities):  # type: ignore[no-untyped-def]
    cumulative = np.empty(probabilities.shape[1], probabilities.dtype)
    for i in range(len(probabilities)):
        actions[i] = chosen = drawn_from(probabilities[i], cumulative, uniforms[i])
        propensities[i] = probabilities[i, chosen]


@numba.njit(nogil=True, cache=True)
def drawn_from(probabilities, cumulative, uniform):  # type: ignore[no-untyped-def]
    """The action that a uniform number falls on; `cumulative` is filled with the running sums."""
    total = probabilities.dtype.type(0)
    for a in range(len(probabilities)):
        total += probabilities[a]
        cumulative[a] = total
    return draw_row(probabilities, cumulative, uniform)


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
