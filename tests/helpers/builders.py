"""Small data sets in memory for tests, and folders whose checksums are right whatever was done to them."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from fedbandit.core.ragged import Ragged
from fedbandit.data import FederatedDataset
from fedbandit.data.dataset import Header, Log, Split
from fedbandit.data.validation import write_checksums
from fedbandit.data.writer import DatasetWriter


def add_example(
    writer: DatasetWriter,
    client: str,
    features: np.ndarray | tuple[np.ndarray, np.ndarray],
    labels: Iterable[int] = (),
    *,
    split: str = "train",
    action: int | None = None,
    reward: float = 0.0,
    propensity: float = 1.0,
    available: Iterable[int] | None = None,
) -> None:
    """Add one example: dense features, or ids and values; with an action it is a logged one."""
    if isinstance(features, tuple):
        ids, values = np.asarray(features[0], np.int32), np.asarray(features[1], np.float32)
        rows = Ragged(np.array([0, len(ids)]), ids, values)
    else:
        rows = np.asarray(features)[None]
    log = None
    if action is not None:
        sets = None if available is None else Ragged.from_rows([list(available)])
        log = Log(np.int32([action]), np.float32([reward]), np.float32([propensity]), sets)
    writer.add_many([client], rows, Ragged.from_rows([list(labels)]), split=split, log=log)


def with_checksums(folder: Path) -> Path:
    """The folder with the checksums of its files as they are now, so that types, shapes and ranges speak."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "checksums.json"]
    sums = {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }
    write_checksums(folder, sums)
    return folder


def dataset_in_memory(
    features: np.ndarray | Ragged,
    labels: Sequence[Sequence[int]] | Ragged,
    offsets: Sequence[int] | np.ndarray,
    num_actions: int,
    *,
    shape: tuple[int, ...] | None = None,
    multilabel: bool = False,
    lower_case: dict[int, int] | None = None,
) -> FederatedDataset:
    """A data set with clients named c000, c001, ... and no test split."""
    offsets = np.asarray(offsets, np.int64)
    if not isinstance(labels, Ragged):
        labels = Ragged.from_rows([list(row) for row in labels])
    sparse = isinstance(features, Ragged)
    header = Header(
        name="in memory",
        kind="sparse" if sparse else "dense",
        shape=shape or features.shape[1:],
        actions=tuple(f"a{i}" for i in range(num_actions)),
        action_counts=tuple(int(c) for c in np.bincount(labels.ids, minlength=num_actions)),
        multilabel=multilabel,
        lower_case=lower_case or {},
        fingerprint="in memory",
    )
    ids = np.array([f"c{i:03d}" for i in range(len(offsets) - 1)], dtype=bytes)
    return FederatedDataset(header, Split(ids, offsets, features, labels))


def random_text(
    seed: int = 0, clients: int = 12, words: int = 40, num_actions: int = 6
) -> FederatedDataset:
    """Sparse rows with repeated words across a client, several labels or none, and one client without examples."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 40, clients)
    sizes[3] = 0
    rows = []
    for _ in range(int(sizes.sum())):
        ids = np.sort(rng.choice(words, rng.integers(0, 7), replace=False))
        counts = rng.integers(1, 4, len(ids)).astype(float)
        rows.append((ids, counts / max(np.linalg.norm(counts), 1e-12)))
    offsets = np.cumsum([0, *(len(ids) for ids, _ in rows)])
    features = Ragged(
        offsets,
        np.concatenate([ids for ids, _ in rows]).astype(np.int32),
        np.concatenate([values for _, values in rows]).astype(np.float32),
    )
    labels = [rng.choice(num_actions, rng.integers(0, 3), replace=False).tolist() for _ in rows]
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    return dataset_in_memory(features, labels, bounds, num_actions, shape=(words,), multilabel=True)


def random_images(
    seed: int = 0, clients: int = 8, shape: tuple[int, ...] = (4, 4), num_actions: int = 6
) -> FederatedDataset:
    """Dense contexts with one label each; labels 0-1 are the upper case of 2-3."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 30, clients)
    n = int(sizes.sum())
    labels = rng.integers(0, num_actions, n)
    centres = rng.random((num_actions, *shape))
    features = (centres[labels] + 0.3 * rng.random((n, *shape))).astype(np.float32)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return dataset_in_memory(
        features, [[int(label)] for label in labels], offsets, num_actions, lower_case={0: 2, 1: 3}
    )
