"""The SQLite file under the device's log: opened, checked, set aside when damaged; and its
clock.
"""

import hashlib
import os
import secrets
import sqlite3
import threading
import time
import uuid
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbandit.core.errors import DataError, FedbanditError
from fedbandit.deploy.private_files import SqliteKind


@dataclass(frozen=True)
class Reading:
    """Both clocks at one moment."""

    wall: float  # seconds since 1970; users, networks and flat batteries make it jump
    steady: float  # seconds since the boot, sleep included where the system can tell; never jumps
    boot: str  # readings of the steady clock can be compared only within one boot


def read_clocks() -> Reading:
    """Both clocks now."""
    steady = (
        time.clock_gettime(time.CLOCK_BOOTTIME)
        if hasattr(time, "CLOCK_BOOTTIME")
        else time.monotonic()
    )
    return Reading(time.time(), steady, _BOOT)


def seconds_between(before: Reading, now: Reading) -> float:
    """Seconds that have passed: by the steady clock within a boot, by the wall clock across one,
    never less than 0.
    """
    if before.boot == now.boot:
        return max(0.0, now.steady - before.steady)
    return max(0.0, now.wall - before.wall)


def _this_boot() -> str:
    """The system's name for this boot; where it has none, the steady clock is trusted within one
    process only.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return uuid.uuid4().hex


_BOOT = _this_boot()
_LONGEST = 30.0  # seconds of one transaction: no honest log takes longer
_STEPS = 100_000  # of SQLite's machine between two looks at the clock
# `made` and `settled` count in the log's own time and order, never in a clock's. Large columns come
# last, so that looking at the others does not read them. `mark` is a row's checksum; the row of
# `log` has how many events there are, the sum of their marks, and a mark of its own.
_ADDED = {
    "events": ("catalogue TEXT", "items BLOB", "own BLOB", "mark INTEGER NOT NULL DEFAULT 0"),
    "log": tuple(
        f"{name} INTEGER NOT NULL DEFAULT 0" for name in ("last", "held", "total", "mark")
    ),
}  # since format 1
_SCHEMA = f"""
CREATE TABLE events (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    made REAL NOT NULL,
    nonce INTEGER NOT NULL,
    version INTEGER NOT NULL,
    space TEXT NOT NULL,
    action INTEGER NOT NULL,
    propensity REAL NOT NULL,
    reward REAL,
    settled INTEGER,
    available BLOB,
    ids BLOB,
    vals BLOB NOT NULL,
    {", ".join(_ADDED["events"])}
);
CREATE INDEX open_events ON events (made) WHERE reward IS NULL;
CREATE TABLE log (
    only INTEGER PRIMARY KEY CHECK (only = 1),
    elapsed REAL NOT NULL,
    wall REAL NOT NULL,
    steady REAL NOT NULL,
    boot TEXT NOT NULL,
    rewarded INTEGER NOT NULL,
    rules TEXT NOT NULL,
    {", ".join(_ADDED["log"])}
);
"""
_PARTS = {"events": "table", "log": "table", "sqlite_sequence": "table", "open_events": "index"}


class LogUnavailable(FedbanditError):
    """The event log could not be written just now: the disk is full, or another process holds it.
    Try again later.
    """


_KIND = SqliteKind(
    application=0x66626C67,
    format=2,
    schema=_SCHEMA,
    not_ours="not an event log, or damaged",
    mend="move it away to start a new one",
    unavailable=LogUnavailable,
    journal="WAL",
)


class LogFile:
    """One SQLite file in WAL mode, with one connection per process behind a lock."""

    def __init__(self, path: Path, timeout: float, power_safe: bool) -> None:
        self.path = path
        self._timeout = timeout
        self._synchronous = "FULL" if power_safe else "NORMAL"
        self._connection: sqlite3.Connection | None = None
        self._checked = False
        self._started = 0.0
        self.lock = threading.Lock()
        _open_files.add(self)

    @contextmanager
    def transaction(self, write: bool) -> Iterator[sqlite3.Connection]:
        """A connection inside a transaction that is committed at the end, or leaves no trace if
        anything goes wrong.
        """
        with self.lock, _KIND.explained(self.path):
            connection = self._connect()
            try:
                self._started = time.monotonic()
                connection.execute("BEGIN IMMEDIATE" if write else "BEGIN")
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                self.disconnect()  # rolls back; a connection that has failed is not used again
                raise

    def exists(self) -> bool:
        """Whether there is a log; a write-ahead file without its log is damage, since it would
        spoil a new one.
        """
        waiting = self.path.with_name(
            f"{self.path.name}-wal"
        ).exists()  # looked at first: the log appears before it
        there = self.path.exists()
        if waiting and not there:
            said = f"its log {self.path.name} is gone; move both away to start a new log"
            raise DataError(f"{self.path}-wal: {said}")
        return there

    def create(self, rules: str, now: Reading) -> None:
        """Make an empty log. It appears complete, so a file without the right contents is never a
        new one.
        """
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}-{secrets.token_hex(4)}")
        row = (0.0, now.wall, now.steady, now.boot, 0, rules, 0, 0, 0)
        values, places = (1, *row, mark_of(row)), ", ".join("?" * 11)
        try:  # SQLite gives its write-ahead files the rights of the log
            _KIND.make(
                temporary, lambda db: db.execute(f"INSERT INTO log VALUES ({places})", values)
            )
            _give_name(temporary, self.path)
        except OSError as error:
            raise LogUnavailable(f"{self.path}: {error.strerror}") from None
        finally:
            for end in ("", "-wal", "-shm"):
                temporary.with_name(temporary.name + end).unlink(missing_ok=True)

    def disconnect(self) -> None:
        """Give up the connection; the next transaction opens another."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _connect(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = connection = _KIND.connect(self.path, self._timeout)
            connection.text_factory = _text
            connection.set_progress_handler(self._too_long, _STEPS)
            try:
                if not self._checked:
                    self._started = time.monotonic()
                    if problem := _other_parts(connection) or _KIND.problem_in(connection):
                        raise _KIND.damaged(self.path, problem)
                    self._checked = True
                connection.execute(f"PRAGMA synchronous = {self._synchronous}")
                connection.execute("PRAGMA journal_size_limit = 1048576")
            except BaseException:
                self.disconnect()
                raise
        return self._connection

    def _too_long(self) -> bool:
        """Whether to end a query: no damage to the file makes it endless."""
        return time.monotonic() - self._started > _LONGEST + self._timeout


