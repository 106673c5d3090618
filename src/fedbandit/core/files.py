"""Small files that survive a crash: written whole or not at all, and read without minding who is writing them.

Knows nothing of what stands in them.
"""

import errno
import json
import math
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any


def write_atomically(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Have `write` fill a temporary file, make sure it is on disk, and only then give it its name, for good."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a folder, not a file", str(path))
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")  # others may write it too
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
    _keep_names(path.parent)


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


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file; None if there is none, or nothing that can be read as one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """A file of one JSON object a line; a last line that is still being written is left out."""
    return objects_in(path.read_bytes())


def objects_in(lines: bytes) -> list[dict[str, Any]]:
    """One JSON object a line, as far as lines have their end; `ValueError` where one is something else."""
    found = [json.loads(line) for line in lines.splitlines(keepends=True) if line.endswith(b"\n")]
    if not all(isinstance(one, dict) for one in found):
        raise ValueError("not one object a line")
    return found


def _keep_names(folder: Path) -> None:
    """Have the folder itself on disk: a new name could be gone after a power cut, and with it what it stood for."""
    if os.name == "nt":  # where a folder cannot be opened
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value
