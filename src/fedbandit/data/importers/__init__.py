"""Importers of the sources people have, and the parts that they share: holding rows out, adding
them, counting what is dropped, refusing what would take all memory, cleaning up.

An importer reads some source in batches and hands `Rows` to a `DatasetWriter` by `write_rows`.
Which rows are held out depends on the client's id alone, so that importing a grown file again keeps
every client on its side.
"""

import errno
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from fedbandit.core.contexts import Features, rows_at
from fedbandit.core.errors import ConfigError, DataError, refuse
from fedbandit.core.process import handling
from fedbandit.core.ragged import Ragged
from fedbandit.core.randomness import Purpose, uniforms
from fedbandit.data.dataset import Log
from fedbandit.data.writer import DatasetWriter, check_target

MOST_ACTIONS = 1_000_000
LONGEST_NAME = 1024  # characters of a client's or a label's name
ALWAYS_UNPACKED = 1 << 30  # bytes, however small they were packed
MOST_UNPACKED = 200  # times the packed size; published files unpack to 20 times, a bomb to 1,000
_MOST_PARSED = 100 << 20  # bytes that one value of JSON may take in memory, as estimated
_DEEPEST_JSON = 200  # brackets in names of clients count, too
_CHECKED = 1 << 16  # bytes looked at together
_STEPS = np.zeros(256, np.int64)
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1
_COST = np.ones(256, np.int64)  # bytes of memory that a letter stands for, once it is parsed
_COST[list(b'[{,:"')] = 80, 240, 48, 60, 26
_PACKED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
}
_SEED = 0  # part of the format: another seed would be another split


