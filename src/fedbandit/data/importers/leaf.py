"""LEAF's FEMNIST: folders `train/` and `test/` of JSON files with `users`, `num_samples` and `user_data`.

Files are read user by user, so one writer's images are in memory at a time.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedbandit.core.errors import DataError
from fedbandit.core.progress import SILENT, Progress
from fedbandit.data.formats.json_stream import JsonWalker
from fedbandit.data.importers.common import HoldOut
from fedbandit.data.importers.images import SIDE, Image, write_images
from fedbandit.data.text import EMNIST_ACTIONS
from fedbandit.data.writer import check_target

User = tuple[str, np.ndarray, np.ndarray]
"""Id, float32 [n, 784], int64 [n]."""


def import_leaf(path: Path | str, out: Path | str, test_fraction: float = 0.1, progress: Progress = SILENT) -> Path:
    """Import LEAF's FEMNIST; without a `test` folder, examples are held out within each writer."""
    path = Path(path)
    check_target(out)
    train = sorted((path / "train").glob("*.json"))
    test = sorted((path / "test").glob("*.json"))
    if not train:
        raise DataError(f"{path}: no JSON files in {path / 'train'}; expected LEAF's folders train and test")

    def read(source: dict[str, Any]) -> Iterator[Image]:
        hold_out = HoldOut(0.0 if test else test_fraction, by_client=False)
        seen: set[str] = set()
        named: set[str] = set()
        total = sum(file.stat().st_size for file in (*train, *test))
        with progress.task("Writing images", total) as advance:
            for split, files in (("train", train), ("test", test)):
                for file in files:
                    for user, images, labels in _users(file, named):
                        if len(labels):
                            seen.add(user)
                        held_out = hold_out.is_test([user] * len(labels))
                        for image, label, is_test in zip(images, labels, held_out, strict=True):
                            yield "test" if is_test else split, user, image, int(label)
                    advance(file.stat().st_size)
        if named - seen:
            source["dropped_clients"] = len(named - seen)

    source = {"importer": "leaf", "files": len(train) + len(test)}
    return write_images(out, EMNIST_ACTIONS, read, source)


def _users(path: Path, named: set[str]) -> Iterator[User]:
    """The users of one file with their images; adds everybody the file lists to `named`."""
    promised: dict[str, list[Any]] = {"users": [], "num_samples": []}
    counts: dict[str, int] = {}
    try:
        with open(path, encoding="utf-8") as file:
            walker = JsonWalker(file)
            for key in walker.members():
                if key in promised:
                    promised[key] = walker.value()
                elif key == "user_data":
                    for user in walker.members():
                        images, labels = _user(walker, f"{path}: client {user}")
                        counts[user] = len(labels)
                        yield user, images, labels
                else:
                    walker.skip()
    except (ValueError, TypeError) as error:
        raise DataError(f"{path}: not LEAF's JSON: {error}") from None
    if len(promised["users"]) != len(promised["num_samples"]):
        raise DataError(f"{path}: 'users' and 'num_samples' differ in length")
    for user, count in zip(promised["users"], promised["num_samples"], strict=True):
        if counts.get(user, 0) != count:
            raise DataError(f"{path}: client {user}: {counts.get(user, 0)} examples, 'num_samples' promises {count}")
    named.update(promised["users"], counts)


def _user(walker: JsonWalker, where: str) -> tuple[np.ndarray, np.ndarray]:
    images: list[np.ndarray] = []
    labels: list[Any] = []
    for key in walker.members():
        if key == "x":
            for image in walker.entries():
                pixels = np.array(image, np.float32)
                if pixels.shape != (SIDE * SIDE,) or not np.isfinite(pixels).all():
                    raise DataError(f"{where}, example {len(images)}: not {SIDE * SIDE} finite numbers")
                images.append(pixels)
        elif key == "y":
            labels = walker.value()
        else:
            walker.skip()
    if len(images) != len(labels):
        raise DataError(f"{where}: {len(images)} images, {len(labels)} labels")
    for position, label in enumerate(labels):
        if not isinstance(label, int) or not 0 <= label < len(EMNIST_ACTIONS):
            raise DataError(f"{where}, example {position}: label {label!r} is outside 0..{len(EMNIST_ACTIONS) - 1}")
    stacked = np.stack(images) if images else np.empty((0, SIDE * SIDE), np.float32)
    return stacked, np.array(labels, np.int64)
