"""Writing a data set folder: examples in any order come in, whole clients go out, in bounded
memory.

One process writes a folder at a time, and a folder is either whole or not there: it is made beside
its place, as `.NAME.partial`, and renamed in the end.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from fedbandit.core.contexts import ItemSpec, rows_at
from fedbandit.core.errors import DataError, explaining
from fedbandit.core.progress import SILENT, ProgressReporter
from fedbandit.core.ragged import Ragged
from fedbandit.data.dataset import Catalogue, FederatedDataset, Header, Log
from fedbandit.data.encoder import Encoder
from fedbandit.data.split_writer import SplitWriter, save_blocks
from fedbandit.data.validation import write_checksums


def check_target(out: Path | str) -> Path:
    """The path of a data set to write; one that already holds something is refused.

    To be called before any work is done for it. An empty folder is as good as none.
    """
    out = Path(out)
    with explaining(str(out), OSError):
        if out.exists() and not (out.is_dir() and not any(out.iterdir())):
            raise DataError(f"{out}: already exists; nothing was overwritten")
    return out


class DatasetWriter:
    """Add examples in any order by `add_many`, then `finish()`. As a context manager it cleans up
    unless finished.

    Memory holds one batch and a few bytes for every client, however many examples there are.
    `staging` is the folder that it works in; importers may put files there, and remove them before
    `finish`.
    Without a `name` the data set is called as its folder, which is no part of its fingerprint.

    Examples:
        >>> from fedbandit.data import FederatedDataset, Ragged
        >>> x, labels = np.ones((3, 2), np.float32), Ragged.from_rows([[0], [1], [0]])
        >>> with DatasetWriter("visits", kind="dense", shape=(2,), actions=["a", "b"]) as writer:
        ...     writer.add_many(["ann", "bob", "ann"], x, labels)
        ...     path = writer.finish()
        >>> train = FederatedDataset.open(path).train
        >>> train.client_id(0), train.sizes().tolist()
        ('ann', [2, 1])
    """

    def __init__(
        self,
        out: Path | str,
        *,
        name: str | None = None,
        kind: Literal["dense", "sparse"],
        shape: tuple[int, ...],
        actions: Iterable[str] = (),
        multilabel: bool = False,
        lower_case: Mapping[int, int] | None = None,
        scale: float = 1.0,
        dtype: type[np.generic] = np.float32,
        logged: bool = False,
        vocabulary: Iterable[str] | None = None,
        source: Mapping[str, Any] | None = None,
        published_counts: Iterable[int] | None = None,
        encoder: Encoder | None = None,
        catalogue: Catalogue | None = None,
        item_encoder: Encoder | None = None,
        item_vocabulary: Iterable[str] = (),
        timed: bool = False,
    ) -> None:
        self.out = check_target(out)
        optional = {
            "name": name,
            # Published counts change rewards, so they are part of the fingerprint.
            "published_counts": None if published_counts is None else tuple(published_counts),
            "encoder": encoder,
            "item_encoder": item_encoder,
        }
        self._header: dict[str, Any] = {
            **{key: value for key, value in optional.items() if value is not None},
            "kind": kind,
            "shape": tuple(shape),
            "actions": tuple(actions),
            "multilabel": multilabel,
            "lower_case": dict(lower_case or {}),
            "scale": scale,
            "logged": logged,
        }
        self._catalogue, self._timed = catalogue, timed
        self._vocabularies = {"vocabulary.txt": vocabulary} if vocabulary is not None else {}
        if words := list(item_vocabulary):
            self._vocabularies["catalogue/vocabulary.txt"] = words
        self.source = dict(
            source or {}
        )  # may be added to until finish(): counts of what was dropped, for example
        self._dtype = np.dtype(dtype)
        if self._dtype not in (np.float32, np.uint8):  # what a reader lets in
            raise DataError(
                f"{self.out}: features are stored as float32 or uint8, not {self._dtype}"
            )
        self.staging = self.out.parent / f".{self.out.name}.partial"
        self._splits: dict[str, SplitWriter] = {}
        self._made_parents = [
            p for p in (self.out.parent, *self.out.parent.parents) if not p.exists()
        ]
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self._lock: int | None = _claimed(self.staging, self.out)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def close(self) -> None:
        """Throw away what is not finished: raw files, the staging folder, and parents made for it.

        Called at the end of a `with` block; does nothing after `finish`.
        """
        for writer in self._splits.values():
            writer.close()
        if self._lock is not None:
            shutil.rmtree(self.staging, ignore_errors=True)
            self._release()
        for parent in self._made_parents:  # innermost first
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()

    def add_many(
        self,
        clients: Iterable[str] | np.ndarray,
        features: np.ndarray | Ragged,
        labels: Ragged,
        *,
        split: str = "train",
        log: Log | None = None,
        candidates: Ragged | None = None,
        times: np.ndarray | None = None,
    ) -> None:
        """Add examples: `clients` holds one id for each; features are [n, *shape] or sparse rows,
        labels are rows.

        A logged data set has the feedback of every row in `log`, and rows of labels that are empty.
        Over a catalogue `candidates` lists the items of every row, and labels and logged actions
        are places in these lists. `times`, float64 [n] in seconds, go with a writer that is timed.
        """
        self._split_writer(split).add_many(clients, features, labels, log, candidates, times)

    def finish(self, progress: ProgressReporter = SILENT) -> Path:
        """Group the examples by client, write header and arrays, and give the folder its name.

        Returns the path. The fingerprint is a digest of the header's facts, all arrays and the
        vocabulary, so that the same examples give the same data set in whatever order clients came.
        """
        train = self._splits.get("train")
        if train is None or train.examples == 0:
            raise DataError(
                f"{self.out.name}: no client has a training example; nothing was written"
            )
        digest = hashlib.sha256(
            json.dumps(self._header, default=Encoder.to_json, sort_keys=True).encode()
        )
        sums: dict[str, str] = {}
        size = sum(writer.size for writer in self._splits.values())
        with progress.task("Grouping by client", size, unit="B") as advance:
            for split, writer in sorted(self._splits.items()):
                if writer.examples:
                    sums |= writer.complete(self.staging / split, digest, advance)
                writer.close()
        if self._catalogue is not None:
            sums |= self._write_catalogue(self._catalogue, digest)
        for name, words in self._vocabularies.items():
            text = "".join(f"{word}\n" for word in words).encode()
            sums[name] = self._write(name, text)
            digest.update(text)
        header = Header(
            **{"name": self.out.name, **self._header},
            items=self._items(),
            action_counts=tuple(int(count) for count in train.action_counts),
            source=self.source,
            fingerprint=digest.hexdigest(),
        )
        sums["header.json"] = self._write(
            "header.json", json.dumps(header.to_json(), indent=1).encode()
        )
        write_checksums(self.staging, sums)
        if check_target(self.out).exists():
            self.out.rmdir()  # empty
        self.staging.rename(self.out)
        self._release()
        return self.out

    def _items(self) -> ItemSpec | None:
        """Facts of the catalogue for the header; None without one."""
        if self._catalogue is None:
            return None
        items, train = self._catalogue.features, self._splits["train"]
        shown = train.listed / train.examples
        most = max(writer.longest for writer in self._splits.values())
        if isinstance(items, Ragged):
            encoder = self._header.get("item_encoder")
            width = encoder.width if encoder else int(items.ids.max(initial=0)) + 1
            return ItemSpec("sparse", (width,), shown, most)
        return ItemSpec("dense", items.shape[1:], shown, most)

    def _write_catalogue(self, catalogue: Catalogue, digest: Any) -> dict[str, str]:
        """Write the arrays of the items, each once: the SHA-256 of each file by its path."""
        folder, items = self.staging / "catalogue", catalogue.features
        folder.mkdir()
        if isinstance(items, Ragged):
            parts = {"offsets": items.offsets, "ids": items.ids, "values": items.values}
            arrays = {f"feature_{name}": np.asarray(array) for name, array in parts.items()}
        else:
            arrays = {"features": items}
        others = {"names": catalogue.names, "items": catalogue.items, "since": catalogue.since}
        arrays |= {name: array for name, array in others.items() if array is not None}
        return {
            f"catalogue/{name}.npy": save_blocks(
                folder / f"{name}.npy", array.shape, array.dtype, [array], digest
            )
            for name, array in arrays.items()
        }

    def _write(self, name: str, content: bytes) -> str:
        """Write a file beside the splits, on disk for good: its SHA-256."""
        with open(self.staging / name, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        return hashlib.sha256(content).hexdigest()

    def _release(self) -> None:
        """Let others import to this place; a second call does nothing."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _split_writer(self, split: str) -> SplitWriter:
        """The writer of a split, made when its first rows come."""
        if split not in self._splits:
            h = self._header
            self._splits[split] = SplitWriter(
                self.staging / f"{split}.spool",
                sparse=h["kind"] == "sparse",
                shape=h["shape"],
                actions=len(h["actions"]),
                items=None if self._catalogue is None else len(self._catalogue.features),
                timed=self._timed,
                dtype=self._dtype,
                logged=h["logged"],
            )
        return self._splits[split]


