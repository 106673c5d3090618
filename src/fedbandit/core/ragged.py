"""Arrays that are not rectangles: rows of different lengths, and vectors that are mostly zero.

Flat numpy arrays underneath; knows nothing of what they hold.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fedbandit.core import loops


@dataclass(frozen=True)
class Ragged:
    """Row i is `ids[offsets[i]:offsets[i + 1]]`, with `values` beside the ids where the rows carry
    weights.
    """

    offsets: np.ndarray  # int64 [n + 1]
    ids: np.ndarray  # int32 [total]
    values: np.ndarray | None = None  # float32 [total]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def take(self, rows: np.ndarray) -> "Ragged":
        """The given rows, in the given order, as arrays of their own."""
        lengths = self.offsets[rows + 1] - self.offsets[rows]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
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

    def unit(self, dtype: Any = np.float64) -> "Ragged":
        """The rows scaled to length one, with values of that type; rows of zeros stay zero.

        Examples:
            >>> Ragged(np.array([0, 2]), np.array([5, 1]), np.array([3.0, 4.0])).unit().values
            array([0.6, 0.8])
        """
        rows = self.row_of_entry()
        values = np.ones(len(rows)) if self.values is None else self.values
        squares = np.bincount(rows, values.astype(np.float64) ** 2, minlength=len(self))
        scale = 1 / np.sqrt(np.where(squares > 0, squares, 1.0))
        return Ragged(self.offsets, self.ids, (values * scale[rows]).astype(dtype))

    def row_of_entry(self) -> np.ndarray:
        """For each entry, the row it stands in: int64 [total]."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    @classmethod
    def from_rows(cls, rows: list[list[int]]) -> "Ragged":
        """From a list of lists of ids; small data and tests."""
        lengths = np.array([0, *(len(row) for row in rows)], np.int64)
        return cls(np.cumsum(lengths), np.array([i for row in rows for i in row], np.int32))


@dataclass(frozen=True, eq=False)
class SparseVector:
    """A vector [size] that is zero but for some entries.

    Sums and differences of sparse vectors, and products with a number, are sparse; together with an
    array they make an array. `np.asarray` gives the whole vector.

    Examples:
        >>> one = SparseVector(np.array([1, 4]), np.array([0.5, 2.0]), 6)
        >>> other = SparseVector(np.array([0, 4]), np.array([1.0, 1.0]), 6)
        >>> np.asarray(2 * one - other)
        array([-1.,  1.,  0.,  0.,  3.,  0.])
        >>> (one + np.ones(6)).tolist()
        [1.0, 1.5, 1.0, 1.0, 3.0, 1.0]
    """

    entries: np.ndarray  # int64 [n], ascending, each once
    values: np.ndarray  # [n]
    size: int

    __array_ufunc__: ClassVar[None] = None  # numpy leaves operators to this class

    @classmethod
    def zeros(cls, size: int, dtype: Any = np.float64) -> "SparseVector":
        """The zero vector."""
        return cls(np.empty(0, np.int64), np.empty(0, dtype), size)

    @classmethod
    def of(cls, array: np.ndarray) -> "SparseVector":
        """The entries of a vector whose bits are not all zero: a negative zero is kept as it is."""
        entries = np.flatnonzero(array.view(f"u{array.itemsize}"))
        return cls(entries, array[entries], len(array))

    @property
    def shape(self) -> tuple[int]:
        """(size,), as an array has it."""
        return (self.size,)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the values."""
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of entries and values."""
        return self.entries.nbytes + self.values.nbytes

    def add_to(self, total: np.ndarray) -> None:
        """Add the vector to an array [size]."""
        total[self.entries] += self.values

    def over(self, other: "SparseVector") -> "SparseVector":
        """The entries of this vector, and those of another where this one has none."""
        return self._merged(other, 0.0)

    def _merged(self, other: "SparseVector", times: float) -> "SparseVector":
        """The sum of this vector and so many times the other; 0: `over`."""
        most, dtype = (
            len(self.entries) + len(other.entries),
            np.result_type(self.dtype, other.dtype),
        )
        entries, values = np.empty(most, np.int64), np.empty(most, dtype)
        found = loops.merge(
            self.entries, self.values, other.entries, other.values, times, entries, values
        )
        return SparseVector(entries[:found], values[:found], self.size)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        whole = np.zeros(self.size, dtype or self.dtype)
        whole[self.entries] = self.values
        return whole

    def __neg__(self) -> "SparseVector":
        return SparseVector(self.entries, -self.values, self.size)

    def __mul__(self, number: Any) -> "SparseVector":
        return SparseVector(self.entries, self.values * number, self.size)

    __rmul__ = __mul__

    def __add__(self, other: Any) -> Any:
        return self._merged(other, 1.0) if _sparse(other) else np.asarray(self) + other

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self._merged(other, -1.0) if _sparse(other) else np.asarray(self) - other

    def __rsub__(self, other: Any) -> Any:
        return -self + other


def _sparse(vector: Any) -> bool:
    return isinstance(vector, SparseVector)
