"""The loops of `ragged_kernels` in plain numpy, for installations without numba: the same names, the same bits."""

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
