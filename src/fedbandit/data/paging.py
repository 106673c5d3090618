"""Mapped data counts as this process's memory once it was read; here it is given back before that becomes much.

The system keeps the pages in its cache, so what is needed again is there again at once.
"""

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedbandit.data.dataset import FederatedDataset
from fedbandit.data.ragged import Ragged

# Bytes of mapped files, of which the libraries take about 100 MB. Giving back costs page faults afterwards: seldom is
# better than often, as long as a process stays below 1 GB.
_LIMIT = 768 * 2**20
_STATUS = Path("/proc/self/statm")


def give_back(dataset: FederatedDataset, limit: int = _LIMIT) -> bool:
    """Let go of the data set's pages if more than `limit` bytes are mapped; True if so. Nothing is lost."""
    if not hasattr(mmap, "MADV_DONTNEED") or _mapped_bytes() <= limit:
        return False
    for pages in _mappings(dataset):
        pages.madvise(mmap.MADV_DONTNEED)
    return True


def _mapped_bytes() -> int:
    """What is resident of files, where the system tells; 0 elsewhere."""
    try:
        return int(_STATUS.read_text().split()[2]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _mappings(dataset: FederatedDataset) -> Iterator[mmap.mmap]:
    for split in (dataset.train, dataset.test):
        if split is None:
            continue
        arrays: list[np.ndarray | None] = [split.client_ids, split.offsets]
        for part in (split.features, split.labels):
            arrays += [part.offsets, part.ids, part.values] if isinstance(part, Ragged) else [part]
        for array in arrays:
            base: Any = None if array is None else array.base
            if isinstance(base, mmap.mmap):
                yield base
