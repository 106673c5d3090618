"""A process and its surroundings: locks on folders, signals that ask it to stop, and
where its time goes.

A lock ends with its process, however it ends. Timings never enter results.
"""

import os
import signal
import sqlite3
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]


_PATIENCE = 60.0  # seconds to wait for others; they hold a lock for milliseconds


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other thread or process is in such a block of this folder, and keep the others
    waiting.
    """
    with _by_folder(folder) if fcntl is not None else _by_file(folder / ".turn.sqlite"):
        yield


@contextmanager
def _by_folder(folder: Path) -> Iterator[None]:
    """A lock on the folder itself, by the system's own means."""
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


STOPPING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def handling(
    handle: Callable[[int], None], numbers: tuple[signal.Signals, ...] = STOPPING
) -> Iterator[None]:
    """Call `handle(number)` for each of these signals; only the main thread can, elsewhere nothing
    is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, lambda received, frame: handle(received))
        for number in numbers
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Lap:
    """Adds the seconds between its two ends to those of a name; a class, because it is used dozens
    of times a round.
    """

    __slots__ = ("_name", "_seconds", "_start")

    def __init__(self, seconds: defaultdict[str, float], name: str) -> None:
        self._seconds, self._name = seconds, name

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *failure: object) -> None:
        self._seconds[self._name] += time.perf_counter() - self._start


class Stopwatch:
    """Adds up seconds by name: `with watch("step"): ...`"""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def __call__(self, name: str) -> "_Lap":
        return _Lap(self.seconds, name)

    def add(self, seconds: dict[str, float]) -> None:
        """Add seconds measured elsewhere."""
        for name, value in seconds.items():
            self.seconds[name] += value

    def take(self) -> dict[str, float]:
        """The seconds since the last call, by name; starts again from zero."""
        taken = dict(self.seconds)
        self.seconds.clear()
        return taken
