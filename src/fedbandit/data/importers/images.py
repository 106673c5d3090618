"""Images: EMNIST from its published SQLite file, and FEMNIST from LEAF's folders of JSON files."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import ijson
import numpy as np

from fedbandit.core.errors import DataError
from fedbandit.core.progress import SILENT, ProgressReporter
from fedbandit.core.ragged import Ragged
from fedbandit.data.formats.fetching import unpacked
from fedbandit.data.importers.common import HoldOut
from fedbandit.data.importers.stackoverflow import PublishedSqlite
from fedbandit.data.text import EMNIST_ACTIONS, case_map
from fedbandit.data.writer import DatasetWriter, check_target

BYTE_SCALE = 1 / 255


class NotBytes(Exception):
    """Some pixel is no multiple of 1/255: the data set has to be stored as floats."""


def as_bytes(pixels: np.ndarray) -> np.ndarray:
    """Float pixels as uint8 with scale 1/255; raises `NotBytes` unless every one is exactly
    representable.
    """
    levels = np.rint(pixels * np.float32(255))
    with np.errstate(invalid="ignore"):
        inside = (levels >= 0) & (levels <= 255)
        close = np.abs(levels * np.float32(BYTE_SCALE) - pixels) < 1e-6
    if not (inside & close).all():  # NaN is neither
        raise NotBytes
    return levels.astype(np.uint8)


SIDE = 28


_BATCH = 2048  # images written at a time


Image = tuple[str, str, np.ndarray, int]


"""Split, client, float32 [784], label."""


def write_images(
    out: Path | str,
    actions: Sequence[str],
    read: Callable[[dict[str, Any]], Iterator[Image]],
    source: dict[str, Any],
) -> Path:
    """Write all images that `read(source)` yields; it is called a second time if they turn out not
    to be bytes.
    """
    try:
        return _write(out, actions, read, dict(source), bytewise=True)
    except NotBytes:
        return _write(out, actions, read, dict(source), bytewise=False)


def _write(
    out: Path | str,
    actions: Sequence[str],
    read: Callable[[dict[str, Any]], Iterator[Image]],
    source: dict[str, Any],
    *,
    bytewise: bool,
) -> Path:
    with DatasetWriter(
        out,
        name=Path(out).name,
        kind="dense",
        shape=(SIDE, SIDE),
        actions=actions,
        lower_case=case_map(actions),
        scale=BYTE_SCALE if bytewise else 1.0,
        dtype=np.uint8 if bytewise else np.float32,
        source=source,
    ) as writer:
        images = read(source)
        while batch := list(islice(images, _BATCH)):
            for split in ("train", "test"):
                chosen = [image for image in batch if image[0] == split]
                if not chosen:
                    continue
                pixels = np.stack([image[2] for image in chosen]).reshape(-1, SIDE, SIDE)
                labels = np.array([image[3] for image in chosen], np.int32)
                writer.add_many(
                    [image[1] for image in chosen],
                    as_bytes(pixels) if bytewise else pixels,
                    Ragged(np.arange(len(labels) + 1, dtype=np.int64), labels),
                    split=split,
                )
        writer.source |= source
        return writer.finish()


def import_emnist(
    path: Path | str,
    out: Path | str,
    digits_only: bool = False,
    progress: ProgressReporter = SILENT,
) -> Path:
    """Import the published SQLite file, packed or not; keeps its training and test split."""
    path, out = Path(path), check_target(out)
    variant = "digits_only" if digits_only else "all"
    actions = EMNIST_ACTIONS[:10] if digits_only else EMNIST_ACTIONS
    with unpacked(path, out, progress) as database, PublishedSqlite(database) as published:

        def read(source: dict[str, Any]) -> Iterator[Image]:
            return _images(published, variant, len(actions), source, progress)

        source = {"importer": "emnist", "file": path.name, "variant": variant}
        return write_images(out, actions, read, source)


def _images(
    published: PublishedSqlite,
    variant: str,
    classes: int,
    source: dict[str, Any],
    progress: ProgressReporter,
) -> Iterator[Image]:
    names = {f"{variant}_train": "train", f"{variant}_test": "test"}
    promised = {name: published.clients(name) for name in names}
    seen: dict[str, set[str]] = {name: set() for name in names}
    totals = {name: sum(clients.values()) for name, clients in promised.items()}
    for split, client, row, features in published.rows(
        totals, ("pixels", "label"), progress, "Writing images"
    ):
        where = f"{published.path}: client {client}, row {row}"
        pixels, label = features.get("pixels"), features.get("label")
        if (
            not isinstance(pixels, np.ndarray)
            or pixels.dtype != np.float32
            or len(pixels) != SIDE * SIDE
        ):
            raise DataError(f"{where}: feature 'pixels' is missing or is not {SIDE * SIDE} floats")
        if not isinstance(label, np.ndarray) or label.dtype != np.int64 or len(label) != 1:
            raise DataError(f"{where}: feature 'label' is missing or is not one whole number")
        if not 0 <= label[0] < classes:
            raise DataError(f"{where}: label {label[0]} is outside 0..{classes - 1}")
        if not np.isfinite(pixels).all():
            raise DataError(f"{where}: a pixel is not finite (NaN or infinity)")
        seen[split].add(client)
        yield names[split], client, pixels, int(label[0])
    empty = set().union(*promised.values()) - set().union(*seen.values())
    if empty:
        source["dropped_clients"] = len(empty)


User = tuple[str, np.ndarray, np.ndarray]


"""Id, float32 [n, 784], int64 [n]."""


def import_leaf(
    path: Path | str,
    out: Path | str,
    test_fraction: float = 0.1,
    progress: ProgressReporter = SILENT,
) -> Path:
    """Import LEAF's FEMNIST; without a `test` folder, examples are held out within each writer."""
    path = Path(path)
    check_target(out)
    train = sorted((path / "train").glob("*.json"))
    test = sorted((path / "test").glob("*.json"))
    if not train:
        raise DataError(
            f"{path}: no JSON files in {path / 'train'}; expected LEAF's folders train and test"
        )

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
        said = (
            str(error).removeprefix("b'").replace("\\n", "\n").partition("\n")[0]
        )  # the parser draws where, below
        raise DataError(f"{path}: not LEAF's JSON, {place}: {said}") from None
    if len(users) != len(promised):
        raise DataError(f"{path}: 'users' and 'num_samples' differ in length")
    for user, count in zip(users, promised, strict=True):
        if not isinstance(user, str):
            raise DataError(f"{path}: {user!r:.40} in 'users' is not the id of a client")
        if counts.get(user, 0) != count:
            raise DataError(
                f"{path}: client {user}: {counts.get(user, 0)} examples, 'num_samples' promises {count}"
            )
    named.update(users, counts)


