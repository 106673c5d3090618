"""A federated data set: clients, each with examples. On disk it is a folder of plain memory-mapped
arrays.

Whatever is opened has been verified, so that those who compute with it may trust it; a client is a
slice. Knows nothing of policies, models or rounds.
"""

import hashlib
import math
import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BeforeValidator, Field, FiniteFloat

from fedbandit.core.contexts import Candidates, Contexts, Features, ItemSpec, rows_at
from fedbandit.core.errors import DataError, explaining, refuse
from fedbandit.core.files import read_checked
from fedbandit.core.progress import ProgressReporter
from fedbandit.core.ragged import Ragged
from fedbandit.data.encoder import Encoder
from fedbandit.data.validation import (
    AGAIN,
    CHECKSUMS,
    FINITE,
    PROPENSITY,
    FileState,
    FolderReader,
    ValueRule,
    ascending,
    below,
    client_ids,
    ensure_verified,
    item_names,
)

FORMAT = "fedbandit-dataset"
VERSION = 2
_MOST_ENTRIES = 2**62
_Count = Annotated[int, Field(ge=0, le=_MOST_ENTRIES)]


def _pairs(found: Any) -> Any:
    """A case map as `header.json` has it, a list of pairs, as a dictionary."""
    try:
        return dict(found)
    except (TypeError, ValueError):
        raise ValueError("not pairs of actions") from None


