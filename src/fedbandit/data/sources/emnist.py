"""EMNIST by writer, from the published `emnist_all.sqlite(.lzma)`: all 62 classes, or the ten digits.

Pixels are kept as published: 784 values in [0, 1], where 1.0 is background.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedbandit.data.compressed import unpacked
from fedbandit.data.labels import EMNIST_ACTIONS
from fedbandit.data.progress import SILENT, Progress
from fedbandit.data.sources.images import SIDE, Image, write_images
from fedbandit.data.sources.published_sqlite import PublishedSqlite
from fedbandit.data.writer import check_target
from fedbandit.errors import DataError


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
