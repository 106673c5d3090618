"""Small files that survive a crash: written whole or not at all, and read without minding who is
writing them.

Arrays stand in safetensors files with a checksum over all of it, verified before anything is used.
"""

import errno
import hashlib
import json
import math
import os
import stat
import threading
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from fedbandit.core.errors import first_problem

if TYPE_CHECKING:  # the command line answers without
    import numpy as np

_Kind = TypeVar("_Kind")
_DEEPEST = 40  # levels; configurations and notes have three


_MOST_DOTS = 1000  # in a key of TOML, whose parser would take hours with many more


_SMALL = 16_000_000  # bytes: no configuration, summary or note comes near it
LONGEST_LINE = 64_000_000  # bytes; what is longer was not written here


def write_atomically(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Have `write` fill a temporary file, make sure it is on disk, and only then give it its name,
    for good.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a folder, not a file", str(path))
    temporary = path.with_name(
        f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp"
    )  # others may write it too
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):  # name the file that was asked for, not the temporary one
            error.filename, error.filename2 = str(path), None
        raise
    keep_names(path.parent)


def write_bytes(path: Path, payload: bytes) -> None:
    """The file with this content, or the one that was there before."""
    write_atomically(path, lambda file: file.write(payload))


def write_text(path: Path, text: str) -> None:
    """The file with this text, or the one that was there before."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """The value as JSON for people and programs, or the file that was there before."""
    write_text(path, to_json(value, indent=1) + "\n")


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON that every reader takes: what is not a finite number becomes null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def open_regular(path: Path, append: bool = False) -> IO[bytes]:
    """Open a file for reading, or a new or old one to append to; `OSError` where the name is not a
    file's.

    Never waits for those at the other end of a pipe.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT if append else os.O_RDONLY
    handle = os.open(
        path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0), 0o666
    )
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "is not a file", str(path))
    return os.fdopen(handle, "ab" if append else "rb")


def read_small(path: Path) -> bytes:
    """The bytes of a file that people and programs keep small; `ValueError` where it is not."""
    with open_regular(path) as file:
        payload = file.read(_SMALL + 1)
    if len(payload) > _SMALL:
        raise ValueError(f"{path.name} is larger than {_SMALL // 1_000_000} MB")
    return payload


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a small file; `OSError` if it cannot be read, `ValueError` if it is
    something else.
    """
    return shallow(object_in(read_small(path)))


def parse_toml(payload: bytes) -> dict[str, Any]:
    """The values in a TOML file; `ValueError` where it is something else, or nested deeper than
    anybody can follow.
    """
    if any(line.partition(b"=")[0].count(b".") > _MOST_DOTS for line in payload.splitlines()):
        raise ValueError("nested too deeply")
    try:
        return shallow(tomllib.loads(payload.decode()))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def shallow(values: dict[str, Any]) -> dict[str, Any]:
    """The values, if they are nested no deeper than anything that walks through them can go; else
    `ValueError`.
    """
    level: list[Any] = [values]
    for _ in range(_DEEPEST):
        inner = [
            list(one.values()) if isinstance(one, dict) else one
            for one in level
            if isinstance(one, dict | list)
        ]
        level = [value for values in inner for value in values]
        if not level:
            return values
    raise ValueError("nested too deeply")


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a small file; None if there is none, or nothing that can be read as one."""
    try:
        return read_object(path)
    except (OSError, ValueError):
        return None


def read_checked(kind: type[_Kind], found: object) -> _Kind:
    """A dataclass from plain values of JSON, every field checked, since they may be a stranger's.

    `ValueError` says in one line what is wrong with the first field that is wrong.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(kind).validate_json(json.dumps(found), strict=True)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValidationError as error:
        raise ValueError(first_problem(error)) from None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """A file of one JSON object a line; a last line that is still being written is left out."""
    with open_regular(path) as file:
        return [object_in(line) for line in lines_in(file)]


def lines_in(file: IO[bytes]) -> Iterator[bytes]:
    """The complete lines of a file from where it is read; `ValueError` where one does not end."""
    while line := file.readline(LONGEST_LINE):
        if line.endswith(b"\n"):
            yield line
        elif len(line) == LONGEST_LINE:
            raise ValueError(f"a line of more than {LONGEST_LINE // 1_000_000} MB")


def object_in(text: bytes) -> dict[str, Any]:
    """The JSON object in a line or a file; `ValueError` where it is something else."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("not an object")
    return found