def _claimed(folder: Path, out: Path) -> int:
    """Make the staging folder of `out`, locked and empty: a descriptor to close in the end.

    While it is open, a second import of `out` is refused.
    """
    import fcntl  # a device, which may have none, writes no data sets

    folder.mkdir(exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(lock), os.stat(folder)):
            raise BlockingIOError
    except (BlockingIOError, FileNotFoundError):  # another holds it, or has just renamed it
        os.close(lock)
        raise DataError(f"{out}: another import is writing it; nothing was overwritten") from None
    for left in folder.iterdir():  # by an import that was killed
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    return lock


_ROWS = 8192  # copied at a time


def rewrite(
    dataset: FederatedDataset,
    out: Path | str,
    *,
    catalogue: Catalogue | None = None,
    propensities: Mapping[str, np.ndarray] | None = None,
    source: Mapping[str, Any] | None = None,
) -> Path:
    """Write a data set again with another catalogue or other propensities, float32 [n] by split.

    Examples, their order and everything else stay; `source` is added to what the header says about
    the origin. The result is a data set with a fingerprint of its own.
    """
    header, train = dataset.header, dataset.train
    kept = ("kind", "shape", "actions", "multilabel", "lower_case", "scale", "logged", "encoder")
    pixels = isinstance(train.features, np.ndarray) and train.features.dtype == np.uint8
    has_words = dataset.path is not None and (dataset.path / "vocabulary.txt").exists()
    with DatasetWriter(
        out,
        **{name: getattr(header, name) for name in kept},
        dtype=np.uint8 if pixels else np.float32,
        vocabulary=dataset.vocabulary() if has_words else None,
        source={**header.source, **(source or {})},
        published_counts=header.published_counts or None,
        catalogue=catalogue or train.catalogue,
        item_encoder=header.item_encoder,
        item_vocabulary=dataset.item_vocabulary(),
        timed=train.times is not None,
    ) as writer:
        for name, split in dataset.splits.items():
            owners = np.repeat(np.arange(split.num_clients), split.sizes())
            other = None if propensities is None else propensities[name]
            for start in range(0, split.num_examples, _ROWS):
                rows = np.arange(start, min(start + _ROWS, split.num_examples))
                log = None if split.log is None else split.log.take(rows)
                if log is not None and other is not None:
                    log = replace(log, propensities=other[rows])
                writer.add_many(
                    np.array([split.client_id(int(client)) for client in owners[rows]]),
                    rows_at(split.features, rows),
                    split.labels.take(rows),
                    split=name,
                    log=log,
                    candidates=None if split.candidates is None else split.candidates.take(rows),
                    times=None if split.times is None else split.times[rows],
                )
        return writer.finish()
