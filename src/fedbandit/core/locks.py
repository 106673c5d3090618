"""Taking turns in a folder, between threads and processes. A lock that ends with its process, however it ends.

Devices use it, so it works without `fcntl` too, which Windows does not have.
"""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]

_PATIENCE = 60.0  # seconds to wait for others; they hold a lock for milliseconds


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other thread or process is in such a block of this folder, and keep the others waiting."""
    with _by_folder(folder) if fcntl is not None else _by_file(folder / ".turn.sqlite"):
        yield


@contextmanager
def _by_folder(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)  # and the lock with it


@contextmanager
def _by_file(path: Path) -> Iterator[None]:
    """SQLite takes locks on every system; the database stays empty."""
    connection = sqlite3.connect(path, timeout=_PATIENCE, isolation_level=None)
    try:
        try:
            connection.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError as error:
            raise TimeoutError(f"{path}: {error}") from None
        yield
    finally:
        connection.close()  # and the lock with it
