"""The server's SQLite file: what it knows of each device, and which files hold its state.

One commit is one round. Reads and writes touch the devices of a round alone, however many there
are. Knows nothing of what a state means.
"""

import hashlib
import json
import os
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbandit.core.errors import DataError, FedbanditError
from fedbandit.core.files import keep_names
from fedbandit.deploy.private_files import SqliteKind

NAME = "server.sqlite"
_AT_ONCE = 500  # names in one query
_MARKS = "SELECT name, counted, turn, settled, checksum FROM devices WHERE name"
_NODES = "SELECT node, name FROM nodes WHERE node"
_OWNERS = "SELECT name, node FROM nodes WHERE name"
_HELD = "SELECT node, version FROM held WHERE node"
_OLD_DEVICE = "UPDATE devices SET counted = ?, turn = ?, settled = ?, checksum = ? WHERE name = ?"
_NEW_DEVICE = "INSERT INTO devices (counted, turn, settled, checksum, name) VALUES (?, ?, ?, ?, ?)"
_LONGEST_NAME = 64  # of a device
_PATIENCE = 60.0  # seconds to wait for somebody who reads the status
_SCHEMA = """
CREATE TABLE devices (
    name TEXT PRIMARY KEY,
    counted INTEGER NOT NULL,
    turn INTEGER,
    settled TEXT,
    checksum INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE nodes (
    node TEXT PRIMARY KEY,
    name TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX owners ON nodes (name);
CREATE TABLE held (
    node TEXT PRIMARY KEY,
    version INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE generations (
    number INTEGER PRIMARY KEY,
    files TEXT NOT NULL,
    facts TEXT NOT NULL,
    checksum TEXT NOT NULL
);
"""


@dataclass(frozen=True)
class Mark:
    """One device in the server's memory, so that a reward counts once and turns are kept.

    A checksum protects each mark. A damaged one bars its device: without it nobody knows what of
    the device's log was counted.
    """

    counted: int = 0  # rewards settled up to this mark of its log are in the metrics
    turn: int | None = None  # the round in which it was last in a sum
    settled: str | None = None  # the token of the last secure sum that it was in
    damaged: bool = False  # what was kept of it is not what was written
    owner: int | None = None  # the node that goes by the name; None: none has reported yet


def user_key(user: str) -> str:
    """The name under which a user's turns are kept, longer than a device's name can be."""
    return f"user:{hashlib.sha256(user.encode()).hexdigest()}"


def own_key(node: int, device: str) -> str:
    """The name under which a node's mark is kept while another one goes by its device's name."""
    return f"node:{hashlib.sha256(f'{node} {device}'.encode()).hexdigest()}"


MarksOf = Callable[[Iterable[str]], dict[str, Mark]]
"""Looks up the marks of the devices with these names, of those that are known."""


@dataclass(frozen=True)
class Generation:
    """One state of the server: files that hold its arrays, and everything else as facts."""

    number: int
    files: Mapping[str, str]  # name -> SHA-256 of its bytes
    facts: Mapping[str, Any]  # JSON


class DatabaseUnavailable(FedbanditError):
    """The server's database could not be used just now: the disk is full, or another process holds
    it.
    """


_KIND = SqliteKind(
    application=0x66627376,
    format=3,
    schema=_SCHEMA,
    not_ours="not the state of a deployment, or damaged",
    mend="restore it from a copy",
    unavailable=DatabaseUnavailable,
)


