"""The server's SQLite file: what it knows of each device, and which files hold its state. One commit is one round.

Reads and writes touch the devices of a round alone, however many there are. Knows nothing of what a state means.
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
from fedbandit.deploy.device.device_identity import make_private
from fedbandit.deploy.sqlite_files import check_format, check_structure, first_line, passes

NAME = "server.sqlite"
FORMAT = 3
_APPLICATION = 0x66627376  # marks the file as ours
_AT_ONCE = 500  # names in one query
_MARKS = "SELECT name, counted, turn, settled, checksum FROM devices WHERE name"
_NODES = "SELECT node, name FROM nodes WHERE node"
_NEW_DEVICE = "INSERT INTO devices (counted, turn, settled, checksum, name) VALUES (?, ?, ?, ?, ?)"
_LONGEST_NAME = 64  # of a device
_USER = "user:"
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
CREATE TABLE generations (
    number INTEGER PRIMARY KEY,
    files TEXT NOT NULL,
    facts TEXT NOT NULL,
    checksum TEXT NOT NULL
);
"""


@dataclass(frozen=True)
class Mark:
    """What the server remembers of one device."""

    counted: int = 0  # rewards settled up to this mark of its log are in the metrics
    turn: int | None = None  # the round in which it was last in a sum
    settled: str | None = None  # the token of the last secure sum that it was in
    damaged: bool = False  # what was kept of it is not what was written


def user_key(user: str) -> str:
    """The name under which the turns of a user are kept, among the devices; longer than a device's can be."""
    return _USER + hashlib.sha256(user.encode()).hexdigest()


MarksOf = Callable[[Iterable[str]], dict[str, Mark]]
"""What is remembered of the devices with these names, of those that are known."""


@dataclass(frozen=True)
class Generation:
    """One state of the server: the files that hold its arrays, and everything that is not an array."""

    number: int
    files: Mapping[str, str]  # name -> SHA-256 of its bytes
    facts: Mapping[str, Any]  # JSON


class DatabaseUnavailable(FedbanditError):
    """The server's database could not be used just now: the disk is full, or another process holds it."""


