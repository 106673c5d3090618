"""Validation of a data set folder: types, shapes, sizes and checksums of its files, and the numbers
in them.

Rules say which numbers a file may hold; they are applied while every byte is read once. A folder
that was verified and has not changed since is known by a stamp in the cache folder, so that a large
one opens in milliseconds; a small one is verified whenever it is opened. What has passed may be
trusted by the kernels: they check nothing again. Knows nothing of what the numbers mean.
"""

import hashlib
import json
import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from fedbandit.core.errors import DataError, explaining, refuse
from fedbandit.core.files import open_regular, read_json, to_json, write_text
from fedbandit.core.progress import SILENT, ProgressReporter, to_stderr

_LARGEST = float(np.finfo(np.float32).max)
_SMALLEST = float(np.finfo(np.float32).smallest_subnormal)
ValueRule = Callable[[np.ndarray, np.ndarray], tuple[int, str] | None]
"""A rule for the numbers of one array, applied block by block while the file is read.

`rule(block, before)` gives the place of the first wrong entry and its fault in words, or None.
`before` holds the last entry of the block before, or nothing: rules keep nothing between blocks.
"""


def within(low: float, high: float, fault: str) -> ValueRule:
    """Numbers from `low` to `high`, both included; NaN never is."""

    def rule(block: np.ndarray, before: np.ndarray) -> tuple[int, str] | None:
        # Smallest and largest take no further memory; NaN comes through both and compares as false.
        if block.min() >= low and block.max() <= high:
            return None
        place = int(np.argmin((block >= low) & (block <= high)))
        return place, f"{block[place]} is {fault}"

    return rule


FINITE = within(-_LARGEST, _LARGEST, "not finite")
PROPENSITY = within(_SMALLEST, 1.0, "outside (0, 1]")


def below(number: int) -> ValueRule:
    """Whole numbers from 0 to number - 1."""
    return within(0, number - 1, f"outside 0..{number - 1}")


def ascending(block: np.ndarray, before: np.ndarray) -> tuple[int, str] | None:
    """Offsets: where rows begin, from 0, never descending; the last is the length of the whole.

    A reader slices `values[offsets[i]:offsets[i + 1]]`, so a wrong offset would read the memory
    behind an array.
    """
    wrong = np.append(
        block[0] < before[0] if len(before) else block[0] != 0, block[1:] < block[:-1]
    )
    if not wrong.any():
        return None
    place = int(np.argmax(wrong))
    return place, f"offset {block[place]} does not follow: offsets ascend from 0"


def item_names(block: np.ndarray, before: np.ndarray) -> tuple[int, str] | None:
    """Names in UTF-8, none empty, in any order."""
    good = block != b""
    place = None if good.all() else int(np.argmin(good))
    if place is None:
        # Each behind a zero byte, so that half a letter at the end of one cannot be completed by the next.
        letters = np.zeros((len(block), block.dtype.itemsize + 1), np.uint8)
        letters[:, 1:] = block.view(np.uint8).reshape(len(block), -1)
        try:
            letters.tobytes().decode("utf-8")
        except UnicodeDecodeError as error:
            place = error.start // letters.shape[1]
    fault = "is empty, not UTF-8 or not in ascending order"
    return None if place is None else (place, f"{block[place]!r} {fault}")


def client_ids(block: np.ndarray, before: np.ndarray) -> tuple[int, str] | None:
    """Client ids in UTF-8, none empty, strictly ascending.

    The order makes the place of a client in its split a function of the ids alone, and two clients
    of one id impossible.
    """
    descending = np.append(before, block[:-1]) >= block[1 - len(before) :]
    if descending.any():
        place = int(np.argmax(descending)) + 1 - len(before)
        return place, f"{block[place]!r} is not in ascending order"
    return item_names(block, before)


AGAIN = "import the data set again"
_LARGEST_JSON = 1 << 28  # bytes
# What numpy raises for an array's header that was damaged, or made up.
NPY_ERRORS = (
    ValueError,
    TypeError,
    SyntaxError,
    OverflowError,
    EOFError,
    MemoryError,
    RecursionError,
    TokenError,
)


