"""Mapped files, and plain reads of the rows of a few clients.

A page of a large file that was never touched costs a fault, which maps its neighbours too; a plain
read of a client's rows costs a third of that and leaves nothing mapped. Small files are mapped once
and stay.
"""

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np

from fedbandit.core.errors import DataError
from fedbandit.core.ragged import Ragged

_LARGE = 1 << 26  # bytes of a file from which on reading is cheaper than mapping
_WASTE = 4  # times as much as is asked for may be read


class MappedFile(mmap.mmap):
    """A file that is mapped for reading and can be read from by its own handle as well.

    The arrays of a data set have it as their `base`, by which `read_rows` finds the file again. The
    handle is closed with the mapping.
    """

    handle: int
    path: Path

    @classmethod
    def of(cls, handle: int, size: int, path: Path) -> Self:
        """Map the first `size` bytes of an open file; `path` is for messages."""
        pages = cls(handle, size, access=mmap.ACCESS_READ)
        pages.handle, pages.path = os.dup(handle), path
        return pages

    def __del__(
        self, close: Callable[[int], None] = os.close
    ) -> None:  # modules may be gone before the last mapping
        if hasattr(self, "handle"):
            close(self.handle)


def read_pays(rows: Ragged, asked: int, stored: int) -> bool:
    """Whether to read all `stored` rows of some clients for the sake of `asked` of them.

    True for files beyond 64 MB, as long as at most four times as much is read as is asked for.
    """
    pages: object = rows.ids.base
    return isinstance(pages, MappedFile) and len(pages) >= _LARGE and stored <= _WASTE * asked


def read_rows(
    rows: Ragged, starts: np.ndarray, stops: np.ndarray, bounds: np.ndarray, chosen: np.ndarray
) -> Ragged:
    """The same as `rows.take(chosen)`, read from the mapped files client by client.

    Client i has the rows starts[i] to stops[i], and chosen[bounds[i]:bounds[i + 1]] are some of
    them.
    """
    from fedbandit.core.kernels import read_entries, read_offsets

    offsets, places = np.zeros(len(chosen) + 1, np.int64), np.empty(len(chosen), np.int64)
    firsts, counts = np.empty(len(starts), np.int64), np.empty(len(starts), np.int64)
    file = _file(rows.offsets)
    _check(
        read_offsets(*file, starts, stops, bounds, chosen, firsts, counts, places, offsets),
        rows.offsets,
    )

    def entries(mapped: np.ndarray) -> np.ndarray:
        found = np.empty(
            offsets[-1], np.int32
        )  # the loop moves four bytes at a time, whatever they mean
        _check(read_entries(*_file(mapped), firsts, counts, bounds, places, offsets, found), mapped)
        return found.view(mapped.dtype)

    return Ragged(offsets, entries(rows.ids), None if rows.values is None else entries(rows.values))


def _file(mapped: np.ndarray) -> tuple[int, int]:
    """The handle of a mapped array's file, and where in it the array begins."""
    pages: Any = mapped.base
    return pages.handle, len(pages) - mapped.nbytes


def _check(complete: bool, mapped: np.ndarray) -> None:
    if not complete:
        pages: Any = mapped.base
        raise DataError(f"{pages.path}: was cut while it was in use")
