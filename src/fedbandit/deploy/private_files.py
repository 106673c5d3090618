"""Files that only their owner reads, and what a device's log and a server's state share as SQLite
files.

Knows nothing of what is in them.
"""

import logging
import os
import sqlite3
from pathlib import Path

from fedbandit.core.errors import ConfigError, DataError

_logger = logging.getLogger("fedbandit.deploy")
# Failures that pass or that free space or rights would mend; everything else that SQLite reports is
# damage.
_PASSING = {
    getattr(sqlite3, f"SQLITE_{name}")
    for name in (
        *("FULL", "BUSY", "LOCKED", "IOERR", "CANTOPEN", "READONLY", "PERM", "NOMEM"),
        *("PROTOCOL", "INTERRUPT", "AUTH"),
    )
}


def passes(error: sqlite3.DatabaseError) -> bool:
    """Whether an error says nothing about the file's contents: try again later."""
    code = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF in _PASSING and code != sqlite3.SQLITE_IOERR_SHORT_READ


def check_format(
    connection: sqlite3.Connection, path: Path, application: int, newest: int, otherwise: str
) -> None:
    """Refuse a file of another application, with the words given, and by name one of a newer
    format.
    """
    found = [
        connection.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("application_id", "user_version")
    ]
    if found[0] != application or found[1] < 1:
        raise DataError(f"{path}: {otherwise}")
    if found[1] > newest:
        newer = f"made by a newer fedbandit, format {found[1]}"
        raise DataError(f"{path}: {newer}; this one reads formats up to {newest}")


def check_structure(connection: sqlite3.Connection) -> str | None:
    """The first thing that SQLite finds wrong with the file, in one line; None if nothing."""
    problem = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    return None if problem == "ok" else first_line(problem)


def first_line(text: str) -> str:
    """SQLite's longer reports begin with a line that only says that a report follows."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("***")]
    return lines[0] if lines else text


def make_private_folder(folder: Path) -> None:
    """Make the folder, or take an existing one, with all that stands in it, from everybody else."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(exist_ok=True, mode=0o700)
    _restrict(folder, 0o700)
    for path in folder.iterdir():
        if path.is_file() and not path.is_symlink():
            make_private(path)


def make_private(path: Path) -> None:
    """Let only its owner read and write a file."""
    _restrict(path, 0o600)


def _restrict(path: Path, mode: int) -> None:
    try:
        if path.stat().st_mode & 0o777 & ~mode:
            path.chmod(mode)
    except FileNotFoundError:
        pass  # another process has cleared it away
    except OSError as error:
        _logger.warning(
            "%s: others may read it, and that cannot be changed: %s", path, error.strerror
        )


def held_alone(path: Path, otherwise: str) -> int:
    """An open file that nobody else can lock; the system lets go of it when the process ends.

    Where another process has locked it, the error says so in the words given.
    """
    import fcntl  # an app on a device, which may have none, locks nothing

    try:
        held = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise DataError(f"{path}: cannot be locked: {error.strerror}") from None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise ConfigError(otherwise) from None
    return held
