"""Binary sources read strictly: `.npz` arrays without unpickling, `tf.train.Example` messages
without TensorFlow.

Both know how much a file may ask for: generous for data that people have; more is an accident or an
attack.
"""

import math
import tempfile
import zipfile
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from fedbandit.core.errors import DataError
from fedbandit.core.parts import nearest
from fedbandit.data.validation import NPY_ERRORS, read_npy_header

MOST_ACTIONS = 1_000_000


LONGEST_NAME = 1024  # characters of a client's or a label's name


ALWAYS_UNPACKED = 1 << 30  # bytes, however small they were packed


MOST_UNPACKED = 200  # times the packed size; published files unpack to 20 times theirs, a bomb to 1,000 and more


def check_unpacked(
    where: str, unpacked: int, packed: int, advice: str, at_least: bool = False
) -> None:
    """Refuse what is out of all proportion to its packed size, before it fills the disk."""
    if unpacked > max(ALWAYS_UNPACKED, MOST_UNPACKED * packed):
        size = f"{'more than ' if at_least else ''}{unpacked / 1e6:,.1f} MB"
        raise DataError(
            f"{where} unpacks to {size}, {unpacked // max(packed, 1):,} times its size; {advice}"
        )


_BLOCK_BYTES = 8 << 20


_DAMAGE = (zipfile.BadZipFile, zlib.error, NotImplementedError, KeyError, RuntimeError, *NPY_ERRORS)


class Npz:
    """An open `.npz` file whose arrays are read block by block, and never unpickled; a context
    manager.

    Names are without `.npy`. An array that is stored by columns is turned by way of a nameless
    file, so that memory stays that of one block.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        try:
            self._zip = zipfile.ZipFile(self.path)
        except FileNotFoundError:
            raise DataError(f"{self.path}: no such file") from None
        except IsADirectoryError:
            raise DataError(f"{self.path}: is a folder, not a .npz file") from None
        except _DAMAGE:
            raise DataError(f"{self.path}: damaged, or not a .npz file") from None
        self.names = [name.removesuffix(".npy") for name in self._zip.namelist()]

    def __enter__(self) -> "Npz":
        return self

    def __exit__(self, *error: object) -> None:
        self._zip.close()

    def header(self, name: str) -> tuple[tuple[int, ...], np.dtype]:
        """The shape and type of an array, without reading it."""
        with self._member(name) as (shape, dtype, *_):
            return shape, dtype

    def array(self, name: str) -> np.ndarray:
        """A whole array; for labels and ids."""
        return np.concatenate(list(self.blocks(name)))

    def blocks(self, name: str) -> Iterator[np.ndarray]:
        """An array as consecutive blocks of rows."""
        with self._member(name) as (shape, dtype, file, by_columns):
            if not shape:
                raise DataError(f"{self.path}: {name} is a single number, not an array of rows")
            row = dtype.itemsize * math.prod(shape[1:])
            step = max(_BLOCK_BYTES // max(row, 1), 1)
            if not shape[0]:
                yield np.empty(shape, dtype)
            elif by_columns:
                yield from self._turned(name, file, shape, dtype, step)
                return
            for start in range(0, shape[0], step):
                rows = min(step, shape[0] - start)
                data = self._read(name, file, rows * row)
                yield np.frombuffer(data, dtype).reshape(rows, *shape[1:])

    def _turned(
        self,
        name: str,
        file: IO[bytes],
        shape: tuple[int, ...],
        dtype: np.dtype,
        step: int,
    ) -> Iterator[np.ndarray]:
        """Blocks of rows of an array that is stored by columns: by way of a nameless file, not of
        memory.
        """
        with tempfile.TemporaryFile() as copy:
            left = dtype.itemsize * math.prod(shape)
            while left:
                data = self._read(name, file, min(left, _BLOCK_BYTES))
                copy.write(data)
                left -= len(data)
            copy.flush()
            for start in range(0, shape[0], step):
                # Mapped again for every block, so that pages which were read stop counting as this process's memory.
                columns = np.memmap(copy, dtype, "r", shape=shape, order="F")
                yield np.ascontiguousarray(columns[start : start + step])

    def _read(self, name: str, file: IO[bytes], size: int) -> bytes:
        try:
            data = file.read(size)
        except _DAMAGE as error:
            raise DataError(f"{self.path}: {name} is damaged: {error}") from None
        if len(data) < size:
            raise DataError(f"{self.path}: {name} is truncated")
        return data

    @contextmanager
    def _member(self, name: str) -> Iterator[tuple[tuple[int, ...], np.dtype, IO[bytes], bool]]:
        """An array opened just behind its header: its shape and type, the file, and whether it is
        stored by columns.
        """
        if name not in self.names:
            raise DataError(f"{self.path}: no array {name!r}{nearest(name, self.names)}")
        member = self._zip.getinfo(f"{name}.npy")
        try:
            file = self._zip.open(member)
        except _DAMAGE as error:
            raise DataError(f"{self.path}: {name} is damaged: {error}") from None
        with file:
            shape, dtype, fortran = _header(f"{self.path}: {name}", file, member)
            yield shape, dtype, file, fortran


def _header(
    where: str, file: IO[bytes], member: zipfile.ZipInfo
) -> tuple[tuple[int, ...], np.dtype, bool]:
    """Shape, type and order of the array that begins here; whatever is not plain numbers or names
    is refused.
    """
    check_unpacked(
        where,
        member.file_size,
        member.compress_size,
        "if it is right, save it by np.savez, unpacked",
    )
    try:
        shape, fortran, dtype = read_npy_header(file)
    except _DAMAGE as error:  # of the array's header, or of the archive around it
        raise DataError(f"{where} is damaged: {str(error) or type(error).__name__}") from None
    if dtype.hasobject:
        raise DataError(f"{where} holds Python objects, which are never loaded; store numbers")
    if not dtype.itemsize or dtype.kind == "V":
        raise DataError(f"{where} holds {dtype}, neither numbers nor names")
    if dtype.kind in "SU" and dtype.itemsize > LONGEST_NAME * (4 if dtype.kind == "U" else 1):
        raise DataError(
            f"{where} holds names of up to {dtype.itemsize:,} bytes; {LONGEST_NAME:,} characters are enough"
        )
    size, there = math.prod(shape) * dtype.itemsize, member.file_size - file.tell()
    if min(shape, default=0) < 0 or size > there:
        raise DataError(f"{where} is truncated: its shape {shape} does not fit its {there:,} bytes")
    if size < there or (shape and not size and shape[0]):
        raise DataError(f"{where} is damaged: its shape {shape} does not fit its {there:,} bytes")
    return shape, dtype, fortran and len(shape) > 1


Feature = list[bytes] | np.ndarray


"""A list of byte strings, float32 [n] or int64 [n]; an unset feature is an empty list."""


_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3


class NotAnExample(ValueError):
    """The bytes are not a serialized `tf.train.Example`; says where they stop making sense."""


def parse_example(data: bytes, wanted: Collection[str] | None = None) -> dict[str, Feature]:
    """The features of one serialized Example by name, all or only those wanted; raises
    `NotAnExample`.
    """
    features: dict[str, Feature] = {}
    for number, wire, start, end in _fields(data, 0, len(data)):
        if number == 1 and wire == _BYTES:
            for inner, inner_wire, first, last in _fields(data, start, end):
                if inner == 1 and inner_wire == _BYTES:
                    name, ranges = _map_entry(data, first, last)
                    if wanted is None or name in wanted:
                        features[name] = _feature(data, ranges)
    return features


def _map_entry(data: bytes, start: int, end: int) -> tuple[str, list[tuple[int, int]]]:
    """A feature's name and where its value stands; protobuf allows it in several pieces."""
    key, ranges = b"", []
    for number, wire, first, last in _fields(data, start, end):
        if number == 1 and wire == _BYTES:
            key = data[first:last]
        elif number == 2 and wire == _BYTES:
            ranges.append((first, last))
    try:
        return key.decode(), ranges
    except UnicodeDecodeError:
        raise NotAnExample(f"a feature name near byte {start} is not UTF-8") from None


