"""Rows of different lengths in flat arrays (labels of an example, words of a sentence), and gathering them quickly.

The loops are compiled in `kernels`; their twins in plain numpy, with the same bits, serve installations without numba.
"""

import sys
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np


def gathered_offsets(offsets: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Where each of the given rows begins when they stand one after the other, and where the last one ends."""
    lengths = offsets[rows + 1] - offsets[rows]
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def gather(
    offsets: np.ndarray, source: np.ndarray, rows: np.ndarray, target_offsets: np.ndarray, target: np.ndarray
) -> None:
    """Copy the entries of the given rows, one row after the other."""
    moved = np.repeat(offsets[rows] - target_offsets[:-1], np.diff(target_offsets))
    target[:] = source[moved + np.arange(len(target))]


def count_rows(
    offsets: np.ndarray,
    ids: np.ndarray,
    unknown: int,
    row_offsets: np.ndarray,
    words: np.ndarray,
    values: np.ndarray,
) -> int:
    """Count each row's ids below `unknown`, ascending, and divide the counts by their L2 norm; how many there are."""
    row = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    known = ids < unknown
    found, counts = np.unique(row[known] * max(unknown, 1) + ids[known], return_counts=True)
    row = found // max(unknown, 1)
    squares = np.bincount(row, counts.astype(np.float64) ** 2, minlength=len(offsets) - 1)
    words[: len(found)] = found % max(unknown, 1)
    values[: len(found)] = counts / np.sqrt(squares[row])
    row_offsets[1:] = np.cumsum(np.bincount(row, minlength=len(offsets) - 1))
    return len(found)


@cache
def loops() -> Any:
    """The compiled loops or, where numba is not installed, the same in numpy; imported when first needed."""
    try:
        return import_module("fedbandit.core.kernels")
    except ModuleNotFoundError as error:
        if error.name != "numba":
            raise
        return sys.modules[__name__]


@dataclass(frozen=True)
class Ragged:
    """Row i is `ids[offsets[i]:offsets[i + 1]]`, with `values` beside the ids where the rows carry weights."""

    offsets: np.ndarray  # int64 [n + 1]
    ids: np.ndarray  # int32 [total]
    values: np.ndarray | None = None  # float32 [total]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def take(self, rows: np.ndarray) -> "Ragged":
        """The given rows, in the given order, as arrays of their own."""
        offsets = loops().gathered_offsets(self.offsets, rows)
        ids = np.empty(offsets[-1], self.ids.dtype)
        loops().gather(self.offsets, self.ids, rows, offsets, ids)
        if self.values is None:
            return Ragged(offsets, ids)
        values = np.empty(offsets[-1], self.values.dtype)
        loops().gather(self.offsets, self.values, rows, offsets, values)
        return Ragged(offsets, ids, values)

    def slice(self, start: int, stop: int) -> "Ragged":
        """Rows start to stop; shares memory with this one."""
        offsets = self.offsets[start : stop + 1]
        first, last = offsets[0], offsets[-1]
        values = None if self.values is None else self.values[first:last]
        return Ragged(offsets - first, self.ids[first:last], values)

    def copy(self) -> "Ragged":
        """The same rows in arrays of their own."""
        return Ragged(self.offsets.copy(), self.ids.copy(), None if self.values is None else self.values.copy())

    def row_of_entry(self) -> np.ndarray:
        """For each entry, the row it stands in: int64 [total]."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    @classmethod
    def from_rows(cls, rows: list[list[int]]) -> "Ragged":
        """From a list of lists of ids; small data and tests."""
        lengths = np.array([0, *(len(row) for row in rows)], np.int64)
        return cls(np.cumsum(lengths), np.array([i for row in rows for i in row], np.int32))
