"""Parts that importers share: holding rows out, adding them, counting what is dropped, cleaning up.

An importer reads some source in batches and hands rows to a `DatasetWriter` by `add_rows`. Which
rows are held out depends on the client's id alone, so that importing a grown file again keeps every
client on its side.
"""

import errno
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from fedbandit.core.errors import ConfigError, DataError
from fedbandit.core.process import handling
from fedbandit.core.ragged import Ragged
from fedbandit.core.randomness import Purpose, uniforms
from fedbandit.data.dataset import Log
from fedbandit.data.formats.binary import MOST_ACTIONS
from fedbandit.data.formats.fetching import clear_unpacked
from fedbandit.data.writer import DatasetWriter, check_target

_SEED = 0  # part of the format: another seed would be another split


class HoldOut:
    """Decides row by row what is held out for testing.

    With `by_client` whole clients are: a model is then tested on people it has never seen.
    Otherwise a part of each client's rows, never its first one. The draw is a hash of the client's
    id (and of the row's place among the client's rows), not of the order in which rows come.
    """

    def __init__(self, fraction: float, *, by_client: bool) -> None:
        if not 0 <= fraction < 1:
            raise ConfigError(f"test-fraction: must be at least 0 and below 1, got {fraction}")
        self._fraction, self._by_client = fraction, by_client
        self._keys: dict[str, int] = {}
        self._seen: dict[str, int] = {}

    def is_test(self, clients: Sequence[str]) -> np.ndarray:
        """For each row whether it is held out: bool [rows]."""
        if self._fraction == 0:
            return np.zeros(len(clients), bool)
        keys = np.array([self._key(client) for client in clients], np.uint64)
        if self._by_client:
            return uniforms(_SEED, Purpose.SPLIT, keys) < self._fraction
        positions = np.empty(len(clients), np.int64)
        seen = self._seen
        for row, client in enumerate(clients):
            positions[row] = seen.get(client, 0)
            seen[client] = positions[row] + 1
        # A client's first example always trains, so that no client has test examples only.
        return (uniforms(_SEED, Purpose.SPLIT, keys, positions) < self._fraction) & (positions > 0)

    def _key(self, client: str) -> int:
        if client not in self._keys:
            self._keys[client] = int.from_bytes(
                blake2b(client.encode(), digest_size=8).digest(), "little"
            )
        return self._keys[client]


def add_rows(
    writer: DatasetWriter,
    clients: Sequence[str],
    contexts: np.ndarray | Ragged,
    labels: Ragged,
    is_test: np.ndarray,
    log: Log | None = None,
) -> None:
    """Add a batch; `is_test` says for each row where it goes: bool [rows]."""
    for split, wanted in (("train", ~is_test), ("test", is_test)):
        rows = np.flatnonzero(wanted)
        if len(rows):
            chosen = contexts[rows] if isinstance(contexts, np.ndarray) else contexts.take(rows)
            names = [clients[row] for row in rows.tolist()]
            part = None if log is None else take_log(log, rows)
            writer.add_many(names, chosen, labels.take(rows), split=split, log=part)


def take_log(log: Log, rows: np.ndarray) -> Log:
    """The feedback of the given rows, int64 [n]: actions, rewards, propensities and sets."""
    available = None if log.available is None else log.available.take(rows)
    return Log(log.actions[rows], log.rewards[rows], log.propensities[rows], available)


class Dropped:
    """Chooses the rows to keep, and remembers how many were not kept and why.

    `report` goes into the header's `source`, from where `data info` prints it.
    """

    def __init__(self, clients: Iterable[str] = ()) -> None:
        self._seen = set(clients)  # a source may list clients that have no rows at all
        self._kept: set[str] = set()
        self._anonymous = self._unlabelled = self._others = 0

    def choose(
        self,
        clients: Sequence[str],
        labels: Ragged,
        drop_unlabelled: bool,
        named: np.ndarray | None = None,
    ) -> np.ndarray:
        """The rows to keep: int64 [kept]. A row without a client is never kept.

        `named`, bool [rows], says which rows have labels at all, be they actions or not.
        """
        owned = np.array([bool(client) for client in clients], bool)
        labelled = (np.diff(labels.offsets) > 0) | (not drop_unlabelled)
        keep = np.flatnonzero(owned & labelled)
        self._anonymous += int((~owned).sum())
        other = np.zeros(len(owned), bool) if named is None else named
        self._unlabelled += int((owned & ~labelled & ~other).sum())
        self._others += int((owned & ~labelled & other).sum())
        self._seen.update(client for client in clients if client)
        self._kept.update(clients[row] for row in keep.tolist())
        return keep

    def report(self) -> dict[str, Any]:
        """For the header's `source`: only what happened."""
        counts = {
            "dropped_clients": len(self._seen - self._kept),
            "dropped_rows_without_client": self._anonymous,
            "dropped_rows_without_label": self._unlabelled,
            "dropped_rows_of_other_labels": self._others,
        }
        return {name: count for name, count in counts.items() if count}


def check_counts(*, actions: int | None, vocabulary: int = 1) -> None:
    """Refuse an empty vocabulary, fewer actions than there is a choice between, and more than any
    data set has.
    """
    for name, number, least in (("vocabulary", vocabulary, 1), ("actions", actions, 2)):
        if number is not None and number < least:
            raise ConfigError(f"{name}: must be at least {least}, got {number}")
    if actions is not None and actions > MOST_ACTIONS:
        raise ConfigError(f"actions: must be at most {MOST_ACTIONS:,}, got {actions}")


def check_separator(name: str, separator: str | None) -> None:
    """Refuse an empty separator; it is named as its option is."""
    if separator == "":
        raise ConfigError(f"{name}: may not be empty")


_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def importing(out: Path | str) -> Iterator[None]:
    """Surrounds an import: checks the target before any work, and leaves nothing behind if it
    fails.

    SIGTERM and SIGHUP clean up as Ctrl-C does. Errors of the system become one line that names the
    data set, not the staging folder; on a full disk it says so.
    """
    out = check_target(out)
    clear_unpacked(out)  # the writer clears its own leftovers
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