class Database:
    """The file, opened anew for each transaction."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def check(self) -> None:
        """Have SQLite look at the whole file; once at the start, since this takes seconds for millions of devices."""
        with self._transaction(write=False) as db:
            if problem := check_structure(db):
                raise _damaged(self.path, problem)

    def marks(self, names: Iterable[str]) -> dict[str, Mark]:
        """What is remembered of these devices, of those that are known."""
        found: dict[str, Mark] = {}
        for name, counted, turn, settled, checksum in self._rows(
            _MARKS, list(dict.fromkeys(names))
        ):
            sound = checksum == _checksum(name, counted, turn, settled)
            found[name] = Mark(counted, turn, settled) if sound else Mark(damaged=True)
        return found

    def devices(self, nodes: Iterable[int]) -> dict[int, str]:
        """Which devices these nodes were when they last took part, of those that have."""
        return {
            int(node): str(name) for node, name in self._rows(_NODES, [str(node) for node in nodes])
        }

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
        for number, files, facts, checksum in rows:
            if checksum != _digest(number, files, facts):
                raise _damaged(self.path, f"generation {number} is not what was written")
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
    ) -> int:
        """From here on `following` is the state; the number of devices that are known.

        It must come after generation `after`; the generation `beside` is kept with it.
        """
        with self._transaction(write=True) as db:
            newest = db.execute("SELECT max(number) FROM generations").fetchone()[0]
            if newest != after:
                raise DataError(
                    f"{self.path}: is at generation {newest}, where {after} was expected; start again"
                )
            new = [name for name, mark in marks.items() if _write(db, name, mark)]
            devices = int(following.facts["devices"]) + sum(
                len(name) <= _LONGEST_NAME for name in new
            )
            known = ((str(node), name) for node, name in nodes.items())
            db.executemany("INSERT OR REPLACE INTO nodes VALUES (?, ?)", known)
            _insert(db, following, devices)
            db.execute(
                "DELETE FROM generations WHERE number NOT IN (?, ?)", (following.number, beside)
            )
        return devices

    @contextmanager
    def _transaction(self, write: bool) -> Iterator[sqlite3.Connection]:
        with _explained(self.path):
            uri = f"{self.path.absolute().as_uri()}?mode=rw"
            with closing(
                sqlite3.connect(uri, uri=True, timeout=_PATIENCE, isolation_level=None)
            ) as db:
                otherwise = "not the state of a deployment, or damaged; restore it from a copy"
                check_format(db, self.path, _APPLICATION, FORMAT, otherwise)
                db.execute("PRAGMA synchronous = EXTRA")  # the end of a commit is on disk as well
                db.execute("BEGIN IMMEDIATE" if write else "BEGIN")
                yield db
                if write:  # without it, closing leaves no trace
                    commit(db)


def commit(db: sqlite3.Connection) -> None:
    """The moment in which a round happens."""
    db.execute("COMMIT")


def create(path: Path, first: Generation, marks: Iterable[tuple[str, Mark]] = ()) -> Database:
    """A new database with its first generation. It appears complete or not at all."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)  # of a server that was killed; the folder is ours alone
    with _explained(temporary), closing(sqlite3.connect(temporary, isolation_level=None)) as db:
        make_private(temporary)
        db.execute("PRAGMA synchronous = OFF")  # once for all below, before the file has its name
        db.execute("PRAGMA journal_mode = OFF")
        db.executescript(_SCHEMA)
        db.execute("BEGIN")
        rows = (
            (m.counted, m.turn, m.settled, _checksum(name, m.counted, m.turn, m.settled), name)
            for name, m in marks
        )
        _insert(db, first, db.executemany(_NEW_DEVICE, rows).rowcount)
        db.execute(f"PRAGMA application_id = {_APPLICATION}")
        db.execute(f"PRAGMA user_version = {FORMAT}")
        db.execute("COMMIT")
    with open(temporary, "rb+") as complete:
        os.fsync(complete.fileno())
    os.replace(temporary, path)
    keep_names(path.parent)
    return Database(path)


def _write(db: sqlite3.Connection, name: str, mark: Mark) -> bool:
    """Keep a device's mark; whether it is a new device."""
    row = _row(name, mark)
    update = "UPDATE devices SET counted = ?, turn = ?, settled = ?, checksum = ? WHERE name = ?"
    if db.execute(update, row).rowcount:
        return False
    db.execute(_NEW_DEVICE, row)
    return True


def _row(name: str, mark: Mark) -> tuple[object, ...]:
    return (
        mark.counted,
        mark.turn,
        mark.settled,
        _checksum(name, mark.counted, mark.turn, mark.settled),
        name,
    )


def _insert(db: sqlite3.Connection, generation: Generation, devices: int) -> None:
    files = json.dumps(dict(generation.files))
    facts = json.dumps({**generation.facts, "devices": devices})
    row = (generation.number, files, facts, _digest(generation.number, files, facts))
    db.execute("INSERT INTO generations VALUES (?, ?, ?, ?)", row)


def _checksum(name: object, counted: object, turn: object, settled: object) -> int:
    return zlib.crc32(
        f"{name}\n{counted!r}\n{turn!r}\n{settled}".encode()
    )  # damage can make any type of a value


def _digest(*values: object) -> str:
    return hashlib.sha256(json.dumps(values, default=repr).encode()).hexdigest()


def _damaged(path: Path, problem: str) -> DataError:
    return DataError(f"{path}: damaged ({problem}); restore it from a copy")


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """SQLite's errors as ours."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        if passes(error):
            raise DatabaseUnavailable(f"{path}: {error}") from None
        raise _damaged(path, first_line(str(error))) from None
    except UnicodeDecodeError:  # of SQLite's own words, which quote the file
        raise _damaged(path, "its texts are not texts") from None
