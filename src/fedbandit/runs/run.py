"""Running a configuration into a run folder, so that it can be interrupted at any moment and
resumed.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbandit.assembly.experiment import Experiment, build_experiment
from fedbandit.assembly.parts import make_engine
from fedbandit.config import Config, EnvironmentConfig
from fedbandit.core.errors import DataError, Diverged, Interrupted
from fedbandit.core.process import Stopwatch, handling
from fedbandit.data import FederatedDataset, open_dataset
from fedbandit.federated.round import Engine, published
from fedbandit.federated.state import State
from fedbandit.privacy.reporting import summary as privacy_summary
from fedbandit.runs.folder import RunFolder, read_metrics
from fedbandit.runs.reporting import (
    ShowProgress,
    Tracker,
    show_progress,
    tracker_named,
)
from fedbandit.simulation import Callback, Pretraining, Simulation, checked, simulate

if TYPE_CHECKING:  # imported by those who look at results; a run only writes them
    from fedbandit.results import Results

Follow = Callable[[dict[str, Any]], Any]  # is told the metrics of every round
CHECKPOINT_SECONDS = 20.0  # at most this much work is repeated after a crash


@dataclass(frozen=True)
class RunOutcome:
    """The end of a call of `execute`: rounds, summary, and where its time went."""

    summary: dict[str, Any] | None  # None: stopped or paused before the last round
    rounds: int
    profile: dict[str, float]  # seconds by name, of this call
    finished_before: bool = False  # an earlier call had finished it, and nothing was run now
    pretraining: int | None = (
        None  # the rounds of pre-training that were run, if it stopped among them
    )


def run(
    config: Config,
    out: Path | str,
    *,
    dataset: FederatedDataset | None = None,
    engine: Engine | None = None,
    callbacks: Iterable[Callback] = (),
    progress: ShowProgress | bool = False,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    tracker: str | Callable[[Path, Config], Tracker] | None = None,
    until: int | None = None,
) -> "Results":
    """Run a configuration into a folder and return its `Results`; called again, it resumes where it
    stopped.

    A finished run is only read, or with more rounds extended (not a private one). Ctrl-C stops
    after the current round and raises `Interrupted`; with `until` the run pauses after that round.
    Callbacks are as in `simulate`, and are called again for rounds that are repeated after a crash;
    with `privacy.noise = "system"` each round is kept before they see it, none is repeated, and
    they and the tracker are told what may be published; the exact figures are in `private/`.
    `progress=True` shows the progress on standard error. `tracker` is "tensorboard", "mlflow",
    "wandb", "my_module:MyTracker", or makes one from a folder and a `Config`.

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
    from fedbandit.results import Results

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
    tracker: str | Callable[[Path, Config], Tracker] | None = None,
    until: int | None = None,
) -> RunOutcome:
    """Run the configuration into the folder, or resume it. Ctrl-C stops after the current round.

    With `until` the run pauses after that round, for a later call to resume.
    """
    callbacks = checked(callbacks)
    tracker = tracker_named(tracker) if isinstance(tracker, str) else tracker
    dataset = dataset or open_dataset(config.data.source)
    experiment = build_experiment(
        config, dataset
    )  # a wrong configuration is refused before the folder is touched
    with ExitStack() as stack:
        folder = stack.enter_context(RunFolder(out, experiment))
        if (ended := _ended(folder, experiment.rounds, until)) is not None:
            return ended
        stack.push(folder.note_failure)
        if experiment.secret is not None:
            experiment = experiment.with_secret(folder.secret())
        stopping = stack.enter_context(stop_requests())
        engine = engine or stack.enter_context(closing(make_engine(config)))
        watch = Stopwatch()
        state, memory = folder.resume(experiment.bandit.work.algorithm)
        if memory is not None:
            stack.callback(memory.close)
        if state is not None and (wrong := _misfit(experiment, state)):
            path = out / "checkpoints" / f"round-{state.round:06d}.safetensors"
            raise DataError(f"{path}: does not fit the run: {wrong}; use another folder")
        if state is None and experiment.pretraining is not None:
            pretraining = Pretraining(experiment, engine, checkpoint_seconds)
            with watch("pretrain"):
                _pretrain(pretraining, progress, stopping)
            if pretraining.state.round < pretraining.rounds:
                return RunOutcome(None, 0, watch.take(), pretraining=pretraining.state.round)
            state = experiment.bandit.start(pretraining.state.weights)
        simulation = stack.enter_context(
            simulate(
                config,
                experiment=experiment,
                engine=engine,
                state=state,
                memory=memory,
                watch=watch,
                callbacks=callbacks,
            )
        )
        followers: list[Follow] = []
        if progress is not None:
            shown = progress("round", experiment.rounds, simulation.state.round)
            followers.append(stack.enter_context(shown).update)
        if tracker is not None:
            update = stack.enter_context(closing(tracker(out, config))).update
            secret = experiment.secret is not None
            followers.append((lambda metrics: update(published(metrics))) if secret else update)
        return _run_rounds(
            simulation,
            folder,
            followers,
            checkpoint_seconds,
            lambda number: stopping.is_set() or number == until,
        )


def _misfit(experiment: Experiment, state: State) -> str | None:
    """The part of a state that cannot have come from this run, in words; None if all can."""
    fresh = experiment.bandit.start(experiment.initial_weights())
    if state.weights.shape != fresh.weights.shape:
        return f"the model has {len(fresh.weights)} weights, the state {len(state.weights)}"
    for name, value in fresh.server_state.items():
        if name not in state.server_state:
            return f"{name} is missing"
        if value.size > 1 and state.server_state[name].shape != value.shape:
            return f"{name} has shape {state.server_state[name].shape}, not {value.shape}"
    return None


