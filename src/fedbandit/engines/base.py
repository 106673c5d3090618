"""What an engine is, and how a cohort is cut into chunks: by the cohort alone, so that sums add up in one order."""

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from fedbandit.federated.client import Broadcast, ChunkResult, ClientWork

CHUNK_CLIENTS = 4  # small enough to balance threads, large enough that one sum per chunk travels, not one per client


class Engine(Protocol):
    """Runs the work of a round; yields the chunks' results in the order of the chunks."""

    def run(self, work: ClientWork, chunks: list[np.ndarray], broadcast: Broadcast) -> Iterator[ChunkResult]: ...

    def close(self) -> None: ...


def chunks_of(cohort: np.ndarray) -> list[np.ndarray]:
    """The cohort in order, cut into chunks."""
    return [cohort[start : start + CHUNK_CLIENTS] for start in range(0, len(cohort), CHUNK_CLIENTS)]
