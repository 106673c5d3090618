"""Arrays in a `.npz` file: features or images, one label per row (or a 0/1 matrix), one client per
row.

Features are read a block at a time; labels and clients are held in memory.
"""

import math
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from fedbandit.core.errors import ConfigError, DataError, explaining, refuse
from fedbandit.core.parts import nearest
from fedbandit.core.progress import SILENT, Advance, ProgressReporter
from fedbandit.core.ragged import Ragged
from fedbandit.data.importers import (
    LONGEST_NAME,
    MOST_ACTIONS,
    HoldOut,
    Rows,
    check_counts,
    check_unpacked,
    one_each,
    write_rows,
)
from fedbandit.data.text import EMNIST_ACTIONS, EMNIST_LOWER_CASE, case_map, in_natural_order
from fedbandit.data.validation import NPY_ERRORS, read_npy_header
from fedbandit.data.writer import DatasetWriter, check_target

_EMNIST_SHAPE = (28, 28)


@dataclass(frozen=True, kw_only=True)
class ArrayOptions:
    """Which arrays mean what; the names are those of the command line's options."""

    features: str
    labels: str
    clients: str
    invert: bool = False  # ink as high values becomes ink as low values, as in EMNIST
    case_map: bool | None = (
        None  # None: yes for 62 classes of 28x28 images, or labels named 0-9A-Za-z
    )
    actions: int | None = (
        None  # how many classes whole-number labels have; None: the largest plus one
    )
    test_fraction: float = 0.1

    def __post_init__(self) -> None:
        check_counts(actions=self.actions)
        HoldOut(self.test_fraction, by_client=False)


def import_arrays(
    path: Path | str, out: Path | str, options: ArrayOptions, progress: ProgressReporter = SILENT
) -> Path:
    """Import a `.npz` file, and return the folder of the data set.

    The arrays that the options name have the same number of rows: features [n, ...], labels [n] or
    a 0/1 matrix [n, K] for several labels a row, and clients [n]. `uint8` features are pixels,
    stored as they are and read as value/255; other numbers become float32. Examples are held out
    within each client.
    """
    check_target(out)
    with _Npz(path) as arrays:
        shape, dtype = arrays.header(options.features)
        clients = _client_names(arrays, options.clients)
        labels, names = _read_labels(arrays, options)
        if not len(shape) or not shape[0] == len(clients) == len(labels):
            counts = f"{shape[:1]}, {len(labels)} and {len(clients)}"
            raise DataError(
                f"{path}: features, labels and clients have {counts} rows; they must have the same number"
            )
        shape = (
            shape[:-1] if len(shape) == 4 and shape[-1] == 1 else shape
        )  # one channel says nothing
        actions, lower_case = _name_actions(names, shape[1:], options.case_map)
        pixels = dtype == np.uint8
        hold_out = HoldOut(options.test_fraction, by_client=False)
        source = {"importer": "arrays", "file": arrays.path.name, "inverted": options.invert}

        def batches(advance: Advance) -> Iterator[Rows]:
            start = 0
            for block in arrays.blocks(options.features):
                block = block.reshape(len(block), *shape[1:])
                features = block if pixels else _as_float32(block, options.features)
                if options.invert:
                    features = _invert(features, options.features)
                stop = start + len(block)
                yield Rows(clients[start:stop], features.__getitem__, labels.slice(start, stop))
                start = stop
                advance(len(block))

        with (
            DatasetWriter(
                out,
                kind="dense",
                shape=shape[1:],
                actions=actions,
                multilabel=arrays.header(options.labels)[0][1:] != (),
                lower_case=lower_case,
                scale=1 / 255 if pixels else 1.0,
                dtype=np.uint8 if pixels else np.float32,
                source=source,
            ) as writer,
            progress.task("Writing examples", len(clients)) as advance,
        ):
            return write_rows(writer, batches(advance), hold_out)


def _client_names(arrays: "_Npz", name: str) -> list[str]:
    """The client of every row by name; whole numbers are named by their digits."""
    values = arrays.array(name)
    if values.ndim != 1 or values.dtype.kind not in "iuUS":
        raise DataError(f"{arrays.path}: {name} must be one whole number or name per row")
    return [str(value) for value in _decoded(values, f"{arrays.path}: {name}").tolist()]


def _decoded(values: np.ndarray, where: str) -> np.ndarray:
    """Names stored as bytes in UTF-8 become text; other arrays stay as they are."""
    if values.dtype.kind != "S":
        return values
    try:
        return np.char.decode(values, "utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: {error.object!r} is not text in UTF-8") from None


def _read_labels(arrays: "_Npz", options: ArrayOptions) -> tuple[Ragged, list[str]]:
    """The labels of every row, and the names of all.

    Columns of a 0/1 matrix and whole numbers are named by their digits; names keep theirs, in
    natural order. A number outside the classes is refused with its row.
    """
    values = arrays.array(options.labels)
    where = f"{arrays.path}: {options.labels}"
    if values.ndim == 2:
        if not np.isin(values, (0, 1)).all():
            raise DataError(f"{where} has two dimensions, so it must hold only 0 and 1")
        _no_number_of(options, f"{options.labels} has a column for each")
        rows, columns = np.nonzero(values)
        offsets = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(values)))])
        names = [str(i) for i in range(values.shape[1])]
        return Ragged(offsets, columns.astype(np.int32)), names
    if values.ndim != 1 or values.dtype.kind not in "iuUS" or not len(values):
        raise DataError(f"{where} must be one whole number or name per row, or a 0/1 matrix")
    if values.dtype.kind in "US":
        _no_number_of(options, f"{options.labels} names them")
        unique, inverse = np.unique(_decoded(values, where), return_inverse=True)
        actions = in_natural_order(str(name) for name in unique)
        position = {name: i for i, name in enumerate(actions)}
        ids = np.array([position[str(name)] for name in unique], np.int32)[inverse]
    else:
        largest = int(np.argmax(values))
        if options.actions is None and values[largest] >= MOST_ACTIONS:
            beyond = f"is larger than any data set has actions ({MOST_ACTIONS:,})"
            raise DataError(f"{where}, row {largest}: label {values[largest]} {beyond}")
        count = options.actions or int(values[largest]) + 1
        bad = np.flatnonzero((values < 0) | (values >= count))
        if len(bad):
            raise DataError(
                f"{where}, row {bad[0]}: label {values[bad[0]]} is outside 0..{count - 1}"
            )
        actions, ids = [str(i) for i in range(count)], values.astype(np.int32)
    return one_each(ids), actions