def _feature(data: bytes, ranges: list[tuple[int, int]]) -> Feature:
    kind = 0
    parts: list[tuple[int, int]] = []
    for start, end in ranges:
        for number, wire, first, last in _fields(data, start, end):
            if wire == _BYTES and number in (_BYTES_LIST, _FLOAT_LIST, _INT64_LIST):
                if number != kind:  # only one kind is set; a later one replaces an earlier one
                    kind, parts = number, []
                parts.append((first, last))
    if kind == _BYTES_LIST:
        return [value for first, last in parts for value in _bytes_list(data, first, last)]
    if kind == _FLOAT_LIST:
        return _joined([_float_list(data, first, last) for first, last in parts], np.float32)
    if kind == _INT64_LIST:
        return _joined([_int64_list(data, first, last) for first, last in parts], np.int64)
    return []


def _joined(arrays: list[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate([np.empty(0, dtype), *arrays])


def _bytes_list(data: bytes, start: int, end: int) -> list[bytes]:
    fields = _fields(data, start, end)
    return [
        data[first:last] for number, wire, first, last in fields if number == 1 and wire == _BYTES
    ]


def _float_list(data: bytes, start: int, end: int) -> np.ndarray:
    arrays = []
    for number, wire, first, last in _fields(data, start, end):
        if number == 1 and wire in (_BYTES, _FIXED32):  # packed, or one by one
            if (last - first) % 4:
                raise NotAnExample(f"the packed floats at byte {first} are cut off")
            arrays.append(np.frombuffer(data, "<f4", (last - first) // 4, first))
    return _joined(arrays, np.float32)


def _int64_list(data: bytes, start: int, end: int) -> np.ndarray:
    values: list[int] = []
    for number, wire, first, last in _fields(data, start, end):
        if number == 1 and wire in (_BYTES, _VARINT):
            position = first
            while position < last:
                value, position = _varint(data, position, last)
                values.append(value)
    return np.array(values, np.uint64).astype(
        np.int64
    )  # negative numbers travel as two's complement


def _fields(data: bytes, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """The fields of a message in `data[start:end]`: number, wire type, and where the value begins
    and ends.
    """
    position = start
    while position < end:
        tag = data[position]
        if tag < 0x80:  # nearly all tags and lengths are one byte: worth a short cut
            position += 1
        else:
            tag, position = _varint(data, position, end)
        number, wire = tag >> 3, tag & 7
        if not 0 < number < 1 << 29:
            raise NotAnExample(f"field number {number} at byte {position}")
        if wire == _BYTES:
            if position < end and data[position] < 0x80:
                length = data[position]
                position += 1
            else:
                length, position = _varint(data, position, end)
        elif wire == _VARINT:
            length = _varint(data, position, end)[1] - position
        elif wire == _FIXED32:
            length = 4
        elif wire == _FIXED64:
            length = 8
        else:
            raise NotAnExample(f"wire type {wire} at byte {position}")
        if length > end - position:
            raise NotAnExample(
                f"cut off at byte {position}: {length} bytes announced, {end - position} left"
            )
        yield number, wire, position, position + length
        position += length


def _varint(data: bytes, position: int, end: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= end:
            raise NotAnExample(f"cut off within a number at byte {position}")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, position
    raise NotAnExample(f"a number longer than ten bytes at byte {position}")
