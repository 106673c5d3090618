"""The default engine: chunks over Python threads, one intra-op thread each.

The heavy work, in torch, numba and numpy, releases the interpreter lock.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from fedbandit.federated.client import Broadcast, ChunkResult, ClientWork


class ThreadEngine:
    """Runs chunks on `threads` threads; the longest first, so that none is left waiting for a straggler."""

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or usable_cores()
        self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="fedbandit")

    def run(self, work: ClientWork, chunks: list[np.ndarray], broadcast: Broadcast) -> Iterator[ChunkResult]:
        longest_first = sorted(range(len(chunks)), key=lambda i: -int(work.event_counts(chunks[i]).sum()))
        futures = {i: self._pool.submit(work, chunks[i], broadcast) for i in longest_first}
        for i in range(len(chunks)):
            yield futures.pop(i).result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def usable_cores() -> int:
    """The cores this process may use, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