def _no_number_of(options: ArrayOptions, because: str) -> None:
    """Refuse the option `actions` where the labels themselves say how many there are."""
    if options.actions is not None:
        raise ConfigError(f"actions: {because}; leave it out, or give labels as whole numbers")


def _name_actions(
    actions: list[str], shape: tuple[int, ...], wanted: bool | None
) -> tuple[list[str], dict[int, int]]:
    """EMNIST's names and case map for data that counts its 62 characters as EMNIST does."""
    if wanted and len(actions) != len(EMNIST_ACTIONS):
        raise ConfigError(
            f"case-map: needs the 62 classes 0-9, A-Z, a-z, found {len(actions)} classes"
        )
    numbered = actions == [str(i) for i in range(len(EMNIST_ACTIONS))]
    if wanted or (wanted is None and numbered and shape == _EMNIST_SHAPE):
        return list(EMNIST_ACTIONS), dict(EMNIST_LOWER_CASE)
    return actions, {} if wanted is False else case_map(actions)


def _as_float32(block: np.ndarray, name: str) -> np.ndarray:
    """A block of numbers as float32 [n, ...]; refused where it holds anything else."""
    if block.dtype.kind not in "fiub":
        raise DataError(f"features {name} must be numbers, found {block.dtype}")
    with np.errstate(
        over="ignore"
    ):  # what overflows becomes infinite and is refused with its client and row
        return block.astype(np.float32)


def _invert(features: np.ndarray, name: str) -> np.ndarray:
    """Pixels with ink and background exchanged: 255 - x for bytes, 1 - x for floats."""
    if features.dtype == np.uint8:
        return 255 - features
    if (
        (features < 0) | (features > 1)
    ).any():  # NaN passes here and is refused with its client and row
        raise DataError(f"features {name}: --invert needs uint8 pixels or values in [0, 1]")
    return 1 - features


_BLOCK_BYTES = 8 << 20
_ADVICE = "if it is right, save it by np.savez, unpacked"
_DAMAGE = (zipfile.BadZipFile, zlib.error, NotImplementedError, KeyError, RuntimeError, *NPY_ERRORS)


class _Npz:
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

    def __enter__(self) -> "_Npz":
        return self

    def __exit__(self, *error: object) -> None:
        self._zip.close()

    def header(self, name: str) -> tuple[tuple[int, ...], np.dtype]:
        """The shape and type of an array, without reading it."""
        with self._member(name) as (shape, dtype, *_):
            return shape, dtype

    def array(self, name: str) -> np.ndarray:
        """A whole array; for labels and ids, which take little beside the features."""
        shape, dtype = self.header(name)
        size, whole = math.prod(shape) * dtype.itemsize, self.path.stat().st_size
        check_unpacked(f"{self.path}: {name}", size, whole, _ADVICE, always=_BLOCK_BYTES)
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
        """The next `size` bytes of an array; `DataError` where they are damaged or missing."""
        with explaining(f"{self.path}: {name} is damaged", *_DAMAGE):
            data = file.read(size)
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
        with explaining(f"{self.path}: {name} is damaged", *_DAMAGE):
            file = self._zip.open(member)
        with file:
            shape, dtype, fortran = _array_header(f"{self.path}: {name}", file, member)
            yield shape, dtype, file, fortran


def _array_header(
    where: str, file: IO[bytes], member: zipfile.ZipInfo
) -> tuple[tuple[int, ...], np.dtype, bool]:
    """Shape, type and order of the array that begins here; whatever is not plain numbers or names
    is refused.
    """
    check_unpacked(where, member.file_size, member.compress_size, _ADVICE)
    with explaining(f"{where} is damaged", *_DAMAGE):  # its header, or the archive around it
        shape, fortran, dtype = read_npy_header(file)
    longest = LONGEST_NAME * {"S": 1, "U": 4}.get(dtype.kind, dtype.itemsize)
    size, there = math.prod(shape) * dtype.itemsize, member.file_size - file.tell()
    negative, fit = min(shape, default=0) < 0, f"its shape {shape} does not fit its {there:,} bytes"
    names = f"names of up to {dtype.itemsize:,} bytes; {LONGEST_NAME:,} characters are enough"
    refuse(
        (dtype.hasobject, f"{where} holds Python objects, which are never loaded; store numbers"),
        (
            not dtype.itemsize or dtype.kind == "V",
            f"{where} holds {dtype}, neither numbers nor names",
        ),
        (dtype.itemsize > longest, f"{where} holds {names}"),
        (negative or size > there, f"{where} is truncated: {fit}"),
        (size < there or (shape and not size and shape[0]), f"{where} is damaged: {fit}"),
        error=DataError,
    )
    return shape, dtype, fortran and len(shape) > 1