def read_npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, whether stored by columns, and type of the `.npy` array that begins here; never
    unpickles.

    `ValueError` says in one line what is wrong with it.
    """
    try:
        version = npy.read_magic(file)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, by_columns, dtype = read(file)
    except NPY_ERRORS as error:
        said = str(error).partition("\n")[0]
        raise ValueError(said or type(error).__name__) from None
    return shape, by_columns, dtype


@dataclass(frozen=True)
class FileState:
    """Size, times and inode of a file; other contents have another state, unless a disk is
    failing.
    """

    size: int
    modified: int  # nanoseconds
    changed: int  # nanoseconds; also moved by renaming, linking and other permissions
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> "FileState":
        """The state that `os.stat` has reported."""
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


@dataclass(frozen=True)
class Part:
    """An array of the folder: what it is made of, where its data begins, and the rule its numbers
    must follow.
    """

    name: str
    dtype: np.dtype
    width: int  # numbers a row
    begins: int
    rule: ValueRule | None


class FolderReader:
    """Opens the files of one data set folder and remembers each one's state at that moment.

    `array` maps a `.npy` file after checking its type, shape and size against what the caller
    expects; `parts` then lists what was mapped with the rule of each, for `verify` to read through.
    `states` are what a run compares with later, to notice a file that changes under it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.states: dict[str, FileState] = {}
        self.parts: list[Part] = []

    def json(self, name: str) -> Any:
        """The value in a JSON file of the folder.

        `DataError` where the file is missing, too large to be a header, or not JSON.
        """
        with self._open(name) as file:
            if self.states[name].size > _LARGEST_JSON:
                raise DataError(f"{self.folder / name}: {self.states[name].size:,} bytes; {AGAIN}")
            with explaining(f"{self.folder / name}: unreadable", ValueError, RecursionError):
                return json.loads(file.read())

    def look_at(self, name: str) -> bool:
        """Remember a file that is not mapped; False if there is none."""
        if not (self.folder / name).exists():
            return False
        self._open(name).close()
        return True

    def array(
        self,
        name: str,
        types: Collection[str],
        shape: tuple[int | None, ...],
        rule: ValueRule | None = None,
    ) -> np.ndarray:
        """A mapped array of one of these types and of this shape, where None stands for any length.

        `name` is the path below the folder, such as `train/offsets.npy`. Types are numpy's names,
        or `bytes` for ids of any width. Arrays of Python objects, of another byte order, or stored
        by columns are refused; so is a file with bytes missing or left over.
        """
        path = self.folder / name
        with self._open(name) as file:
            try:
                found, by_columns, dtype = read_npy_header(file)
            except ValueError as error:
                raise DataError(f"{path}: damaged: {error}; {AGAIN}") from None
            kind = dtype.str if dtype.kind == "S" or not dtype.isnative else dtype.name
            usable = dtype.itemsize and not dtype.hasobject and _is_one_of(dtype, types)
            expected = ", ".join("any" if side is None else str(side) for side in shape)
            begins, size = file.tell(), math.prod(found) * dtype.itemsize
            excess = self.states[name].size - begins - size
            wrong = (
                (not usable, f"holds {kind} where {' or '.join(types)} is expected"),
                (by_columns and len(found) > 1, "is stored by columns"),
                (not _fits(found, shape), f"has shape {found} where ({expected}) is expected"),
                (excess < 0, f"truncated: {-excess:,} bytes are missing"),
                (excess > 0, f"has {excess:,} bytes too many"),
            )
            refuse(*((bad, f"{path}: {what}; {AGAIN}") for bad, what in wrong), error=DataError)
            self.parts.append(Part(name, dtype, math.prod(found[1:]), begins, rule))
            if not size:
                return np.empty(found, dtype)
            # Mapped from the open file: the one whose state was taken, even if another has taken its name since.
            pages = mmap.mmap(file.fileno(), begins + size, access=mmap.ACCESS_READ)
            return np.ndarray(found, dtype, pages, begins)

    def _open(self, name: str) -> IO[bytes]:
        path = self.folder / name
        try:
            file = open_regular(path)
        except FileNotFoundError:
            raise DataError(f"{path.parent}: {path.name} is missing; {AGAIN}") from None
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}; {AGAIN}") from None
        self.states[name] = FileState.of(os.fstat(file.fileno()))
        return file


def _is_one_of(dtype: np.dtype, types: Collection[str]) -> bool:
    """Whether a type has one of these names; `bytes` stands for ids of any width."""
    return any(dtype.kind == "S" if name == "bytes" else dtype == np.dtype(name) for name in types)


def _fits(found: tuple[int, ...], shape: tuple[int | None, ...]) -> bool:
    """Whether a shape is the expected one, where None stands for any length."""
    return len(found) == len(shape) and all(
        side >= 0 and wanted in (None, side) for side, wanted in zip(found, shape, strict=True)
    )


