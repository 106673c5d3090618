"""Compiled loops over ragged arrays. Imported when first called, so that a device that calls none needs no numba."""

import numba
import numpy as np


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
