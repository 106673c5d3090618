"""What a device's log and a server's state have in common as SQLite files: their format, and what an error means.

Knows nothing of what is in them.
"""

import sqlite3
from pathlib import Path

from fedbandit.core.errors import DataError

# Failures that pass or that free space or rights would mend; everything else that SQLite reports is damage.
_PASSING = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_IOERR}
_PASSING |= {
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_NOMEM,
}
_PASSING |= {sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_INTERRUPT, sqlite3.SQLITE_AUTH}


def passes(error: sqlite3.DatabaseError) -> bool:
    """Whether an error says nothing about the file's contents: try again later."""
    code = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF in _PASSING and code != sqlite3.SQLITE_IOERR_SHORT_READ


def check_format(
    connection: sqlite3.Connection, path: Path, application: int, newest: int, otherwise: str
) -> None:
    """Refuse a file of another application, with the words given, and by name one of a newer format."""
    found = [
        connection.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("application_id", "user_version")
    ]
    if found[0] != application or found[1] < 1:
        raise DataError(f"{path}: {otherwise}")
    if found[1] > newest:
        raise DataError(
            f"{path}: made by a newer fedbandit, format {found[1]}; this one reads formats up to {newest}"
        )


def check_structure(connection: sqlite3.Connection) -> str | None:
    """What SQLite finds wrong with the file, in one line; None if nothing."""
    problem = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    return None if problem == "ok" else first_line(problem)


def first_line(text: str) -> str:
    """SQLite's longer reports begin with a line that only says that a report follows."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("***")]
    return lines[0] if lines else text
