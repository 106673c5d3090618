"""The Ray engine: chunks over the workers of a cluster, with the same bits as threads.

Workers make the work themselves from a recipe; what travels are weights out and sums back.
"""

import os
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedbandit.core.errors import ConfigError, FedbanditError, needing
from fedbandit.core.sources import always_compile
from fedbandit.federated.clients import Broadcast, ChunkResult, ClientWork, Recipe
from fedbandit.federated.memory import Memory
from fedbandit.federated.pipeline import Contribution, Memories


def load_ray() -> Any:
    """The Ray package, or a word on how to get it."""
    with needing("engine: ray"):
        import ray
    return ray


def join(ray: Any, address: str | None, cores: int | None = None) -> bool:
    """Join the cluster at `address` (`auto`: the one on this machine) or start one of `cores` cores here.

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
    """What went wrong in a worker, as if it had gone wrong here."""
    return error.cause if isinstance(error.cause, FedbanditError) else error


@dataclass(frozen=True)
class RoundWeights:
    """A broadcast whose weights lie in Ray's object store, each reference in a list so that Ray leaves it alone."""

    key: int  # another one for every round
    received: Mapping[str, list[Any]]
    deployed: Mapping[int, list[Any]]
    base: list[Any]  # the whole model, or nothing
    rest: list[
        Any
    ]  # everything else, with no weights in it: fetched once the code that it may need is the right one


class Worker:
    """One core's worth of work. It keeps the work it has made, and the weights of the round and the versions in use."""

    def __init__(self) -> None:
        always_compile()
        self._made: dict[str, ClientWork] = {}  # by the digest of its recipe
        self._key = 0
        self._broadcast: Broadcast | None = None
        self._versions: dict[int, tuple[Any, np.ndarray]] = {}

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
        if self._broadcast is None or weights.key != self._key:
            held = {}
            for version, (reference,) in weights.deployed.items():
                before = self._versions.get(version)
                held[version] = (
                    before
                    if before and before[0] == reference
                    else (reference, _fetched(reference))
                )
            self._versions, self._key = held, weights.key
            rest = _unpacked(weights.rest[0])
            self._broadcast = replace(
                rest,
                received={
                    name: _fetched(reference) for name, (reference,) in weights.received.items()
                },
                deployed={
                    version: replace(rest.deployed[version], weights=array)
                    for version, (_, array) in held.items()
                },
                base=_fetched(weights.base[0]) if weights.base else None,
            )
        return self._broadcast


def _unpacked(reference: Any) -> Broadcast:
    import ray

    rest: Broadcast = ray.get(reference)
    return rest


def _fetched(reference: Any) -> np.ndarray:
    """An array of our own: what lies in the object store is read-only, which torch and compiled loops do not like."""
    import ray

    return np.array(ray.get(reference))


_PARTS_PER_WORKER = 4  # parts of a cohort per worker: few messages, and no long wait for the last
_MOST_ATTEMPTS = 4  # a part that has killed this many workers is not retried
_START_SECONDS = 300.0  # for the first worker of a cluster to start


@dataclass
class Traffic:
    """What has travelled so far, in bytes: weights put once, and sums that came back."""

    weights: int = 0
    sums: int = 0
    replaced: int = 0  # workers that died and were replaced


@dataclass
class _Part:
    """Some chunks of a cohort that go to one worker together; each comes back as a sum of its own."""

    chunks: list[int]
    attempts: int = 0


@dataclass
class _Pool:
    """The workers: those that can be given work, and calls that are under way."""

    ready: list[Any] = field(default_factory=list)
    starting: dict[Any, Any] = field(default_factory=dict)  # call -> worker


