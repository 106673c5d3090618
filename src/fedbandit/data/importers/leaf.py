"""LEAF's FEMNIST: folders `train/` and `test/` of JSON files with `users`, `num_samples` and `user_data`.

Files are read user by user, so one writer's images are in memory at a time.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import ijson
import numpy as np

from fedbandit.core.errors import DataError
from fedbandit.core.progress import SILENT, Progress
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
        with progress.task("Writing images", total, unit="B") as advance:
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
    counts: dict[str, int] = {}
    place = "before the first client"
    try:
        with open(path, "rb") as file:
            users, promised = _array(file, "users"), _array(file, "num_samples")
            file.seek(0)
            for user, data in ijson.kvitems(file, "user_data", use_float=True):
                images, labels = _user(data, f"{path}: client {user}")
                counts[user] = len(labels)
                place = f"after client {user}"
                yield user, images, labels
    except ijson.JSONError as error:
        said = str(error).removeprefix("b'").replace("\\n", "\n").partition("\n")[0]  # the parser draws where, below
        raise DataError(f"{path}: not LEAF's JSON, {place}: {said}") from None
    if len(users) != len(promised):
        raise DataError(f"{path}: 'users' and 'num_samples' differ in length")
    for user, count in zip(users, promised, strict=True):
        if counts.get(user, 0) != count:
            raise DataError(f"{path}: client {user}: {counts.get(user, 0)} examples, 'num_samples' promises {count}")
    named.update(users, counts)


def _array(file: BinaryIO, key: str) -> list[Any]:
    """A small array of the outermost object; LEAF writes these before the images, so little is read."""
    file.seek(0)
    found: Any = next(ijson.items(file, key), [])
    if not isinstance(found, list):
        raise DataError(f"{file.name}: not LEAF's JSON: {key!r} is not an array")
    return found


def _user(data: Any, where: str) -> tuple[np.ndarray, np.ndarray]:
    """The images [n, 784] and labels [n] of one entry of `user_data`."""
    if not isinstance(data, dict) or not all(isinstance(data.setdefault(key, []), list) for key in ("x", "y")):
        raise DataError(f"{where}: expected an object with the arrays 'x' and 'y'")
    images, labels = data["x"], data["y"]
    if len(images) != len(labels):
        raise DataError(f"{where}: {len(images)} images, {len(labels)} labels")
    stacked = np.empty((len(images), SIDE * SIDE), np.float32)
    for position, (image, label) in enumerate(zip(images, labels, strict=True)):
        if not isinstance(label, int) or not 0 <= label < len(EMNIST_ACTIONS):
            raise DataError(f"{where}, example {position}: label {label!r} is outside 0..{len(EMNIST_ACTIONS) - 1}")
        try:
            pixels = np.array(image, np.float32)
        except (ValueError, TypeError):
            pixels = np.empty(0, np.float32)
        if pixels.shape != (SIDE * SIDE,) or not np.isfinite(pixels).all():
            raise DataError(f"{where}, example {position}: not {SIDE * SIDE} finite numbers")
        stacked[position] = pixels
    return stacked, np.array(labels, np.int64)
