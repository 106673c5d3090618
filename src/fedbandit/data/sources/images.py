"""Writing handwriting images that come one by one: 28x28, as bytes where that loses nothing, else as floats."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from fedbandit.data.labels import case_map
from fedbandit.data.pixels import BYTE_SCALE, NotBytes, as_bytes
from fedbandit.data.ragged import Ragged
from fedbandit.data.writer import DatasetWriter

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
