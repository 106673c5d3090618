"""The device's event log: every decision with its propensity, its reward when one comes, and when it is too late.

Sequence numbers give the order and the log's own seconds the age; no clock that somebody can set decides anything.
"""

import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fedbandit.core.errors import DataError
from fedbandit.deploy.device.log_file import (
    LogFile,
    LogUnavailable,
    Reading,
    read_clocks,
    seconds_between,
)

__all__ = ["EventLog", "LogRow", "LogUnavailable", "Outcome", "Record", "Retention", "Totals"]
DAY = 86400.0
LARGEST_REWARD = 3.4028234663852886e38  # of float32, in which devices train


@dataclass(frozen=True)
class Retention:
    """How long events live. The log remembers it, so that an app and a training process keep the same rules."""

    max_events: int = 1024  # the paper's M: only the newest are kept
    max_age: float = 30 * DAY  # seconds
    reward_within: float = DAY  # seconds after a decision in which its reward may come
    without_reward: Literal["drop", "zero"] = (
        "drop"  # what becomes of an event whose reward did not come in time
    )

    def __post_init__(self) -> None:
        if self.max_events < 1:
            raise ValueError(f"max_events must be at least 1, not {self.max_events}")
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
    """What became of a reward."""

    RECORDED = "recorded"
    DUPLICATE = "duplicate"  # the event has its reward; the first one stays
    EXPIRED = "expired"  # the event is too old, or was pushed out by newer ones
    UNKNOWN = "unknown"  # no event of this log has that id
    NOT_STORED = "not stored"  # the log could not be written: try again, a repetition does no harm


class Record(NamedTuple):
    """A decision as it is logged; contexts and sets of actions as bytes."""

    version: int
    space: str
    action: int
    propensity: float
    available: bytes | None
    ids: bytes | None
    values: bytes


class LogRow(NamedTuple):
    """An event that can be trained on."""

    sequence: int
    settled: int  # counts up in the order in which events became readable: what is above a remembered one is new
    version: int
    space: str
    action: int
    propensity: float
    reward: float
    available: bytes | None
    ids: bytes | None
    values: bytes


@dataclass(frozen=True)
class Totals:
    """Counts over the life of the log, and what it holds now."""

    logged: int
    rewarded: int
    held: int
    waiting: int  # of those held, without a reward so far


