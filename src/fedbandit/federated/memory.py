"""Memory of clients between rounds, kept by the driver for all of them: named arrays in one
SQLite file.

Records are keyed by (client, round). A read takes the newest from before the current round, and
records from after the checkpoint that a run resumes from are dropped, so that a killed run ends
with the same bits. Each record has a checksum, and so have all of them together; they are verified
when the file is opened. An array that is mostly zero is written as its other entries; every record
says how it is written, and comes back to the last bit. The file names its run and the oldest round
that it can serve: what only older checkpoints would ask for is gone.
"""

import hashlib
import json
import math
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from fedbandit.core.errors import DataError
from fedbandit.core.identity import digest_of, require_run
from fedbandit.core.ragged import SparseVector
from fedbandit.federated.pipeline import Memories

_COLUMNS = "client, round, name, form, dtype, shape, value"
_PLACE = np.dtype("<u4")  # of an entry in its vector


class Memory:
    """The memory of all clients of a run. Written by one thread; read by any."""

    def __init__(self, path: Path | None = None, run: str = "") -> None:
        """In the file at `path`, of the run with that id; None: in a temporary file that is gone
        when it is closed.
        """
        self._lock = threading.Lock()
        self._run = run
        self._unkept: set[int] = set()  # clients with a record from after the last `keep`
        self._path = path
        with self._explained():
            self._db = sqlite3.connect(
                "" if path is None else path, check_same_thread=False, isolation_level=None
            )
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA cache_size=-32768")  # KB: pages that need no second reading
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS memory (client INTEGER, round INTEGER, name TEXT, form TEXT, dtype TEXT,"
                " shape TEXT, value BLOB, digest BLOB, PRIMARY KEY (client, round, name))"
            )
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS kept (run TEXT, oldest INTEGER, round INTEGER, digest TEXT)"
            )
            self._db.execute("BEGIN")
            self._sum = 0
            for *row, digest in self._db.execute(f"SELECT {_COLUMNS}, digest FROM memory"):
                if digest != _digest(*row):
                    wrong = f"client {row[0]}, {row[2]!r:.40} of round {row[1]!r:.40}"
                    raise ValueError(f"{wrong}: its checksum does not match")
                _read(*row[3:])
                self._count([(digest,)])
            self._oldest, self._kept = self._last_kept()

    def read(self, clients: Iterable[int], round_number: int) -> dict[int, Memories]:
        """The memory of these clients from before the round; those that remember nothing are
        missing.
        """
        found: dict[int, Memories] = {}
        with self._lock, self._explained():
            for client in map(int, clients):
                rows = self._db.execute(
                    f"SELECT {_COLUMNS} FROM memory WHERE client = ?1 AND round ="
                    " (SELECT max(round) FROM memory WHERE client = ?1 AND round < ?2)",
                    (client, round_number),
                ).fetchall()
                if rows:
                    found[client] = {name: _read(*written) for _, _, name, *written in rows}
        return found

    def write(self, round_number: int, memory: Mapping[int, Memories]) -> None:
        """Store what clients remember from this round on."""
        with self._lock, self._explained():
            for client, vectors in memory.items():
                # What came after the last checkpoint is needed only as long as it is the newest.
                if client in self._unkept:
                    self._drop("client = ? AND round > ?", int(client), self._kept)
                for name, value in vectors.items():
                    row = (int(client), round_number, name, *_written(value))
                    digest = _digest(*row)
                    self._db.execute(
                        "INSERT INTO memory VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*row, digest)
                    )
                    self._count([(digest,)])
            self._unkept |= memory.keys()

    def keep(self, round_number: int, oldest_needed: int) -> None:
        """Make all up to this round last; drop what no checkpoint from round `oldest_needed` on can
        ask for.
        """
        with self._lock, self._explained():
            # Also of clients that were not drawn again: they, too, have records for older checkpoints.
            newest = "SELECT max(round) FROM memory AS n WHERE n.client = memory.client"
            self._drop(f"round < ({newest} AND n.round <= ?)", oldest_needed)
            self._unkept.clear()
            self._oldest, self._kept = max(self._oldest, oldest_needed), round_number
            self._db.execute("DELETE FROM kept")
            row = (self._run, self._oldest, round_number)
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
            self._oldest, self._kept = min(self._oldest, round_number), round_number

    def close(self) -> None:
        """Let go of the file; what was not kept is gone. Closed already, it stays so."""
        with self._lock, suppress(sqlite3.ProgrammingError):
            self._db.rollback()
            self._db.close()

    def _drop(self, where: str, *values: int) -> None:
        self._count(self._db.execute(f"DELETE FROM memory WHERE {where} RETURNING digest", values))

    def _count(self, digests: Iterable[tuple[bytes]]) -> None:
        """Add records to the sum of checksums, or take them out; their order does not matter."""
        for (digest,) in digests:
            self._sum ^= int.from_bytes(digest or b"", "little")

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


def _written(value: np.ndarray | SparseVector) -> tuple[str, str, str, bytes]:
    """Form, type, shape and bytes of a record: `dense`, `sparse`, or `entries` for a sparse vector.

    Sparse forms hold the places of all entries that are not zero, then their values.
    """
    form, vector = "entries", value
    if isinstance(value, np.ndarray):
        flat = np.ascontiguousarray(value).reshape(-1)
        reached = np.count_nonzero(flat.view(f"u{flat.itemsize}"))
        if reached * (_PLACE.itemsize + flat.itemsize) >= flat.nbytes:
            return "dense", value.dtype.str, json.dumps(value.shape), flat.tobytes()
        form, vector = "sparse", SparseVector.of(flat)
    assert isinstance(vector, SparseVector)
    written = vector.entries.astype(_PLACE).tobytes() + vector.values.tobytes()
    return form, value.dtype.str, json.dumps(value.shape), written


def _read(form: str, dtype: str, shape: str, value: bytes) -> np.ndarray | SparseVector:
    """An array or a sparse vector, to the last bit as it was written."""
    if form == "dense":
        return np.frombuffer(value, dtype).reshape(json.loads(shape)).copy()
    count = len(value) // (_PLACE.itemsize + np.dtype(dtype).itemsize)
    places = np.frombuffer(value, _PLACE, count).astype(np.int64)
    values = np.frombuffer(value, dtype, count, count * _PLACE.itemsize).copy()
    found = SparseVector(places, values, math.prod(json.loads(shape)))
    return found if form == "entries" else np.asarray(found).reshape(json.loads(shape))


def _digest(*record: int | str | bytes) -> bytes:
    """The checksum of a record's columns."""
    *columns, value = record
    digest = hashlib.blake2b(json.dumps(columns).encode(), digest_size=16)
    digest.update(value)  # type: ignore[arg-type]
    return digest.digest()
