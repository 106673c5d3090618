"""Images: EMNIST from its published SQLite file, and FEMNIST from LEAF's folders of JSON files."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import ijson
import numpy as np

from fedbandit.core.errors import DataError, refuse
from fedbandit.core.progress import SILENT, ProgressReporter
from fedbandit.data.importers import GuardedJson, HoldOut, Rows, one_each, write_rows
from fedbandit.data.importers.published import open_published
from fedbandit.data.text import EMNIST_ACTIONS, case_map
from fedbandit.data.writer import DatasetWriter, check_target

BYTE_SCALE = 1 / 255
SIDE = 28
_BATCH = 2048  # images written at a time
Image = tuple[bool, str, np.ndarray, int]
"""Whether it is held out, client, float32 [784], label."""
User = tuple[str, np.ndarray, np.ndarray]
"""Id, float32 [n, 784], int64 [n]."""


class NotBytes(Exception):
    """Some pixel is no multiple of 1/255: the data set has to be stored as floats."""


def as_bytes(pixels: np.ndarray) -> np.ndarray:
    """Float pixels as uint8 with scale 1/255; raises `NotBytes` unless every one is exactly
    representable.

    Examples:
        >>> as_bytes(np.array([0.0, 51 / 255, 1.0], np.float32)).tolist()
        [0, 51, 255]
    """
    levels = np.rint(pixels * np.float32(255))
    with np.errstate(invalid="ignore"):
        inside = (levels >= 0) & (levels <= 255)
        close = np.abs(levels * np.float32(BYTE_SCALE) - pixels) < 1e-6
    if not (inside & close).all():  # NaN is neither
        raise NotBytes
    return levels.astype(np.uint8)


def write_images(
    out: Path | str,
    actions: Sequence[str],
    read: Callable[[dict[str, Any], Path], Iterator[Image]],
    source: dict[str, Any],
    bytewise: bool = True,
) -> Path:
    """Write all images that `read(facts, folder)` yields, and return the data set's folder.

    Published pixels are nearly always multiples of 1/255 in float32, and a byte takes a quarter of
    the room. So images are first written as bytes; the first that is none ends this attempt, and
    `read` is called a second time to write all of them as floats. What it adds to `facts` goes into
    the header's `source`; files that it needs on the way may be put into the folder.
    """
    facts: dict[str, Any] = {}

    def batches(folder: Path) -> Iterator[Rows]:
        images = read(facts, folder)
        while batch := list(islice(images, _BATCH)):
            is_test, clients, pixels, labels = zip(*batch, strict=True)
            stacked = np.stack(pixels).reshape(-1, SIDE, SIDE)
            stacked = as_bytes(stacked) if bytewise else stacked
            yield Rows(clients, stacked.__getitem__, one_each(labels), is_test=np.array(is_test))

    try:
        with DatasetWriter(
            out,
            kind="dense",
            shape=(SIDE, SIDE),
            actions=actions,
            lower_case=case_map(actions),
            scale=BYTE_SCALE if bytewise else 1.0,
            dtype=np.uint8 if bytewise else np.float32,
            source=source,
        ) as writer:
            return write_rows(writer, batches(writer.staging), facts=lambda: facts)
    except NotBytes:
        return write_images(out, actions, read, source, bytewise=False)


def import_emnist(
    path: Path | str,
    out: Path | str,
    digits_only: bool = False,
    progress: ProgressReporter = SILENT,
) -> Path:
    """Import EMNIST's published SQLite file, packed or not; keeps its training and test split.

    A client is a writer, an example an image of 28 x 28 pixels with one of 62 characters. With
    `digits_only` the splits of the ten digits are read in place of those of all characters. Writers
    whom the file lists and who have no image are counted in the header's `source`. An image that is
    not 784 finite floats, or has no known label, is refused with its client and row.
    """
    path = Path(path)
    check_target(out)
    variant = "digits_only" if digits_only else "all"
    actions = EMNIST_ACTIONS[:10] if digits_only else EMNIST_ACTIONS

    def read(facts: dict[str, Any], folder: Path) -> Iterator[Image]:
        seen: set[str] = set()
        with open_published(path, folder / "unpacked", progress) as published:
            splits = (f"{variant}_train", f"{variant}_test")
            promised = {name: published.clients(name) for name in splits}
            rows = published.rows(promised, ("pixels", "label"), progress, "Writing images")
            for split, client, row, features in rows:
                pixels: Any = features.get("pixels")
                label: Any = features.get("label")
                _check_image(pixels, label, len(actions), f"{path}: client {client}, row {row}")
                seen.add(client)
                yield split.endswith("test"), client, pixels, int(label[0])
        if empty := set().union(*promised.values()) - seen:
            facts["dropped_clients"] = len(empty)

    source = {"importer": "emnist", "file": path.name, "variant": variant}
    return write_images(out, actions, read, source)


def _check_image(pixels: Any, label: Any, classes: int, where: str) -> None:
    """Refuse what is not 784 finite floats and one label of a known class."""
    if not _is_array(pixels, np.float32, SIDE * SIDE):
        raise DataError(f"{where}: feature 'pixels' is missing or is not {SIDE * SIDE} floats")
    if not _is_array(label, np.int64, 1):
        raise DataError(f"{where}: feature 'label' is missing or is not one whole number")
    refuse(
        (not 0 <= label[0] < classes, f"{where}: label {label[0]} is outside 0..{classes - 1}"),
        (not np.isfinite(pixels).all(), f"{where}: a pixel is not finite (NaN or infinity)"),
        error=DataError,
    )


def _is_array(found: Any, dtype: type, length: int) -> bool:
    """Whether a feature is an array of this type and length."""
    return isinstance(found, np.ndarray) and found.dtype == dtype and len(found) == length


def import_leaf(
    path: Path | str,
    out: Path | str,
    test_fraction: float = 0.1,
    progress: ProgressReporter = SILENT,
) -> Path:
    """Import LEAF's FEMNIST: the JSON files in the folders `train` and `test` of `path`.

    Without a `test` folder, `test_fraction` of each writer's examples are held out. A file is
    streamed client by client, so that memory holds one writer's images, and a guard refuses values
    that would take more than a hundred megabytes. Each file has to hold as many examples of every
    client as its `num_samples` promises.
    """
    path = Path(path)
    check_target(out)
    train = sorted((path / "train").glob("*.json"))
    test = sorted((path / "test").glob("*.json"))
    if not train:
        raise DataError(
            f"{path}: no JSON files in {path / 'train'}; expected LEAF's folders train and test"
        )

    def read(facts: dict[str, Any], folder: Path) -> Iterator[Image]:
        hold_out = HoldOut(0.0 if test else test_fraction, by_client=False)
        seen: set[str] = set()
        named: set[str] = set()
        total = sum(file.stat().st_size for file in (*train, *test))
        with progress.task("Writing images", total, unit="B") as advance:
            for file in (*train, *test):
                for user, images, labels in _users(file, named):
                    if len(labels):
                        seen.add(user)
                    is_test = hold_out.is_test([user] * len(labels)) | (file in test)
                    for held_out, image, label in zip(is_test, images, labels, strict=True):
                        yield bool(held_out), user, image, int(label)
                advance(file.stat().st_size)
        if named - seen:
            facts["dropped_clients"] = len(named - seen)

    source = {"importer": "leaf", "files": len(train) + len(test)}
    return write_images(out, EMNIST_ACTIONS, read, source)


def _users(path: Path, named: set[str]) -> Iterator[User]:
    """The users of one file with their images; adds everybody the file lists to `named`.

    What the file promises is compared with what it held once all users were read; an error of the
    parser says behind which client the file is damaged.
    """
    counts: dict[str, int] = {}
    place = "before the first client"
    try:
        with open(path, "rb", buffering=0) as raw:
            file = GuardedJson(raw, path)
            users, promised = _array(file, "users"), _array(file, "num_samples")
            file.begin()
            for user, data in ijson.kvitems(file, "user_data", use_float=True):
                file.next_value()
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


def _array(file: GuardedJson, key: str) -> list[Any]:
    """A small array of the outermost object; LEAF writes these before the images, so little is
    read.
    """
    file.begin()
    found: Any = next(ijson.items(file, key), [])
    if not isinstance(found, list):
        raise DataError(f"{file.path}: not LEAF's JSON: {key!r} is not an array")
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
