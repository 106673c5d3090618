"""Many runs over a Ray cluster: each is one task on one core of some machine, into a folder that
all machines share.

What crosses the network is a job, its pre-trained model and how it ended; everything else is in the
run's folder.
"""

import os
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedbandit.assembly.experiment import open_same_data
from fedbandit.core.errors import ConfigError, FedbanditError
from fedbandit.core.files import write_bytes
from fedbandit.core.progress import SILENT, ProgressReporter
from fedbandit.data import cache_folder
from fedbandit.engines import ThreadEngine, cores_of, join, load_ray, original
from fedbandit.runs.folder import FolderBusy
from fedbandit.runs.local_runner import (
    Ended,
    Job,
    OnEnd,
    dataset_of,
    lengths_of,
    nobody,
    prepare,
    run_one,
    shared_start,
)
from fedbandit.runs.reporting import showing_runs
from fedbandit.runs.run import stop_requests

_MOST_ATTEMPTS = 4  # a run that has killed this many workers is not retried
_LOOK_SECONDS = 1.0  # how often the driver looks for interrupts and for machines that came or went
_STOP_SECONDS = 60.0  # for runs to end their round and keep their state after an interrupt
_LOCK_SECONDS = 60.0  # for the lock of a worker that was lost to be given up
_SEE_SECONDS = 5.0  # for a new file to show on other machines


@dataclass(frozen=True)
class Token:
    """A file that the driver has written beside the runs; a machine that does not see it has
    another folder there.
    """

    path: str
    text: str

    def check(self, machine: str) -> None:
        """Refuse to run on a machine that would write into a folder of its own."""
        ends = time.monotonic() + _SEE_SECONDS
        while True:
            with suppress(OSError):
                if Path(self.path).read_text(encoding="utf-8") == self.text:
                    return
            if time.monotonic() > ends:
                raise ConfigError(
                    f"--out: {machine} does not see what is written to {Path(self.path).parent}"
                    " here; with --engine ray"
                    " it has to be a folder that all machines share, under the same path"
                )
            time.sleep(0.2)


@dataclass(frozen=True)
class RayTask:
    """A job as it is sent: with absolute paths, since a worker's current folder is another one."""

    job: Job
    data_path: str
    fingerprint: str
    token: Token
    pretrained: str | None  # the name of the file that the starting weights are kept under


