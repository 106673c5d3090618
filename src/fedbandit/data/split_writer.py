"""The examples of one split on their way to disk: raw files in the order they came, then by client.

Memory is proportional to the number of runs (stretches of rows of one client in a batch), not to
rows or features: a population of millions is written in a few hundred megabytes.
"""

import hashlib
import io
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import dtype_to_descr, write_array_header_1_0

from fedbandit.core.errors import DataError, refuse
from fedbandit.core.progress import Advance
from fedbandit.core.ragged import Ragged
from fedbandit.data.dataset import Log

_BLOCK_BYTES = 8 << 20  # gathered at a time when a split is completed
_LONGEST_ID = 256  # ids are stored in columns of one width, so one absurd id would inflate them all


class SplitWriter:
    """Collects the rows of a split; `complete` writes them as `.npy` files grouped by client.

    Every column (lengths and ids of labels, features, feedback) is appended to a raw file of its
    own. `complete` sorts the runs by client and copies each column once, a few megabytes at a time,
    so that disks see long reads.
    """

    def __init__(
        self,
        folder: Path,
        *,
        sparse: bool,
        shape: tuple[int, ...],
        actions: int,
        dtype: np.dtype,
        logged: bool,
        items: int | None = None,
        timed: bool = False,
    ) -> None:
        folder.mkdir()
        self._folder, self._sparse, self._shape, self._actions, self._logged = (
            folder,
            sparse,
            shape,
            actions,
            logged,
        )
        self._items = items
        self.examples = 0
        self.listed = self.longest = 0  # candidates of all examples, and of the one with most
        self.action_counts = np.zeros(actions, np.int64)  # as labels, or as logged actions
        self._codes: dict[str, int] = {}  # client id -> number, in order of appearance
        self._run_codes: list[np.ndarray] = []
        self._run_rows: list[np.ndarray] = []
        self._columns: dict[str, _Column] = {}
        words = {"feature_length": "int32", "feature_ids": "int32", "feature_values": "float32"}
        listed = {"candidate_length": "int32", "candidate_ids": "int32"}
        feedback = {"actions": "int32", "rewards": "float32", "propensities": "float32"}
        layout = {
            "label_length": "int32",
            "label_ids": "int32",
            **(words if sparse else {"features": dtype.name}),
            **(listed if items is not None else {}),
            **({"times": "float64"} if timed else {}),
            **(feedback if logged else {}),
        }
        for name, kind in layout.items():
            self._columns[name] = _Column(folder / name, np.dtype(kind))

    @property
    def clients(self) -> int:
        """The number of clients that have rows."""
        return len(self._codes)

    def close(self) -> None:
        """Close and remove the raw files, whether or not they were completed."""
        for column in self._columns.values():
            column.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def add_many(
        self,
        clients: Iterable[str],
        features: np.ndarray | Ragged,
        labels: Ragged,
        log: Log | None = None,
        candidates: Ragged | None = None,
        times: np.ndarray | None = None,
    ) -> None:
        """Append rows; within a batch they are grouped by client, keeping each client's order.

        `clients` has an id per row; an array of ids that come in stretches is not looped over. Rows
        that a reader would refuse later (not finite, outside the vocabulary or the actions, ids
        that are empty or longer than 256 characters) are refused here, with the client and the row.
        """
        ids, lengths = _stretches(clients)
        self._check(ids, lengths, features, labels, log, candidates)
        codes = np.array(
            [self._codes.setdefault(client, len(self._codes)) for client in ids], np.int32
        )
        codes = np.repeat(codes, lengths)
        if not len(codes):
            return
        order = np.argsort(codes, kind="stable")
        codes = codes[order]
        starts = np.flatnonzero(np.concatenate([[True], codes[1:] != codes[:-1]]))
        ends = np.append(starts[1:], len(codes))
        self._run_codes.append(codes[starts])
        self._run_rows.append(ends - starts)
        self._add_ragged("label", labels.take(order), starts, ends)
        if isinstance(features, Ragged):
            self._add_ragged("feature", features.take(order), starts, ends)
        else:
            width = int(np.prod(self._shape, dtype=np.int64))
            self._columns["features"].append(features[order], (ends - starts) * width)
        if "times" in self._columns:
            if times is None or not np.isfinite(times).all():
                raise DataError("a data set with times needs a finite one for every row")
            self._columns["times"].append(times[order], ends - starts)
        if candidates is not None:
            self._add_ragged("candidate", candidates.take(order), starts, ends)
            self.listed += len(candidates.ids)
            self.longest = max(self.longest, int(np.diff(candidates.offsets).max()))
        elif log is None:
            self.action_counts += np.bincount(labels.ids, minlength=self._actions)
        if log is not None:
            self._add_log(log, order, starts, ends)
        self.examples += len(codes)

    def _add_ragged(self, name: str, rows: Ragged, starts: np.ndarray, ends: np.ndarray) -> None:
        """Append ragged rows: their lengths and entries, as columns that begin with `name`.

        `starts` and `ends` are the bounds of the runs, int64 [runs]; a run has any number of rows.
        """
        entries = rows.offsets[ends] - rows.offsets[starts]
        self._columns[f"{name}_length"].append(np.diff(rows.offsets), ends - starts)
        self._columns[f"{name}_ids"].append(rows.ids, entries)
        if rows.values is not None:
            self._columns[f"{name}_values"].append(rows.values, entries)

    def _add_log(self, log: Log, order: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> None:
        """Append the feedback of the rows in the given order.

        The sets of available actions are kept from the first restriction on: a log that never
        restricts anything has no such arrays.
        """
        rows = ends - starts
        for name in ("actions", "rewards", "propensities"):
            self._columns[name].append(getattr(log, name)[order], rows)
        if self._items is None:
            self.action_counts += np.bincount(log.actions, minlength=self._actions)
        if log.available is not None and "available_ids" not in self._columns:
            for name in ("available_length", "available_ids"):
                self._columns[name] = _Column(self._folder / name, np.dtype(np.int32))
            for earlier in self._run_rows[
                :-1
            ]:  # rows that came before the first restriction had every action
                self._add_ragged(
                    "available", self._every_action(int(earlier.sum())), *_bounds(earlier)
                )
        if "available_ids" in self._columns:
            available = (
                self._every_action(len(order))
                if log.available is None
                else log.available.take(order)
            )
            self._add_ragged("available", available, starts, ends)

    def _every_action(self, rows: int) -> Ragged:
        """That many rows with all actions in each."""
        offsets = np.arange(rows + 1, dtype=np.int64) * self._actions
        return Ragged(offsets, np.tile(np.arange(self._actions, dtype=np.int32), rows))

    def _check(
        self,
        ids: list[str],
        lengths: np.ndarray,
        features: np.ndarray | Ragged,
        labels: Ragged,
        log: Log | None,
        candidates: Ragged | None,
    ) -> None:
        """Refuse what would only hurt later, naming the client and its place in the stream."""
        ends = np.cumsum(lengths)
        rows = int(ends[-1]) if len(ends) else 0

        def refuse_rows(bad: np.ndarray, what: str) -> None:
            if len(bad):
                client = ids[int(np.searchsorted(ends, bad[0], side="right"))]
                raise DataError(f"client {client}, row {self.examples + int(bad[0])}: {what}")

        feedback = "an action, a reward and a propensity for every row"
        shape = self._shape if isinstance(features, Ragged) else features.shape[1:]
        lists = rows if candidates is None else len(candidates)
        listed = (candidates is None) != (self._items is None)
        refuse(
            (
                (log is not None) != self._logged,
                f"a logged data set needs {feedback}; others none",
            ),
            (
                not len(features) == len(labels) == rows,
                f"{rows} client ids for {len(features)} features and {len(labels)} label rows",
            ),
            (
                shape != self._shape,
                f"features have shape {shape}, the data set has {self._shape}",
            ),
            (listed, "over a catalogue every row has candidates; elsewhere none has"),
            (lists != rows, f"{rows} client ids for {lists} lists of candidates"),
            error=DataError,
        )
        for row, client in zip((ends - lengths).tolist(), ids, strict=True):
            if not client or client.endswith("\0") or len(client) > _LONGEST_ID:
                what = "a client id is empty, ends in a zero byte or is longer than 256 characters"
                raise DataError(f"row {self.examples + row}: {what}: {client[:40]!r}")
        if isinstance(features, Ragged):
            assert features.values is not None
            wrong = (
                ~np.isfinite(features.values)
                | (features.ids < 0)
                | (features.ids >= self._shape[0])
            )
            refuse_rows(
                features.row_of_entry()[wrong], "a feature is not finite or outside the vocabulary"
            )
        else:
            finite = np.isfinite(features.reshape(len(features), -1)).all(axis=1)
            refuse_rows(np.flatnonzero(~finite), "a feature is not finite (NaN or infinity)")
        places = np.full(rows, self._actions)
        allowed = f"outside 0..{self._actions - 1}"
        if candidates is not None:
            places, allowed = np.diff(candidates.offsets), "no place among the candidates"
            refuse_rows(np.flatnonzero(places < 2), "fewer than two candidates")
            unknown = (candidates.ids < 0) | (candidates.ids >= (self._items or 0))
            refuse_rows(candidates.row_of_entry()[unknown], "a candidate is not in the catalogue")
        owner = labels.row_of_entry()
        refuse_rows(
            owner[(labels.ids < 0) | (labels.ids >= places[owner])], f"a label is {allowed}"
        )
        if log is not None:
            outside = (log.actions < 0) | (log.actions >= places)
            refuse_rows(np.flatnonzero(outside), f"the action is {allowed}")
            refuse_rows(np.flatnonzero(~np.isfinite(log.rewards)), "the reward is not finite")
            usable = (log.propensities > 0) & (log.propensities <= 1)
            refuse_rows(np.flatnonzero(~usable), "the propensity is outside (0, 1]")

    @property
    def size(self) -> int:
        """Bytes on disk so far."""
        return sum(column.entries * column.dtype.itemsize for column in self._columns.values())

    def complete(self, folder: Path, digest: Any, advance: Advance) -> dict[str, str]:
        """Write the arrays of the split to `folder`, grouped by client; the SHA-256 of each file by
        its path.

        All bytes are fed to `digest` in the order of the files, which makes the fingerprint of the
        data set. `advance` is told how many bytes were copied.
        """
        folder.mkdir()
        sums: dict[str, str] = {}

        def save(
            name: str, shape: tuple[int, ...], dtype: np.dtype, blocks: Iterable[np.ndarray]
        ) -> None:
            sums[f"{folder.name}/{name}.npy"] = save_blocks(
                folder / f"{name}.npy", shape, dtype, blocks, digest
            )

        ids = sorted(self._codes, key=str.encode)
        rank = np.empty(len(ids), np.int32)
        rank[[self._codes[i] for i in ids]] = np.arange(len(ids), dtype=np.int32)
        client_of_run = rank[np.concatenate(self._run_codes)]
        order = np.argsort(client_of_run, kind="stable")
        sizes = np.bincount(client_of_run, np.concatenate(self._run_rows), len(ids)).astype(
            np.int64
        )
        clients = np.array([i.encode() for i in ids], dtype=bytes)
        for name, array in (
            ("clients", clients),
            ("offsets", np.concatenate([[0], np.cumsum(sizes)])),
        ):
            save(name, array.shape, array.dtype, [array])
        for name, column in self._columns.items():
            blocks = _telling(column.gathered(order), advance)
            if name.endswith("_length"):
                target = f"{name.removesuffix('_length')}_offsets"
                save(target, (self.examples + 1,), np.dtype(np.int64), _running_sum(blocks))
            else:
                shape = (self.examples, *self._shape) if name == "features" else (column.entries,)
                save(name, shape, column.dtype, blocks)
        return sums


class _Column:
    """One raw file; for every run it remembers how many entries the run has in it."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self.path, self.dtype, self.entries = path, dtype, 0
        self._counts: list[np.ndarray] = []
        self._file = open(path, "wb")  # noqa: SIM115 - closed by close()

    def append(self, values: np.ndarray, entries_per_run: np.ndarray) -> None:
        """Add the entries of some runs at the end: int64 [runs] says how many each has."""
        self._file.write(np.ascontiguousarray(values, self.dtype).data)
        self._counts.append(entries_per_run)
        self.entries += values.size

    def close(self) -> None:
        """Close the file; what it holds stays until its folder is removed."""
        with suppress(OSError):  # a full disk was already reported by the write that met it
            self._file.close()

    def gathered(self, order: np.ndarray) -> Iterator[np.ndarray]:
        """The entries with the runs in the given order, a few megabytes at a time."""
        self._file.flush()
        counts = np.concatenate(self._counts)
        offsets = np.concatenate([[0], np.cumsum(counts)])
        filled = np.cumsum(counts[order])
        limit = max(_BLOCK_BYTES // self.dtype.itemsize, 1)
        start = 0
        while start < len(order) and self.entries:
            done = filled[start - 1] if start else 0
            stop = max(int(np.searchsorted(filled, done + limit, side="right")), start + 1)
            # Mapped again for every block: pages of finished blocks then stop counting as this process's memory.
            source = np.asarray(np.memmap(self.path, self.dtype, mode="r"))
            yield Ragged(offsets, source).take(order[start:stop]).ids
            start = stop


def _stretches(clients: Iterable[str]) -> tuple[list[str], np.ndarray]:
    """Client ids one a row, as (ids, rows each) of the stretches of equal ones; arrays are not
    looped over.
    """
    if not isinstance(clients, np.ndarray):
        ids = [str(client) for client in clients]
        return ids, np.ones(len(ids), np.int64)
    starts = (
        np.flatnonzero(np.append(True, clients[1:] != clients[:-1]))
        if len(clients)
        else np.zeros(0, np.int64)
    )
    return [str(client) for client in clients[starts]], np.diff(np.append(starts, len(clients)))


def _telling(blocks: Iterable[np.ndarray], advance: Advance) -> Iterator[np.ndarray]:
    """The same blocks; `advance` is told the bytes of each once it was used."""
    for block in blocks:
        yield block
        advance(block.nbytes)


def _bounds(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where runs of these lengths start and end: int64 [runs] each."""
    ends = np.cumsum(lengths)
    return ends - lengths, ends


def _running_sum(blocks: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Lengths that come in blocks as offsets: 0, and the sum behind every entry."""
    total = np.zeros(1, np.int64)
    yield total
    for block in blocks:
        sums = total[-1] + np.cumsum(block, dtype=np.int64)
        yield sums
        total = sums[-1:] if len(sums) else total


def save_blocks(
    path: Path, shape: tuple[int, ...], dtype: np.dtype, blocks: Iterable[np.ndarray], digest: Any
) -> str:
    """Write a `.npy` file block by block; its SHA-256.

    Plain writes, not a map: on a full disk they raise an error, where a map would end the process.
    """
    header = io.BytesIO()
    write_array_header_1_0(
        header, {"descr": dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    )
    own = hashlib.sha256(header.getvalue())
    with open(path, "wb") as file:
        file.write(header.getvalue())
        for block in blocks:
            data = np.ascontiguousarray(block, dtype).data
            file.write(data)
            digest.update(data)
            own.update(data)
        file.flush()
        os.fsync(file.fileno())
    return own.hexdigest()
