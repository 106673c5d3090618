"""The device's event log: every decision with its propensity, its reward when one comes, and when
it is too late.

Sequence numbers give the order and the log's own seconds the age; no clock that somebody can set
decides anything.
"""

import hashlib
import json
import os
import secrets
import sqlite3
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, NamedTuple

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


DAY = 86400.0
_MOST_EVENTS = 2**40
_MODULUS = 2**62  # of the sum of marks
LARGEST_REWARD = 3.4028234663852886e38  # of float32, in which devices train


@dataclass(frozen=True)
class Retention:
    """Rules for how long events live, and what a missing reward means.

    The log remembers them, so that an app and a training process keep the same rules.

    Examples:
        >>> rules = Retention(max_events=500, reward_within=3600.0, without_reward="zero")
        >>> rules.max_age / 86400
        30.0
    """

    max_events: int = 1024  # the paper's M: only the newest are kept
    max_age: float = 30 * DAY  # seconds
    reward_within: float = DAY  # seconds after a decision in which its reward may come
    without_reward: Literal["drop", "zero"] = (
        "drop"  # what becomes of an event whose reward did not come in time
    )

    def __post_init__(self) -> None:
        if type(self.max_events) is not int or not 1 <= self.max_events <= _MOST_EVENTS:
            raise ValueError(f"max_events must be at least 1, not {str(self.max_events)[:40]}")
        for name in ("max_age", "reward_within"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        if self.without_reward not in ("drop", "zero"):
            raise ValueError(
                f"without_reward must be 'drop' or 'zero', not {self.without_reward!r}"
            )
        if self.without_reward == "zero" and self.reward_within >= self.max_age:
            raise ValueError(
                "max_age must be longer than reward_within, or no event would ever count as zero"
            )


class Outcome(StrEnum):
    """The fate of a reward that an app has given."""

    RECORDED = "recorded"
    DUPLICATE = "duplicate"  # the event has its reward; the first one stays
    EXPIRED = "expired"  # the event is too old, or was pushed out by newer ones
    UNKNOWN = "unknown"  # no event of this log has that id
    NOT_STORED = "not stored"  # the log could not be written: try again, a repetition does no harm


class LogRow(NamedTuple):
    """A decision as it is logged, by the columns of its table, with what the log adds to it.

    Contexts and sets of actions are bytes. Over candidates `items` has their numbers in the
    catalogue of that digest, and `own` the features of those outside it. `settled` counts up in the
    order in which events became readable: what is above a remembered one is new. A damaged file can
    hold any type in any column.
    """

    sequence: int = 0  # with the next two, the log's own
    made: float = 0.0
    nonce: int = 0
    version: int = 0
    space: str = ""
    action: int = 0
    propensity: float = 1.0
    reward: float | None = None
    settled: int | None = None
    available: bytes | None = None
    ids: bytes | None = None
    values: bytes = b""
    catalogue: str | None = None
    items: bytes | None = None
    own: bytes | None = None
    intact: bool = True  # whether the row is as it was written; not stored

    @property
    def mark(self) -> int:
        """The checksum of what is stored."""
        return mark_of(self[:-1])


_STORED = ", ".join(LogRow._fields[:-1]).replace("values", "vals")
_SELECTED = f"SELECT mark, {_STORED} FROM events"


@dataclass
class _Head:
    """The row that stands for the whole log: its clock, its rules, and what is in it."""

    elapsed: float
    wall: float
    steady: float
    boot: str
    rewarded: int
    rules: str
    last: int  # the highest sequence number given out
    held: int  # events in the log
    total: int  # the sum of their marks

    def add(self, mark: int, events: int = 1) -> None:
        """Count events that came (1) or went (-1)."""
        self.held += events
        self.total = (self.total + events * mark) % _MODULUS


_OF_LOG = ", ".join(_Head.__dataclass_fields__)


@dataclass(frozen=True)
class Totals:
    """Counts over the life of the log, and what it holds now."""

    logged: int
    rewarded: int
    held: int
    waiting: int  # of those held, without a reward so far


class EventLog:
    """Appends events, takes rewards, and reads what can be trained on; safe for threads and
    processes.

    Every call is one transaction. Sequence numbers are given out once, even after events are gone.
    The log's own row has its clock, its rules, the number of its events and the sum of their
    checksums, so that a row that was changed, deleted or put in is noticed.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     log = EventLog(Path(folder) / "events.sqlite")
        ...     event = log.append(LogRow(version=1, propensity=0.5, values=bytes(4)))
        ...     said = [str(log.reward(event, 1.0)), str(log.reward(event, 0.0))]
        ...     rewards = [row.reward for row in log.read()]
        ...     log.close()
        >>> said, rewards
        (['recorded', 'duplicate'], [1.0])
    """

    def __init__(
        self,
        path: Path,
        retention: Retention | None = None,
        *,
        timeout: float = 5.0,
        power_safe: bool = False,
        clocks: Callable[[], Reading] = read_clocks,
    ) -> None:
        """Open the log, or make one. Without `retention` the log keeps the rules it has.

        A damaged log raises `DataError`. `power_safe` waits for the disk at every event, so that a
        power cut loses none; a killed process never does.
        """
        self._file = LogFile(path, timeout, power_safe)
        self._retention = retention
        self._clocks = clocks
        self._ready = False

    def append(self, decision: LogRow) -> str:
        """Log a decision; the event's id."""
        nonce = int.from_bytes(os.urandom(7), "little")
        with self._writing() as (db, head, rules):
            sequence = head.last = head.last + 1
            row = decision._replace(sequence=sequence, made=head.elapsed, nonce=nonce)
            values, places = (*row[:-1], row.mark), ", ".join("?" * len(row))
            db.execute(f"INSERT INTO events ({_STORED}, mark) VALUES ({places})", values)
            head.add(row.mark)
            _prune(db, head, rules)
        return f"{sequence}-{nonce:014x}"

    def reward(self, event_id: str, value: float) -> Outcome:
        """Record an event's reward, once."""
        if not abs(value) <= LARGEST_REWARD:
            raise ValueError(f"reward must be finite in float32, not {str(value)[:40]}")
        parsed = _parse(event_id)
        if parsed is None:
            return Outcome.UNKNOWN
        sequence, nonce = parsed
        with self._writing() as (db, head, rules):
            found = db.execute(f"{_SELECTED} WHERE sequence = ?", (sequence,)).fetchone()
            if found is None:
                return Outcome.EXPIRED if sequence <= head.last else Outcome.UNKNOWN
            mark, event = found[0], LogRow(*found[1:])
            if event.nonce != nonce or event.mark != mark:
                return Outcome.UNKNOWN
            if event.reward is not None:
                return Outcome.DUPLICATE
            if head.elapsed - event.made >= min(rules.reward_within, rules.max_age):
                return Outcome.EXPIRED
            head.rewarded += 1
            event = event._replace(reward=float(value), settled=head.rewarded)
            db.execute(
                "UPDATE events SET reward = ?, settled = ?, mark = ? WHERE sequence = ?",
                (event.reward, event.settled, event.mark, sequence),
            )
            head.add(mark, -1)
            head.add(event.mark)
        return Outcome.RECORDED

    def read(self) -> list[LogRow]:
        """The events that can be trained on, oldest first; consumes nothing.

        Where a missing reward counts as zero, an event is held back until its time for a reward is
        over: before that, those with a reward would be seen and those without one not, and every
        action would look better than it is.
        """
        with self._reading() as (db, head, rules):
            zero = rules.without_reward == "zero"
            newest = head.elapsed - rules.reward_within if zero else head.elapsed
            oldest, first = head.elapsed - rules.max_age, head.last - rules.max_events
            stored = db.execute(f"{_SELECTED} ORDER BY sequence").fetchall()
        found = []
        for mark, *values in stored:
            row = LogRow(*values)
            # What is not as it was written is read, too: training counts it as damaged.
            intact = row.mark == mark
            readable = intact and oldest < row.made <= newest and row.sequence > first
            if not intact or (readable and (zero or row.reward is not None)):
                reward = 0.0 if row.reward is None else row.reward
                settled = row.sequence if zero else row.settled
                found.append(row._replace(reward=reward, settled=settled, intact=intact))
        return found

    def missing(self) -> int:
        """Count events that are gone though nothing here deleted them, or were put in; 0 in a sound
        log.
        """
        with self._reading() as (db, head, _):
            held, total = db.execute(
                "SELECT count(*), coalesce(sum(mark), 0) FROM events"
            ).fetchone()
        if held == head.held and total % _MODULUS == head.total:
            return 0
        return max(1, abs(head.held - int(held)))

    def totals(self) -> Totals:
        """Count what the log has seen and what it holds."""
        with self._reading() as (db, head, _):
            held, settled = db.execute("SELECT count(*), count(reward) FROM events").fetchone()
            return Totals(head.last, head.rewarded, held, held - settled)

    def retention(self) -> Retention:
        """The rules in force."""
        with self._reading() as (_, _, rules):
            return rules

    def close(self) -> None:
        """Let go of the file. Using the log again opens it again."""
        with self._file.lock:
            self._file.disconnect()

    @contextmanager
    def _writing(self) -> Iterator[tuple[sqlite3.Connection, _Head, Retention]]:
        """A write transaction with the log's head at this moment, stored in the end, and
        the rules.
        """
        self._prepare()
        with self._file.transaction(write=True) as db:
            head, rules = self._head(db)
            yield db, head, rules
            self._store(db, head)

    @contextmanager
    def _reading(self) -> Iterator[tuple[sqlite3.Connection, _Head, Retention]]:
        with suppress(LogUnavailable):  # on a full disk a log can still be read
            self._prepare()
        with self._file.transaction(write=False) as db:
            yield db, *self._head(db)

    def _head(self, db: sqlite3.Connection) -> tuple[_Head, Retention]:
        """The log's head with its clock moved on to now, and the rules in it."""
        row = db.execute(f"SELECT {_OF_LOG}, mark FROM log").fetchone()
        try:
            if row is None or mark_of(row[:-1]) != row[-1]:
                raise ValueError("its checksum does not match")
            head, rules = _Head(*row[:-1]), Retention(**json.loads(row[5]))
        except (TypeError, ValueError, RecursionError) as error:
            problem = f"{self._file.path}: damaged (its clock or rules: {str(error)[:100]})"
            raise DataError(f"{problem}; move it away to start a new one") from None
        reading = self._clocks()
        head.elapsed += seconds_between(Reading(head.wall, head.steady, head.boot), reading)
        head.wall, head.steady, head.boot = reading.wall, reading.steady, reading.boot
        return head, rules

    def _store(self, db: sqlite3.Connection, head: _Head) -> None:
        values = tuple(vars(head).values())
        places = ", ".join(f"{name} = ?" for name in (*_OF_LOG.split(", "), "mark"))
        db.execute(f"UPDATE log SET {places}", (*values, mark_of(values)))

    def _prepare(self) -> None:
        """Before the first use: make the log if there is none, and store the rules asked for."""
        if self._ready:
            return
        if not self._file.exists():
            self._file.create(json.dumps(asdict(self._retention or Retention())), self._clocks())
        with self._file.transaction(write=True) as db:
            if upgrade(db):
                self._mark_all(db)
            # After a reboot the wall clock is asked once, here; later it may be set at will.
            head, _ = self._head(db)
            if self._retention is not None:
                head.rules = json.dumps(asdict(self._retention))
            self._store(db, head)
        self._ready = True

    def _mark_all(self, db: sqlite3.Connection) -> None:
        """Take the rows of a log of format 1 as they are, and count and mark them."""
        head = _Head(*db.execute(f"SELECT {_OF_LOG} FROM log").fetchone())
        given = db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'events'").fetchone()
        head.last = 0 if given is None else int(given[0])
        for _, *values in db.execute(_SELECTED).fetchall():
            row = LogRow(*values)
            db.execute("UPDATE events SET mark = ? WHERE sequence = ?", (row.mark, row.sequence))
            head.add(row.mark)
        self._store(db, head)


def _prune(db: sqlite3.Connection, head: _Head, rules: Retention) -> None:
    """Delete what the rules no longer keep: the oldest, the too old, and what got no reward."""
    fresh = "SELECT sequence FROM events WHERE made > ? ORDER BY sequence LIMIT 1"
    outdated = [
        ("sequence <= ?", head.last - rules.max_events),
        (f"sequence < ({fresh})", head.elapsed - rules.max_age),
    ]
    if rules.without_reward == "drop":
        outdated.append(("reward IS NULL AND made <= ?", head.elapsed - rules.reward_within))
    for condition, limit in outdated:
        # Times ascend with the sequence, so the too old stand at the beginning.
        gone = db.execute(f"SELECT mark FROM events WHERE {condition}", (limit,)).fetchall()
        for (mark,) in gone:
            head.add(mark if isinstance(mark, int) else 0, -1)
        if gone:
            db.execute(f"DELETE FROM events WHERE {condition}", (limit,))


def _parse(event_id: str) -> tuple[int, int] | None:
    sequence, dash, nonce = event_id.partition("-")
    try:
        return (int(sequence), int(nonce, 16)) if dash and 0 < int(sequence) < 2**63 else None
    except ValueError:
        return None