@dataclass(frozen=True)
class Header:
    """The facts about a data set that are true of all its splits; `header.json` of its folder.

    `fingerprint` identifies the contents: names of actions, arrays and words. It is part of a run's
    identity, so that a run is never resumed on other data. `published_counts` are frequencies that
    the source itself has published, for rewards by rarity; without them the training split is
    counted.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}
    name: str
    kind: Literal["dense", "sparse"]
    shape: tuple[_Count, ...]  # of one context; for sparse ones (features,)
    actions: tuple[str, ...]  # their names, in the order of the model's outputs
    action_counts: tuple[_Count, ...]  # how many training examples carry each as a label
    multilabel: bool = False
    lower_case: Annotated[Mapping[int, int], BeforeValidator(_pairs)] = field(
        default_factory=dict
    )  # upper-case label -> its lower-case version
    logged: bool = False  # actions, rewards and propensities in place of labels
    scale: FiniteFloat = 1.0  # stored dense features times this are the contexts
    source: Mapping[str, Any] = field(default_factory=dict)  # how it was made
    fingerprint: str = ""  # identifies the contents; part of a run's identity
    published_counts: tuple[_Count, ...] = ()  # frequencies, where the source itself says them
    encoder: Encoder | None = (
        None  # how a row of a table becomes a context; None: words alone, or as it was given
    )
    items: ItemSpec | None = None  # of a catalogue, in place of fixed actions
    item_encoder: Encoder | None = None  # how a row of a table of items becomes their features

    @property
    def num_actions(self) -> int:
        """K, the number of actions."""
        return len(self.actions)

    @property
    def places(self) -> int:
        """The largest action of any decision, plus one: fixed actions, or the longest list of candidates."""
        return len(self.actions) if self.items is None else self.items.most

    @property
    def typical_actions(self) -> int:
        """Number of actions of a decision: fixed ones, or candidates on average."""
        return len(self.actions) if self.items is None else round(self.items.shown)

    @property
    def frequencies(self) -> tuple[int, ...]:
        """Frequency of each action: as its source published it, otherwise counted over the
        training split.
        """
        return self.published_counts or self.action_counts

    def to_json(self) -> dict[str, Any]:
        """The header as plain values, as `header.json` holds them; the inverse of `from_json`."""
        plain = {
            **vars(self),
            "lower_case": sorted(self.lower_case.items()),
            "encoder": self.encoder and self.encoder.to_json(),
            "items": self.items and vars(self.items),
            "item_encoder": self.item_encoder and self.item_encoder.to_json(),
        }
        given = {name: value for name, value in plain.items() if value is not None}
        return {"format": FORMAT, "version": VERSION, **given}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "Header":
        """From what `to_json` has made; `ValueError` names the field that is wrong.

        Every field must be there, with its own type, and they must agree with each other.
        """
        given = {key: value for key, value in found.items() if key not in ("format", "version")}
        optional = {"encoder", "items", "item_encoder"}
        if missing := {one.name for one in fields(cls)} - given.keys() - optional:
            raise ValueError(f"{min(missing)} is missing")
        header = read_checked(cls, given)
        header._check()
        return header

    def _check(self) -> None:
        """Refuse fields that do not belong together."""
        dense, actions, items = self.kind == "dense", len(self.actions), self.items
        cases = [label for pair in self.lower_case.items() for label in pair]
        sides = () if items is None else items.shape
        wrong = {
            "shape is not that of a context": math.prod(self.shape) > _MOST_ENTRIES
            or not (dense or len(self.shape) == 1),
            "items have no such features, or numbers of candidates": items is not None
            and not (
                1 <= items.shown <= items.most
                and min(sides, default=0) >= 0
                and (items.kind == "dense" or len(sides) == 1)
            ),
            "actions are missing, or stand beside items": bool(actions) == (items is not None),
            "action_counts are not one for each action": len(self.action_counts) != actions,
            "published_counts are not one for each action": len(self.published_counts)
            not in (0, actions),
            "lower_case are not pairs of actions": not all(0 <= one < actions for one in cases),
            "encoder does not make contexts of this kind and shape": self.encoder is not None
            and ((self.encoder.width,), self.encoder.dense) != (self.shape, dense),
            "item_encoder does not make features of this shape": self.item_encoder is not None
            and (self.item_encoder.width,) != sides,
        }
        for fault, found in wrong.items():
            if found:
                raise ValueError(fault)


@dataclass(frozen=True)
class Log:
    """Logged bandit feedback of a split: one entry per example, in the order of its rows.

    `propensities` are the probabilities with which the logging policy took the actions; off-policy
    evaluation divides by them, so all lie in (0, 1].

    Examples:
        >>> log = Log(np.array([0, 2]), np.array([1.0, 0.0]), np.array([0.5, 0.25]))
        >>> log.take(np.array([1])).actions.tolist()
        [2]
    """

    actions: np.ndarray  # int32 [n]
    rewards: np.ndarray  # float32 [n]
    propensities: np.ndarray  # float32 [n]
    available: Ragged | None = None  # the actions that could be chosen; None: all of them

    def take(self, rows: np.ndarray) -> "Log":
        """The feedback of the given rows, int64 [n], in that order."""
        available = None if self.available is None else self.available.take(rows)
        return Log(self.actions[rows], self.rewards[rows], self.propensities[rows], available)


@dataclass(frozen=True)
class Catalogue:
    """Items that decisions choose from, each with features, stored once.

    Features may change over time: an item then has several rows, its versions, of which the newest
    before an event is the one that the event's list names. Lists hold rows; `items` says which item
    each row is, and everything else (names, logs, evaluation) goes by items.

    Examples:
        >>> shop = Catalogue(np.eye(3), np.array([b"tea", b"cup"]), np.array([0, 0, 1]))
        >>> len(shop), shop.item_of(np.array([1, 2])).tolist(), shop.name(1)
        (2, [0, 1], 'cup')
    """

    features: Features  # of every row
    names: np.ndarray | None = None  # bytes [items], utf-8; None: items are called by their number
    items: np.ndarray | None = None  # int32 [rows]; None: every row is an item of its own
    since: np.ndarray | None = None  # float64 [rows], in seconds: from when each row holds

    def __len__(self) -> int:
        """The number of items."""
        return len(self.features) if self.names is None else len(self.names)

    def item_of(self, rows: np.ndarray) -> np.ndarray:
        """Which item each of the rows is a version of: int64 [n]."""
        return (rows if self.items is None else self.items[rows]).astype(np.int64)

    def name(self, item: int) -> str:
        """An item's name; its number where it has none."""
        return str(item) if self.names is None else bytes(self.names[item]).decode()


