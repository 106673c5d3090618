"""The arrays of a `.npz` file, whole or a block of rows at a time, without unpickling and without unpacking to disk."""

import math
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from tokenize import TokenError

import numpy as np
from numpy.lib import format as npy

from fedbandit.core.errors import DataError
from fedbandit.core.parts import nearest
from fedbandit.data.formats.limits import LONGEST_NAME, check_unpacked

_BLOCK_BYTES = 8 << 20
_DAMAGE = (
    *(zipfile.BadZipFile, zlib.error, ValueError, EOFError, NotImplementedError, KeyError, RuntimeError),
    *(TypeError, SyntaxError, OverflowError, MemoryError, TokenError),
)


class Npz:
    """An open `.npz` file; a context manager."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        try:
            self._zip = zipfile.ZipFile(self.path)
        except FileNotFoundError:
            raise DataError(f"{self.path}: no such file") from None
        except IsADirectoryError:
            raise DataError(f"{self.path}: is a folder, not a .npz file") from None
        except zipfile.BadZipFile:
            raise DataError(f"{self.path}: damaged, or not a .npz file") from None
        self.names = [name.removesuffix(".npy") for name in self._zip.namelist()]

    def __enter__(self) -> "Npz":
        return self

    def __exit__(self, *error: object) -> None:
        self._zip.close()

    def header(self, name: str) -> tuple[tuple[int, ...], np.dtype]:
        """The shape and type of an array, without reading it."""
        with self._member(name) as (shape, dtype, _):
            return shape, dtype

    def array(self, name: str) -> np.ndarray:
        """A whole array; for labels and ids."""
        return np.concatenate(list(self.blocks(name)))

    def blocks(self, name: str) -> Iterator[np.ndarray]:
        """An array as consecutive blocks of rows."""
        with self._member(name) as (shape, dtype, file):
            if not shape:
                raise DataError(f"{self.path}: {name} is a single number, not an array of rows")
            row = dtype.itemsize * math.prod(shape[1:])
            step = max(_BLOCK_BYTES // max(row, 1), 1)
            if not shape[0]:
                yield np.empty(shape, dtype)
            for start in range(0, shape[0], step):
                rows = min(step, shape[0] - start)
                data = self._read(name, file, rows * row)
                yield np.frombuffer(data, dtype).reshape(rows, *shape[1:])

    def _read(self, name: str, file: zipfile.ZipExtFile, size: int) -> bytes:
        try:
            data = file.read(size)
        except _DAMAGE as error:
            raise DataError(f"{self.path}: {name} is damaged: {error}") from None
        if len(data) < size:
            raise DataError(f"{self.path}: {name} is truncated")
        return data

    def _member(self, name: str) -> "_Member":
        if name not in self.names:
            raise DataError(f"{self.path}: no array {name!r}{nearest(name, self.names)}")
        return _Member(self.path, self._zip, name)


class _Member:
    """One array, opened just behind its header."""

    def __init__(self, path: Path, archive: zipfile.ZipFile, name: str) -> None:
        self._path, self._archive, self._name = path, archive, name

    def __enter__(self) -> tuple[tuple[int, ...], np.dtype, zipfile.ZipExtFile]:
        inside = f"{self._name}.npy"
        try:
            self._file: zipfile.ZipExtFile = self._archive.open(inside)  # type: ignore[assignment]
        except _DAMAGE as error:
            raise DataError(f"{self._path}: {self._name} is damaged: {error}") from None
        try:
            return self._header(self._archive.getinfo(inside))
        except BaseException:
            self._file.close()
            raise

    def _header(self, member: zipfile.ZipInfo) -> tuple[tuple[int, ...], np.dtype, zipfile.ZipExtFile]:
        where = f"{self._path}: {self._name}"
        check_unpacked(where, member.file_size, member.compress_size, "if it is right, save it by np.savez, unpacked")
        try:
            version = npy.read_magic(self._file)
            read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            shape, fortran, dtype = read(self._file)
        except _DAMAGE as error:
            said = str(error).partition("\n")[0]
            raise DataError(f"{where} is damaged: {said or type(error).__name__}") from None
        if dtype.hasobject:
            raise DataError(f"{where} holds Python objects, which are never loaded; store numbers")
        if not dtype.itemsize or dtype.kind == "V":
            raise DataError(f"{where} holds {dtype}, neither numbers nor names")
        if dtype.kind in "SU" and dtype.itemsize > LONGEST_NAME * (4 if dtype.kind == "U" else 1):
            raise DataError(
                f"{where} holds names of up to {dtype.itemsize:,} bytes; {LONGEST_NAME:,} characters are enough"
            )
        if fortran and len(shape) > 1:
            raise DataError(f"{where} is stored by columns; save np.ascontiguousarray of it")
        size, there = math.prod(shape) * dtype.itemsize, member.file_size - self._file.tell()
        if min(shape, default=0) < 0 or size > there:
            raise DataError(f"{where} is truncated: its shape {shape} does not fit its {there:,} bytes")
        if size < there or (shape and not size and shape[0]):
            raise DataError(f"{where} is damaged: its shape {shape} does not fit its {there:,} bytes")
        return shape, dtype, self._file

    def __exit__(self, *error: object) -> None:
        self._file.close()