class EventLog:
    """Appends events, takes rewards, and reads what can be trained on; safe for threads and processes."""

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

        A damaged log raises `DataError`. `power_safe` waits for the disk at every event, so that a power cut loses
        none; a killed process never does.
        """
        self._file = LogFile(path, timeout, power_safe)
        self._retention = retention
        self._clocks = clocks
        self._ready = False

    def append(self, record: Record) -> str:
        """Log a decision; the event's id."""
        nonce = int.from_bytes(os.urandom(7), "little")
        with self._writing() as (db, now, rules):
            cursor = db.execute(
                "INSERT INTO events (made, nonce, version, space, action, propensity, available, ids, vals)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (now, nonce, *record),
            )
            sequence = cursor.lastrowid
            assert sequence is not None
            _prune(db, sequence, now, rules)
        return f"{sequence}-{nonce:014x}"

    def reward(self, event_id: str, value: float) -> Outcome:
        """Record an event's reward, once."""
        if not abs(value) <= LARGEST_REWARD:
            raise ValueError(f"reward must be finite in float32, not {str(value)[:40]}")
        parsed = _parse(event_id)
        if parsed is None:
            return Outcome.UNKNOWN
        sequence, nonce = parsed
        with self._writing() as (db, now, rules):
            event = db.execute(
                "SELECT nonce, made, reward FROM events WHERE sequence = ?", (sequence,)
            ).fetchone()
            if event is None:
                return Outcome.EXPIRED if sequence <= _last_sequence(db) else Outcome.UNKNOWN
            if event[0] != nonce:
                return Outcome.UNKNOWN
            if event[2] is not None:
                return Outcome.DUPLICATE
            if now - event[1] >= min(rules.reward_within, rules.max_age):
                return Outcome.EXPIRED
            db.execute("UPDATE log SET rewarded = rewarded + 1")
            db.execute(
                "UPDATE events SET reward = ?, settled = (SELECT rewarded FROM log) WHERE sequence = ?",
                (float(value), sequence),
            )
        return Outcome.RECORDED

    def read(self) -> list[LogRow]:
        """The events that can be trained on, oldest first; consumes nothing.

        Where a missing reward counts as zero, an event is held back until its time for a reward is over: before that,
        those with a reward would be seen and those without one not, and every action would look better than it is.
        """
        columns = "version, space, action, propensity, coalesce(reward, 0), available, ids, vals"
        with self._reading() as (db, now, rules):
            if rules.without_reward == "zero":
                query = (
                    f"SELECT sequence, sequence, {columns} FROM events WHERE made <= ? AND made > ?"
                )
                window = (now - rules.reward_within, now - rules.max_age)
            else:
                query = f"SELECT sequence, settled, {columns} FROM events WHERE reward IS NOT NULL AND made > ?"
                window = (now - rules.max_age,)  # type: ignore[assignment]
            oldest = _last_sequence(db) - rules.max_events
            found = db.execute(
                f"{query} AND sequence > ? ORDER BY sequence", (*window, oldest)
            ).fetchall()
        return [LogRow(*row) for row in found]

    def totals(self) -> Totals:
        """What the log has seen and what it holds."""
        with self._reading() as (db, _, _):
            rewarded = db.execute("SELECT rewarded FROM log").fetchone()[0]
            held, settled = db.execute("SELECT count(*), count(reward) FROM events").fetchone()
            return Totals(_last_sequence(db), rewarded, held, held - settled)

    def retention(self) -> Retention:
        """The rules in force."""
        with self._reading() as (_, _, rules):
            return rules

    def close(self) -> None:
        """Let go of the file. Using the log again opens it again."""
        with self._file.lock:
            self._file.disconnect()

    @contextmanager
    def _writing(self) -> Iterator[tuple[sqlite3.Connection, float, Retention]]:
        """A write transaction, its time in the log's seconds, and the rules; the log's clock moves on with it."""
        self._prepare()
        with self._file.transaction(write=True) as db:
            now, rules = self._move_clock(db)
            yield db, now, rules

    @contextmanager
    def _reading(self) -> Iterator[tuple[sqlite3.Connection, float, Retention]]:
        with suppress(LogUnavailable):  # on a full disk a log can still be read
            self._prepare()
        with self._file.transaction(write=False) as db:
            now, _, rules = self._now(db)
            yield db, now, rules

    def _now(self, db: sqlite3.Connection) -> tuple[float, Reading, Retention]:
        row = db.execute("SELECT elapsed, wall, steady, boot, rules FROM log").fetchone()
        try:
            (elapsed, wall, steady), boot, rules = (
                map(float, row[:3]),
                str(row[3]),
                _from_json(row[4]),
            )
        except (TypeError, ValueError, RecursionError) as error:
            problem = f"{self._file.path}: damaged (its clock or rules: {str(error)[:100]})"
            raise DataError(f"{problem}; move it away to start a new one") from None
        reading = self._clocks()
        return elapsed + seconds_between(Reading(wall, steady, boot), reading), reading, rules

    def _move_clock(self, db: sqlite3.Connection) -> tuple[float, Retention]:
        now, reading, rules = self._now(db)
        update = "UPDATE log SET elapsed = ?, wall = ?, steady = ?, boot = ?"
        db.execute(update, (now, reading.wall, reading.steady, reading.boot))
        return now, rules

    def _prepare(self) -> None:
        """Before the first use: make the log if there is none, and have it keep the rules that were asked for."""
        if self._ready:
            return
        if not self._file.exists():
            self._file.create(_to_json(self._retention or Retention()), self._clocks())
        with self._file.transaction(write=True) as db:
            # After a reboot the wall clock is asked once, here, and may be set as anyone likes then.
            self._move_clock(db)
            if self._retention is not None:
                db.execute("UPDATE log SET rules = ?", (_to_json(self._retention),))
        self._ready = True


def _prune(db: sqlite3.Connection, newest: int, now: float, rules: Retention) -> None:
    """Delete what the rules no longer keep. Times ascend with the sequence, so the too old stand at the beginning."""
    db.execute("DELETE FROM events WHERE sequence <= ?", (newest - rules.max_events,))
    fresh = "SELECT sequence FROM events WHERE made > ? ORDER BY sequence LIMIT 1"
    db.execute(f"DELETE FROM events WHERE sequence < ({fresh})", (now - rules.max_age,))
    if rules.without_reward == "drop":
        db.execute(
            "DELETE FROM events WHERE reward IS NULL AND made <= ?", (now - rules.reward_within,)
        )


def _last_sequence(db: sqlite3.Connection) -> int:
    found = db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'events'").fetchone()
    return 0 if found is None else int(found[0])


def _parse(event_id: str) -> tuple[int, int] | None:
    sequence, dash, nonce = event_id.partition("-")
    try:
        return (int(sequence), int(nonce, 16)) if dash and 0 < int(sequence) < 2**63 else None
    except ValueError:
        return None


def _to_json(rules: Retention) -> str:
    return json.dumps(asdict(rules))


def _from_json(text: str) -> Retention:
    values: Any = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError(f"a {type(values).__name__} where rules were expected")
    return Retention(**values)
