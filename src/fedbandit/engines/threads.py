"""The default engine: chunks over Python threads, one intra-op thread each.

The heavy work, in torch, numba and numpy, releases the interpreter lock.
"""

import ctypes
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from fedbandit.federated.clients import Broadcast, ChunkResult, ClientWork
from fedbandit.federated.memory import Memory

_LAST = 3  # chunks per thread at the end of a round, of which the longest goes first
_KEPT = 8 * 2**20  # bytes
_ARENA_MAX = -8  # glibc's name for the number of heaps


class ThreadEngine:
    """Runs chunks on `threads` threads: in order but for the last ones, of which the longest go
    first.

    Longest first leaves nobody waiting for a straggler at the end. But sums are added in the order
    of the chunks, and what comes before its turn is kept in memory, a whole model each: hence in
    order until then.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or usable_cores()
        _keep_freed_memory()
        self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="fedbandit")

    def run(
        self,
        work: ClientWork,
        chunks: list[np.ndarray],
        broadcast: Broadcast,
        memory: Memory | None = None,
    ) -> Iterator[ChunkResult]:
        """The chunks' results in the order of the chunks."""

        def done(chunk: np.ndarray) -> ChunkResult:
            return work(
                chunk, broadcast, None if memory is None else memory.read(chunk, broadcast.round)
            )

        if self.threads == 1:  # nothing to do side by side: no thread to hand it to and to wait for
            yield from map(done, chunks)
            return
        in_order = max(0, len(chunks) - _LAST * self.threads)
        lengths = [int(work.event_counts(chunk).sum()) for chunk in chunks[in_order:]]
        order = [*range(in_order), *(in_order + np.argsort(lengths)[::-1])]
        futures = {i: self._pool.submit(done, chunks[i]) for i in order}
        for i in range(len(chunks)):
            yield futures.pop(i).result()

    def close(self) -> None:
        """End the threads; no round can run after that."""
        self._pool.shutdown(cancel_futures=True)


def _keep_freed_memory() -> None:
    """Have the C library keep the memory of a round's arrays for the next round, in one heap for
    all threads.

    glibc gives it back to the system or not, depending on where it happens to lie, and a round that
    gets it again pays up to a thousand page faults. It keeps twice as much as the largest block that
    was ever freed, up to 32 MB. In a heap of its own each thread would keep as much again, which
    the others cannot use.
    """
    if (
        mallopt := getattr(ctypes.CDLL(None), "mallopt", None)
    ) is not None:  # other C libraries may not have it
        mallopt(_ARENA_MAX, 1)
    np.empty(_KEPT, np.uint8)


def usable_cores() -> int:
    """The cores this process may use, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
