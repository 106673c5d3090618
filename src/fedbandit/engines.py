"""Engines: where the chunks of a cohort run, on threads or on a Ray cluster. The same bits everywhere.

Threads have one intra-op thread each: the heavy work, in torch, numba and numpy, releases the
interpreter lock. Workers of a cluster make the work themselves from a recipe; what travels are
weights out and sums back.
"""

import ctypes
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from fedbandit.core.errors import ConfigError, FedbanditError, needing
from fedbandit.core.identity import always_compile
from fedbandit.federated.clients import Broadcast, ChunkResult, ClientWork, Recipe
from fedbandit.federated.memory import Memory
from fedbandit.federated.pipeline import Contribution, Memories

__all__ = ["RayEngine", "ThreadEngine"]

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


def load_ray() -> Any:
    """The Ray package, or a word on how to get it."""
    with needing("engine: ray"):
        import ray
    return ray


def join(ray: Any, address: str | None, cores: int | None = None) -> bool:
    """Join the cluster at `address` (`auto`: the one on this machine) or start one of `cores` cores
    here.

    False if this process was part of a cluster already: then somebody else will leave it.
    """
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a run reports to nobody
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        if address is None:
            ray.init(address="local", num_cpus=cores, include_dashboard=False, **quiet)
        else:
            ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"ray-address: cannot join {address or 'a local cluster'}: {str(error).splitlines()[0]}"
        ) from None
    return True


def cores_of(ray: Any) -> int:
    """The cores of all machines that are in the cluster now."""
    return int(ray.cluster_resources().get("CPU", 0))


def original(error: Any) -> Exception:
    """The error of a worker, as if it had been raised here."""
    return error.cause if isinstance(error.cause, FedbanditError) else error


@dataclass(frozen=True)
class RoundWeights:
    """A broadcast whose weights lie in Ray's object store, each reference in a list so that Ray
    leaves it alone.
    """

    key: int  # another one for every round
    arrays: Mapping[str, list[Any]]  # by name, as `Broadcast.arrays` has them
    rest: list[Any]  # the broadcast without weights, fetched once the code it may need is there


class Worker:
    """One core's worth of work. It keeps the work it has made, and the weights of the round and the
    versions in use.
    """

    def __init__(self) -> None:
        always_compile()
        self._made: dict[str, ClientWork] = {}  # by the digest of its recipe
        self._key = 0
        self._broadcast: Broadcast | None = None
        self._held: dict[Any, np.ndarray] = {}  # by reference

    def ready(self) -> None:
        """Returns when the worker has started."""

    def work(
        self,
        recipe: Recipe,
        description: str,
        chunks: list[np.ndarray],
        weights: RoundWeights,
        memory: list[dict[int, Memories]],
    ) -> list[ChunkResult]:
        """The results of some chunks, each on its own."""
        if recipe.digest not in self._made:
            made = recipe.make()
            if made.description != description:
                raise ValueError("the recipe makes other work than the one that is to be run")
            self._made = {
                **dict(list(self._made.items())[-1:]),
                recipe.digest: made,
            }  # a run has two phases
        work, broadcast = self._made[recipe.digest], self._received(weights)
        return [
            work(chunk.copy(), broadcast, own) for chunk, own in zip(chunks, memory, strict=True)
        ]

    def _received(self, weights: RoundWeights) -> Broadcast:
        """The broadcast of a round; weights that are here already are not fetched again."""
        if self._broadcast is None or weights.key != self._key:
            import ray

            before = self._held
            self._held = {
                reference: before[reference] if reference in before else _fetched(reference)
                for (reference,) in weights.arrays.values()
            }
            arrays = {name: self._held[reference] for name, (reference,) in weights.arrays.items()}
            rest: Broadcast = ray.get(weights.rest[0])
            self._broadcast, self._key = rest.with_arrays(arrays), weights.key
        return self._broadcast


def _fetched(reference: Any) -> np.ndarray:
    """An array of our own: what lies in the object store is read-only, which torch and compiled
    loops do not like.
    """
    import ray

    return np.array(ray.get(reference))


_PARTS_PER_WORKER = 4  # parts of a cohort per worker: few messages, and no long wait for the last
_MOST_ATTEMPTS = 4  # a part that has killed this many workers is not retried
_LEAST_LATE = 0.5  # seconds: no part is late before, however short the others were
_START_SECONDS = 300.0  # for the first worker of a cluster to start


@dataclass
class Traffic:
    """Traffic so far, in bytes: weights put once, and sums that came back."""

    weights: int = 0
    sums: int = 0
    replaced: int = 0  # workers that died and were replaced
    given_again: int = 0  # parts that were late and went to another worker, too