def _ended(folder: RunFolder, rounds: int, until: int | None) -> RunOutcome | None:
    """The outcome of a run that is finished already, or has come as far as it should."""
    if (summary := folder.summary(rounds)) is not None:
        return RunOutcome(summary, summary["rounds"], {}, finished_before=True)
    failure = folder.failure or {}
    if failure.get("kind") == Diverged.__name__:
        raise Diverged(
            str(failure.get("error", "diverged"))
        )  # it would again: a run is a function of its configuration
    if until is not None and until < rounds and folder.rounds_recorded() >= until:
        return RunOutcome(None, until, {})
    return None


def _pretrain(
    pretraining: Pretraining, progress: ShowProgress | None, stopping: threading.Event
) -> None:
    """Run the missing rounds of pre-training, until the end or a request to stop."""
    done, rounds = pretraining.state.round, pretraining.rounds
    if progress is None or done == rounds:
        pretraining.run(stopping=stopping)
        return
    with progress("pre-training round", rounds, done) as shown:
        pretraining.run(shown.update, stopping)


def _run_rounds(
    simulation: Simulation,
    folder: RunFolder,
    followers: Sequence[Follow],
    checkpoint_seconds: float,
    pauses_after: Callable[[int], bool],
) -> RunOutcome:
    """Run the remaining rounds into the folder, and pass the metrics of each to the followers.

    A round that draws other noise when it is repeated is kept before callbacks and followers are
    told of it: repeated after a crash, it would show them the same cohort twice.
    """
    config, watch, profile = simulation.experiment.config, simulation.watch, Stopwatch()
    kept_at, kept_round = time.monotonic(), 0
    started = time.perf_counter()

    once = simulation.experiment.secret is not None

    def checkpoint() -> None:
        nonlocal kept_at, kept_round
        with watch("checkpoint"):
            folder.checkpoint(simulation.state, simulation.memory)
        kept_at, kept_round = time.monotonic(), simulation.state.round

    def keep(metrics: dict[str, Any]) -> None:
        nonlocal started
        timings = watch.take()
        profile.add(timings)
        now = time.perf_counter()
        folder.record(metrics, {"round": metrics["round"], "seconds": now - started, **timings})
        started = now
        if once:
            checkpoint()

    simulation.keep = keep
    last: dict[str, Any] = {}
    for last in simulation:
        for follow in followers:
            follow(last)
        pausing = pauses_after(last["round"])
        since = time.monotonic() - kept_at
        deployed = last["round"] % config.deploy_every == 0
        # Deployments are kept sooner, unless the last checkpoint is very recent.
        due = since >= (checkpoint_seconds / 10 if deployed else checkpoint_seconds)
        if not once and (pausing or due):
            checkpoint()
        if pausing and last["round"] < simulation.experiment.rounds:
            return RunOutcome(None, last["round"], dict(profile.seconds))
    if kept_round != simulation.state.round:
        checkpoint()
    profile.add(watch.take())
    summary = _summary(simulation, folder, last or read_metrics(folder.path)[-1])
    folder.finish(summary)
    return RunOutcome(summary, summary["rounds"], dict(profile.seconds))


def _summary(simulation: Simulation, folder: RunFolder, last: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of `summary.json`."""
    config, state = simulation.experiment.config, simulation.state
    return {
        "running_reward": state.running_reward,
        "rounds": state.round,
        "seconds_per_round": folder.seconds / state.round,
        "scenario": config.scenario,
        **_environment(simulation.experiment),
        "policy": config.policy.model_dump(),
        "seed": config.seed,
        "data": simulation.experiment.dataset.header.name,
        "weights": simulation.experiment.layout.size,
        **{key: value for key, value in last.items() if key.startswith("test_")},
        **_personal(simulation),
        "privacy": privacy_summary(simulation.experiment.privacy, state.round),
    }


def _personal(simulation: Simulation) -> dict[str, Any]:
    """Who gained by weights of their own, where the algorithm has `who_gained(memories)`."""
    bandit, memory = simulation.experiment.bandit, simulation.memory
    tell = getattr(bandit.work.algorithm, "who_gained", None)
    if tell is None or memory is None:
        return {}
    kept = memory.read(bandit.cohorts.pool, simulation.state.round + 1)
    return {"personal": tell(kept.values())}


def _environment(experiment: Experiment) -> dict[str, Any]:
    """The world of a run where it is not the scenario's tables, with what it says of itself."""
    chosen = experiment.config.environment
    if chosen == EnvironmentConfig():
        return {}
    note = getattr(experiment.bandit.scenario.stages[0].environment, "note", None)
    return {"environment": {**chosen.model_dump(), **({"note": note} if note else {})}}


@contextmanager
def stop_requests(
    workers: Callable[[], Iterable[int | None]] | None = None,
) -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set; only the main thread gets signals.

    `workers` are processes, which are sent SIGTERM and stop after their round. Without any, a
    second signal interrupts immediately; telling workers twice would cut their round short.
    """
    requested = threading.Event()

    def handle(number: int) -> None:
        if requested.is_set():
            if workers is None:
                raise KeyboardInterrupt
            return
        requested.set()
        for worker in workers() if workers is not None else ():
            if worker is not None:
                with suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGTERM)

    with handling(handle):
        yield requested