@dataclass(frozen=True)
class Split:
    """The examples of one split, grouped by client; clients are sorted by id.

    Examples of client c are the rows `offsets[c]` to `offsets[c + 1]`. Features are stored as they
    came (`uint8` pixels, float32, or sparse rows) and become contexts when they are asked for. A
    split with labels has no log; a logged one has rows of labels that are empty. Over a catalogue,
    labels and logged actions are places in the example's own list of candidates.

    Examples:
        >>> ids, offsets = np.array([b"ann", b"bob"]), np.array([0, 2, 3])
        >>> x, labels = np.arange(3.0)[:, None], Ragged.from_rows([[0], [1], [1]])
        >>> split = Split(ids, offsets, x, labels)
        >>> split.num_clients, split.num_examples, split.sizes().tolist()
        (2, 3, [2, 1])
        >>> split.contexts(np.array([2])).shared.tolist()  # of bob
        [[2.0]]
    """

    client_ids: np.ndarray  # bytes [clients], utf-8
    offsets: (
        np.ndarray
    )  # int64 [clients + 1]: examples of client c are rows offsets[c]:offsets[c + 1]
    features: np.ndarray | Ragged
    labels: Ragged
    scale: float = 1.0
    log: Log | None = None
    candidates: Ragged | None = None  # the items that each example could choose from
    catalogue: Catalogue | None = None
    times: np.ndarray | None = None  # float64 [n], in seconds: when each example took place

    @property
    def num_clients(self) -> int:
        """The number of clients."""
        return len(self.offsets) - 1

    @property
    def num_examples(self) -> int:
        """The number of rows over all clients."""
        return int(self.offsets[-1])

    def client_id(self, client: int) -> str:
        """The id of a client by its place in the split."""
        return bytes(self.client_ids[client]).decode()

    def sizes(self) -> np.ndarray:
        """Examples per client: int64 [clients]."""
        return np.diff(self.offsets)

    def contexts(self, rows: np.ndarray) -> Contexts:
        """The decisions of the given rows."""
        return Contexts(self.shared(rows), self._shown(rows))

    def _shown(self, rows: np.ndarray) -> Candidates | None:
        """The candidates of the given rows with their features; cost goes with what is shown."""
        if self.candidates is None:
            return None
        assert self.catalogue is not None
        listed = self.candidates.take(rows)
        features = rows_at(self.catalogue.features, listed.ids.astype(np.int64))
        return Candidates(listed.offsets, self.catalogue.item_of(listed.ids), features)

    def shared(self, rows: np.ndarray) -> Features:
        """Features of user and moment in the given rows: float32 [n, *shape], or sparse rows."""
        if isinstance(self.features, Ragged):
            return self.features.take(rows)
        return self._scaled(self.features[rows])

    def between(self, start: int, stop: int) -> tuple[Contexts, Ragged]:
        """Contexts and labels of rows start to stop, as `contexts` and `labels.take` give them but
        in one piece.
        """
        labels, shown = self.labels.slice(start, stop).copy(), self._shown(np.arange(start, stop))
        if isinstance(self.features, Ragged):
            return Contexts(self.features.slice(start, stop).copy(), shown), labels
        return Contexts(self._scaled(self.features[start:stop]), shown), labels

    def _scaled(self, features: np.ndarray) -> np.ndarray:
        """Bytes as float32 times the scale; floats as they are stored."""
        if features.dtype != np.uint8:
            return features
        scaled = features.astype(np.float32)
        scaled *= np.float32(self.scale)
        return scaled