def cache_folder() -> Path:
    """Where embedded data sets and pre-trained models are kept: $FEDBANDIT_CACHE, or the user's
    cache folder.
    """
    if chosen := os.environ.get("FEDBANDIT_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedbandit"


CHECKSUMS = "checksums.json"
_STAMP = 1  # raised when more is verified than before
_SMALL = 8 << 20  # bytes that are read again at every opening: they take a few milliseconds
_LONG = 1 << 28  # bytes whose reading is worth a line about its progress
_BLOCK = 1 << 20
_THREADS = 4
_CLOCK_TICK = 100_000_000  # nanoseconds within which two changes of a file may carry the same time


def ensure_verified(
    reader: FolderReader, *, again: bool = False, progress: ProgressReporter | None = None
) -> None:
    """Read all files that the reader has opened, unless they are as they were when last verified.

    Folders up to 8 MB are read every time. A larger one leaves a stamp: size, times and inode of
    each file. The stamp is written only if no file changed within a clock tick of the reading,
    since two changes within one tick cannot be told apart. `again` reads in any case, as `data
    info` does.
    """
    total = sum(state.size for state in reader.states.values())
    stamp = _stamp_path(reader.folder)
    if total > _SMALL and not again and read_json(stamp) == _stamp_of(reader):
        return
    started = time.time_ns()
    verify(reader, progress or (to_stderr() if total > _LONG else SILENT))
    settled = all(started - state.changed > _CLOCK_TICK for state in reader.states.values())
    if total > _SMALL and settled:
        # Without a cache to write to, it is read again next time.
        with suppress(OSError):
            stamp.parent.mkdir(parents=True, exist_ok=True)
            write_text(stamp, to_json(_stamp_of(reader)) + "\n")


def verify(reader: FolderReader, progress: ProgressReporter = SILENT) -> None:
    """Read all files that the reader has opened, four at a time; the largest first.

    `DataError` names the first file that is wrong, and the entry: a checksum that does not match, a
    number against its rule, or a file that was changed or cut while it was read.
    """
    sums = _checksums(reader)
    parts = {part.name: part for part in reader.parts}
    names = sorted(reader.states.keys() - {CHECKSUMS}, key=lambda name: -reader.states[name].size)
    stop, lock = threading.Event(), threading.Lock()
    total = sum(reader.states[name].size for name in names)
    with progress.task(f"Verifying {reader.folder.name}", total, unit="B") as advance:

        def advanced(amount: int) -> None:
            if stop.is_set():
                raise InterruptedError
            with lock:
                advance(amount)

        def read(name: str) -> None:
            _read(reader, name, parts.get(name), sums[name], advanced)

        with ThreadPoolExecutor(_THREADS) as threads:
            try:
                list(threads.map(read, names))
            finally:
                stop.set()  # the others need not finish if one is wrong, or the user has had enough


def _read(
    reader: FolderReader,
    name: str,
    part: Part | None,
    expected: str,
    advance: Callable[[int], None],
) -> None:
    """Read one file by plain reads: a file that is cut meanwhile is an error then, not a signal."""
    path, state = reader.folder / name, reader.states[name]
    digest = hashlib.sha256()
    try:
        with open(path, "rb", buffering=0) as file:
            if FileState.of(os.fstat(file.fileno())) != state:
                raise DataError(f"{path}: was changed while it was being opened")
            left = state.size
            if part is not None:
                digest.update(file.read(part.begins))
                left -= part.begins
            item = 1 if part is None else part.dtype.itemsize
            buffer = np.empty(max(_BLOCK // item, 1) * item, np.uint8)
            before = np.empty(0, np.uint8 if part is None else part.dtype)
            position = 0
            while left:
                block = buffer[: min(len(buffer), left)]
                if file.readinto(block.data) != len(block):
                    raise DataError(f"{path}: was truncated while it was being read")
                digest.update(block.data)
                if part is not None and part.rule is not None:
                    entries = block.view(part.dtype)
                    if wrong := part.rule(entries, before):
                        entry, fault = position + wrong[0], wrong[1]
                        row = f"entry {entry}" if part.width == 1 else f"row {entry // part.width}"
                        raise DataError(f"{path}, {row}: {fault}; {AGAIN}")
                    before = entries[-1:].copy()
                position += len(block) // item
                left -= len(block)
                advance(len(block))
            if FileState.of(os.fstat(file.fileno())) != state:
                raise DataError(f"{path}: was changed while it was being read")
    except InterruptedError:
        return
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    if digest.hexdigest() != expected:
        raise DataError(
            f"{path}: its checksum is not the one that was written: it was damaged or changed; {AGAIN}"
        )


def write_checksums(folder: Path, sums: Mapping[str, str]) -> None:
    """Keep the SHA-256 of every file of a data set beside them, in `checksums.json`.

    `sums` has a hexadecimal digest for each path below the folder.
    """
    with open(folder / CHECKSUMS, "w", encoding="utf-8") as file:
        json.dump({"sha256": dict(sorted(sums.items()))}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _checksums(reader: FolderReader) -> dict[str, str]:
    """The SHA-256 of every file, which must be exactly those that were opened."""
    path = reader.folder / CHECKSUMS
    found = reader.json(CHECKSUMS)
    sums = found.get("sha256") if isinstance(found, dict) else None
    if not isinstance(sums, dict) or not all(isinstance(value, str) for value in sums.values()):
        raise DataError(f"{path}: damaged; {AGAIN}")
    if missing := sorted(sums.keys() - reader.states.keys()):
        raise DataError(
            f"{reader.folder / missing[0]}: is missing, or is not a part of such a data set; {AGAIN}"
        )
    if unknown := sorted(reader.states.keys() - sums.keys() - {CHECKSUMS}):
        raise DataError(f"{path}: has no checksum of {unknown[0]}; {AGAIN}")
    return sums


def _stamp_path(folder: Path) -> Path:
    """Where the stamp of a folder is kept: by its place on disk, whatever it is called from."""
    name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:32]
    return cache_folder() / "verified" / f"{name}.json"


def _stamp_of(reader: FolderReader) -> dict[str, Any]:
    """The state of all files, as a stamp keeps it."""
    files = {name: list(astuple(state)) for name, state in sorted(reader.states.items())}
    return {"stamp": _STAMP, "folder": str(reader.folder.resolve()), "files": files}
