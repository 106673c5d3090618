"""What a run tells a person while it works: the number of the round and what it earned."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

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
