"""The Ray engine: chunks over the workers of a cluster, with the same bits as threads.

Workers make the work themselves from a recipe; what travels are weights out and sums back.
"""

import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np

from fedbandit.core.errors import ConfigError, FedbanditError, needing
from fedbandit.core.identity import always_compile
from fedbandit.federated.clients import Broadcast, ChunkResult, ClientWork, Recipe
from fedbandit.federated.memory import Memory
from fedbandit.federated.pipeline import Contribution, Memories


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
    done: bool = False


@dataclass(frozen=True)
class _Call:
    """A part that a worker has been given, and when (`time.monotonic`)."""

    worker: Any
    part: _Part
    started: float


@dataclass
class _Pool:
    """The workers: those that can be given work, that are starting, and that are late.

    A late one still works on a part of an earlier round, which others have done since.
    """

    ready: list[Any] = field(default_factory=list)
    starting: dict[Any, Any] = field(default_factory=dict)  # call -> worker
    late: dict[Any, Any] = field(default_factory=dict)  # call -> worker

    def everybody(self) -> list[Any]:
        """All workers, whatever they do."""
        return [*self.ready, *self.starting.values(), *self.late.values()]


class RayEngine:
    """Runs chunks on a Ray cluster; a worker that dies is replaced and its chunks are done again,
    to the same bits.

    Machines that join get work in the next round. A part that takes twice as long as the slowest
    one so far is given to an idle worker too, and the first answer counts: a lost machine costs a
    round no more than that.
    """

    def __init__(self, *, address: str | None = None, workers: int | None = None) -> None:
        """Join the cluster at `address` (`auto` for the one on this machine), or start one here.

        One worker per core of the cluster, unless `workers` says otherwise. Workers open the data
        set themselves: it must lie under the same path on every machine, or be an embedded one.
        """
        ray = load_ray()
        self._owns_cluster = join(ray, address, workers)
        self._ray = ray
        self._remote = ray.remote(num_cpus=1, max_restarts=0)(Worker)
        self._pool = _Pool()
        self._put: dict[str, tuple[np.ndarray, Any]] = {}  # weights, and where they were put
        self._rounds = 0
        self.traffic = Traffic()
        self._asked, self.workers = workers, workers or max(1, cores_of(ray))
        self._slowest: float | None = None  # seconds of a part in this round, once one is back
        self._before: float | None = None  # as it was in the round before
        for _ in range(self.workers):
            self._start_worker()

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
        waiting = deque(self._parts(work, chunks))
        under_way: dict[Any, _Call] = {}
        results: dict[int, ChunkResult] = {}

        def give(part: _Part, worker: Any) -> None:
            given = [chunks[i] for i in part.chunks]
            own = [{} if memory is None else memory.read(c, broadcast.round) for c in given]
            call = worker.work.remote(work.recipe, description, given, weights, own)
            part.copies += 1
            under_way[call] = _Call(worker, part, time.monotonic())

        try:
            for due in range(len(chunks)):
                while due not in results:
                    busy = [call.worker for call in under_way.values()]
                    idle = [w for w in self._pool.ready if all(w is not other for other in busy)]
                    while waiting and idle:
                        give(waiting.popleft(), idle.pop())
                    for part in self._late_parts(under_way):
                        if idle:
                            give(part, idle.pop())
                            self.traffic.given_again += 1
                    self._await_one(under_way, waiting, results, bool(idle))
                yield results.pop(due)
        finally:
            self._leave(under_way)

    def close(self) -> None:
        """End the workers, and the cluster if it was started for this run."""
        for worker in self._pool.everybody():
            with suppress(Exception):  # it may be gone already
                self._ray.kill(worker)
        self._pool = _Pool()
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
        """Ask for workers on cores that have joined since; those that have started are ready."""
        if self._asked is None:
            # Cores of machines that are gone leave the list when Ray has noticed.
            self.workers = max(1, cores_of(self._ray))
        for _ in range(self.workers - len(self._pool.everybody())):
            self._start_worker()
        calls = [*self._pool.starting, *self._pool.late]
        for call in self._ray.wait(calls, num_returns=len(calls), timeout=0)[0] if calls else ():
            self._welcome(call)

    def _leave(self, under_way: Mapping[Any, _Call]) -> None:
        """End the round: who still works on a copy of a part gets no work until that ends."""
        for call, given in under_way.items():
            self._pool.ready = [other for other in self._pool.ready if other is not given.worker]
            self._pool.late[call] = given.worker

    def _limit(self) -> float:
        """The seconds after which a part is late; infinite before the first one has come back."""
        slowest = self._before if self._slowest is None else self._slowest
        return inf if slowest is None else max(_LEAST_LATE, 2 * slowest)

    def _late_parts(self, under_way: Mapping[Any, _Call]) -> list[_Part]:
        """Parts that one worker has had for too long, and nobody else yet."""
        now, limit = time.monotonic(), self._limit()
        late = [one.part for one in under_way.values() if now - one.started >= limit]
        return [part for part in late if not part.done and part.copies == 1]

    def _patience(self, under_way: Mapping[Any, _Call], idle: bool) -> float | None:
        """The seconds to wait for an answer: until a part is late for which somebody is idle."""
        if not under_way:
            return _START_SECONDS
        starts = [one.started for one in under_way.values() if one.part.copies == 1]
        if not idle or not starts or self._limit() == inf:
            return None
        return max(0.0, min(starts) + self._limit() - time.monotonic())

    def _await_one(
        self,
        under_way: dict[Any, _Call],
        waiting: deque[_Part],
        results: dict[int, ChunkResult],
        idle: bool,
    ) -> None:
        """Wait until something happens: a part's sums come back or are late, a worker is new, is
        back from an earlier round, or has died.
        """
        ray = self._ray
        calls = [*under_way, *self._pool.starting, *self._pool.late]
        done, _ = ray.wait(calls, num_returns=1, timeout=self._patience(under_way, idle))
        if not done:
            if under_way:
                return
            raise FedbanditError(
                f"ray: no worker could be started within {_START_SECONDS:.0f} s; has the cluster"
                " free cores?"
            )
        call = done[0]
        given = under_way.pop(call, None)
        if given is None:
            self._welcome(call)
            return
        part = given.part
        try:
            answers = ray.get(call)
        except ray.exceptions.RayTaskError as error:
            raise original(error) from None
        except ray.exceptions.RayError as error:
            self._replace(given.worker, error)
            part.attempts += 1
            if part.attempts >= _MOST_ATTEMPTS:
                raise FedbanditError(
                    f"ray: {part.attempts} workers died on the same clients: {error}"
                ) from None
            if not part.done and all(other.part is not part for other in under_way.values()):
                part.copies = 0
                waiting.appendleft(part)
            return
        if part.done:
            return  # a copy was faster
        part.done = True
        self._slowest = max(self._slowest or 0.0, time.monotonic() - given.started)
        for i, answer in zip(part.chunks, answers, strict=True):
            self.traffic.sums += _bytes(answer.sent)
            results[i] = answer

    def _start_worker(self) -> None:
        """Ask the cluster for one worker more."""
        worker = self._remote.remote()
        self._pool.starting[worker.ready.remote()] = worker

    def _welcome(self, call: Any) -> None:
        """A worker has started, or is back from a round that did not wait for it; or why not."""
        late = call in self._pool.late
        worker = (self._pool.late if late else self._pool.starting).pop(call)
        try:
            self._ray.get(call)
        except self._ray.exceptions.RayTaskError as error:
            if not late:
                raise original(error) from None
        except self._ray.exceptions.RayError as error:
            self._replace(worker, error)
            return
        self._pool.ready.append(worker)

    def _replace(self, worker: Any, error: Exception) -> None:
        """Replace a worker that died; the others take its part if no new one can start."""
        self._pool.ready = [other for other in self._pool.ready if other is not worker]
        self.traffic.replaced += 1
        if self.traffic.replaced > _MOST_ATTEMPTS * self.workers and not self._pool.ready:
            raise FedbanditError(f"ray: workers keep dying: {error}") from None
        self._start_worker()

    def _put_weights(self, broadcast: Broadcast) -> RoundWeights:
        """Put the training weights, and those deployed versions that were not put before."""
        named, before, self._put = broadcast.arrays(), self._put, {}
        for name, array in named.items():
            kept, reference = before.get(name, (None, None))
            known = kept is array and name.startswith("deployed/")
            self._put[name] = (array, reference if known else self._send(array))
        self._rounds += 1
        rest = broadcast.with_arrays(dict.fromkeys(named, np.empty(0)))
        references = {name: [reference] for name, (_, reference) in self._put.items()}
        return RoundWeights(self._rounds, references, [self._ray.put(rest)])

    def _send(self, array: np.ndarray) -> Any:
        """Put an array into the object store once for all workers."""
        self.traffic.weights += array.nbytes
        return self._ray.put(array)


def _bytes(sent: Contribution) -> int:
    """The size of what a chunk has sent back."""
    memory = sum(array.nbytes for vectors in sent.memory.values() for array in vectors.values())
    return memory + sum(_size(update) for update in sent.sums.values())


def _size(part: Any) -> int:
    if isinstance(part, np.ndarray) or part is None:
        return 0 if part is None else part.nbytes
    return sum(map(_size, part if isinstance(part, tuple) else vars(part).values()))
