"""The device's event log: every decision with its propensity, its reward when one comes, and when
it is too late.

Sequence numbers give the order and the log's own seconds the age; no clock that somebody can set
decides anything.
"""

import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal, NamedTuple

from fedbandit.core.errors import DataError
from fedbandit.deploy.device.log_file import (
    LogFile,
    LogUnavailable,
    Reading,
    mark_of,
    read_clocks,
    seconds_between,
    upgrade,
)

__all__ = ["EventLog", "LogRow", "LogUnavailable", "Outcome", "Retention", "Totals"]
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
