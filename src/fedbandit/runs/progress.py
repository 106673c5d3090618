"""How a run looks while it works: a bar on a terminal, plain lines when piped."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any

from fedbandit.runs.run import Progress

_LINES = 20  # how many lines a piped run prints


@contextmanager
def show_progress(name: str, rounds: int, done: int) -> Iterator[Progress]:
    """A bar with reward and time left on a terminal, otherwise a line every now and then.

    `name` is what a round is called; `done` of the `rounds` were run earlier.
    """
    if done:
        print(f"resuming after {name} {done}", file=sys.stderr)
    if not sys.stderr.isatty():
        yield _Lines(name, rounds, done)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
    )
    with RichProgress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(f"{name}s", total=rounds, completed=done, figures="")
        yield _Bar(bar, task)


def figures(metrics: dict[str, Any]) -> str:
    """A round in a few words."""

    def number(key: str) -> str:
        return "-" if metrics.get(key) is None else f"{metrics[key]:.3f}"

    text = f"reward {number('reward')}  running {number('running_reward')}"
    return f"{text}  epsilon {number('epsilon')}" if "epsilon" in metrics else text


@dataclass(frozen=True)
class _Bar:
    bar: Any
    task: Any

    def update(self, metrics: dict[str, Any]) -> None:
        self.bar.update(self.task, completed=metrics["round"], figures=figures(metrics))


@dataclass
class _Lines:
    name: str
    rounds: int
    done: int
    file: IO[str] = field(default_factory=lambda: sys.stderr)
    started: float = field(default_factory=time.monotonic)

    def update(self, metrics: dict[str, Any]) -> None:
        number = metrics["round"]
        if number % max(1, self.rounds // _LINES) and number != self.rounds:
            return
        left = (time.monotonic() - self.started) / (number - self.done) * (self.rounds - number)
        minutes, seconds = divmod(round(left), 60)
        print(
            f"{self.name} {number}/{self.rounds}  {figures(metrics)}  {minutes}:{seconds:02d} left",
            file=self.file,
            flush=True,
        )
