"""A federated data set: clients, each with examples. On disk it is a folder of plain memory-mapped arrays.

Opening one reads a small JSON header and no data; a client is a slice. Knows nothing of policies, models or rounds.
"""

import json
import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedbandit.core.errors import DataError
from fedbandit.core.ragged import Ragged

FORMAT = "fedbandit-dataset"
VERSION = 1
Contexts = np.ndarray | Ragged
"""What a model scores: float [n, *shape] for dense data, `Ragged` rows of (word, value) for sparse text."""


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
    shape: tuple[int, ...]  # of one context; for sparse text (words,)
    actions: tuple[str, ...]  # their names, in the order of the model's outputs
    action_counts: tuple[int, ...]  # how many training examples carry each as a label
    multilabel: bool = False
    lower_case: Mapping[int, int] = field(default_factory=dict)  # upper-case label -> its lower-case version
    logged: bool = False  # actions, rewards and propensities in place of labels
    scale: float = 1.0  # stored dense features times this are the contexts
    source: Mapping[str, Any] = field(default_factory=dict)  # how it was made
    fingerprint: str = ""  # identifies the contents; part of a run's identity
    published_counts: tuple[int, ...] = ()  # how frequent each action is, where the source itself says so

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
        return {"format": FORMAT, "version": VERSION, **fields}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Header":
        fields = {key: value for key, value in fields.items() if key not in ("format", "version")}
        fields.setdefault("published_counts", ())  # headers written before there were any
        for key in ("shape", "actions", "action_counts", "published_counts"):
            fields[key] = tuple(fields[key])
        fields["lower_case"] = {int(upper): int(lower) for upper, lower in fields["lower_case"]}
        return cls(**fields)


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
    offsets: np.ndarray  # int64 [clients + 1]: examples of client c are rows offsets[c]:offsets[c + 1]
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
        x: np.ndarray = self.features[rows]
        if x.dtype == np.uint8:
            x = x.astype(np.float32)
            x *= np.float32(self.scale)
        return x


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

    @classmethod
    def open(cls, path: Path | str) -> "FederatedDataset":
        """Open a folder made by `fedbandit data import`; maps the arrays, reads none of them."""
        path = Path(path)
        header = _read_header(path)
        train = _open_split(path / "train", header)
        if train is None:
            raise DataError(f"{path}: the data set has no training split")
        return cls(header, train, _open_split(path / "test", header), path)

    def vocabulary(self) -> list[str]:
        """The words behind the columns of sparse text, most frequent first."""
        if self.path is None or not (self.path / "vocabulary.txt").exists():
            raise DataError(f"{self.header.name}: the data set has no vocabulary")
        return (self.path / "vocabulary.txt").read_text(encoding="utf-8").splitlines()


def _read_header(path: Path) -> Header:
    try:
        fields = json.loads((path / "header.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path}: not a data set folder (no header.json); `fedbandit data import` makes one") from None
    except NotADirectoryError:
        raise DataError(f"{path}: is a file, not a data set folder; `fedbandit data import` makes one of it") from None
    except OSError as error:
        raise DataError(f"{path / 'header.json'}: {error.strerror}") from None
    except ValueError as error:
        raise DataError(f"{path / 'header.json'}: unreadable: {error}") from None
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise DataError(f"{path / 'header.json'}: not the header of a fedbandit data set")
    if fields.get("version") != VERSION:
        found = fields.get("version")
        raise DataError(f"{path}: format version {found}, this fedbandit reads {VERSION}; import it again")
    try:
        return Header.from_json(fields)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path / 'header.json'}: damaged: {error}") from None


def _open_split(folder: Path, header: Header) -> Split | None:
    if not folder.is_dir():
        return None

    def array(name: str) -> np.ndarray:
        try:
            mapped: np.ndarray = np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
            return mapped
        except FileNotFoundError:
            raise DataError(f"{folder}: {name}.npy is missing; import the data set again") from None
        except (OSError, ValueError) as error:
            raise DataError(f"{folder / name}.npy: damaged: {error}") from None

    def ragged(name: str, values: bool = False) -> Ragged:
        return Ragged(array(f"{name}_offsets"), array(f"{name}_ids"), array(f"{name}_values") if values else None)

    features = ragged("feature", values=True) if header.kind == "sparse" else array("features")
    log = None
    if header.logged:
        available = ragged("available") if (folder / "available_ids.npy").exists() else None
        log = Log(array("actions"), array("rewards"), array("propensities"), available)
    split = Split(array("clients"), array("offsets"), features, ragged("label"), header.scale, log)
    check_split(split, str(folder))
    return split


def check_split(split: Split, where: str) -> None:
    """Raise `DataError` unless the arrays of a split fit each other."""
    n = int(split.offsets[-1]) if len(split.offsets) else -1
    if len(split.client_ids) != split.num_clients or len(split.features) != n or len(split.labels) != n:
        raise DataError(f"{where}: the arrays do not fit each other; import the data set again")
    log = split.log
    if log is not None and any(len(column) != n for column in (log.actions, log.rewards, log.propensities)):
        raise DataError(f"{where}: the log does not fit the examples; import the data set again")
    parts = [split.labels, split.features] if isinstance(split.features, Ragged) else [split.labels]
    if any(int(part.offsets[-1]) != len(part.ids) for part in parts):
        raise DataError(f"{where}: an array is truncated; import the data set again")


# Bytes of mapped files, of which the libraries take about 100 MB. Giving back costs page faults afterwards: seldom is
# better than often, as long as a process stays below 1 GB.
_LIMIT = 768 * 2**20
_STATUS = Path("/proc/self/statm")


def give_back(dataset: FederatedDataset, limit: int = _LIMIT) -> bool:
    """Let go of the data set's pages if more than `limit` bytes are mapped; True if so. Nothing is lost."""
    if not hasattr(mmap, "MADV_DONTNEED") or _mapped_bytes() <= limit:
        return False
    for pages in _mappings(dataset):
        pages.madvise(mmap.MADV_DONTNEED)
    return True


def _mapped_bytes() -> int:
    """What is resident of files, where the system reports it; 0 elsewhere."""
    try:
        return int(_STATUS.read_text().split()[2]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _mappings(dataset: FederatedDataset) -> Iterator[mmap.mmap]:
    for split in (dataset.train, dataset.test):
        if split is None:
            continue
        arrays: list[np.ndarray | None] = [split.client_ids, split.offsets]
        for part in (split.features, split.labels):
            arrays += [part.offsets, part.ids, part.values] if isinstance(part, Ragged) else [part]
        for array in arrays:
            base: Any = None if array is None else array.base
            if isinstance(base, mmap.mmap):
                yield base
