"""What clients remember between rounds, kept by the driver for all of them: named vectors in one SQLite file.

Records are keyed by (client, round). A read takes the newest from before the current round, and records from after the
checkpoint that a run resumes from are dropped, so that a killed run ends with the same bits.
"""

import sqlite3
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from fedbandit.core.errors import DataError
from fedbandit.federated.pipeline import Vectors


class Memory:
    """The memory of all clients of a run. Written by one thread; read by any."""

    def __init__(self, path: Path | None = None) -> None:
        """In the file at `path`; None: in a temporary file that is gone when the memory is closed."""
        self._lock = threading.Lock()
        self._touched: set[int] = set()  # clients with something new since the last `keep`
        try:
            self._db = sqlite3.connect("" if path is None else path, check_same_thread=False, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS memory (client INTEGER, round INTEGER, name TEXT, dtype TEXT, value BLOB,"
                " PRIMARY KEY (client, round, name)) WITHOUT ROWID"
            )
            self._db.execute("CREATE TABLE IF NOT EXISTS kept (round INTEGER)")
            self._db.execute("BEGIN")
            self._kept = self._last_kept()
        except sqlite3.DatabaseError as error:
            raise DataError(f"{path}: the clients' memory cannot be used: {error}") from None

    def read(self, clients: Iterable[int], round_number: int) -> dict[int, Vectors]:
        """What these clients remember from before the round; those that remember nothing are missing."""
        found: dict[int, Vectors] = {}
        with self._lock:
            for client in map(int, clients):
                rows = self._db.execute(
                    "SELECT name, dtype, value FROM memory WHERE client = ?1 AND round ="
                    " (SELECT max(round) FROM memory WHERE client = ?1 AND round < ?2)",
                    (client, round_number),
                ).fetchall()
                if rows:
                    found[client] = {name: np.frombuffer(value, dtype).copy() for name, dtype, value in rows}
        return found

    def write(self, round_number: int, memory: Mapping[int, Vectors]) -> None:
        """What clients remember from this round on."""
        rows = [
            (int(client), round_number, name, value.dtype.str, value.tobytes())
            for client, vectors in memory.items()
            for name, value in vectors.items()
        ]
        with self._lock:
            self._touched |= {int(client) for client in memory}
            # What came after the last checkpoint is needed only as long as it is the newest.
            newer = [(int(client), self._kept) for client in memory]
            self._db.executemany("DELETE FROM memory WHERE client = ? AND round > ?", newer)
            self._db.executemany("INSERT OR REPLACE INTO memory VALUES (?, ?, ?, ?, ?)", rows)

    def keep(self, round_number: int, oldest_needed: int) -> None:
        """Make all up to this round last; drop what no checkpoint from round `oldest_needed` on can ask for."""
        with self._lock:
            self._db.executemany(
                "DELETE FROM memory WHERE client = ?1 AND round <"
                " (SELECT max(round) FROM memory WHERE client = ?1 AND round <= ?2)",
                [(client, oldest_needed) for client in self._touched],
            )
            self._touched.clear()
            self._db.execute("DELETE FROM kept")
            self._db.execute("INSERT INTO kept VALUES (?)", (round_number,))
            self._kept = round_number
            self._db.execute("COMMIT")
            self._db.execute("BEGIN")

    def resume(self, round_number: int) -> None:
        """Forget everything from after that round; `DataError` if not all up to it is here."""
        with self._lock:
            if self._kept < round_number:
                raise DataError(f"the clients' memory is missing or older than the checkpoint of round {round_number}")
            self._db.execute("DELETE FROM memory WHERE round > ?", (round_number,))
            self._kept = min(self._kept, round_number)

    def _last_kept(self) -> int:
        row = self._db.execute("SELECT round FROM kept").fetchone()
        return int(row[0]) if row else 0

    def close(self) -> None:
        """Let go of the file; what was not kept is gone."""
        with self._lock:
            self._db.rollback()
            self._db.close()
