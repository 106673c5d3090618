"""Many runs, each in its folder: one per core at a time, interrupted and resumed like a
single one.

Knows nothing of figures or sweeps. What a run computes does not depend on where it runs or what
runs beside it.
"""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from multiprocessing import connection, get_context, parent_process, resource_tracker
from pathlib import Path
from typing import Any, Literal, Protocol

from fedbandit.assembly.experiment import build_experiment
from fedbandit.config import Config
from fedbandit.core.errors import Diverged, FedbanditError
from fedbandit.core.progress import SILENT, ProgressReporter
from fedbandit.data import FederatedDataset, open_dataset
from fedbandit.engines import ThreadEngine, usable_cores
from fedbandit.federated.round import Engine
from fedbandit.runs.reporting import showing_runs
from fedbandit.runs.run import execute, stop_requests
from fedbandit.simulation import Pretraining, pretrained_file

_orphaned = threading.Event()  # set in a worker whose parent is gone
# what no pre-trained model depends on
_OF_RUNS = ("seed", "rounds", "deploy_every", "training", "evaluate_every", "policy", "objective")
Status = Literal["finished", "paused", "diverged", "interrupted", "not run"]


@dataclass(frozen=True)
class Job:
    """A configuration to run into a folder, to its last round or up to a round to pause at
    (`until`).
    """

    config: Config
    folder: Path
    until: int | None = None


@dataclass(frozen=True)
class Ended:
    """The end of a job: its status, the rounds it has, why it stopped, and the seconds it took."""

    status: Status
    rounds: int = 0
    message: str = ""
    seconds: float = 0.0


OnEnd = Callable[[Job, Ended], None]


def nobody(job: Job, ended: Ended) -> None:
    """Listens to no end of a job."""


class Runner(Protocol):
    """Runs jobs somewhere. What a run computes is the same everywhere, and so are the files it
    leaves.

    `LocalRunner` uses the cores of this machine, `RayRunner` those of a cluster.
    """

    def run(
        self, jobs: Sequence[Job], *, deadline: float | None = None, on_end: OnEnd = nobody
    ) -> list[Ended]:
        """Run every job, and return how each ended, in the order of the jobs.

        Jobs not started by the deadline (of `time.monotonic`), or after an interrupt, are `not
        run`; `on_end` hears of each that ends.
        """
        ...


@dataclass(frozen=True)
class LocalRunner:
    """Runs jobs on this machine, `workers` at a time (one per core).

    A run alone spreads its clients over all cores, but its rounds have a serial part and end when
    the slowest thread does. With several jobs, one run per core on one thread wastes neither.
    """

    workers: int | None = None
    progress: ProgressReporter = (
        SILENT  # where it says how far the runs have come, and the time left
    )

    def run(
        self, jobs: Sequence[Job], *, deadline: float | None = None, on_end: OnEnd = nobody
    ) -> list[Ended]:
        """Run every job on this machine, in separate processes if several run at a time."""
        workers = min(self.workers or usable_cores(), len(jobs))
        if workers <= 1:
            return self._run(jobs, _at_once, list, 1, deadline, on_end)
        # spawn: the threads of torch and numba do not survive a fork
        context = get_context("spawn")
        with ProcessPoolExecutor(workers, context, initializer=_follow_parent) as pool:

            def submit(*call: Any) -> Future[Ended]:
                with _deaf_to_interrupts():
                    return pool.submit(*call)

            def pids() -> list[int | None]:
                return [process.pid for process in list(pool._processes.values())]

            return self._run(jobs, submit, pids, workers, deadline, on_end)

    def _run(
        self,
        jobs: Sequence[Job],
        submit: Callable[..., Future[Ended]],
        pids: Callable[[], list[int | None]],
        workers: int,
        deadline: float | None,
        on_end: OnEnd,
    ) -> list[Ended]:
        """Submit every job, `workers` at a time; `pids` are asked to stop when this process is."""
        results = [Ended("not run")] * len(jobs)
        threads = _threads(len(jobs), workers)
        waiting = iter(enumerate(jobs))
        running: dict[Future[Ended], int] = {}
        with stop_requests(pids) as interrupted:
            prepare(jobs, interrupted, self.progress)

            def start(count: int) -> None:
                for position, job in islice(waiting, count):
                    in_time = deadline is None or time.monotonic() <= deadline
                    if in_time and not interrupted.is_set():
                        running[submit(_play_alone, job, threads[position])] = position

            with showing_runs(lengths_of(jobs), self.progress):
                start(workers)
                while running:
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        position = running.pop(future)
                        results[position] = _result(future, jobs[position], interrupted)
                        on_end(jobs[position], results[position])
                        if results[position].status == "interrupted":
                            interrupted.set()
                        start(1)
        if interrupted.is_set():  # what was not begun must not look as if there was no time for it
            return [Ended("interrupted") if one.status == "not run" else one for one in results]
        return results


