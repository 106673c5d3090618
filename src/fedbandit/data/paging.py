"""Mapped files, and reading from them what a few clients have.

A page of a large file that nobody has looked at yet costs a fault, which maps its neighbours too; a plain read of a
client's rows costs a third of that and leaves nothing mapped. Small files are mapped once and stay.
"""

import mmap
import os
from typing import Any, Self

import numpy as np

from fedbandit.core.errors import DataError
from fedbandit.core.ragged import Ragged

_LARGE = 1 << 26  # bytes of a file from which on reading is cheaper than mapping
_WASTE = 4  # times as much as is asked for may be read


class Pages(mmap.mmap):
    """A file that is mapped for reading and can be read from as well."""

    handle: int

    @classmethod
    def of(cls, handle: int, size: int) -> Self:
        pages = cls(handle, size, access=mmap.ACCESS_READ)
        pages.handle = os.dup(handle)
        return pages

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            os.close(self.handle)


def read_pays(rows: Ragged, asked: int, stored: int) -> bool:
    """Whether to read all `stored` rows of some clients for the sake of `asked` of them."""
    pages: object = rows.ids.base
    return isinstance(pages, Pages) and len(pages) >= _LARGE and stored <= _WASTE * asked


def read_ranges(rows: Ragged, starts: np.ndarray, stops: np.ndarray) -> tuple[Ragged, np.ndarray]:
    """Rows starts[i] to stops[i] of a mapped file, for every i, and where each of these ranges begins among them.

    Between two ranges stands one row that belongs to neither.
    """
    lengths = stops - starts + 1  # of offsets: there is one more of them than rows
    begins = np.cumsum(lengths) - lengths
    offsets = np.empty(int(lengths.sum()), np.int64)
    _read(rows.offsets, starts, offsets, begins, lengths)
    first, last = offsets[begins], offsets[begins + lengths - 1]
    entries = last - first
    placed = np.cumsum(entries) - entries
    offsets -= np.repeat(first - placed, lengths)
    ids = np.empty(int(entries.sum()), rows.ids.dtype)
    _read(rows.ids, first, ids, placed, entries)
    if rows.values is None:
        return Ragged(offsets, ids), begins
    values = np.empty(len(ids), rows.values.dtype)
    _read(rows.values, first, values, placed, entries)
    return Ragged(offsets, ids, values), begins


def _read(mapped: np.ndarray, firsts: np.ndarray, into: np.ndarray, places: np.ndarray, counts: np.ndarray) -> None:
    """Read counts[i] entries of a mapped array from firsts[i] on to places[i], for every i."""
    pages: Any = mapped.base
    size = mapped.itemsize
    begins, target = len(pages) - mapped.nbytes, into.view(np.uint8).data
    for first, place, count in zip(
        (begins + firsts * size).tolist(), (places * size).tolist(), (counts * size).tolist(), strict=True
    ):
        if os.preadv(pages.handle, (target[place : place + count],), first) != count:
            raise DataError("a file of the data set was cut while it was being read")
