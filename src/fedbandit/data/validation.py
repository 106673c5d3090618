"""Validation of a data set folder: fields of its header, types, shapes and sizes of its files.

Rules say which numbers a file may hold; `fedbandit.data.checksums` applies them while it reads
every byte. What has passed may be trusted by the kernels: they check nothing again. Knows nothing
of what the numbers mean.
"""

import json
import math
import mmap
import os
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any, Protocol

import numpy as np
from numpy.lib import format as npy

from fedbandit.core.contexts import ItemSpec
from fedbandit.core.errors import DataError
from fedbandit.data.encoder import Encoder

_MOST_ENTRIES = 2**62


_TYPES: dict[str, type] = {
    "name": str,
    "multilabel": bool,
    "logged": bool,
    "source": dict,
    "fingerprint": str,
}


_LISTS = ("shape", "actions", "action_counts", "published_counts", "lower_case")


def checked_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a `Header` from the plain values of a JSON file.

    Every field must be there, with its own type; `shape`, counts, pairs of letters and the encoder
    must agree with each other. `ValueError` names the field that is wrong, in words that fit behind
    the name of the file: "shape is not that of a context".
    """
    found = {"encoder": None, "items": None, "item_encoder": None, **fields}
    needed = {*_TYPES, *_LISTS, "kind", "scale", "encoder", "items", "item_encoder"}
    if wrong := sorted(needed ^ found.keys()):
        raise ValueError(
            f"{wrong[0]} is {'missing' if wrong[0] in needed else 'not a field of a header'}"
        )
    for name, kind in _TYPES.items():
        if type(found[name]) is not kind:
            raise ValueError(
                f"{name} is not {'true or false' if kind is bool else f'a {kind.__name__}'}"
            )
    for name in _LISTS:
        if not isinstance(found[name], list):
            raise ValueError(f"{name} is not a list")
    if found["kind"] not in ("dense", "sparse"):
        raise ValueError("kind is neither dense nor sparse")
    if type(found["scale"]) not in (int, float) or not math.isfinite(found["scale"]):
        raise ValueError("scale is not a finite number")
    shape, actions = found["shape"], found["actions"]
    if (
        not _whole(shape)
        or math.prod(shape) > _MOST_ENTRIES
        or (found["kind"] == "sparse" and len(shape) != 1)
    ):
        raise ValueError("shape is not that of a context")
    items = _items(found["items"])
    if bool(actions) == (items is not None) or not all(isinstance(name, str) for name in actions):
        raise ValueError("actions are not a list of names")
    for name in ("action_counts", "published_counts"):
        counts = found[name]
        if not _whole(counts) or (
            len(counts) != len(actions) and (name == "action_counts" or counts)
        ):
            raise ValueError(f"{name} are not one whole number for each action")
    pairs = found["lower_case"]
    if not all(
        isinstance(pair, list) and len(pair) == 2 and _whole(pair, len(actions) - 1)
        for pair in pairs
    ):
        raise ValueError("lower_case are not pairs of actions")
    encoder = None if found["encoder"] is None else Encoder.from_json(found["encoder"])
    if encoder is not None and (
        shape != [encoder.width] or encoder.dense != (found["kind"] == "dense")
    ):
        raise ValueError("encoder does not make contexts of this kind and shape")
    of_items = found["item_encoder"]
    if of_items is not None:
        of_items = Encoder.from_json(of_items)
        if items is None or list(items.shape) != [of_items.width]:
            raise ValueError("item_encoder does not make features of this shape")
    sequences = {
        name: tuple(found[name])
        for name in ("shape", "actions", "action_counts", "published_counts")
    }
    return {
        **found,
        **sequences,
        "lower_case": dict(pairs),
        "encoder": encoder,
        "items": items,
        "item_encoder": of_items,
    }


def _items(found: Any) -> ItemSpec | None:
    """What a header says about the items of a catalogue."""
    if found is None:
        return None
    if not isinstance(found, dict) or set(found) != {"kind", "shape", "shown", "most"}:
        raise ValueError("items are not described by kind, shape, shown and most")
    kind, shape, shown = found["kind"], found["shape"], found["shown"]
    one_axis = kind == "sparse" and isinstance(shape, list) and len(shape) == 1
    if not (kind == "dense" or one_axis) or not isinstance(shape, list) or not _whole(shape):
        raise ValueError("items do not have the kind and shape of features")
    most = found["most"]
    if type(shown) not in (int, float) or type(most) is not int or not 1 <= shown <= most:
        raise ValueError("items: shown and most are not numbers of candidates")
    return ItemSpec(kind, tuple(shape), float(shown), most)


def _whole(numbers: list[Any], largest: int = _MOST_ENTRIES) -> bool:
    return all(type(number) is int and 0 <= number <= largest for number in numbers)


_LARGEST = float(np.finfo(np.float32).max)


_SMALLEST = float(np.finfo(np.float32).smallest_subnormal)


class ValueRule(Protocol):
    """A rule for the numbers of one array, applied block by block while the file is read.

    `Within`, `Offsets` and `ClientIds` are the rules of data sets. A rule keeps nothing between
    blocks: what it needs of the block before is handed to it.
    """

    def first_wrong(self, block: np.ndarray, before: np.ndarray) -> int | None:
        """The first wrong entry of a block; `before` holds the last entry of the block before it,
        or nothing.
        """
        ...

    def wrong(self, value: object) -> str:
        """The fault of an entry in words, for the end of a message."""
        ...


@dataclass(frozen=True)
class Within:
    """Numbers from `low` to `high`, both included; NaN never is."""

    low: float
    high: float
    wanted: str

    def first_wrong(self, block: np.ndarray, before: np.ndarray) -> int | None:
        """The first number outside the range, or None; a good block takes no further memory."""
        # Smallest and largest take no further memory; NaN comes through both and compares as false.
        if block.min() >= self.low and block.max() <= self.high:
            return None
        return int(np.argmin((block >= self.low) & (block <= self.high)))

    def wrong(self, value: object) -> str:
        """`7 is outside 0..4`, for the end of a message."""
        return f"{value} is {self.wanted}"


FINITE = Within(-_LARGEST, _LARGEST, "not finite")


PROPENSITY = Within(_SMALLEST, 1.0, "outside (0, 1]")


def below(number: int) -> Within:
    """Whole numbers from 0 to number - 1."""
    return Within(0, number - 1, f"outside 0..{number - 1}")


@dataclass(frozen=True)
class Offsets:
    """Where rows begin: from 0, never descending. The last one is the length of what they point
    into.

    A reader slices `values[offsets[i]:offsets[i + 1]]`, so a wrong offset would read the memory
    behind an array.
    """

    def first_wrong(self, block: np.ndarray, before: np.ndarray) -> int | None:
        """The first offset that is below the one before it, or a first one that is not 0."""
        if block[0] != 0 if not len(before) else block[0] < before[0]:
            return 0
        descending = block[1:] < block[:-1]
        return int(np.argmax(descending)) + 1 if descending.any() else None

    def wrong(self, value: object) -> str:
        """`offset 3 does not follow`, for the end of a message."""
        return f"offset {value} does not follow: offsets ascend from 0"


@dataclass(frozen=True)
class ClientIds:
    """Client ids in UTF-8, none empty, strictly ascending.

    The order makes the place of a client in its split a function of the ids alone, and two clients
    of one id impossible. Names of items need no order.
    """

    sorted: bool = True

    def first_wrong(self, block: np.ndarray, before: np.ndarray) -> int | None:
        """The first id that is empty, not UTF-8, or not above the one before it."""
        ids = np.concatenate([before, block])
        good = np.concatenate([block[:1] > (before if len(before) else b""), ids[1:] > ids[:-1]])[
            -len(block) :
        ]
        good = good if self.sorted else block != b""
        if not good.all():
            return int(np.argmin(good))
        # Each id behind a zero byte, so that half a letter at the end of one cannot be completed by the next.
        letters = np.zeros((len(block), block.dtype.itemsize + 1), np.uint8)
        letters[:, 1:] = block.view(np.uint8).reshape(len(block), -1)
        try:
            letters.tobytes().decode("utf-8")
        except UnicodeDecodeError as error:
            return error.start // letters.shape[1]
        return None

    def wrong(self, value: object) -> str:
        """The id in quotes and what is expected of it, for the end of a message."""
        return f"client {value!r} is empty, not UTF-8 or not in ascending order"


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
    expects; `parts` then lists what was mapped with the rule of each, for `checksums.verify` to
    read through. `states` are what a run compares with later, to notice a file that changes under
    it.
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
            try:
                return json.loads(file.read())
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"{self.folder / name}: unreadable: {str(error) or 'nested too deeply'}"
                ) from None

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
            if dtype.hasobject or not dtype.itemsize or not _is_one_of(dtype, types):
                kind = dtype.str if dtype.kind == "S" or not dtype.isnative else dtype.name
                raise DataError(
                    f"{path}: holds {kind} where {' or '.join(types)} is expected; {AGAIN}"
                )
            if by_columns and len(found) > 1:
                raise DataError(f"{path}: is stored by columns; {AGAIN}")
            if not _fits(found, shape):
                expected = ", ".join("any" if side is None else str(side) for side in shape)
                raise DataError(
                    f"{path}: has shape {found} where ({expected}) is expected; {AGAIN}"
                )
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
