"""Playing a configuration into a run folder, so that it can be interrupted at any moment and picked up again."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fedbandit.config import Config
from fedbandit.data import FederatedDataset, open_dataset
from fedbandit.engines import Engine
from fedbandit.errors import Diverged, FedbanditError
from fedbandit.experiments.folder import RunFolder, read_metrics
from fedbandit.experiments.trackers import Tracker
from fedbandit.privacy.reporting import summary as privacy_summary
from fedbandit.signals import handling
from fedbandit.simulation.experiment import build_experiment
from fedbandit.simulation.simulate import Simulation, simulate
from fedbandit.timing import Stopwatch

CHECKPOINT_SECONDS = 20.0  # at most this much work is repeated after a crash


class Progress(Protocol):
    """Is told of every round; shows it to somebody."""

    def update(self, metrics: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """How a call of `run` ended."""

    summary: dict[str, Any] | None  # None: stopped or paused before the last round
    rounds: int
    profile: dict[str, float]  # seconds by name, of this call


def run(
    config: Config,
    out: Path,
    *,
    dataset: FederatedDataset | None = None,
    engine: Engine | None = None,
    progress: Callable[[Simulation], AbstractContextManager[Progress]] | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    tracker: Callable[[Path, Config], Tracker] | None = None,
    until: int | None = None,
) -> Outcome:
    """Play the configuration into the folder, from wherever an earlier call stopped. Ctrl-C stops after the round.

    With `until` the run pauses after that round, for a later call to go on with.
    """
    dataset = dataset or open_dataset(config.data.source)
    watch = Stopwatch()
    build_experiment(config, dataset)  # whatever is wrong with the configuration is said before the folder is touched
    with ExitStack() as stack:
        folder = stack.enter_context(RunFolder(out, config, dataset.header))
        if (summary := folder.summary) is not None:
            return Outcome(summary, summary["rounds"], {})
        if (failure := folder.failure) is not None and failure["kind"] == Diverged.__name__:
            raise Diverged(failure["error"])  # it would again: a run is a function of its configuration
        if until is not None and until < config.rounds and folder.rounds_recorded() >= until:
            return Outcome(None, until, {})
        stack.enter_context(_kept_failures(folder))
        simulation = stack.enter_context(simulate(config, dataset, engine=engine, state=folder.resume(), watch=watch))
        shown = stack.enter_context(progress(simulation)) if progress else None
        tracked = stack.enter_context(closing(tracker(out, config))) if tracker else None
        stopping = stack.enter_context(_stop_requests())
        profile = Stopwatch()
        kept_at = time.monotonic()
        started = time.perf_counter()
        metrics: dict[str, Any] = {}
        for metrics in simulation:
            timings = watch.take()
            profile.add(timings)
            now = time.perf_counter()
            folder.record(metrics, {"round": metrics["round"], "seconds": now - started, **timings})
            started = now
            for follower in (shown, tracked):
                if follower is not None:
                    follower.update(metrics)
            pausing = stopping.is_set() or metrics["round"] == until
            since = time.monotonic() - kept_at
            deployed = metrics["round"] % config.deploy_every == 0
            # Deployments are kept sooner, unless the last checkpoint is very recent.
            if pausing or since >= (checkpoint_seconds / 10 if deployed else checkpoint_seconds):
                with watch("checkpoint"):
                    folder.checkpoint(simulation.state)
                kept_at = time.monotonic()
            if pausing and metrics["round"] < simulation.experiment.rounds:
                return Outcome(None, metrics["round"], dict(profile.seconds))
        with watch("checkpoint"):
            folder.checkpoint(simulation.state)
        profile.add(watch.take())
        summary = _summary(simulation, folder)
        folder.finish(summary)
        return Outcome(summary, summary["rounds"], dict(profile.seconds))


def _summary(simulation: Simulation, folder: RunFolder) -> dict[str, Any]:
    config, state = simulation.experiment.config, simulation.state
    last = read_metrics(folder.path)[-1]
    return {
        "running_reward": state.running_reward,
        "rounds": state.round,
        "seconds_per_round": folder.total_seconds() / state.round,
        "scenario": config.scenario,
        "policy": config.policy.model_dump(),
        "seed": config.seed,
        "data": simulation.experiment.dataset.header.name,
        "weights": simulation.experiment.layout.size,
        **{key: value for key, value in last.items() if key.startswith("test_")},
        "privacy": privacy_summary(simulation.experiment.privacy, state.round),
    }


@contextmanager
def _kept_failures(folder: RunFolder) -> Iterator[None]:
    """Leave a note in the folder of what a run died of, for whoever looks at it later."""
    try:
        yield
    except FedbanditError as error:
        folder.fail(error)
        raise


@contextmanager
def _stop_requests() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set; a second one interrupts at once. Only the main thread gets signals."""
    requested = threading.Event()

    def handle(number: int) -> None:
        if requested.is_set():
            raise KeyboardInterrupt
        requested.set()

    with handling(handle):
        yield requested
