"""Reading every byte of a data set folder once: checksums, and the rules for its numbers.

A folder that was verified and has not changed since is known by a stamp in the cache folder, so
that a large one opens in milliseconds. A small one is verified whenever it is opened.
"""

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path

import numpy as np

from fedbandit.core.errors import DataError
from fedbandit.core.files import read_json, to_json, write_text
from fedbandit.core.progress import SILENT, ProgressReporter, to_stderr
from fedbandit.data.validation import AGAIN, FileState, FolderReader, Part


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
    if total > _SMALL and not again and _stamped(stamp, reader.states):
        return
    started = time.time_ns()
    verify(reader, progress or (to_stderr() if total > _LONG else SILENT))
    settled = all(started - state.changed > _CLOCK_TICK for state in reader.states.values())
    if total > _SMALL and settled:
        # Without a cache to write to, it is read again next time.
        with suppress(OSError):
            stamp.parent.mkdir(parents=True, exist_ok=True)
            files = {name: list(astuple(state)) for name, state in sorted(reader.states.items())}
            write_text(
                stamp,
                to_json({"stamp": _STAMP, "folder": str(reader.folder.resolve()), "files": files})
                + "\n",
            )


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
    name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:32]
    return cache_folder() / "verified" / f"{name}.json"


def _stamped(stamp: Path, states: Mapping[str, FileState]) -> bool:
    found = read_json(stamp) or {}
    return found.get("stamp") == _STAMP and found.get("files") == {
        name: list(astuple(state)) for name, state in states.items()
    }