def last_lines(path: Path, enough: int = 1 << 16) -> list[bytes]:
    """The last complete lines of a file, as many as lie in about its last `enough` bytes, and at
    least one.

    `ValueError` where not even one ends in a file that is far larger than that.
    """
    with open_regular(path) as file:
        size = file.seek(0, os.SEEK_END)
        for reach in (enough, enough * 64):
            start = max(0, size - reach)
            file.seek(start)
            lines = file.read(reach).split(b"\n")[
                0 if start == 0 else 1 : -1
            ]  # neither a torn end nor a torn start
            if lines or start == 0:
                return lines
    raise ValueError(f"{path.name} has a line of more than {reach // 1_000_000} MB")


def count_lines(path: Path) -> int:
    """The number of complete lines of a file, as `lines_in` finds them; 0 if there is no file."""
    try:
        with open_regular(path) as file:
            return sum(1 for _ in lines_in(file))
    except FileNotFoundError:
        return 0


def keep_names(folder: Path) -> None:
    """Have the folder itself on disk: a new name could be gone after a power cut, and with it what
    it stood for.
    """
    if os.name == "nt":  # where a folder cannot be opened
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _finite(value: Any) -> Any:
    """The value with null in the place of numbers that are not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value


_CHECKSUM = "sha256"


_LONGEST_HEADER = 100_000_000  # bytes, as safetensors itself has it


def pack(tensors: "Mapping[str, np.ndarray]", texts: Mapping[str, str]) -> bytes:
    """The bytes of a file with these arrays and texts, and the checksum of both."""
    return b"".join(packed(tensors, texts))


def packed(
    tensors: "Mapping[str, np.ndarray]", texts: Mapping[str, str]
) -> tuple[bytes, memoryview]:
    """The same as two parts, a small one and that of the arrays, to be written without another
    copy.
    """
    import numpy as np
    from safetensors.numpy import save

    header, data = _split(
        save({name: np.ascontiguousarray(array) for name, array in tensors.items()})
    )
    header["__metadata__"] = dict(texts)
    header["__metadata__"][_CHECKSUM] = _checksum(header, data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the arrays are aligned
    return len(text).to_bytes(8, "little") + text, data


def read_packed(path: Path) -> bytes:
    """The bytes of a file that `pack` has made; `ValueError` where its size is not the one that its
    header says.

    A file that claims to be far larger than what it holds is refused before it is read.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        first = file.read(8)
        length = min(int.from_bytes(first, "little"), _LONGEST_HEADER)
        header, _ = _split(first + file.read(length))
        try:
            arrays = [value for key, value in header.items() if key != "__metadata__"]
            end = max((int(value["data_offsets"][1]) for value in arrays), default=0)
        except (KeyError, TypeError, ValueError, IndexError):
            raise ValueError("its header is damaged") from None
        if size != 8 + length + end:
            raise ValueError("it is cut short, or longer than it says")
        if size > _memory():
            raise ValueError("it is larger than this machine's memory")
        file.seek(0)
        return file.read(size)


def _memory() -> float:
    """The bytes of this machine's memory; infinite where it does not say."""
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):
        return math.inf


def unpack(payload: bytes) -> "tuple[dict[str, np.ndarray], dict[str, str]]":
    """The arrays and texts of a file; `ValueError` where its bytes are not those that were written.

    A file without a checksum, of an older version or of another program, is checked in its
    structure alone.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    header, data = _split(payload)
    texts = header.get("__metadata__", {})
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise ValueError("its header is damaged")
    expected = texts.pop(_CHECKSUM, None)
    if expected is not None and expected != _checksum(header, data):
        raise ValueError("its checksum does not match")
    try:
        return load(payload), texts
    except (SafetensorError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"its structure is damaged ({error})") from None


def _split(payload: bytes) -> tuple[dict[str, Any], memoryview]:
    """The header, and the bytes of the arrays behind it."""
    length = int.from_bytes(payload[:8], "little")
    if len(payload) < 8 or not 2 <= length <= min(_LONGEST_HEADER, len(payload) - 8):
        raise ValueError("it is cut short")
    try:
        header = json.loads(payload[8 : 8 + length])
    except (ValueError, RecursionError):
        raise ValueError("its header is damaged") from None
    if not isinstance(header, dict):
        raise ValueError("its header is damaged")
    return header, memoryview(payload)[8 + length :]


def _checksum(header: Mapping[str, Any], data: memoryview) -> str:
    """Over names, types, shapes, places, texts and the arrays themselves."""
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    digest.update(data)
    return digest.hexdigest()