def _array(file: BinaryIO, key: str) -> list[Any]:
    """A small array of the outermost object; LEAF writes these before the images, so little is
    read.
    """
    file.seek(0)
    found: Any = next(ijson.items(file, key), [])
    if not isinstance(found, list):
        raise DataError(f"{file.name}: not LEAF's JSON: {key!r} is not an array")
    return found


def _user(data: Any, where: str) -> tuple[np.ndarray, np.ndarray]:
    """The images [n, 784] and labels [n] of one entry of `user_data`."""
    if not isinstance(data, dict) or not all(
        isinstance(data.setdefault(key, []), list) for key in ("x", "y")
    ):
        raise DataError(f"{where}: expected an object with the arrays 'x' and 'y'")
    images, labels = data["x"], data["y"]
    if len(images) != len(labels):
        raise DataError(f"{where}: {len(images)} images, {len(labels)} labels")
    stacked = np.empty((len(images), SIDE * SIDE), np.float32)
    for position, (image, label) in enumerate(zip(images, labels, strict=True)):
        if not isinstance(label, int) or not 0 <= label < len(EMNIST_ACTIONS):
            raise DataError(
                f"{where}, example {position}: label {label!r} is outside 0..{len(EMNIST_ACTIONS) - 1}"
            )
        try:
            pixels = np.array(image, np.float32)
        except (ValueError, TypeError):
            pixels = np.empty(0, np.float32)
        if pixels.shape != (SIDE * SIDE,) or not np.isfinite(pixels).all():
            raise DataError(f"{where}, example {position}: not {SIDE * SIDE} finite numbers")
        stacked[position] = pixels
    return stacked, np.array(labels, np.int64)
