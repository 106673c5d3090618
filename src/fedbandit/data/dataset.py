"""A federated data set: clients, each with examples. On disk it is a folder of plain memory-mapped arrays.

Whatever is opened has been verified, so that those who compute with it may trust it; a client is a slice. Knows nothing
of policies, models or rounds.
"""

import hashlib
import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedbandit.core.errors import DataError
from fedbandit.core.progress import Progress
from fedbandit.core.ragged import Ragged
from fedbandit.data.door import (
    AGAIN,
    FINITE,
    PROPENSITY,
    ClientIds,
    Door,
    FileState,
    Offsets,
    Rule,
    below,
    checked_fields,
)
from fedbandit.data.encoder import Encoder
from fedbandit.data.paging import Pages, read_pays, read_rows
from fedbandit.data.verification import CHECKSUMS, ensure_verified

FORMAT = "fedbandit-dataset"
VERSION = 2
WITHOUT_CHECKSUMS = 1  # the version that 0.1 wrote
Contexts = np.ndarray | Ragged
"""What a model scores: float [n, *shape] for dense data, `Ragged` rows of (word or other feature, value) for sparse."""


def contexts_at(contexts: Contexts, rows: np.ndarray) -> Contexts:
    """Some of the contexts, in the given order."""
    return contexts.take(rows) if isinstance(contexts, Ragged) else contexts[rows]


def contexts_between(contexts: Contexts, start: int, stop: int) -> Contexts:
    """Contexts start to stop; shares memory with the whole."""
    return contexts.slice(start, stop) if isinstance(contexts, Ragged) else contexts[start:stop]


@dataclass(frozen=True)
class Header:
    """The facts about a data set that are true of all its splits."""

    name: str
    kind: Literal["dense", "sparse"]
    shape: tuple[int, ...]  # of one context; for sparse ones (features,)
    actions: tuple[str, ...]  # their names, in the order of the model's outputs
    action_counts: tuple[int, ...]  # how many training examples carry each as a label
    multilabel: bool = False
    lower_case: Mapping[int, int] = field(
        default_factory=dict
    )  # upper-case label -> its lower-case version
    logged: bool = False  # actions, rewards and propensities in place of labels
    scale: float = 1.0  # stored dense features times this are the contexts
    source: Mapping[str, Any] = field(default_factory=dict)  # how it was made
    fingerprint: str = ""  # identifies the contents; part of a run's identity
    published_counts: tuple[
        int, ...
    ] = ()  # how frequent each action is, where the source itself says so
    encoder: Encoder | None = (
        None  # how a row of a table becomes a context; None: words alone, or as it was given
    )

    @property
    def num_actions(self) -> int:
        return len(self.actions)

    @property
    def frequencies(self) -> tuple[int, ...]:
        """How frequent each action is: as its source published it, otherwise counted over the training split."""
        return self.published_counts or self.action_counts

    def to_json(self) -> dict[str, Any]:
        fields = dict(vars(self))
        fields["lower_case"] = sorted(self.lower_case.items())
        if self.encoder is None:
            del fields["encoder"]
        else:
            fields["encoder"] = self.encoder.to_json()
        return {"format": FORMAT, "version": VERSION, **fields}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Header":
        """From what `to_json` has made; `ValueError` names the field that is wrong."""
        fields = {key: value for key, value in fields.items() if key not in ("format", "version")}
        return cls(**checked_fields(fields))


@dataclass(frozen=True)
class Log:
    """Logged bandit feedback of a split: one entry per example."""

    actions: np.ndarray  # int32 [n]
    rewards: np.ndarray  # float32 [n]
    propensities: np.ndarray  # float32 [n]
    available: Ragged | None = None  # the actions that could be chosen; None: all of them


