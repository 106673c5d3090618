"""What clients remember between rounds, kept by the driver for all of them: named vectors in one SQLite file.

Records are keyed by (client, round). A read takes the newest from before the current round, and records from after the
checkpoint that a run resumes from are dropped, so that a killed run ends with the same bits. Each record has a
checksum, and so have all of them together, which is verified when the file is opened. The file names its run and the
oldest round that it can serve: what only older checkpoints would ask for is gone.
"""

import hashlib
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from fedbandit.core.errors import DataError
from fedbandit.core.identity import digest_of, require_run
from fedbandit.federated.pipeline import Vectors


class Memory:
    """The memory of all clients of a run. Written by one thread; read by any."""

    def __init__(self, path: Path | None = None, run: str = "") -> None:
        """In the file at `path`, of the run with that id; None: in a temporary file that is gone when it is closed."""
        self._lock = threading.Lock()
        self._run = run
        self._touched: set[int] = set()  # clients with something new since the last `keep`
        self._path = path
        with self._explained():
            self._db = sqlite3.connect(
                "" if path is None else path, check_same_thread=False, isolation_level=None
            )
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS memory (client INTEGER, round INTEGER, name TEXT, dtype TEXT, value BLOB,"
                " digest BLOB, PRIMARY KEY (client, round, name)) WITHOUT ROWID"
            )
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS kept (run TEXT, oldest INTEGER, round INTEGER, digest TEXT)"
            )
            self._db.execute("BEGIN")
            for row in self._db.execute(
                "SELECT client, round, name, dtype, value, digest FROM memory"
            ):
                _vector(*row)
            self._sum = self._sum_of("TRUE")
            self._oldest, self._kept = self._last_kept()

    def read(self, clients: Iterable[int], round_number: int) -> dict[int, Vectors]:
        """What these clients remember from before the round; those that remember nothing are missing."""
        found: dict[int, Vectors] = {}
        with self._lock, self._explained():
            for client in map(int, clients):
                rows = self._db.execute(
                    "SELECT round, name, dtype, value, digest FROM memory WHERE client = ?1 AND round ="
                    " (SELECT max(round) FROM memory WHERE client = ?1 AND round < ?2)",
                    (client, round_number),
                ).fetchall()
                if rows:
                    found[client] = {row[1]: _vector(client, *row) for row in rows}
        return found

    def write(self, round_number: int, memory: Mapping[int, Vectors]) -> None:
        """What clients remember from this round on."""
        with self._lock, self._explained():
            self._touched |= {int(client) for client in memory}
            for client, vectors in memory.items():
                # What came after the last checkpoint is needed only as long as it is the newest.
                self._drop("client = ? AND round > ?", int(client), self._kept)
                for name, value in vectors.items():
                    row = (int(client), round_number, name, value.dtype.str, value.tobytes())
                    digest = _digest(*row)
                    self._db.execute("INSERT INTO memory VALUES (?, ?, ?, ?, ?, ?)", (*row, digest))
                    self._sum ^= int.from_bytes(digest, "little")

    def keep(self, round_number: int, oldest_needed: int) -> None:
        """Make all up to this round last; drop what no checkpoint from round `oldest_needed` on can ask for."""
        with self._lock, self._explained():
            for client in sorted(self._touched):
                newest = "(SELECT max(round) FROM memory WHERE client = ?1 AND round <= ?2)"
                self._drop(f"client = ?1 AND round < {newest}", client, oldest_needed)
            self._touched.clear()
            self._oldest, self._kept = oldest_needed, round_number
            self._db.execute("DELETE FROM kept")
            row = (self._run, oldest_needed, round_number)
            self._db.execute("INSERT INTO kept VALUES (?, ?, ?, ?)", (*row, self._over_all(*row)))
            self._db.execute("COMMIT")
            self._db.execute("BEGIN")

    def resume(self, round_number: int) -> None:
        """Forget everything from after that round; `DataError` if not all up to it is here."""
        with self._lock, self._explained():
            if self._kept < round_number:
                raise DataError(
                    f"{self._path}: the clients' memory is missing or older than the checkpoint of round"
                    f" {round_number}; put back the file of this run, or use another folder"
                )
            if 0 < round_number < self._oldest:
                raise DataError(
                    f"{self._path}: the clients' memory is newer than the checkpoint of round {round_number}, and"
                    f" serves round {self._oldest} at the earliest; put back the newer checkpoints, or use another folder"
                )
            self._drop("round > ?", round_number)
            self._kept = min(self._kept, round_number)

    def close(self) -> None:
        """Let go of the file; what was not kept is gone. Closed already, it stays so."""
        with self._lock, suppress(sqlite3.ProgrammingError):
            self._db.rollback()
            self._db.close()

    def _drop(self, where: str, *values: int) -> None:
        self._sum ^= self._sum_of(where, *values)
        self._db.execute(f"DELETE FROM memory WHERE {where}", values)

    def _sum_of(self, where: str, *values: int) -> int:
        """The checksums of some records in one number, which does not depend on their order."""
        total = 0
        for (digest,) in self._db.execute(f"SELECT digest FROM memory WHERE {where}", values):
            total ^= int.from_bytes(digest or b"", "little")
        return total

    def _last_kept(self) -> tuple[int, int]:
        """The oldest round that can be served, and the newest."""
        row = self._db.execute("SELECT run, oldest, round, digest FROM kept").fetchone()
        if row is None:
            if self._sum:
                raise ValueError("it does not say up to which round it goes")
            return 0, 0
        run, oldest, number, digest = row
        if type(number) is not int or type(oldest) is not int:
            raise ValueError(f"kept from round {oldest!r:.40} to {number!r:.40}")
        if digest != self._over_all(run, oldest, number):
            raise ValueError("the checksum of all records does not match")
        if self._path is not None:
            require_run(self._path, run, self._run)
        return oldest, number

    def _over_all(self, run: str, oldest: int, number: int) -> str:
        """Over all records, and what is said of them."""
        return digest_of([run, oldest, number, self._sum])

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, ValueError, TypeError) as error:
            raise DataError(f"{self._path}: the clients' memory cannot be used: {error}") from None


def _digest(client: int, round_number: int, name: str, dtype: str, value: bytes) -> bytes:
    digest = hashlib.blake2b(f"{client} {round_number} {name} {dtype} ".encode(), digest_size=16)
    digest.update(value)
    return digest.digest()


def _vector(
    client: int, round_number: int, name: str, dtype: str, value: bytes, digest: bytes
) -> np.ndarray:
    """A vector as it was written."""
    if digest != _digest(client, round_number, name, dtype, value):
        raise ValueError(
            f"client {client}, {name!r:.40} of round {round_number!r:.40}: its checksum does not match"
        )
    return np.frombuffer(value, dtype).copy()
