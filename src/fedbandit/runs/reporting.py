"""What a run tells others while it works: a line for a person, metrics for a tracker."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fedbandit.config import Config
from fedbandit.core.errors import ConfigError, needing
from fedbandit.core.parts import construct, flatten, resolve
from fedbandit.core.progress import Advance, to_stderr


class Progress(Protocol):
    """Receives the metrics of every round, and shows them."""

    def update(self, metrics: dict[str, Any]) -> None: ...


# What the rounds are called, how many there are, and how many of them were run earlier.
ShowProgress = Callable[[str, int, int], AbstractContextManager[Progress]]


@contextmanager
def show_progress(name: str, rounds: int, done: int) -> Iterator[Progress]:
    """Show rounds on stderr; `name` is what one is called, `done` of the `rounds` were run before."""
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
    advance: Advance
    rounds: int
    done: int

    def update(self, metrics: dict[str, Any]) -> None:
        number = metrics["round"]
        self.advance(number - self.done, f"{number}/{self.rounds}  {figures(metrics)}")
        self.done = number


class Tracker(Protocol):
    """Made with the run's folder and configuration, updated after every round, and closed at the end."""

    def update(self, metrics: dict[str, Any]) -> None:
        """One round's metrics, as in `metrics.jsonl`."""
        ...

    def close(self) -> None: ...


class TensorBoard:
    """Scalars of every round and the configuration as text, below `tensorboard` in the run's folder."""

    def __init__(self, folder: Path, config: Config) -> None:
        with needing("--tracker tensorboard"):
            from torch.utils.tensorboard.writer import SummaryWriter
        self._writer = SummaryWriter(str(folder / "tensorboard"))
        self._writer.add_text("config", f"```\n{config.to_toml()}```")

    def update(self, metrics: dict[str, Any]) -> None:
        for name, value in flatten(metrics).items():
            if isinstance(value, int | float) and name != "round":
                self._writer.add_scalar(name.replace(".", "/"), value, metrics["round"])

    def close(self) -> None:
        self._writer.close()


BUILT_IN = {"tensorboard": TensorBoard}


def tracker_named(name: str) -> Callable[[Path, Config], Tracker]:
    """What makes trackers of that name: a built-in one, or `my_module:MyTracker`."""
    make = resolve("--tracker", name, BUILT_IN)

    def made(folder: Path, config: Config) -> Tracker:
        tracker: Tracker = construct("--tracker", make, {}, folder, config)
        for method in ("update", "close"):
            if not callable(getattr(tracker, method, None)):
                raise ConfigError(f"--tracker: {name} has no method {method}")
        return tracker

    return made
