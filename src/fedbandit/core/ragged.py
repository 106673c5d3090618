"""Rows of different lengths in flat arrays (labels of an example, words of a sentence), and gathering them quickly."""

from dataclasses import dataclass

import numpy as np

from fedbandit.core.loops import loops


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
        offsets = loops.gathered_offsets(self.offsets, rows)
        ids = np.empty(offsets[-1], self.ids.dtype)
        loops.gather(self.offsets, self.ids, rows, offsets, ids)
        if self.values is None:
            return Ragged(offsets, ids)
        values = np.empty(offsets[-1], self.values.dtype)
        loops.gather(self.offsets, self.values, rows, offsets, values)
        return Ragged(offsets, ids, values)

    def slice(self, start: int, stop: int) -> "Ragged":
        """Rows start to stop; shares memory with this one."""
        offsets = self.offsets[start : stop + 1]
        first, last = offsets[0], offsets[-1]
        values = None if self.values is None else self.values[first:last]
        return Ragged(offsets - first, self.ids[first:last], values)

    def copy(self) -> "Ragged":
        """The same rows in arrays of their own."""
        return Ragged(
            self.offsets.copy(),
            self.ids.copy(),
            None if self.values is None else self.values.copy(),
        )

    def row_of_entry(self) -> np.ndarray:
        """For each entry, the row it stands in: int64 [total]."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    @classmethod
    def from_rows(cls, rows: list[list[int]]) -> "Ragged":
        """From a list of lists of ids; small data and tests."""
        lengths = np.array([0, *(len(row) for row in rows)], np.int64)
        return cls(np.cumsum(lengths), np.array([i for row in rows for i in row], np.int32))