@dataclass(frozen=True)
class Split:
    """The examples of one split, grouped by client; clients are sorted by id."""

    client_ids: np.ndarray  # bytes [clients], utf-8
    offsets: (
        np.ndarray
    )  # int64 [clients + 1]: examples of client c are rows offsets[c]:offsets[c + 1]
    features: np.ndarray | Ragged
    labels: Ragged
    scale: float = 1.0
    log: Log | None = None

    @property
    def num_clients(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_examples(self) -> int:
        return int(self.offsets[-1])

    def client_id(self, client: int) -> str:
        return bytes(self.client_ids[client]).decode()

    def sizes(self) -> np.ndarray:
        """Examples per client: int64 [clients]."""
        return np.diff(self.offsets)

    def contexts(self, rows: np.ndarray) -> Contexts:
        """The contexts of the given rows: float32 [n, *shape], or sparse rows."""
        if isinstance(self.features, Ragged):
            return self.features.take(rows)
        return self._scaled(self.features[rows])

    def examples(
        self, clients: np.ndarray, bounds: np.ndarray, rows: np.ndarray
    ) -> tuple[Contexts, Ragged]:
        """Contexts and labels of the given rows, where rows bounds[i]:bounds[i + 1] are some of clients[i]."""
        features, starts, stops = self.features, self.offsets[clients], self.offsets[clients + 1]
        if not isinstance(features, Ragged) or not read_pays(
            features, len(rows), int((stops - starts).sum())
        ):
            return self.contexts(rows), self.labels.take(rows)
        asked = (starts, stops, bounds, rows)
        return read_rows(features, *asked), read_rows(self.labels, *asked)

    def between(self, start: int, stop: int) -> tuple[Contexts, Ragged]:
        """Contexts and labels of rows start to stop, as `contexts` and `labels.take` give them but in one piece."""
        labels = self.labels.slice(start, stop).copy()
        if isinstance(self.features, Ragged):
            return self.features.slice(start, stop).copy(), labels
        return self._scaled(self.features[start:stop]), labels

    def _scaled(self, features: np.ndarray) -> np.ndarray:
        if features.dtype != np.uint8:
            return features
        scaled = features.astype(np.float32)
        scaled *= np.float32(self.scale)
        return scaled


@dataclass(frozen=True)
class FederatedDataset:
    """A header, a training split and, where there is one, a test split; examples are grouped by client.

    Examples:
        >>> import numpy as np
        >>> from fedbandit import open_dataset
        >>> topics = open_dataset("topics")
        >>> rows = np.arange(*topics.train.offsets[:2])  # of the first client
        >>> contexts, labels = topics.train.contexts(rows), topics.train.labels.take(rows)
        >>> len(rows), len(contexts), len(labels)
        (5, 5, 5)
    """

    header: Header
    train: Split
    test: Split | None = None
    path: Path | None = None
    files: Mapping[str, FileState] = field(
        default_factory=dict
    )  # as they were when they were opened

    @classmethod
    def open(
        cls, path: Path | str, *, verify: bool = False, progress: Progress | None = None
    ) -> "FederatedDataset":
        """Open a folder made by `fedbandit data import` and map its arrays.

        The whole of it is read the first time it is opened, and again when a file has changed or `verify` asks for it.
        """
        path = Path(path)
        door = Door(path)
        header = _read_header(door)
        train = _open_split(door, "train", header)
        if train is None:
            raise DataError(f"{path}: the data set has no training split")
        test = _open_split(door, "test", header)
        door.look_at("vocabulary.txt")
        ensure_verified(door, again=verify, progress=progress)
        return cls(header, train, test, path, door.states)

    @property
    def has_checksums(self) -> bool:
        """Whether the folder holds checksums; those of 0.1 do not."""
        return CHECKSUMS in self.files

    def contents_digest(self) -> str:
        """The SHA-256 of all arrays: what tells data in memory apart that have no fingerprint."""
        digest = hashlib.sha256()
        for array in _arrays(self):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def check_unchanged(self) -> None:
        """Raise `DataError` if a file of the folder is not the one that was opened: it costs a look at each."""
        for path, state in self._expected:
            try:
                now = os.stat(path)
            except OSError as error:
                raise DataError(
                    f"{path}: {error.strerror}; it was there when it was opened"
                ) from None
            if (now.st_size, now.st_mtime_ns, now.st_ino) != state:
                cut = now.st_size < state[0]
                what = (
                    f"was cut from {state[0]:,} to {now.st_size:,} bytes" if cut else "was changed"
                )
                raise DataError(f"{path}: {what} while it was in use")

    def check_mapped(self) -> None:
        """The same for the files that are mapped, by their open handles: all that a round reads."""
        for handle, state in self._mapped:
            now = os.fstat(handle)
            if (now.st_size, now.st_mtime_ns) != state:
                self.check_unchanged()  # says which
                raise DataError(f"{self.path}: a file was changed while it was in use")

    @cached_property
    def _mapped(self) -> list[tuple[int, tuple[int, int]]]:
        """Handle, size and time of every mapped file."""
        known = {file.inode: (file.size, file.modified) for file in self.files.values()}
        handles = [pages.handle for pages in _mappings(self)]
        return [
            (handle, known[node])
            for handle in handles
            if (node := os.fstat(handle).st_ino) in known
        ]

    @cached_property
    def _expected(self) -> list[tuple[str, tuple[int, int, int]]]:
        """Path, size, time and inode of every file, ready for a look in every round; none of data in memory alone."""
        if self.path is None:
            return []
        return [
            (f"{self.path}/{name}", (f.size, f.modified, f.inode)) for name, f in self.files.items()
        ]

    def vocabulary(self) -> list[str]:
        """The words behind the columns of sparse text, most frequent first."""
        if self.path is None or not (self.path / "vocabulary.txt").exists():
            raise DataError(f"{self.header.name}: the data set has no vocabulary")
        try:
            words = (self.path / "vocabulary.txt").read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise DataError(f"{self.path / 'vocabulary.txt'}: cannot be read: {error}") from None
        expected = (
            self.header.shape[0] if self.header.encoder is None else self.header.encoder.words
        )
        if len(words) != expected:
            counts = f"{len(words):,} words, contexts have {expected:,}"
            raise DataError(f"{self.path / 'vocabulary.txt'}: {counts}; {AGAIN}")
        return words


def _how_to_import(path: Path) -> str:
    """The command that makes a data set of a file."""
    columns = "--client COLUMN --labels COLUMN"
    table = f"table {path} {columns}"
    kinds = {
        ".csv": table, ".tsv": table, ".txt": table, ".parquet": table, ".pq": table,
        ".npz": f"arrays {path} --clients ARRAY --labels ARRAY --features ARRAY",
        ".dsjson": f"dsjson {path} --client FEATURE",
    }  # fmt: skip
    known = kinds.get(path.suffix.lower())
    return f"fedbandit data import {known} --out FOLDER" if known else "fedbandit data import"


def _read_header(door: Door) -> Header:
    path = door.folder
    if not path.is_dir() and path.exists():
        raise DataError(
            f"{path}: is a file, not a data set folder; `{_how_to_import(path)}` makes one of it"
        )
    if not (path / "header.json").exists():
        raise DataError(
            f"{path}: not a data set folder (no header.json); `fedbandit data import` makes one"
        )
    fields = door.json("header.json")
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise DataError(f"{path / 'header.json'}: not the header of a fedbandit data set")
    found = fields.get("version")
    if found not in (WITHOUT_CHECKSUMS, VERSION):
        raise DataError(
            f"{path}: format version {found}, this fedbandit reads {VERSION}; import it again"
        )
    if found == VERSION and not door.look_at(CHECKSUMS):
        raise DataError(f"{path}: {CHECKSUMS} is missing; {AGAIN}")
    try:
        return Header.from_json(fields)
    except ValueError as error:
        raise DataError(f"{path / 'header.json'}: {error}; {AGAIN}") from None


def _open_split(door: Door, split: str, header: Header) -> Split | None:
    """The arrays of a split, each of the type and shape that the others and the header ask for."""
    if not (door.folder / split).is_dir():
        return None

    def array(
        name: str, kinds: tuple[str, ...], shape: tuple[int | None, ...], rule: Rule
    ) -> np.ndarray:
        return door.array(f"{split}/{name}.npy", kinds, shape, rule)

    def offsets(name: str, rows: int) -> np.ndarray:
        found = array(name, ("int64",), (rows + 1,), Offsets())
        if found[-1] < 0:
            raise DataError(
                f"{door.folder / split / name}.npy, entry {rows}: {Offsets().wrong(found[-1])}; {AGAIN}"
            )
        return found

    def ragged(name: str, limit: int, values: bool = False) -> Ragged:
        starts = offsets(f"{name}_offsets", n)
        total = (int(starts[-1]),)
        ids = array(f"{name}_ids", ("int32",), total, below(limit))
        return Ragged(
            starts, ids, array(f"{name}_values", ("float32",), total, FINITE) if values else None
        )

    clients = array("clients", ("bytes",), (None,), ClientIds())
    client_offsets = offsets("offsets", len(clients))
    n = int(client_offsets[-1])
    features: np.ndarray | Ragged
    if header.kind == "sparse":
        features = ragged("feature", header.shape[0], values=True)
    else:
        features = array("features", ("float32", "uint8"), (n, *header.shape), FINITE)
    labels = ragged("label", header.num_actions)
    log = None
    if header.logged:
        chosen = array("actions", ("int32",), (n,), below(header.num_actions))
        rewards = array("rewards", ("float32",), (n,), FINITE)
        propensities = array("propensities", ("float32",), (n,), PROPENSITY)
        limited = (door.folder / split / "available_ids.npy").exists()
        available = ragged("available", header.num_actions) if limited else None
        log = Log(chosen, rewards, propensities, available)
    return Split(clients, client_offsets, features, labels, header.scale, log)


# Bytes of mapped files, of which the libraries take about 100 MB. Giving back costs page faults afterwards: seldom is
# better than often, as long as a process stays below 1 GB.
_LIMIT = 768 * 2**20
_STATUS = "/proc/self/statm"


def give_back(dataset: FederatedDataset, limit: int = _LIMIT) -> bool:
    """Let go of the data set's pages if more than `limit` bytes are mapped; True if so. Nothing is lost."""
    if not hasattr(mmap, "MADV_DONTNEED") or sum(f.size for f in dataset.files.values()) <= limit:
        return False  # so little that it may stay
    if _mapped_bytes() <= limit:
        return False
    for pages in _mappings(dataset):
        pages.madvise(mmap.MADV_DONTNEED)
    return True


def _mapped_bytes() -> int:
    """What is resident of files, where the system reports it; 0 elsewhere. Asked in every round, so it is plain."""
    try:
        handle = os.open(_STATUS, os.O_RDONLY)
    except OSError:
        return 0
    try:
        return int(os.read(handle, 256).split()[2]) * mmap.PAGESIZE
    finally:
        os.close(handle)


def _arrays(dataset: FederatedDataset) -> Iterator[np.ndarray]:
    """The arrays that a simulation reads."""
    for split in (dataset.train, dataset.test):
        if split is None:
            continue
        arrays: list[np.ndarray | None] = [split.client_ids, split.offsets]
        for part in (split.features, split.labels):
            arrays += [part.offsets, part.ids, part.values] if isinstance(part, Ragged) else [part]
        yield from (array for array in arrays if array is not None)


def _mappings(dataset: FederatedDataset) -> Iterator[Pages]:
    for array in _arrays(dataset):
        base: Any = array.base
        if isinstance(base, Pages):
            yield base