class JsonGuard:
    """Refuses JSON that is nested deeply, or one value that would take much memory.

    A parser keeps a path for every level and the whole value that it builds, so that a small file
    of brackets, or a long one of one value, would take all memory. The guard sees the bytes before
    the parser does, and estimates from brackets, commas and quotes what they will take.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self.begin()

    def begin(self) -> None:
        """Count from the start, at the begin of a text."""
        self._depth = self._memory = 0

    def next_value(self) -> None:
        """Forget what a complete value takes."""
        self._memory = 0

    def check(self, block: bytes) -> None:
        """Count the next bytes; `DataError` where they are too much."""
        for start in range(0, len(block), _CHECKED):
            letters = np.frombuffer(block[start : start + _CHECKED], np.uint8)
            depths = self._depth + np.cumsum(_STEPS[letters])
            self._depth, self._memory = int(depths[-1]), self._memory + int(_COST[letters].sum())
            if depths.max() > _DEEPEST_JSON:
                raise DataError(
                    f"{self._where}: not JSON of data: nested deeper than {_DEEPEST_JSON}"
                )
            if self._memory > _MOST_PARSED:
                limit = f"{_MOST_PARSED >> 20} MB in memory"
                raise DataError(f"{self._where}: one value has more than {limit}")


class GuardedJson(JsonGuard):
    """An open JSON file for a parser to read, under a guard."""

    def __init__(self, raw: Any, path: Path) -> None:
        self._raw, self.path = raw, path
        super().__init__(str(path))

    def begin(self) -> None:
        """Read from the start of the file."""
        self._raw.seek(0)
        super().begin()

    def read(self, size: int = -1) -> bytes:
        """The next bytes, at most a few thousand at a time."""
        block: bytes = self._raw.read(_CHECKED if size < 0 else min(size, _CHECKED))
        self.check(block)
        return block


def check_unpacked(
    where: str,
    unpacked: int,
    packed: int,
    advice: str,
    at_least: bool = False,
    always: int | None = None,
) -> None:
    """Refuse what is out of all proportion to its packed size, before it fills memory or disk."""
    if unpacked > max(ALWAYS_UNPACKED if always is None else always, MOST_UNPACKED * packed):
        size = f"{'more than ' if at_least else ''}{unpacked / 1e6:,.1f} MB"
        raise DataError(
            f"{where} unpacks to {size}, {unpacked // max(packed, 1):,} times its size; {advice}"
        )


def refuse_packed(path: Path) -> None:
    """Refuse a file that some program has packed: text and tables are read as they are."""
    with open(path, "rb") as file:
        head = file.read(8)
    for mark, name in _PACKED.items():
        if head.startswith(mark):
            raise DataError(f"{path}: is packed by {name}; unpack it first")


class HoldOut:
    """Decides row by row what is held out for testing.

    With `by_client` whole clients are: a model is then tested on people it has never seen.
    Otherwise a part of each client's rows, never its first one. The draw is a hash of the client's
    id (and of the row's place among the client's rows), not of the order in which rows come.

    Examples:
        >>> hold_out = HoldOut(0.5, by_client=True)
        >>> first = hold_out.is_test(["ann", "bob", "cyd", "ann"])
        >>> again = HoldOut(0.5, by_client=True).is_test(["ann", "bob", "cyd", "ann"])
        >>> bool(first[0] == first[3]), bool((first == again).all())
        (True, True)
        >>> HoldOut(0.5, by_client=False).is_test(["ann", "bob"]).tolist()  # the first of each
        [False, False]
    """

    def __init__(self, fraction: float, by_client: bool) -> None:
        if not 0 <= fraction < 1:
            raise ConfigError(f"test-fraction: must be at least 0 and below 1, got {fraction}")
        self._fraction, self._by_client = fraction, by_client
        self._addresses = Addresses()
        self._chosen: frozenset[str] | None = None

    @classmethod
    def balanced(cls, fraction: float, totals: Mapping[str, tuple[float, float]]) -> "HoldOut":
        """Whole clients, with about their share of all events and of all rewards.

        `totals` has the events and the rewards of every client. Clients come in the order of a hash
        of their ids, and each goes where events and rewards end up closer to the fraction.
        """
        made = cls(fraction, by_client=True)
        keys = made._addresses.of(list(totals))[0]
        order = np.argsort(uniforms(_SEED, Purpose.SPLIT, keys), kind="stable")
        amounts = np.abs(np.array(list(totals.values()), np.float64).reshape(-1, 2))
        amounts /= np.maximum(amounts.sum(axis=0), 1e-12)
        names, chosen = list(totals), set()
        owed = np.zeros(2)  # by which the held-out part lies behind its share so far
        for client in order.tolist():
            owed += fraction * amounts[client]
            if np.abs(owed - amounts[client]).sum() < np.abs(owed).sum():
                owed -= amounts[client]
                chosen.add(names[client])
        made._chosen = frozenset(chosen)
        return made

    def is_test(self, clients: Sequence[str]) -> np.ndarray:
        """For each row whether it is held out: bool [rows]."""
        if self._fraction == 0:
            return np.zeros(len(clients), bool)
        if self._chosen is not None:
            return np.array([client in self._chosen for client in clients], bool)
        keys, positions = self._addresses.of(clients)
        if self._by_client:
            return uniforms(_SEED, Purpose.SPLIT, keys) < self._fraction
        # A client's first example always trains, so that no client has test examples only.
        return (uniforms(_SEED, Purpose.SPLIT, keys, positions) < self._fraction) & (positions > 0)


class Addresses:
    """Addresses of rows for random draws: the client's key, and the place among its rows so far."""

    def __init__(self) -> None:
        self._keys: dict[str, int] = {}
        self._seen: dict[str, int] = {}

    def of(self, clients: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Keys uint64 [rows] and positions int64 [rows] of the next rows."""
        positions = np.empty(len(clients), np.int64)
        seen = self._seen
        for row, client in enumerate(clients):
            positions[row] = seen.get(client, 0)
            seen[client] = positions[row] + 1
        return np.array([self._key(client) for client in clients], np.uint64), positions

    def _key(self, client: str) -> int:
        if client not in self._keys:
            self._keys[client] = int.from_bytes(
                blake2b(client.encode(), digest_size=8).digest(), "little"
            )
        return self._keys[client]


@dataclass(frozen=True)
class Rows:
    """Rows of a source on their way into a data set; all parts have the same number of rows.

    `contexts` makes the features of chosen rows, int64 [kept]: rows that are dropped cost nothing.
    """

    clients: Sequence[str]
    contexts: Callable[[np.ndarray], Features]
    labels: Ragged
    wrong: Mapping[str, np.ndarray] = field(default_factory=dict)  # reason -> bool [rows]
    is_test: np.ndarray | None = None  # bool [rows]; None: the hold-out decides
    log: Log | None = None
    candidates: Ragged | None = None
    times: np.ndarray | None = None


def write_rows(
    writer: DatasetWriter,
    batches: Iterable[Rows],
    hold_out: "HoldOut | None" = None,
    dropped: "Dropped | None" = None,
    facts: Callable[[], Mapping[str, Any]] = dict,
) -> Path:
    """Write all rows that can be used, each into its split, and finish the data set.

    Without `dropped` every row has to be sound. `facts` are asked for when all rows were read, and
    go into the header's `source` behind the counts of what was dropped.
    """
    for rows in batches:
        keep = np.arange(len(rows.clients))
        if dropped is not None:
            keep = dropped.choose(rows.clients, rows.wrong)
        clients, contexts = [rows.clients[row] for row in keep.tolist()], rows.contexts(keep)
        if rows.is_test is not None:
            is_test = rows.is_test[keep]
        else:
            assert hold_out is not None
            is_test = hold_out.is_test(clients)
        for split, wanted in (("train", ~is_test), ("test", is_test)):
            chosen = np.flatnonzero(wanted)
            if not len(chosen):
                continue
            at = keep[chosen]
            writer.add_many(
                [clients[row] for row in chosen.tolist()],
                rows_at(contexts, chosen),
                rows.labels.take(at),
                split=split,
                log=None if rows.log is None else rows.log.take(at),
                candidates=None if rows.candidates is None else rows.candidates.take(at),
                times=None if rows.times is None else rows.times[at],
            )
    writer.source |= {**(dropped.report() if dropped is not None else {}), **facts()}
    return writer.finish()


def one_each(ids: Iterable[int] | np.ndarray) -> Ragged:
    """Rows of one entry each."""
    entries = np.asarray(ids, np.int32)
    return Ragged(np.arange(len(entries) + 1, dtype=np.int64), entries)


class Dropped:
    """Chooses the rows to keep, and remembers how many were not kept and why.

    `report` goes into the header's `source`, from where `data info` prints it.
    """

    def __init__(self) -> None:
        self.seen: set[str] = set()  # a source may list clients that have no rows at all
        self._kept: set[str] = set()
        self._counts: Counter[str] = Counter()

    def choose(self, clients: Sequence[str], wrong: Mapping[str, np.ndarray]) -> np.ndarray:
        """The rows to keep: int64 [kept]. A row without a client is never kept.

        `wrong` has for each reason the rows that cannot be used, bool [rows]; a row counts for the
        first that applies.
        """
        left = np.ones(len(clients), bool)
        anonymous = np.array([not client for client in clients], bool)
        for reason, rows in {"rows_without_client": anonymous, **wrong}.items():
            self._counts[reason] += int((left & rows).sum())
            left &= ~rows
        keep = np.flatnonzero(left)
        self.seen.update(client for client in clients if client)
        self._kept.update(clients[row] for row in keep.tolist())
        return keep

    def report(self) -> dict[str, Any]:
        """For the header's `source`: only what happened."""
        counts = {"clients": len(self.seen - self._kept), **self._counts}
        return {f"dropped_{reason}": count for reason, count in counts.items() if count}


def unlabelled(labels: Ragged, named: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """The rows that have no action, by the reason; `named` says which have labels at all."""
    without = np.diff(labels.offsets) == 0
    named = np.zeros(len(without), bool) if named is None else named.astype(bool)
    return {"rows_without_label": without & ~named, "rows_of_other_labels": without & named}


def check_counts(*, actions: int | None, vocabulary: int = 1) -> None:
    """Refuse an empty vocabulary, fewer actions than there is a choice between, and more than any
    data set has.
    """
    number = 2 if actions is None else actions
    refuse(
        (vocabulary < 1, f"vocabulary: must be at least 1, got {vocabulary}"),
        (number < 2, f"actions: must be at least 2, got {actions}"),
        (number > MOST_ACTIONS, f"actions: must be at most {MOST_ACTIONS:,}, got {actions}"),
    )


_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def importing(out: Path | str) -> Iterator[None]:
    """Surrounds an import: checks the target before any work, and leaves nothing behind if it
    fails.

    SIGTERM and SIGHUP clean up as Ctrl-C does. Errors of the system become one line that names the
    data set, not the staging folder; on a full disk it says so.
    """
    out = check_target(out)
    with handling(_interrupt, (signal.SIGTERM, signal.SIGHUP)):
        try:
            yield
        except OSError as error:
            named = str(error.filename or "")
            # What is written on the way is the data set to the reader of the message.
            staged = any(part.startswith(f".{out.name}.") for part in Path(named).parts)
            where = f"{named}: " if named and not staged else f"{out}: "
            if error.errno in _FULL:
                raise DataError(f"{where}no space left on the disk; nothing was written") from None
            raise DataError(f"{where}{error.strerror or error}; nothing was written") from None


def _interrupt(number: int) -> None:
    raise KeyboardInterrupt
