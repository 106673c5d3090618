"""Vectors that are mostly zero, as the entries that are not. Knows nothing of what they hold."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np


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
        return (self.size,)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        return self.entries.nbytes + self.values.nbytes

    def add_to(self, total: np.ndarray) -> None:
        """Add the vector to an array [size]."""
        total[self.entries] += self.values

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
        if not isinstance(other, SparseVector):
            return np.asarray(self) + other
        entries = np.union1d(self.entries, other.entries)
        values = np.zeros(len(entries), np.result_type(self.dtype, other.dtype))
        for one in (self, other):
            values[np.searchsorted(entries, one.entries)] += one.values
        return SparseVector(entries, values, self.size)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self + -other

    def __rsub__(self, other: Any) -> Any:
        return -self + other