@dataclass(frozen=True)
class FederatedDataset:
    """A header, a training split and, where there is one, a test split; examples are grouped by
    client.

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

    @property
    def splits(self) -> dict[str, Split]:
        """The splits that there are: `train`, and `test` where some examples are held out."""
        return {"train": self.train} | ({} if self.test is None else {"test": self.test})

    @classmethod
    def open(
        cls, path: Path | str, *, verify: bool = False, progress: ProgressReporter | None = None
    ) -> "FederatedDataset":
        """Open a folder made by `fedbandit data import` and map its arrays.

        The whole of it is read the first time it is opened, and again when a file has changed or
        `verify` asks for it.
        """
        path = Path(path)
        reader = FolderReader(path)
        header = _read_header(reader)
        catalogue = _open_catalogue(reader, header)
        train = _open_split(reader, "train", header, catalogue)
        if train is None:
            raise DataError(f"{path}: the data set has no training split")
        test = _open_split(reader, "test", header, catalogue)
        reader.look_at("vocabulary.txt")
        reader.look_at("catalogue/vocabulary.txt")
        ensure_verified(reader, again=verify, progress=progress)
        return cls(header, train, test, path, reader.states)

    def contents_digest(self) -> str:
        """The SHA-256 of all arrays: what tells data in memory apart that have no fingerprint."""
        digest = hashlib.sha256()
        for array in _arrays(self):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def check_unchanged(self) -> None:
        """Raise `DataError` if a file of the folder is not the one that was opened: it costs a look
        at each.

        A run asks before it keeps what it has computed. Size, time of the last change and inode
        decide.
        """
        if self.path is None:  # data in memory alone
            return
        for name, then in self.files.items():
            path = self.path / name
            try:
                now = FileState.of(os.stat(path))
            except OSError as error:
                raise DataError(
                    f"{path}: {error.strerror}; it was there when it was opened"
                ) from None
            if (now.size, now.modified, now.inode) != (then.size, then.modified, then.inode):
                cut = f"was cut from {then.size:,} to {now.size:,} bytes"
                what = cut if now.size < then.size else "was changed"
                raise DataError(f"{path}: {what} while it was in use")

    def vocabulary(self) -> list[str]:
        """The words behind the columns of sparse text, most frequent first.

        `DataError` where the data set has no text, or the file does not have one word a column.
        """
        encoder = self.header.encoder
        return self._words("vocabulary.txt", encoder.words if encoder else self.header.shape[0])

    def item_vocabulary(self) -> list[str]:
        """The words behind the first features of items; none where items have no text."""
        encoder = self.header.item_encoder
        if encoder is None or not encoder.words:
            return []
        return self._words("catalogue/vocabulary.txt", encoder.words)

    def _words(self, name: str, expected: int) -> list[str]:
        """The lines of a file of words, which has to have as many as expected."""
        if self.path is None or not (self.path / name).exists():
            raise DataError(f"{self.header.name}: the data set has no vocabulary")
        path = self.path / name
        with explaining(f"{path}: cannot be read", OSError, ValueError):
            words = path.read_text(encoding="utf-8").splitlines()
        if len(words) != expected:
            counts = f"{len(words):,} words, contexts have {expected:,}"
            raise DataError(f"{path}: {counts}; {AGAIN}")
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


def _read_header(reader: FolderReader) -> Header:
    """The header of a folder; a line says what is there instead, and the command to import it."""
    path = reader.folder
    a_file = f"is a file, not a data set folder; `{_how_to_import(path)}` makes one of it"
    no_header = "not a data set folder (no header.json); `fedbandit data import` makes one"
    refuse(
        (path.exists() and not path.is_dir(), f"{path}: {a_file}"),
        (not (path / "header.json").exists(), f"{path}: {no_header}"),
        error=DataError,
    )
    fields = reader.json("header.json")
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise DataError(f"{path / 'header.json'}: not the header of a fedbandit data set")
    if (found := fields.get("version")) != VERSION:
        version = f"format version {found}, this fedbandit reads {VERSION}"
        raise DataError(f"{path}: {version}; import it again")
    reader.look_at(CHECKSUMS)
    try:
        return Header.from_json(fields)
    except ValueError as error:
        raise DataError(f"{path / 'header.json'}: {error}; {AGAIN}") from None


@dataclass(frozen=True)
class _Part:
    """The arrays of one part of the folder: a split, or the catalogue."""

    reader: FolderReader
    name: str

    def array(
        self, name: str, kinds: tuple[str, ...], shape: tuple[int | None, ...], rule: ValueRule
    ) -> np.ndarray:
        """An array of this part that must be there, of one of these kinds and of this shape."""
        return self.reader.array(f"{self.name}/{name}.npy", kinds, shape, rule)

    def optional(self, name: str, kind: str, rows: int | None, rule: ValueRule) -> Any:
        """An array of one axis that a data set may do without; None where it does."""
        if not (self.reader.folder / self.name / f"{name}.npy").exists():
            return None
        return self.array(name, (kind,), (rows,), rule)

    def offsets(self, name: str, rows: int | None) -> np.ndarray:
        """Where rows begin: int64 [rows + 1], of any number of rows where it is None."""
        found = self.array(name, ("int64",), (None if rows is None else rows + 1,), ascending)
        if not len(found) or found[-1] < 0:
            where = f"{self.reader.folder / self.name / name}.npy, entry {len(found) - 1}"
            raise DataError(f"{where}: the last offset is no length; {AGAIN}")
        return found

    def ragged(self, name: str, rows: int | None, limit: int, values: bool = False) -> Ragged:
        """Rows of ids below `limit`, with values where they have some."""
        starts = self.offsets(f"{name}_offsets", rows)
        total = (int(starts[-1]),)
        ids = self.array(f"{name}_ids", ("int32",), total, below(limit))
        return Ragged(
            starts,
            ids,
            self.array(f"{name}_values", ("float32",), total, FINITE) if values else None,
        )

    def features(self, kind: str, rows: int | None, shape: tuple[int, ...]) -> Features:
        """Dense or sparse features of that many rows."""
        if kind == "sparse":
            return self.ragged("feature", rows, shape[0], values=True)
        return self.array("features", ("float32", "uint8"), (rows, *shape), FINITE)


def _open_catalogue(reader: FolderReader, header: Header) -> Catalogue | None:
    """The items that decisions choose from, where the header has some."""
    if header.items is None:
        return None
    part = _Part(reader, "catalogue")
    features = part.features(header.items.kind, None, header.items.shape)
    names = part.optional("names", "bytes", None, item_names)
    known = len(features) if names is None else len(names)
    items = part.optional("items", "int32", len(features), below(known))
    since = part.optional("since", "float64", len(features), FINITE)
    if names is not None and items is None and known != len(features):
        raise DataError(f"{reader.folder / 'catalogue'}: a name for each item is expected; {AGAIN}")
    return Catalogue(features, names, items, since)


def _open_split(
    reader: FolderReader, split: str, header: Header, catalogue: Catalogue | None
) -> Split | None:
    """The arrays of a split, each of the type and shape that the others and the header ask for."""
    if not (reader.folder / split).is_dir():
        return None
    part = _Part(reader, split)
    clients = part.array("clients", ("bytes",), (None,), client_ids)
    client_offsets = part.offsets("offsets", len(clients))
    n, places = int(client_offsets[-1]), header.num_actions
    features = part.features(header.kind, n, header.shape)
    candidates = None
    if catalogue is not None:
        candidates = part.ragged("candidate", n, len(catalogue.features))
        places = header.places
    labels = part.ragged("label", n, places)
    log = None
    if header.logged:
        chosen = part.array("actions", ("int32",), (n,), below(places))
        rewards = part.array("rewards", ("float32",), (n,), FINITE)
        propensities = part.array("propensities", ("float32",), (n,), PROPENSITY)
        limited = (reader.folder / split / "available_ids.npy").exists()
        available = part.ragged("available", n, places) if limited else None
        log = Log(chosen, rewards, propensities, available)
    times = part.optional("times", "float64", n, FINITE)
    found = Split(
        clients, client_offsets, features, labels, header.scale, log, candidates, catalogue, times
    )
    _check_places(reader.folder / split, found)
    return found


def _check_places(where: Path, split: Split) -> None:
    """Places must lie in their example's own list: a kernel would read a neighbour's candidate."""
    if split.candidates is None:
        return
    counts = np.diff(split.candidates.offsets)
    wrong = split.labels.ids >= counts[split.labels.row_of_entry()]
    if split.log is not None:
        wrong = np.append(wrong, split.log.actions >= counts)
    if wrong.any():
        raise DataError(
            f"{where}: a label or action is no place in its list of candidates; {AGAIN}"
        )


# Bytes of mapped files, of which the libraries take about 100 MB. Giving back costs page faults afterwards: seldom is
# better than often, as long as a process stays below 1 GB.
_LIMIT = 768 * 2**20
_STATUS = "/proc/self/statm"


def give_back(dataset: FederatedDataset, limit: int = _LIMIT) -> bool:
    """Let go of the data set's pages if more than `limit` bytes are mapped; True if so.

    Nothing is lost: pages are read again when they are needed. Without it, a run that visits all
    clients of a large data set would seem to use as much memory as the data set has.
    """
    if not hasattr(mmap, "MADV_DONTNEED") or sum(f.size for f in dataset.files.values()) <= limit:
        return False  # so little that it may stay
    if _mapped_bytes() <= limit:
        return False
    for array in _arrays(dataset):
        pages: Any = array.base
        if isinstance(pages, mmap.mmap):
            pages.madvise(mmap.MADV_DONTNEED)
    return True


def _mapped_bytes() -> int:
    """Bytes of files that are resident, where the system reports it; 0 elsewhere. Asked in every
    round, so it is plain.
    """
    try:
        with open(_STATUS, "rb", buffering=0) as status:
            return int(status.read(256).split()[2]) * mmap.PAGESIZE
    except OSError:
        return 0


def _arrays(dataset: FederatedDataset) -> Iterator[np.ndarray]:
    """The arrays that a simulation reads."""
    for split in dataset.splits.values():
        items = None if split.catalogue is None else split.catalogue.features
        parts = (split.client_ids, split.offsets, split.features, split.labels, split.candidates)
        for part in (*parts, items):
            arrays = (part.offsets, part.ids, part.values) if isinstance(part, Ragged) else (part,)
            yield from (array for array in arrays if array is not None)
