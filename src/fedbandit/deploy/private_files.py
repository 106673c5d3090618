"""Files that only their owner reads, and what a device's log and a server's state share as SQLite
files.

Knows nothing of what is in them.
"""

import logging
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedbandit.core.errors import ConfigError, DataError, FedbanditError

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


@dataclass(frozen=True)
class SqliteKind:
    """One kind of SQLite files of ours: how they are made, recognised, opened, and complained of.

    The device's log and the server's database are two kinds. Each file carries the `application`
    number of its kind and the format it was written in. Whatever SQLite reports becomes one line:
    an error that passes is raised as `unavailable`, and one that says something about the file's
    contents as `DataError`, which ends with what to do about it (`mend`).

    Examples:
        >>> import tempfile
        >>> notes = SqliteKind(7, 1, "CREATE TABLE notes (text)", "not notes", "write them again")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "notes.sqlite"
        ...     notes.make(path, lambda db: None)
        ...     with closing(notes.connect(path, timeout=1.0)) as db:
        ...         notes.problem_in(db)
        ...     _ = path.write_bytes(b"no database at all")
        ...     try:
        ...         notes.connect(path, timeout=1.0)
        ...     except DataError as error:
        ...         print(str(error).removeprefix(str(path)))
        : damaged (file is not a database); write them again
    """

    application: int
    format: int  # the newest that this fedbandit reads, and the one that it writes
    schema: str
    not_ours: str  # what a file of another application is called
    mend: str
    unavailable: type[FedbanditError] = FedbanditError
    journal: str = "DELETE"  # SQLite's journal mode, which only "WAL" stays with the file

    def make(self, path: Path, fill: Callable[[sqlite3.Connection], object]) -> None:
        """Write a new file for its owner alone, on disk before this returns; `fill` adds rows.

        Not safe against kills by itself: give the file its real name afterwards.
        """
        with self.explained(path), closing(sqlite3.connect(path, isolation_level=None)) as db:
            make_private(path)
            for setting in ("synchronous", "journal_mode"):  # on disk once for all, below
                db.execute(f"PRAGMA {setting} = OFF")
            db.executescript(self.schema)
            db.execute("BEGIN")
            fill(db)
            db.execute(f"PRAGMA application_id = {self.application}")
            db.execute(f"PRAGMA user_version = {self.format}")
            db.execute("COMMIT")
            db.execute(f"PRAGMA journal_mode = {self.journal}")
        with open(path, "rb+") as complete:
            os.fsync(complete.fileno())

    def connect(self, path: Path, timeout: float) -> sqlite3.Connection:
        """Open an existing file, for any thread; transactions are begun and ended by hand.

        Refuses a file of another application, and by name one of a newer format.
        """
        if path.exists() and not path.is_file():
            raise DataError(f"{path}: is not a file; {self.mend}")
        uri = f"{path.absolute().as_uri()}?mode=rw"
        with self.explained(path):
            db = sqlite3.connect(
                uri, uri=True, timeout=timeout, isolation_level=None, check_same_thread=False
            )
            try:
                found, version = (
                    db.execute(f"PRAGMA {name}").fetchone()[0]
                    for name in ("application_id", "user_version")
                )
                if found != self.application or version < 1:
                    raise DataError(f"{path}: {self.not_ours}; {self.mend}")
                if version > self.format:
                    newer = f"made by a newer fedbandit, format {version}"
                    raise DataError(f"{path}: {newer}; this one reads formats up to {self.format}")
            except BaseException:
                db.close()
                raise
        return db

    def problem_in(self, db: sqlite3.Connection) -> str | None:
        """The first thing that SQLite finds wrong with the file, in one line; None if nothing."""
        problem = db.execute("PRAGMA quick_check(1)").fetchone()[0]
        return None if problem == "ok" else _first_line(problem)

    def damaged(self, path: Path, problem: str) -> DataError:
        """The error that says what is wrong with a file, and what to do about it."""
        return DataError(f"{path}: damaged ({problem}); {self.mend}")

    @contextmanager
    def explained(self, path: Path) -> Iterator[None]:
        """Raise SQLite's errors about a file as ours."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorcode", 0)
            if code & 0xFF in _PASSING and code != sqlite3.SQLITE_IOERR_SHORT_READ:
                raise self.unavailable(f"{path}: {error}") from None
            raise self.damaged(path, _first_line(str(error))) from None
        except UnicodeDecodeError:  # of SQLite's own words, which quote the file
            raise self.damaged(path, "its texts are not texts") from None


def _first_line(text: str) -> str:
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