HERE = LocalRunner()


def lengths_of(jobs: Iterable[Job]) -> dict[Path, int]:
    """The number of rounds that each folder is to have when its job has ended."""
    return {job.folder: min(job.config.rounds, job.until or job.config.rounds) for job in jobs}


def _at_once(play: Callable[..., Ended], *call: Any) -> Future[Ended]:
    """A call in this process, made before it is waited for."""
    future: Future[Ended] = Future()
    future.set_result(play(*call))
    return future


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Processes that are started in this block do not hear SIGINT, not even while they load.

    A blocked signal stays blocked in a child; one that comes meanwhile is delivered here
    afterwards.
    """
    resource_tracker.ensure_running()  # which would unblock it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _threads(jobs: int, workers: int) -> Sequence[int | None]:
    """One thread for each job; those of a last turn that is not full share the cores among them.

    None, for all cores, where there is one job at a time.
    """
    if workers == 1:
        return [None] * jobs
    left = jobs % workers
    return [1] * (jobs - left) + [workers // max(1, left)] * left


def _result(future: Future[Ended], job: Job, interrupted: threading.Event) -> Ended:
    """The end of a worker's job; a worker that was killed leaves a run that can be resumed."""
    try:
        return future.result()
    except BrokenProcessPool:
        if interrupted.is_set():
            return Ended("interrupted")
        raise FedbanditError(
            f"{job.folder}: a worker process was killed, perhaps out of memory (try fewer"
            " --workers);"
            " run the same command again to resume"
        ) from None


def run_one(job: Job, engine: Engine, dataset: FederatedDataset) -> Ended:
    """Run a job in this process; one that diverges has ended like any other."""
    started = time.monotonic()
    try:
        outcome = execute(job.config, job.folder, dataset=dataset, engine=engine, until=job.until)
    except Diverged as error:
        return Ended("diverged", message=str(error), seconds=time.monotonic() - started)
    status: Status = (
        "finished"
        if outcome.summary
        else "paused"
        if outcome.rounds == job.until
        else "interrupted"
    )
    return Ended(status, outcome.rounds, seconds=time.monotonic() - started)


def _play_alone(job: Job, threads: int | None) -> Ended:
    """One job in a worker process, or in this one."""
    try:
        with contextlib.closing(ThreadEngine(threads)) as engine:
            return run_one(job, engine, dataset_of(job))
    finally:
        if _orphaned.is_set():
            os._exit(0)  # nobody will ask for the result, and nobody will give the next job


_opened = lru_cache(maxsize=4)(open_dataset)  # once in this process


def dataset_of(job: Job) -> FederatedDataset:
    """The data set of a job, opened once for all jobs that share it."""
    return _opened(job.config.data.source)


def prepare(
    jobs: Iterable[Job], stopping: threading.Event, progress: ProgressReporter = SILENT
) -> dict[str, Path]:
    """Make what runs share, embedded data and pre-trained models, once before they start side by
    side.

    The files of the pre-trained models, by `shared_start`. A request to stop ends it after the
    round.
    """
    missing = {shared_start(job.config): job for job in jobs if not _past_start(job.folder)}
    made: dict[str, Path] = {}
    with contextlib.closing(ThreadEngine()) as engine:
        for key, job in missing.items():
            experiment = build_experiment(job.config, dataset_of(job))
            if (file := pretrained_file(experiment)) is None:
                continue
            pretraining = Pretraining(experiment, engine)
            done, total = pretraining.state.round, pretraining.rounds
            shown = progress if done < total else SILENT
            with (
                contextlib.suppress(Diverged),  # the run itself will say so, and be a loser
                shown.task("pre-training", total, unit="rounds", done=done) as advance,
            ):
                if pretraining.run(lambda metrics, advance=advance: advance(1), stopping):  # type: ignore[misc]
                    made[key] = file
            if stopping.is_set():
                break
    return made


def _past_start(folder: Path) -> bool:
    """Whether a run needs no starting weights any more."""
    return any((folder / name).exists() for name in ("checkpoints", "summary.json", "error.json"))


def shared_start(config: Config) -> str:
    """The same for runs that surely start from the same pre-trained model."""
    values = config.identity()
    for key in _OF_RUNS:
        del values[key]
    for part in ("client", "server"):
        if values["pretraining"][f"{part}_learning_rate"] is not None:
            del values[part]["learning_rate"]
    return json.dumps(values, sort_keys=True)


def _follow_parent() -> None:
    """Have this worker ask itself to stop when the process that started it is gone."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        _orphaned.set()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True, name="follow-parent").start()