class Database:
    """The file, opened for each transaction: a server that is killed leaves no lock behind.

    Tables: `devices` (a `Mark` under each name), `nodes` (which device a node was last), `held`
    (which model a node has said it holds) and `generations` (the newest state, and one before).
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def check(self) -> None:
        """Have SQLite look at the whole file, and compare the devices with those that were written.

        Once at the start, since this takes seconds for millions of devices. A device whose row is
        gone or renamed would be a new one, and its rewards counted twice.
        """
        facts = self.generations()[0].facts
        with self._transaction(write=False) as db:
            if problem := _KIND.problem_in(db):
                raise _KIND.damaged(self.path, problem)
            devices = names = 0
            for (name,) in db.execute("SELECT name FROM devices"):
                devices += _is_device(name)
                names ^= _name_hash(name)
        if (devices, names) != (facts["devices"], facts["names"]):
            raise _KIND.damaged(
                self.path,
                "renamed devices"
                if devices == facts["devices"]
                else f"{devices} devices of {facts['devices']}: rows are gone or renamed",
            )

    def marks(self, names: Iterable[str]) -> dict[str, Mark]:
        """The marks of these devices, of those that are known."""
        found: dict[str, Mark] = {}
        names = list(dict.fromkeys(names))
        owners = {name: int(node) for name, node in self._rows(_OWNERS, names)}
        for name, counted, turn, settled, checksum in self._rows(_MARKS, names):
            sound = checksum == _checksum(name, counted, turn, settled)
            mark = Mark(counted, turn, settled, owner=owners.get(name))
            found[name] = mark if sound else Mark(damaged=True)
        return found

    def devices(self, nodes: Iterable[int]) -> dict[int, str]:
        """Which devices these nodes were when they last took part, of those that have."""
        return {int(n): str(name) for n, name in self._rows(_NODES, [str(n) for n in nodes])}

    def held(self, nodes: Iterable[int]) -> dict[int, int]:
        """Which model each of these nodes has said that it holds, of those that have."""
        return {int(n): int(version) for n, version in self._rows(_HELD, [str(n) for n in nodes])}

    def _rows(self, query: str, keys: list[str]) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = []
        if keys:
            with self._transaction(write=False) as db:
                for start in range(0, len(keys), _AT_ONCE):
                    some = keys[start : start + _AT_ONCE]
                    found += db.execute(f"{query} IN ({','.join('?' * len(some))})", some)
        return found

    def generations(self) -> list[Generation]:
        """The generations that are kept, the newest first."""
        with self._transaction(write=False) as db:
            rows = db.execute(
                "SELECT number, files, facts, checksum FROM generations ORDER BY number DESC"
            ).fetchall()
        if not rows:
            raise _KIND.damaged(self.path, "it names no state")
        for number, files, facts, checksum in rows:
            if checksum != _digest(number, files, facts):
                raise _KIND.damaged(self.path, f"generation {number} is not what was written")
        return [
            Generation(number, json.loads(files), json.loads(facts))
            for number, files, facts, _ in rows
        ]

    def commit(
        self,
        following: Generation,
        marks: Mapping[str, Mark],
        nodes: Mapping[int, str],
        after: int,
        beside: int,
        held: Mapping[int, int] | None = None,
    ) -> tuple[int, int]:
        """From here on `following` is the state; the number of known devices, and their names'
        hash.

        It must come after generation `after`; the generation `beside` is kept with it. `nodes` are
        those that go by another name than before, `held` the models that nodes hold now.
        """
        with self._transaction(write=True) as db:
            newest = db.execute("SELECT max(number) FROM generations").fetchone()[0]
            if newest != after:
                raise DataError(
                    f"{self.path}: is at generation {newest}, not at {after}; start again"
                )
            devices, names = following.facts["devices"], following.facts.get("names", 0)
            for name, mark in marks.items():
                if db.execute(_OLD_DEVICE, row := _row(name, mark)).rowcount == 0:
                    db.execute(_NEW_DEVICE, row)
                    devices, names = devices + _is_device(name), names ^ _name_hash(name)
            known = [(str(node), name) for node, name in nodes.items()]
            db.executemany("DELETE FROM nodes WHERE name = ?2 AND node <> ?1", known)
            db.executemany("INSERT OR REPLACE INTO nodes VALUES (?, ?)", known)
            rows = ((str(node), version) for node, version in (held or {}).items())
            db.executemany("INSERT OR REPLACE INTO held VALUES (?, ?)", rows)
            _insert(db, following, devices, names)
            db.execute(
                "DELETE FROM generations WHERE number NOT IN (?, ?)", (following.number, beside)
            )
        return devices, names

    @contextmanager
    def _transaction(self, write: bool) -> Iterator[sqlite3.Connection]:
        """A connection inside a transaction; what goes wrong in a block that writes leaves no
        trace.
        """
        with _KIND.explained(self.path), closing(_KIND.connect(self.path, _PATIENCE)) as db:
            db.execute("PRAGMA synchronous = EXTRA")  # the end of a commit is on disk as well
            db.execute("BEGIN IMMEDIATE" if write else "BEGIN")
            yield db
            if write:
                commit(db)


def commit(db: sqlite3.Connection) -> None:
    """The moment in which a round happens."""
    db.execute("COMMIT")


def create(path: Path, first: Generation) -> Database:
    """A new database with its first generation and no devices. It appears whole or not at all."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)  # of a server that was killed; the folder is ours alone
    _KIND.make(temporary, lambda db: _insert(db, first, 0, 0))
    os.replace(temporary, path)
    keep_names(path.parent)
    return Database(path)


def _is_device(name: str) -> bool:
    """Whether a mark is a device's; keys of users and of single nodes are longer than its name."""
    return len(name) <= _LONGEST_NAME


def _row(name: str, mark: Mark) -> tuple[object, ...]:
    values = (mark.counted, mark.turn, mark.settled)
    return (*values, _checksum(name, *values), name)


def _name_hash(name: str) -> int:
    """Of all names together a hash is kept that any order of them gives."""
    payload = name.encode(errors="replace")
    return zlib.crc32(payload) << 20 ^ zlib.crc32(payload[::-1])  # within JSON's integers


def _insert(db: sqlite3.Connection, generation: Generation, devices: int, names: int) -> None:
    files = json.dumps(dict(generation.files))
    facts = json.dumps({**generation.facts, "devices": devices, "names": names})
    row = (generation.number, files, facts, _digest(generation.number, files, facts))
    db.execute("INSERT INTO generations VALUES (?, ?, ?, ?)", row)


def _checksum(name: object, counted: object, turn: object, settled: object) -> int:
    # Damage can make any type of a value.
    return zlib.crc32(f"{name}\n{counted!r}\n{turn!r}\n{settled}".encode())


def _digest(*values: object) -> str:
    return hashlib.sha256(json.dumps(values, default=repr).encode()).hexdigest()
