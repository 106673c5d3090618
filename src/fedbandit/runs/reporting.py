"""Reports of runs while they work: a line for a person, metrics for a tracker.

A tracker receives every round's metrics: TensorBoard, MLflow, Weights & Biases, or a class of the
user's own by its import path.
"""

import json
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fedbandit.config import Config
from fedbandit.core.errors import ConfigError, FedbanditError, needing
from fedbandit.core.files import read_json, write_json
from fedbandit.core.identity import last_rounds
from fedbandit.core.parts import construct, counted, flatten, resolve
from fedbandit.core.progress import Advance, ProgressReporter, to_stderr

_LOOK_SECONDS = 1.0  # between two looks at runs in other processes


class RoundFollower(Protocol):
    """Receives the metrics of every round, as in `metrics.jsonl`, and shows them."""

    def update(self, metrics: dict[str, Any]) -> None: ...


# What the rounds are called, how many there are, and how many of them were run earlier.
ShowProgress = Callable[[str, int, int], AbstractContextManager[RoundFollower]]


@contextmanager
def show_progress(name: str, rounds: int, done: int) -> Iterator[RoundFollower]:
    """Show rounds on stderr; `name` is what one is called, `done` of the `rounds` were run
    before.
    """
    reporter = to_stderr()
    if done:
        reporter.say(f"resuming after {name} {done}")
    with reporter.task(name, rounds, unit="rounds", done=done) as advance:
        yield _Rounds(advance, rounds, done)


def figures(metrics: dict[str, Any]) -> str:
    """A round in a few words."""

    def number(key: str) -> str:
        return "-" if metrics.get(key) is None else f"{metrics[key]:.3f}"

    text = f"reward {number('reward')}  running {number('running_reward')}"
    return f"{text}  epsilon {number('epsilon')}" if "epsilon" in metrics else text


@dataclass
class _Rounds:
    """Passes rounds on to a progress bar."""

    advance: Advance
    rounds: int
    done: int

    def update(self, metrics: dict[str, Any]) -> None:
        number = metrics["round"]
        self.advance(number - self.done, f"{number}/{self.rounds}  {figures(metrics)}")
        self.done = number


@contextmanager
def showing_runs(lengths: Mapping[Path, int], reporter: ProgressReporter) -> Iterator[None]:
    """Show how far many runs have come together, by folder and number of rounds, while others run
    them.

    It reads the last lines that the runs have written, so it is the same for processes here and on
    other machines.
    """
    runs = _Runs(dict.fromkeys(lengths, 0), lengths)
    runs.look()
    if reporter.stream is None or runs.done >= sum(lengths.values()):
        yield
        return
    ended = threading.Event()
    with reporter.task("runs", sum(lengths.values()), unit="rounds", done=runs.done) as advance:

        def follow() -> None:
            while not ended.wait(_LOOK_SECONDS):
                advance(runs.look(), runs.in_words())

        thread = threading.Thread(target=follow, daemon=True, name="showing-runs")
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            advance(runs.look(), runs.in_words())


@dataclass
class _Runs:
    """Rounds that each run has recorded, of those it is to have; one that failed has no more to
    come.
    """

    seen: dict[Path, int]
    lengths: Mapping[Path, int]

    @property
    def done(self) -> int:
        return sum(self.seen.values())

    def look(self) -> int:
        """Read those that were not complete; how many rounds there are more than before."""
        before = self.done
        for folder, length in self.lengths.items():
            if self.seen[folder] < length:
                self.seen[folder] = (
                    length if (folder / "error.json").exists() else min(_recorded(folder), length)
                )
        return self.done - before

    def in_words(self) -> str:
        """The runs that are complete, of all: `3/8`."""
        complete = sum(self.seen[folder] >= length for folder, length in self.lengths.items())
        return f"{complete}/{len(self.lengths)}"


def _recorded(folder: Path) -> int:
    """The number of the last round that a run has recorded; 0 where there is none that can
    be read.
    """
    try:
        lines = last_rounds(folder / "metrics.jsonl", enough=1 << 12)
        return int(json.loads(lines[-1])["round"]) if lines else 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0


class Tracker(RoundFollower, Protocol):
    """Made with the run's folder and configuration, updated after every round, and closed at the
    end.
    """

    def close(self) -> None: ...


def scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a round by the names that trackers know: parts of a nested metric behind a
    slash.
    """
    flat = {
        name.replace(".", "/"): value for name, value in flatten(metrics).items() if name != "round"
    }
    return {
        name: float(value)
        for name, value in flat.items()
        if type(value) in (int, float) and math.isfinite(value)
    }


def _kept_id(folder: Path, tracker: str, make: Callable[[], str]) -> tuple[str, bool]:
    """The id that a tracker knows this run by, and whether it is new; a resumed run goes on under
    its own.
    """
    kept = read_json(folder / "trackers.json") or {}
    known = kept.get(tracker)
    if isinstance(known, str):
        return known, False
    made = make()
    write_json(folder / "trackers.json", {**kept, tracker: made})
    return made, True


class TensorBoard:
    """Scalars of every round and the configuration as text, below `tensorboard` in the run's
    folder.
    """

    def __init__(self, folder: Path, config: Config) -> None:
        with needing("--tracker tensorboard"):
            import tensorboard  # noqa: F401 - whose extra brings torch, too
            from torch.utils.tensorboard.writer import SummaryWriter
        self._writer = SummaryWriter(str(folder / "tensorboard"))
        self._writer.add_text("config", f"```\n{config.to_toml()}```")

    def update(self, metrics: dict[str, Any]) -> None:
        """Write the numbers of a round."""
        for name, value in scalars(metrics).items():
            self._writer.add_scalar(name, value, metrics["round"])

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class MLflow:
    """A run of MLflow where `MLFLOW_TRACKING_URI` says, in the experiment `MLFLOW_EXPERIMENT_NAME`
    or "fedbandit".

    Settings are its parameters. A resumed or extended run goes on in the same run of MLflow.
    """

    def __init__(self, folder: Path, config: Config) -> None:
        with needing("--tracker mlflow"):
            import mlflow
        self._library, self._rounds, self._last = mlflow, config.rounds, 0
        try:
            self._client = mlflow.MlflowClient()
            self._id, new = _kept_id(folder, "mlflow", lambda: self._create(folder))
            if new:
                settings = flatten(config.model_dump(exclude_none=True)).items()
                said = [mlflow.entities.Param(key, str(value)) for key, value in settings]
                self._client.log_batch(self._id, params=said)
            else:
                self._client.update_run(self._id, status="RUNNING")
        except mlflow.exceptions.MlflowException as error:
            raise FedbanditError(f"--tracker mlflow: {str(error).splitlines()[0]}") from None

    def _create(self, folder: Path) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fedbandit")
        found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        return str(self._client.create_run(experiment, run_name=_name_of(folder)).info.run_id)

    def update(self, metrics: dict[str, Any]) -> None:
        """Log the numbers of a round, with the round as the step."""
        self._last, now = metrics["round"], int(time.time() * 1000)
        entities = self._library.entities
        values = [
            entities.Metric(name, value, now, self._last)
            for name, value in scalars(metrics).items()
        ]
        self._client.log_batch(self._id, metrics=values)

    def close(self) -> None:
        """Mark the run of MLflow as finished, or as killed if rounds are missing."""
        self._client.set_terminated(
            self._id, "FINISHED" if self._last >= self._rounds else "KILLED"
        )


class WeightsAndBiases:
    """A run of Weights & Biases, offline unless `WANDB_MODE` says otherwise, below `wandb` in the
    run's folder.

    `wandb sync FOLDER/wandb/offline-run-*` sends it. A resumed or extended run has the same id.
    """

    def __init__(self, folder: Path, config: Config) -> None:
        with needing("--tracker wandb"):
            import wandb
        known, _ = _kept_id(folder, "wandb", lambda: uuid.uuid4().hex[:12])
        mode: Any = os.environ.get("WANDB_MODE", "offline")  # wandb says which it knows
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "fedbandit"),
            mode=mode,
            dir=str(folder),
            id=known,
            resume="allow"
            if mode == "online"
            else None,  # offline, parts of one id are joined when they are sent
            name=_name_of(folder),
            config=config.model_dump(mode="json"),
            settings=wandb.Settings(silent=True, console="off"),
        )

    def update(self, metrics: dict[str, Any]) -> None:
        """Log the numbers of a round, with the round as the step."""
        self._run.log(scalars(metrics), step=metrics["round"])

    def close(self) -> None:
        """End the run and flush its files."""
        self._run.finish()


def _name_of(folder: Path) -> str:
    """A run's name for people: its folder and the one that holds it, as in `softmax/seed-0`."""
    return "/".join(folder.resolve().parts[-2:])


BUILT_IN = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WeightsAndBiases}


def tracker_named(name: str) -> Callable[[Path, Config], Tracker]:
    """A maker of trackers of that name: a built-in one, or `my_module:MyTracker`."""
    make = resolve("--tracker", name, BUILT_IN)

    def made(folder: Path, config: Config) -> Tracker:
        tracker: Tracker = construct("--tracker", make, {}, folder, config)
        for method in ("update", "close"):
            if not callable(getattr(tracker, method, None)):
                raise ConfigError(f"--tracker: {name} has no method {method}")
        return tracker

    return made


def no_model_acts(members: Mapping[str, Config]) -> str:
    """One line where runs end before anything they learn is deployed; empty where none does.

    Such runs all earn what their first model earns, whatever their rates: nothing is compared.
    """
    idle = {
        name: config
        for name, config in members.items()
        if config.training and config.rounds <= config.deploy_every
    }
    if not idle:
        return ""
    name, config = next(iter(idle.items()))
    who = name if len(idle) == 1 else f"{name} and {len(idle) - 1} more"
    return (
        f"warning: {who}: no model that was trained acts within {counted(config.rounds, 'round')}"
        f" (deploy_every = {config.deploy_every}); for a comparison, deploy earlier or run longer"
    )
