"""Writing a data set folder: examples in any order come in, whole clients go out, in bounded memory.

One process writes a folder at a time, and a folder is either whole or not there.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from fedbandit.core.errors import DataError
from fedbandit.core.progress import SILENT, Progress
from fedbandit.core.ragged import Ragged
from fedbandit.data.dataset import Header, Log
from fedbandit.data.encoder import Encoder
from fedbandit.data.spool import Spool
from fedbandit.data.verification import write_checksums


def claim(path: Path, flags: int, out: Path) -> int:
    """Open `path`, locked: a descriptor to close in the end. While it is open, other imports of `out` are refused."""
    lock = os.open(path, flags, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(lock), os.stat(path)):
            raise BlockingIOError
    except (
        BlockingIOError,
        FileNotFoundError,
    ):  # another one holds it, or has this moment renamed or removed it
        os.close(lock)
        raise DataError(f"{out}: another import is writing it; nothing was overwritten") from None
    return lock


_FLUSH_EVERY = 4096  # examples added one by one before they go to disk


def check_target(out: Path | str) -> Path:
    """Refuse a target that already holds something, before any work is done for it."""
    out = Path(out)
    try:
        if out.exists() and not (out.is_dir() and not any(out.iterdir())):
            raise DataError(f"{out}: already exists; nothing was overwritten")
    except OSError as error:
        raise DataError(f"{out}: {error.strerror}") from None
    return out


class DatasetWriter:
    """Add examples in any order, then `finish()`. As a context manager it cleans up unless finished.

    Without a `name` the data set is called as its folder, which is no part of its fingerprint.
    """

    def __init__(
        self,
        out: Path | str,
        *,
        name: str | None = None,
        kind: Literal["dense", "sparse"],
        shape: tuple[int, ...],
        actions: Iterable[str],
        multilabel: bool = False,
        lower_case: Mapping[int, int] | None = None,
        scale: float = 1.0,
        dtype: type[np.generic] = np.float32,
        logged: bool = False,
        vocabulary: Iterable[str] | None = None,
        source: Mapping[str, Any] | None = None,
        published_counts: Iterable[int] | None = None,
        encoder: Encoder | None = None,
    ) -> None:
        self.out = check_target(out)
        self._header: dict[str, Any] = {
            **({} if name is None else {"name": name}),
            "kind": kind,
            "shape": tuple(shape),
            "actions": tuple(actions),
            "multilabel": multilabel,
            "lower_case": dict(lower_case or {}),
            "scale": scale,
            "logged": logged,
        }
        if published_counts is not None:  # they change rewards, so they are part of the fingerprint
            self._header["published_counts"] = tuple(published_counts)
        if encoder is not None:
            self._header["encoder"] = encoder
        self.source = dict(
            source or {}
        )  # may be added to until finish(): counts of what was dropped, for example
        self._vocabulary = vocabulary
        self._dtype = np.dtype(dtype)
        if self._dtype not in (np.float32, np.uint8):  # what the door lets in
            raise DataError(
                f"{self.out}: features are stored as float32 or uint8, not {self._dtype}"
            )
        self._folder = self.out.parent / f".{self.out.name}.partial"
        self._spools: dict[str, Spool] = {}
        self._pending: dict[str, list[tuple[Any, ...]]] = {}
        self._made_parents = [
            p for p in (self.out.parent, *self.out.parent.parents) if not p.exists()
        ]
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self._lock: int | None = _claimed(self._folder, self.out)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def close(self) -> None:
        """Throw away whatever is not finished."""
        for spool in self._spools.values():
            spool.close()
        if self._lock is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._release()
        for parent in self._made_parents:  # innermost first
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()

    def add(
        self,
        client: str,
        features: np.ndarray | tuple[np.ndarray, np.ndarray],
        labels: Iterable[int] = (),
        *,
        split: str = "train",
        action: int = 0,
        reward: float = 0.0,
        propensity: float = 1.0,
        available: Iterable[int] | None = None,
    ) -> None:
        """Add one example: dense features [*shape], or (word ids, values) for sparse text."""
        pending = self._pending.setdefault(split, [])
        pending.append((client, features, list(labels), action, reward, propensity, available))
        if len(pending) >= _FLUSH_EVERY:
            self._flush(split)

    def add_many(
        self,
        clients: Iterable[str] | np.ndarray,
        features: np.ndarray | Ragged,
        labels: Ragged,
        *,
        split: str = "train",
        log: Log | None = None,
    ) -> None:
        """Add many examples at once; `clients` holds one id per example."""
        self._flush(split)
        self._spool(split).add_many(clients, features, labels, log)

    def num_clients(self, split: str = "train") -> int:
        """How many clients of a split have examples so far."""
        return self._spools[split].clients if split in self._spools else 0

    def num_examples(self, split: str = "train") -> int:
        """How many examples a split has so far."""
        return self._spools[split].examples if split in self._spools else 0

    def finish(self, progress: Progress = SILENT) -> Path:
        """Group the examples by client, write header and arrays, and give the folder its name."""
        for split in list(self._pending):
            self._flush(split)
        train = self._spools.get("train")
        if train is None or train.examples == 0:
            raise DataError(
                f"{self.out.name}: no client has a training example; nothing was written"
            )
        digest = hashlib.sha256(
            json.dumps(self._header, default=Encoder.to_json, sort_keys=True).encode()
        )
        sums: dict[str, str] = {}
        size = sum(spool.size for spool in self._spools.values())
        with progress.task("Grouping by client", size, unit="B") as advance:
            for split, spool in sorted(self._spools.items()):
                if spool.examples:
                    sums |= spool.complete(self._folder / split, digest, advance)
                spool.close()
        if self._vocabulary is not None:
            text = "".join(f"{word}\n" for word in self._vocabulary).encode()
            sums["vocabulary.txt"] = self._write("vocabulary.txt", text)
            digest.update(text)
        header = Header(
            **{"name": self.out.name, **self._header},
            action_counts=tuple(int(count) for count in train.action_counts),
            source=self.source,
            fingerprint=digest.hexdigest(),
        )
        sums["header.json"] = self._write(
            "header.json", json.dumps(header.to_json(), indent=1).encode()
        )
        write_checksums(self._folder, sums)
        if check_target(self.out).exists():
            self.out.rmdir()  # empty
        self._folder.rename(self.out)
        self._release()
        return self.out

    def _write(self, name: str, content: bytes) -> str:
        """A file of its own beside the splits, on disk for good: its SHA-256."""
        with open(self._folder / name, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        return hashlib.sha256(content).hexdigest()

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _spool(self, split: str) -> Spool:
        if split not in self._spools:
            h = self._header
            self._spools[split] = Spool(
                self._folder / f"{split}.spool",
                sparse=h["kind"] == "sparse",
                shape=h["shape"],
                actions=len(h["actions"]),
                dtype=self._dtype,
                logged=h["logged"],
            )
        return self._spools[split]

    def _flush(self, split: str) -> None:
        pending = self._pending.pop(split, [])
        if not pending:
            return
        clients, contexts, labels, actions, rewards, propensities, available = zip(
            *pending, strict=True
        )
        features: np.ndarray | Ragged
        if self._header["kind"] == "sparse":
            features = Ragged(
                np.cumsum([0, *(len(ids) for ids, _ in contexts)]),
                np.concatenate([np.asarray(ids, np.int32) for ids, _ in contexts]),
                np.concatenate([np.asarray(values, np.float32) for _, values in contexts]),
            )
        else:
            features = np.stack([np.asarray(context, self._dtype) for context in contexts])
        log = None
        if self._header["logged"]:
            sets = None
            if any(choice is not None for choice in available):
                everything = list(range(len(self._header["actions"])))
                sets = Ragged.from_rows(
                    [everything if choice is None else list(choice) for choice in available]
                )
            log = Log(
                np.array(actions, np.int32),
                np.array(rewards, np.float32),
                np.array(propensities, np.float32),
                sets,
            )
        self._spool(split).add_many(clients, features, Ragged.from_rows(list(labels)), log)


def _claimed(folder: Path, out: Path) -> int:
    """Make the staging folder of `out`, locked and empty: the lock's descriptor. A second import of it is refused."""
    folder.mkdir(exist_ok=True)
    lock = claim(folder, os.O_RDONLY, out)
    for left in folder.iterdir():  # by an import that was killed
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    return lock
