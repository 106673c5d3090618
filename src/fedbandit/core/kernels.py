"""Compiled loops: random orders, drawing actions, ranks, ragged rows, sparse sums, server steps.

`loops` has the forms of devices and short runs; a test holds the two together, to the last bit.
"""

import sys
from contextlib import suppress
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from fedbandit.core.randomness import GOLDEN, Purpose, bits, scramble


def _load_without_scipy() -> None:
    """Load the part of numba that would import scipy to see whether it has a BLAS.

    No loop of ours multiplies matrices, and scipy takes longer to import than all of fedbandit.
    Others who compile products of matrices in this process get it when they do.
    """
    blas = "scipy.linalg.cython_blas"
    if blas in sys.modules:
        return
    # Importing it fails, before any of its parents is imported.
    sys.modules[blas] = None  # type: ignore[assignment]
    try:
        with suppress(ImportError):  # another numba, which is built otherwise
            import numba.np.arraymath  # noqa: F401
    finally:
        del sys.modules[blas]


_load_without_scipy()
_scramble = numba.njit(nogil=True, cache=True)(scramble)


def _prefetch(typing_context, array, index):  # type: ignore[no-untyped-def]
    """Have the processor fetch an entry of a flat array into its cache, where it knows how; changes
    no result.
    """

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


def random_examples(
    seed: int, times: np.ndarray, clients: np.ndarray, offsets: np.ndarray, limit: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each (client, time) a random subset of its examples in random order: (which pair,
    position, row) per example.

    Client c's examples are rows offsets[c]:offsets[c + 1]. An order is that of the random bits of
    the examples' places.
    """
    start = np.uint64(bits(seed, Purpose.EXAMPLES))  # what the addresses have in common
    drawn: tuple[np.ndarray, np.ndarray, np.ndarray] = _random_examples(
        start, times, clients, offsets, -1 if limit is None else limit
    )
    return drawn


@numba.njit(nogil=True, cache=True)
def _extended(state, part):  # type: ignore[no-untyped-def]
    """The state of an address after one part more."""
    return _scramble(state + GOLDEN + np.uint64(part))


@numba.njit(nogil=True, cache=True)
def _random_examples(start, times, clients, offsets, limit):  # type: ignore[no-untyped-def]
    """As `random_examples`, from the common start of its addresses; limit -1: all."""
    most, total = 0, 0
    for pair in range(len(clients)):
        size = offsets[clients[pair] + 1] - offsets[clients[pair]]
        most = max(most, size)
        total += size if limit < 0 else min(size, limit)
    owner, positions, rows = np.empty((3, total), np.int64)
    keys, end = np.empty(most, np.uint64), 0
    for pair in range(len(clients)):
        client = clients[pair]
        first = offsets[client]
        size = offsets[client + 1] - first
        state = _extended(_extended(start, times[pair]), client)
        for index in range(size):
            keys[index] = _extended(state, index)
        order = np.argsort(keys[:size], kind="mergesort")
        for position in range(size if limit < 0 else min(size, limit)):
            owner[end], positions[end], rows[end] = pair, position, first + order[position]
            end += 1
    return owner, positions, rows


def draw_actions(probabilities: np.ndarray, uniforms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Actions [n] and their probabilities [n] for probabilities [n, K] and uniforms [n] in
    [0, 1).
    """
    actions = np.empty(len(probabilities), np.int64)
    propensities = np.empty(len(probabilities), probabilities.dtype)
    draw_rows(np.ascontiguousarray(probabilities), uniforms, actions, propensities)
    return actions, propensities


@numba.njit(nogil=True, cache=True)
def draw_rows(probabilities, uniforms, actions, propensities):  # type: ignore[no-untyped-def]
    """Draw one action a row; four rows abreast, since each addition of a running sum waits for the
    one before.
    """
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
    """The action that a uniform number falls on, given running sums; counted, since a search
    mispredicts its end.
    """
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
    """Whether all of a vector are; counted, since a loop that may end early cannot be done in
    vectors.
    """
    largest, wrong = np.finfo(numbers.dtype).max, 0
    for i in range(len(numbers)):
        wrong += not abs(numbers[i]) <= largest
    return wrong == 0


@numba.njit(nogil=True, cache=True)
def gather(offsets, source, rows, target_offsets, target):  # type: ignore[no-untyped-def]
    """Copy the entries of the given rows, one row after the other."""
    for i in range(len(rows)):
        start = offsets[rows[i]]
        base = target_offsets[i]
        for j in range(target_offsets[i + 1] - base):
            target[base + j] = source[start + j]


@numba.njit(nogil=True, cache=True)
def add_rows(rows, values, total):  # type: ignore[no-untyped-def]
    """Add each row of values to its row of the total."""
    for i in range(len(rows)):
        of, to = values[i], total[rows[i]]
        for a in range(len(of)):
            to[a] += of[a]


@numba.njit(nogil=True, cache=True)
def merge(entries, values, others, other_values, times, found, sums):  # type: ignore[no-untyped-def]
    """The entries of two sparse vectors with their sum, the second one `times` (1 or -1); how many.

    With 0 the second one counts only where the first has no entry.
    """
    zero, sign = sums.dtype.type(0), sums.dtype.type(times)
    i, j, place = 0, 0, 0
    while i < len(entries) or j < len(others):
        mine = j == len(others) or (i < len(entries) and entries[i] <= others[j])
        both = mine and j < len(others) and entries[i] == others[j]
        found[place] = entries[i] if mine else others[j]
        if times == 0:
            sums[place] = values[i] if mine else other_values[j]
        else:
            total = zero + values[i] if mine else zero
            sums[place] = total + sign * other_values[j] if both or not mine else total
        i, j, place = i + mine, j + (both or not mine), place + 1
    return place


@numba.njit(nogil=True, cache=True)
def labels_among_best(scores, offsets, labels, top):  # type: ignore[no-untyped-def]
    """The number of labels among the best-scored `top` actions of their example; the lower index
    among equals.
    """
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
    """One step of Adam in a single pass over the vectors."""
    rate, beta_1, beta_2, epsilon = constants
    one = constants.dtype.type(1)
    for i in range(len(w)):
        g = update[i]
        m[i] = beta_1 * m0[i] + (one - beta_1) * g
        v[i] = beta_2 * v0[i] + (one - beta_2) * g * g
        w[i] = w0[i] + rate * m[i] / (np.sqrt(v[i]) + epsilon)
