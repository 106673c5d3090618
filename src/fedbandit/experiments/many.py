"""Playing many runs, each into a folder of its own: one per core at a time, stopped and gone on with like a single one.

Knows nothing of figures or sweeps. What a run computes does not depend on where or beside which others it is played.
"""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from types import FrameType
from typing import Literal

from fedbandit.config import Config
from fedbandit.data import FederatedDataset, open_dataset
from fedbandit.engines import Engine, ThreadEngine
from fedbandit.engines.threads import usable_cores
from fedbandit.errors import Diverged
from fedbandit.experiments.run import run
from fedbandit.simulation.experiment import build_experiment
from fedbandit.simulation.simulate import starting_weights

EngineMaker = Callable[[Config, FederatedDataset], Engine]

_orphaned = threading.Event()  # set in a worker whose parent is gone

Status = Literal["finished", "paused", "diverged", "interrupted", "not run"]


@dataclass(frozen=True)
class Job:
    """A configuration to be played into a folder, to its last round or up to a round to pause at."""

    config: Config
    folder: Path
    until: int | None = None


@dataclass(frozen=True)
class Ended:
    """How a job ended."""

    status: Status
    rounds: int = 0
    message: str = ""
    seconds: float = 0.0


def play_all(
    jobs: Sequence[Job],
    *,
    workers: int | None = None,
    deadline: float | None = None,
    on_end: Callable[[Job, Ended], None] = lambda job, ended: None,
    engine: EngineMaker | None = None,
) -> list[Ended]:
    """Play every job; those not started by the deadline (of `time.monotonic`) are left, as is all after an interrupt.

    A run alone spreads its clients over all cores, but its rounds have a serial part and end when the slowest thread
    does. With several runs to play, one run per core on one thread wastes neither. An `engine` that spreads a run over
    more than this machine is made for each run in turn.
    """
    workers = min(workers or usable_cores(), len(jobs))
    if workers <= 1 or engine is not None:
        return _one_after_another(jobs, deadline, on_end, engine)
    _prepare(jobs)
    return _side_by_side(jobs, workers, deadline, on_end)


def _one_after_another(
    jobs: Sequence[Job],
    deadline: float | None,
    on_end: Callable[[Job, Ended], None],
    make: EngineMaker | None = None,
) -> list[Ended]:
    results: list[Ended] = []
    shared = ThreadEngine()
    try:
        for job in jobs:
            if _stopped(results) or (deadline is not None and time.monotonic() > deadline):
                results.append(Ended("not run"))
                continue
            engine = make(job.config, _dataset(job.config.data.source)) if make else shared
            try:
                results.append(_play(job, engine))
            finally:
                if engine is not shared:
                    engine.close()
            on_end(job, results[-1])
    finally:
        shared.close()
    return results


def _side_by_side(
    jobs: Sequence[Job], workers: int, deadline: float | None, on_end: Callable[[Job, Ended], None]
) -> list[Ended]:
    """One process a worker; each holds one thread, and stops cleanly when this process is told to, or dies."""
    results = [Ended("not run")] * len(jobs)
    waiting = iter(enumerate(jobs))
    running: dict[Future[Ended], int] = {}
    # spawn: the threads of torch and numba do not survive a fork
    with (
        ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_follow_parent) as pool,
        _interrupts(lambda: [process.pid for process in pool._processes.values()]) as interrupted,
    ):

        def start(count: int) -> None:
            for position, job in _first(waiting, count):
                if not interrupted.is_set() and (deadline is None or time.monotonic() <= deadline):
                    running[pool.submit(_play_alone, job)] = position

        start(workers)
        while running:
            for future in as_completed(list(running)):
                position = running.pop(future)
                results[position] = future.result()
                on_end(jobs[position], results[position])
                if results[position].status == "interrupted":
                    interrupted.set()
                start(1)
                break
    return results


def _play(job: Job, engine: Engine) -> Ended:
    started = time.monotonic()
    try:
        outcome = run(job.config, job.folder, dataset=_dataset(job.config.data.source), engine=engine, until=job.until)
    except Diverged as error:
        return Ended("diverged", message=str(error), seconds=time.monotonic() - started)
    status: Status = "finished" if outcome.summary else "paused" if outcome.rounds == job.until else "interrupted"
    return Ended(status, outcome.rounds, seconds=time.monotonic() - started)


def _play_alone(job: Job) -> Ended:
    engine = ThreadEngine(1)
    try:
        return _play(job, engine)
    finally:
        engine.close()
        if _orphaned.is_set():
            os._exit(0)  # nobody will ask for the result, and nobody will give the next job


@lru_cache(maxsize=4)
def _dataset(source: str) -> FederatedDataset:
    return open_dataset(source)


def _prepare(jobs: Iterable[Job]) -> None:
    """Make what runs share, embedded data and pre-trained models, once before they start side by side."""
    missing = {_shared_start(job.config): job for job in jobs if not (job.folder / "config.toml").exists()}
    engine = ThreadEngine()
    try:
        for job in missing.values():
            with contextlib.suppress(Diverged):  # the run itself will say so, and be a loser
                starting_weights(build_experiment(job.config, _dataset(job.config.data.source)), engine)
    finally:
        engine.close()


def _shared_start(config: Config) -> str:
    """The same for runs that surely start from the same pre-trained model."""
    values = config.identity()
    for key in ("seed", "rounds", "deploy_every", "training", "evaluate_every", "policy", "objective", "privacy"):
        del values[key]
    chosen = config.pretraining
    for part, rate in (("client", chosen.client_learning_rate), ("server", chosen.server_learning_rate)):
        if rate is not None:
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


@contextmanager
def _interrupts(workers: Callable[[], list[int | None]]) -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set; they are passed on to the workers, who stop after their round."""
    requested = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield requested
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if requested.is_set():
            return  # a terminal's Ctrl-C reaches the workers too; telling them twice would cut their round short
        requested.set()
        for worker in workers():
            if worker is not None and number == signal.SIGTERM:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGTERM)

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield requested
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _stopped(results: Sequence[Ended]) -> bool:
    return bool(results) and any(result.status == "interrupted" for result in results)


def _first(items: Iterator[tuple[int, Job]], count: int) -> Iterator[tuple[int, Job]]:
    for _ in range(count):
        if (item := next(items, None)) is not None:
            yield item