class RayEngine:
    """Runs chunks on a Ray cluster; a worker that dies is replaced and its chunks are done again, to the same bits."""

    def __init__(self, *, address: str | None = None, workers: int | None = None) -> None:
        """Join the cluster at `address` (`auto` for the one on this machine), or start one here.

        One worker per core of the cluster, unless `workers` says otherwise. Workers open the data set themselves: it
        must lie under the same path on every machine, or be an embedded one.
        """
        ray = load_ray()
        self._owns_cluster = join(ray, address, workers)
        self._ray = ray
        self._remote = ray.remote(num_cpus=1, max_restarts=0)(Worker)
        self._pool = _Pool()
        self._put: dict[
            int, tuple[np.ndarray, Any]
        ] = {}  # deployed version -> its weights and where they were put
        self._rounds = 0
        self.traffic = Traffic()
        self.workers = workers or max(1, cores_of(ray))
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
        description, weights = work.description, self._put_weights(broadcast)
        waiting = deque(self._parts(work, chunks))
        under_way: dict[Any, tuple[Any, _Part]] = {}
        results: dict[int, ChunkResult] = {}
        for due in range(len(chunks)):
            while due not in results:
                idle = [
                    w
                    for w in self._pool.ready
                    if all(w is not busy for busy, _ in under_way.values())
                ]
                while waiting and idle:
                    part, worker = waiting.popleft(), idle.pop()
                    given = [chunks[i] for i in part.chunks]
                    own = [
                        {} if memory is None else memory.read(chunk, broadcast.round)
                        for chunk in given
                    ]
                    call = worker.work.remote(work.recipe, description, given, weights, own)
                    under_way[call] = worker, part
                self._await_one(under_way, waiting, results)
            yield results.pop(due)

    def close(self) -> None:
        """End the workers, and the cluster if it was started for this run."""
        for worker in (*self._pool.ready, *self._pool.starting.values()):
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

    def _await_one(
        self,
        under_way: dict[Any, tuple[Any, _Part]],
        waiting: deque[_Part],
        results: dict[int, ChunkResult],
    ) -> None:
        """Wait until something comes back: a part's sums, a new worker, or the news that one has died."""
        ray = self._ray
        calls = [*under_way, *self._pool.starting]
        done, _ = ray.wait(calls, num_returns=1, timeout=None if under_way else _START_SECONDS)
        if not done:
            raise FedbanditError(
                f"ray: no worker could be started within {_START_SECONDS:.0f} s; has the cluster free cores?"
            )
        call = done[0]
        worker, part = under_way.pop(call, (None, None))
        if part is None:
            self._welcome(call)
            return
        try:
            answers = ray.get(call)
        except ray.exceptions.RayTaskError as error:
            raise original(error) from None
        except ray.exceptions.RayError as error:
            self._replace(worker, error)
            part.attempts += 1
            if part.attempts >= _MOST_ATTEMPTS:
                raise FedbanditError(
                    f"ray: {part.attempts} workers died on the same clients: {error}"
                ) from None
            waiting.appendleft(part)
            return
        for i, answer in zip(part.chunks, answers, strict=True):
            self.traffic.sums += _bytes(answer.sent)
            results[i] = answer

    def _start_worker(self) -> None:
        worker = self._remote.remote()
        self._pool.starting[worker.ready.remote()] = worker

    def _welcome(self, call: Any) -> None:
        """A worker has started and can be given work, or says why it cannot."""
        worker = self._pool.starting.pop(call)
        try:
            self._ray.get(call)
        except self._ray.exceptions.RayTaskError as error:
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
        kept = {}
        for version, deployed in broadcast.deployed.items():
            before = self._put.get(version)
            if before is None or before[0] is not deployed.weights:
                before = (deployed.weights, self._send(deployed.weights))
            kept[version] = before
        self._put = kept
        self._rounds += 1
        empty = np.empty(0)
        rest = replace(
            broadcast,
            received={},
            deployed={
                version: replace(held, weights=empty)
                for version, held in broadcast.deployed.items()
            },
            base=None,
        )
        return RoundWeights(
            key=self._rounds,
            received={name: [self._send(array)] for name, array in broadcast.received.items()},
            deployed={version: [reference] for version, (_, reference) in kept.items()},
            base=[] if broadcast.base is None else [self._send(broadcast.base)],
            rest=[self._ray.put(rest)],
        )

    def _send(self, array: np.ndarray) -> Any:
        self.traffic.weights += array.nbytes
        return self._ray.put(array)


def _bytes(sent: Contribution) -> int:
    memory = sum(array.nbytes for vectors in sent.memory.values() for array in vectors.values())
    return memory + sum(_size(update) for update in sent.sums.values())


def _size(part: Any) -> int:
    if isinstance(part, np.ndarray) or part is None:
        return 0 if part is None else part.nbytes
    return sum(map(_size, part if isinstance(part, tuple) else vars(part).values()))
