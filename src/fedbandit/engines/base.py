"""What an engine is. It decides where the chunks of a cohort run, never what they are or what they compute."""

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from fedbandit.federated.client import Broadcast, ChunkResult, ClientWork


class Engine(Protocol):
    """Runs the work of a round; yields the chunks' results in the order of the chunks."""

    def run(self, work: ClientWork, chunks: list[np.ndarray], broadcast: Broadcast) -> Iterator[ChunkResult]: ...

    def close(self) -> None: ...