@dataclass
class _Part:
    """Some chunks of a cohort that go to one worker together; each comes back as a sum of
    its own.
    """

    chunks: list[int]
    attempts: int = 0  # that a worker has died on
    copies: int = 0  # given out so far
    done: bool = False  # or not wanted any more: its round is over


@dataclass(frozen=True)
class _Call:
    """What a worker is doing, and since when (`time.monotonic`)."""

    worker: Any
    part: _Part | None  # None: it is starting
    started: float


class RayEngine:
    """Runs chunks on a Ray cluster; a worker that dies is replaced and its chunks are done again,
    to the same bits.

    Machines that join get work in the next round. A part that takes twice as long as the slowest
    one so far is given to an idle worker too, and the first answer counts: a lost machine costs a
    round no more than that. A worker that is late with a part gets no other until that ends.
    """

    def __init__(self, *, address: str | None = None, workers: int | None = None) -> None:
        """Join the cluster at `address` (`auto` for the one on this machine), or start one here.

        One worker per core of the cluster, unless `workers` says otherwise. Workers open the data
        set themselves: it must lie under the same path on every machine, or be an embedded one.
        """
        self._ray = load_ray()
        self._owns_cluster = join(self._ray, address, workers)
        self._remote = self._ray.remote(num_cpus=1, max_restarts=0)(Worker)
        self._alive: list[Any] = []  # workers, also those that are starting
        self._calls: dict[Any, _Call] = {}  # what is under way; who is not in it is idle
        self._put: dict[str, tuple[np.ndarray, Any]] = {}  # weights, and where they were put
        self._rounds = 0
        self.traffic = Traffic()
        self._asked, self.workers = workers, workers or 0
        self._slowest: float | None = None  # seconds of a part in this round, once one is back
        self._before: float | None = None  # as it was in the round before
        self._grow()

    def run(
        self,
        work: ClientWork,
        chunks: list[np.ndarray],
        broadcast: Broadcast,
        memory: Memory | None = None,
    ) -> Iterator[ChunkResult]:
        """The chunks' results in the order of the chunks."""
        if work.recipe is None:
            raise ConfigError(
                "engine: ray needs a data set on disk, which every worker can open for itself"
            )
        self._grow()
        self._before, self._slowest = self._slowest or self._before, None
        description, weights = work.description, self._put_weights(broadcast)
        parts = self._parts(work, chunks)
        waiting = deque(parts)
        results: dict[int, ChunkResult] = {}

        def give(part: _Part, worker: Any) -> None:
            given = [chunks[i] for i in part.chunks]
            own = [{} if memory is None else memory.read(c, broadcast.round) for c in given]
            call = worker.work.remote(work.recipe, description, given, weights, own)
            part.copies += 1
            self._calls[call] = _Call(worker, part, time.monotonic())

        try:
            for due in range(len(chunks)):
                while due not in results:
                    idle = self._idle()
                    while waiting and idle:
                        give(waiting.popleft(), idle.pop())
                    for part in self._late_parts():
                        if idle:
                            give(part, idle.pop())
                            self.traffic.given_again += 1
                    for i, answer in self._await_one(waiting, bool(idle)):
                        self.traffic.sums += _bytes(answer.sent)
                        results[i] = answer
                yield results.pop(due)
        finally:
            for part in parts:
                part.done = True

    def close(self) -> None:
        """End the workers, and the cluster if it was started for this run."""
        for worker in self._alive:
            with suppress(Exception):  # it may be gone already
                self._ray.kill(worker)
        self._alive, self._calls = [], {}
        if self._owns_cluster:
            self._ray.shutdown()

    def _parts(self, work: ClientWork, chunks: list[np.ndarray]) -> list[_Part]:
        """The chunks in parts of about the same size, the longest chunks first."""
        longest_first = sorted(
            range(len(chunks)), key=lambda i: -int(work.event_counts(chunks[i]).sum())
        )
        count = min(len(chunks), _PARTS_PER_WORKER * self.workers)
        return [_Part(longest_first[first::count]) for first in range(count)]

    def _grow(self) -> None:
        """Ask for workers on cores that have joined since."""
        if self._asked is None:
            # Cores of machines that are gone leave the list when Ray has noticed.
            self.workers = max(1, cores_of(self._ray))
        for _ in range(self.workers - len(self._alive)):
            self._start_worker()

    def _start_worker(self) -> None:
        """Ask the cluster for one worker more."""
        worker = self._remote.remote()
        self._alive.append(worker)
        self._calls[worker.ready.remote()] = _Call(worker, None, time.monotonic())

    def _idle(self) -> list[Any]:
        """The workers that have started and have nothing to do."""
        busy = [call.worker for call in self._calls.values()]
        return [w for w in self._alive if all(w is not other for other in busy)]

    def _under_way(self) -> list[_Call]:
        """The calls of this round that somebody waits for."""
        return [call for call in self._calls.values() if call.part and not call.part.done]

    def _limit(self) -> float:
        """The seconds after which a part is late; infinite before the first one has come back."""
        slowest = self._before if self._slowest is None else self._slowest
        return inf if slowest is None else max(_LEAST_LATE, 2 * slowest)

    def _late_parts(self) -> list[_Part]:
        """Parts that one worker has had for too long, and nobody else yet."""
        since = time.monotonic() - self._limit()
        late = [call.part for call in self._under_way() if call.started <= since]
        return [part for part in late if part is not None and part.copies == 1]

    def _patience(self, idle: bool) -> float | None:
        """The seconds to wait for an answer: until a part is late for which somebody is idle."""
        if not (calls := self._under_way()):
            return _START_SECONDS
        starts = [call.started for call in calls if call.part and call.part.copies == 1]
        if not idle or not starts or self._limit() == inf:
            return None
        return max(0.0, min(starts) + self._limit() - time.monotonic())

    def _await_one(self, waiting: deque[_Part], idle: bool) -> Iterable[tuple[int, ChunkResult]]:
        """Wait until something happens; the chunks of a part that has come back, with their sums.

        Nothing where a part is late, a worker is new, is back from an earlier round, or has died:
        then it is replaced, and its part waits for another.
        """
        ray = self._ray
        done, _ = ray.wait(list(self._calls), num_returns=1, timeout=self._patience(idle))
        if not done and not self._under_way():
            raise FedbanditError(
                f"ray: no worker could be started within {_START_SECONDS:.0f} s; has the cluster"
                " free cores?"
            )
        if not done:
            return ()
        call = self._calls.pop(done[0])
        part, wanted = call.part, call.part is None or not call.part.done
        try:
            answers = ray.get(done[0])
        except ray.exceptions.RayTaskError as error:
            if wanted:
                raise original(error) from None
            return ()
        except ray.exceptions.RayError as error:
            self._replace(call.worker, error)
            if part is not None and wanted:
                self._try_again(part, waiting, error)
            return ()
        if part is None or not wanted:
            return ()  # it has started, or a copy was faster
        part.done = True
        self._slowest = max(self._slowest or 0.0, time.monotonic() - call.started)
        return zip(part.chunks, answers, strict=True)

    def _replace(self, worker: Any, error: Exception) -> None:
        """Replace a worker that died; the others take its part if no new one can start."""
        self._alive = [other for other in self._alive if other is not worker]
        self.traffic.replaced += 1
        starting = [call for call in self._calls.values() if call.part is None]
        too_often = self.traffic.replaced > _MOST_ATTEMPTS * self.workers
        if too_often and len(starting) == len(self._alive):
            raise FedbanditError(f"ray: workers keep dying: {error}") from None
        self._start_worker()

    def _try_again(self, part: _Part, waiting: deque[_Part], error: Exception) -> None:
        """Have a part that a worker has died on wait for another, unless somebody has it too."""
        part.attempts += 1
        if part.attempts >= _MOST_ATTEMPTS:
            raise FedbanditError(
                f"ray: {part.attempts} workers died on the same clients: {error}"
            ) from None
        if all(call.part is not part for call in self._calls.values()):
            part.copies = 0
            waiting.appendleft(part)

    def _put_weights(self, broadcast: Broadcast) -> RoundWeights:
        """Put the training weights, and those deployed versions that were not put before."""
        named, before, self._put = broadcast.arrays(), self._put, {}
        for name, array in named.items():
            kept, reference = before.get(name, (None, None))
            if kept is not array or not name.startswith("deployed/"):
                self.traffic.weights += array.nbytes
                reference = self._ray.put(array)
            self._put[name] = (array, reference)
        self._rounds += 1
        rest = broadcast.with_arrays(dict.fromkeys(named, np.empty(0)))
        references = {name: [reference] for name, (_, reference) in self._put.items()}
        return RoundWeights(self._rounds, references, [self._ray.put(rest)])


def _bytes(sent: Contribution) -> int:
    """The size of what a chunk has sent back."""
    memory = sum(array.nbytes for vectors in sent.memory.values() for array in vectors.values())
    return memory + sum(_size(update) for update in sent.sums.values())


def _size(part: Any) -> int:
    if isinstance(part, np.ndarray) or part is None:
        return 0 if part is None else part.nbytes
    return sum(map(_size, part if isinstance(part, tuple) else vars(part).values()))
