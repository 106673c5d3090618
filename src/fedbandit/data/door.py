"""The door of a data set folder: every file is opened here, its type, shape and size checked before it is mapped.

What the numbers mean is the business of `dataset`; reading all of them once is that of `verification`.
"""

import json
import math
import mmap
import os
import stat
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from fedbandit.core.errors import DataError
from fedbandit.data.rules import Rule

AGAIN = "import the data set again"
_LARGEST_JSON = 1 << 28  # bytes
_UNREADABLE = (ValueError, TypeError, SyntaxError, OverflowError, EOFError, MemoryError, RecursionError, TokenError)


@dataclass(frozen=True)
class FileState:
    """What the system says about a file; other contents have another state, unless a disk is failing."""

    size: int
    modified: int  # nanoseconds
    changed: int  # nanoseconds; also moved by renaming, linking and other permissions
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> "FileState":
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


@dataclass(frozen=True)
class Part:
    """An array of the folder: what it is made of, where its data begins, and the rule its numbers must follow."""

    name: str
    dtype: np.dtype
    width: int  # numbers a row
    begins: int
    rule: Rule | None


class Door:
    """Opens the files of one folder and remembers each one's state at that moment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.states: dict[str, FileState] = {}
        self.parts: list[Part] = []

    def json(self, name: str) -> Any:
        """What a JSON file of the folder holds."""
        with self._open(name) as file:
            if self.states[name].size > _LARGEST_JSON:
                raise DataError(f"{self.folder / name}: {self.states[name].size:,} bytes; {AGAIN}")
            try:
                return json.loads(file.read())
            except (ValueError, RecursionError) as error:
                raise DataError(f"{self.folder / name}: unreadable: {str(error) or 'nested too deeply'}") from None

    def look_at(self, name: str) -> bool:
        """Remember a file that is not mapped; False if there is none."""
        if not (self.folder / name).exists():
            return False
        self._open(name).close()
        return True

    def array(
        self, name: str, types: Collection[str], shape: tuple[int | None, ...], rule: Rule | None = None
    ) -> np.ndarray:
        """A mapped array of one of these types and of this shape, where None stands for any length."""
        path = self.folder / name
        with self._open(name) as file:
            try:
                version = npy.read_magic(file)
                read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
                found, by_columns, dtype = read(file)
            except _UNREADABLE as error:
                said = str(error).partition("\n")[0]
                raise DataError(f"{path}: damaged: {said or type(error).__name__}; {AGAIN}") from None
            if dtype.hasobject or not dtype.itemsize or not _is_one_of(dtype, types):
                kind = dtype.str if dtype.kind == "S" or not dtype.isnative else dtype.name
                raise DataError(f"{path}: holds {kind} where {' or '.join(types)} is expected; {AGAIN}")
            if by_columns and len(found) > 1:
                raise DataError(f"{path}: is stored by columns; {AGAIN}")
            if not _fits(found, shape):
                expected = ", ".join("any" if side is None else str(side) for side in shape)
                raise DataError(f"{path}: has shape {found} where ({expected}) is expected; {AGAIN}")
            begins, size = file.tell(), math.prod(found) * dtype.itemsize
            excess = self.states[name].size - begins - size
            if excess < 0:
                raise DataError(f"{path}: truncated: {-excess:,} bytes are missing; {AGAIN}")
            if excess:
                raise DataError(f"{path}: has {excess:,} bytes too many; {AGAIN}")
            self.parts.append(Part(name, dtype, math.prod(found[1:]), begins, rule))
            if not size:
                return np.empty(found, dtype)
            # Mapped from the open file: the one whose state was taken, even if another has taken its name since.
            pages = mmap.mmap(file.fileno(), begins + size, access=mmap.ACCESS_READ)
            return np.ndarray(found, dtype, pages, begins)

    def _open(self, name: str) -> IO[bytes]:
        path = self.folder / name
        try:
            # Without waiting: the name may be that of a pipe.
            handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        except FileNotFoundError:
            raise DataError(f"{path.parent}: {path.name} is missing; {AGAIN}") from None
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from None
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            os.close(handle)
            raise DataError(f"{path}: not a file; {AGAIN}")
        self.states[name] = FileState.of(status)
        return open(handle, "rb")


def _is_one_of(dtype: np.dtype, types: Collection[str]) -> bool:
    return any(dtype.kind == "S" if name == "bytes" else dtype == np.dtype(name) for name in types)


def _fits(found: tuple[int, ...], shape: tuple[int | None, ...]) -> bool:
    return len(found) == len(shape) and all(
        side >= 0 and wanted in (None, side) for side, wanted in zip(found, shape, strict=True)
    )
