"""Playing a configuration into a run folder, so that it can be interrupted at any moment and picked up again."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fedbandit.building.experiment import build_experiment
from fedbandit.building.parts import make_engine
from fedbandit.config import Config
from fedbandit.core.errors import Diverged, FedbanditError, Interrupted
from fedbandit.core.signals import handling
from fedbandit.core.timing import Stopwatch
from fedbandit.data import FederatedDataset, open_dataset
from fedbandit.federated.round import Engine
from fedbandit.privacy.reporting import summary as privacy_summary
from fedbandit.results import Results
from fedbandit.runs.folder import RunFolder, read_metrics
from fedbandit.runs.trackers import Tracker
from fedbandit.simulation.callbacks import Callback, checked
from fedbandit.simulation.pretraining import Pretraining
from fedbandit.simulation.simulate import Simulation, simulate

CHECKPOINT_SECONDS = 20.0  # at most this much work is repeated after a crash


class Progress(Protocol):
    """Is told of every round; shows it to somebody."""

    def update(self, metrics: dict[str, Any]) -> None: ...


# What the rounds are called, how many there are, and how many of them have been played before.
ShowProgress = Callable[[str, int, int], AbstractContextManager[Progress]]


@dataclass(frozen=True)
class Outcome:
    """How a call of `execute` ended."""

    summary: dict[str, Any] | None  # None: stopped or paused before the last round
    rounds: int
    profile: dict[str, float]  # seconds by name, of this call
    pretraining: int | None = None  # the rounds of pre-training that were played, if it stopped among them


def run(
    config: Config,
    out: Path | str,
    *,
    dataset: FederatedDataset | None = None,
    engine: Engine | None = None,
    callbacks: Iterable[Callback] = (),
    progress: ShowProgress | bool = False,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    tracker: Callable[[Path, Config], Tracker] | None = None,
    until: int | None = None,
) -> Results:
    """Run a configuration into a folder and return its `Results`; called again, it resumes where it stopped.

    A finished run is only read. Ctrl-C stops after the current round and raises `Interrupted`; with `until` the run
    pauses after that round. Callbacks are as in `simulate`, and are called again for rounds that are repeated after a
    crash. `progress=True` shows the progress on standard error.

    Examples:
        >>> import tempfile
        >>> from fedbandit import preset
        >>> config = preset("so-scratch-softmax").with_values({"rounds": 2, "clients_per_round": 4})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     first = run(config, f"{folder}/softmax", until=1)
        ...     whole = run(config, f"{folder}/softmax")
        >>> first, whole
        (<Results: softmax, 1 round; 1 problem>, <Results: softmax, 2 rounds>)
        >>> bool(whole["reward"][0] == first["reward"][0])
        True
    """
    from fedbandit.runs.progress import show_progress

    out = Path(out)
    outcome = execute(
        config,
        out,
        dataset=dataset,
        engine=engine,
        callbacks=callbacks,
        progress=show_progress if progress is True else progress or None,
        checkpoint_seconds=checkpoint_seconds,
        tracker=tracker,
        until=until,
    )
    if outcome.summary is None and outcome.rounds != until:
        raise Interrupted(f"{out}: stopped before the last round; run it again to resume")
    return Results.open(out)


def execute(
    config: Config,
    out: Path,
    *,
    dataset: FederatedDataset | None = None,
    engine: Engine | None = None,
    callbacks: Iterable[Callback] = (),
    progress: ShowProgress | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    tracker: Callable[[Path, Config], Tracker] | None = None,
    until: int | None = None,
) -> Outcome:
    """Run the configuration into the folder, from wherever an earlier call stopped. Ctrl-C stops after the round.

    With `until` the run pauses after that round, for a later call to resume.
    """
    callbacks = checked(callbacks)
    dataset = dataset or open_dataset(config.data.source)
    experiment = build_experiment(config, dataset)  # what is wrong with it is said before the folder is touched
    with ExitStack() as stack:
        folder = stack.enter_context(RunFolder(out, config, dataset.header))
        if (ended := _ended(folder, experiment.rounds, until)) is not None:
            return ended
        stack.enter_context(_kept_failures(folder))
        stopping = stack.enter_context(_stop_requests())
        engine = engine or stack.enter_context(closing(make_engine(config)))
        watch = Stopwatch()
        state = folder.resume()
        if state is None and experiment.pretraining is not None:
            pretraining = Pretraining(experiment, engine, checkpoint_seconds)
            with watch("pretrain"):
                _pretrain(pretraining, progress, stopping)
            if pretraining.state.round < pretraining.rounds:
                return Outcome(None, 0, watch.take(), pretraining.state.round)
            state = experiment.bandit.start(pretraining.state.weights)
        simulation = stack.enter_context(
            simulate(config, dataset, engine=engine, state=state, watch=watch, callbacks=callbacks)
        )
        followers: list[Progress] = []
        if progress is not None:
            followers.append(stack.enter_context(progress("round", experiment.rounds, simulation.state.round)))
        if tracker is not None:
            followers.append(stack.enter_context(closing(tracker(out, config))))
        return _play(
            simulation, folder, followers, checkpoint_seconds, lambda number: stopping.is_set() or number == until
        )


def _ended(folder: RunFolder, rounds: int, until: int | None) -> Outcome | None:
    """How the run has ended already, if it has, or come as far as it should."""
    if (summary := folder.summary) is not None:
        return Outcome(summary, summary["rounds"], {})
    failure = folder.failure or {}
    if failure.get("kind") == Diverged.__name__:
        raise Diverged(
            str(failure.get("error", "diverged"))
        )  # it would again: a run is a function of its configuration
    if until is not None and until < rounds and folder.rounds_recorded() >= until:
        return Outcome(None, until, {})
    return None


def _pretrain(pretraining: Pretraining, progress: ShowProgress | None, stopping: threading.Event) -> None:
    """Play what is missing of the pre-training, or as much of it as there is before a request to stop."""
    with ExitStack() as stack:
        shown = None
        if progress is not None and pretraining.state.round < pretraining.rounds:
            shown = stack.enter_context(progress("pre-training round", pretraining.rounds, pretraining.state.round))
        for metrics in pretraining:
            if shown is not None:
                shown.update(metrics)
            if stopping.is_set():
                pretraining.keep()
                return


def _play(
    simulation: Simulation,
    folder: RunFolder,
    followers: Sequence[Progress],
    checkpoint_seconds: float,
    pauses_after: Callable[[int], bool],
) -> Outcome:
    """Play the remaining rounds into the folder, and tell the followers of each."""
    config, watch, profile = simulation.experiment.config, simulation.watch, Stopwatch()
    kept_at = time.monotonic()
    started = time.perf_counter()
    for metrics in simulation:
        timings = watch.take()
        profile.add(timings)
        now = time.perf_counter()
        folder.record(metrics, {"round": metrics["round"], "seconds": now - started, **timings})
        started = now
        for follower in followers:
            follower.update(metrics)
        pausing = pauses_after(metrics["round"])
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