class RayRunner:
    """Runs jobs on a Ray cluster. If a worker dies, its run resumes on another worker, to the same
    bytes.
    """

    def __init__(
        self,
        address: str | None = None,
        workers: int | None = None,
        progress: ProgressReporter = SILENT,
    ) -> None:
        """Join the cluster at `address` (`auto` for the one on this machine), or start one here for
        this command.

        One run per core of the cluster, at most `workers` at a time.
        """
        self._ray = load_ray()
        self._owns_cluster = join(self._ray, address, workers)
        self._workers, self._progress = workers, progress
        # Attempts are counted here and not by Ray, since a second one has to wait for the first
        # one's lock.
        self._remote = self._ray.remote(num_cpus=1, max_retries=0)(run_task)
        self._look = self._ray.remote(num_cpus=0, max_retries=0)(Token.check)
        self.attempts = 0  # tasks sent, over all calls

    def run(
        self, jobs: Sequence[Job], *, deadline: float | None = None, on_end: OnEnd = nobody
    ) -> list[Ended]:
        """Play every job on whichever core is free."""
        results = [Ended("not run")] * len(jobs)
        if not jobs:
            return results
        with _token(jobs) as token, stop_requests(list) as interrupted, ExitStack() as ending:
            self._check_machines(token)
            tasks, weights = self._tasks(jobs, token, interrupted)
            waiting = deque(range(len(jobs)))
            lost: Counter[int] = Counter()  # workers that each job has cost
            running: dict[Any, int] = {}
            ending.enter_context(showing_runs(lengths_of(jobs), self._progress))
            ending.callback(self._stop, running)
            while (waiting or running) and not interrupted.is_set():
                in_time = deadline is None or time.monotonic() <= deadline
                while in_time and waiting and len(running) < self._room():
                    position = waiting.popleft()
                    task = tasks[position]
                    patience = _LOCK_SECONDS if lost[position] else 0.0
                    call = self._remote.remote(task, weights.get(task.pretrained), patience)
                    running[call] = position
                    self.attempts += 1
                if not running:
                    break  # out of time
                done, _ = self._ray.wait(list(running), num_returns=1, timeout=_LOOK_SECONDS)
                for call in done:
                    position = running.pop(call)
                    ended = self._answer(call, position, jobs[position], lost)
                    if ended is None:
                        waiting.appendleft(position)
                        continue
                    results[position] = ended
                    on_end(jobs[position], ended)
            if interrupted.is_set():
                for position in (*running.values(), *waiting):
                    results[position] = Ended("interrupted")
        return results

    def close(self) -> None:
        """Leave the cluster; one that was started for this command ends."""
        if self._owns_cluster:
            self._ray.shutdown()

    def _room(self) -> int:
        """The number of runs that may be under way: as many as the cluster has cores now."""
        cores = cores_of(self._ray)
        return max(1, min(self._workers or cores, cores))

    def _tasks(
        self, jobs: Sequence[Job], token: Token, stopping: threading.Event
    ) -> tuple[list[RayTask], dict[str | None, Any]]:
        """The task to send for each job, and the pre-trained models, put once for all machines, by
        name.
        """
        made = prepare(jobs, stopping, self._progress)
        put: dict[str | None, Any] = {
            f.name: self._ray.put(f.read_bytes()) for f in set(made.values())
        }
        tasks = []
        for job in jobs:
            dataset, file = dataset_of(job), made.get(shared_start(job.config))
            assert dataset.path is not None
            sent = replace(job, folder=job.folder.absolute())
            place = str(Path(dataset.path).absolute())
            tasks.append(
                RayTask(sent, place, dataset.header.fingerprint, token, file.name if file else None)
            )
        return tasks, put

    def _check_machines(self, token: Token) -> None:
        """Every machine has to see the folder before the first run starts; later ones are asked as
        they come.
        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        machines = {
            node["NodeID"]: node["NodeManagerAddress"]
            for node in self._ray.nodes()
            if node["Alive"]
        }
        calls = [
            self._look.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
            ).remote(token, name)
            for node, name in machines.items()
        ]
        try:
            self._ray.get(calls)
        except self._ray.exceptions.RayTaskError as error:
            raise original(error) from None

    def _answer(self, call: Any, position: int, job: Job, lost: Counter[int]) -> Ended | None:
        """The end of the job; None if its worker died first, and the job has to resume
        elsewhere.
        """
        try:
            ended: Ended = self._ray.get(call)
            if ended.status != "interrupted":
                return ended
            reason = "the worker was stopped from outside"
        except self._ray.exceptions.RayTaskError as error:
            raise original(error) from None
        except self._ray.exceptions.RayError as error:
            reason = str(error).splitlines()[0]
        lost[position] += 1
        if lost[position] >= _MOST_ATTEMPTS:
            raise FedbanditError(
                f"{job.folder}: {lost[position]} Ray workers died during this run: {reason}"
            )
        return None

    def _stop(self, running: Iterable[Any]) -> None:
        """Have runs that are under way stop after their round, and wait until they have kept their
        state.
        """
        calls = list(running)
        for call in calls:
            self._ray.cancel(call, force=False)
        if calls:
            self._ray.wait(calls, num_returns=len(calls), timeout=_STOP_SECONDS)


def run_task(task: RayTask, weights: bytes | None, patience: float) -> Ended:
    """Runs inside a Ray worker: run the job on one thread, from where an earlier worker stopped."""
    import ray

    task.token.check(str(ray.util.get_node_ip_address()))
    if task.pretrained is not None and weights is not None:
        # where a run on this machine looks for it
        file = cache_folder() / "pretrained" / task.pretrained
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(file, weights)
    dataset = _opened(task.job.config.data.source, task.data_path, task.fingerprint)
    ends = time.monotonic() + patience
    with closing(ThreadEngine(1)) as engine:
        while True:
            try:
                return run_one(task.job, engine, dataset)
            except FolderBusy:
                if time.monotonic() > ends:
                    raise
                time.sleep(0.5)


_opened = lru_cache(maxsize=4)(open_same_data)  # once in a worker


@contextmanager
def _token(jobs: Sequence[Job]) -> Iterator[Token]:
    """A token in the folder that holds all the runs, while they run."""
    folder = Path(os.path.commonpath([job.folder.absolute().parent for job in jobs]))
    folder.mkdir(parents=True, exist_ok=True)
    mark = uuid.uuid4().hex
    token = Token(str(folder / f".shared-{mark}"), mark)
    Path(token.path).write_text(mark, encoding="utf-8")
    try:
        yield token
    finally:
        Path(token.path).unlink(missing_ok=True)