def mark_of(row: Iterable[Any]) -> int:
    """The checksum of a row's values: 40 bits, so that a sum of millions of them fits."""
    digest = hashlib.blake2b(digest_size=5)
    for value in row:
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # which of the two a column returns is SQLite's choice
        large = isinstance(value, bytes)
        head = (b"b%d:" % len(value)) if large else repr(value).encode() + b";"
        digest.update(head + value if large else head)
    return int.from_bytes(digest.digest(), "little")


def _other_parts(connection: sqlite3.Connection) -> str | None:
    """A part of the file that no log has, or lacks: a view or trigger could say anything, and never
    end.
    """
    found = connection.execute("SELECT name, type, sql FROM sqlite_master").fetchall()
    for name, kind, sql in found:
        plain = sql is None or str(sql).upper().startswith(("CREATE TABLE", "CREATE INDEX"))
        if _PARTS.get(name) != kind or not plain:
            return f"{str(kind)[:20]} {str(name)[:50]!r} is not part of a log"
    missing = _PARTS.keys() - {name for name, *_ in found}
    return f"{min(missing)} is missing" if missing else None


def upgrade(connection: sqlite3.Connection) -> bool:
    """Give a log of format 1 the columns that it lacks; True if it was one."""
    if connection.execute("PRAGMA user_version").fetchone()[0] >= _KIND.format:
        return False
    for table, columns in _ADDED.items():
        for column in columns:
            connection.execute(f"ALTER TABLE {table} ADD COLUMN {column}")
    connection.execute(f"PRAGMA user_version = {_KIND.format}")
    return True


def _text(found: bytes) -> str:
    """A text of the file, whatever its bytes: one damaged row must not keep the others from being
    read.
    """
    return found.decode("utf-8", "replace")


def _give_name(temporary: Path, path: Path) -> None:
    """Put a new log in its place unless another process was faster."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    except (
        OSError
    ):  # hard links are not allowed everywhere; there, start the first process before the others
        if not path.exists():
            os.rename(temporary, path)


_open_files: "weakref.WeakSet[LogFile]" = weakref.WeakSet()
_held_over_fork: list[LogFile] = []


def _before_fork() -> None:
    """SQLite loses its locks in a child that inherits a connection, so none may be open while a
    process forks.
    """
    for file in list(_open_files):
        file.lock.acquire()
        file.disconnect()
        _held_over_fork.append(file)


def _after_fork() -> None:
    while _held_over_fork:
        _held_over_fork.pop().lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork
    )
