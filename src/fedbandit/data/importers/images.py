"""Images: EMNIST from its published SQLite file, and the writer of image data sets that other importers use."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from fedbandit.core.errors import DataError
from fedbandit.core.progress import SILENT, Progress
from fedbandit.core.ragged import Ragged
from fedbandit.data.formats.fetching import unpacked
from fedbandit.data.importers.published import PublishedSqlite
from fedbandit.data.text import EMNIST_ACTIONS, case_map
from fedbandit.data.writer import DatasetWriter, check_target

BYTE_SCALE = 1 / 255


class NotBytes(Exception):
    """Some pixel is no multiple of 1/255: the data set has to be stored as floats."""


def as_bytes(pixels: np.ndarray) -> np.ndarray:
    """Float pixels as uint8 with scale 1/255; raises `NotBytes` unless every one is exactly representable."""
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
    out: Path | str, actions: Sequence[str], read: Callable[[dict[str, Any]], Iterator[Image]], source: dict[str, Any]
) -> Path:
    """Write all images that `read(source)` yields; it is called a second time if they turn out not to be bytes."""
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


def import_emnist(path: Path | str, out: Path | str, digits_only: bool = False, progress: Progress = SILENT) -> Path:
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
    published: PublishedSqlite, variant: str, classes: int, source: dict[str, Any], progress: Progress
) -> Iterator[Image]:
    names = {f"{variant}_train": "train", f"{variant}_test": "test"}
    promised = {name: published.clients(name) for name in names}
    seen: dict[str, set[str]] = {name: set() for name in names}
    totals = {name: sum(clients.values()) for name, clients in promised.items()}
    for split, client, row, features in published.rows(totals, ("pixels", "label"), progress, "Writing images"):
        where = f"{published.path}: client {client}, row {row}"
        pixels, label = features.get("pixels"), features.get("label")
        if not isinstance(pixels, np.ndarray) or pixels.dtype != np.float32 or len(pixels) != SIDE * SIDE:
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
