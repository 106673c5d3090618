"""Telling a person how far a long job is: a bar with time left on a terminal, plain lines when piped.

Knows nothing of what the job does; `SILENT` is for library calls and tests.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

Advance = Callable[[float], None]
"""Call with how much was done since the last call."""
_LINE_EVERY = 10.0  # seconds between plain lines
_BAR_EVERY = 0.1  # seconds between updates of a bar


class Progress:
    """Reports tasks one after the other to a stream; without a stream, silent."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def say(self, text: str) -> None:
        """One plain line."""
        if self._stream is not None:
            print(text, file=self._stream, flush=True)

    @contextmanager
    def task(self, what: str, total: float | None = None) -> Iterator[Advance]:
        """Report one task; `total` is in the units given to the yielded `advance`."""
        if self._stream is None:
            yield lambda amount: None
        elif self._stream.isatty():
            with _bar(what, total, self._stream) as advance:
                yield advance
        else:
            with _lines(what, total, self.say) as advance:
                yield advance


SILENT = Progress(None)


def to_stderr() -> Progress:
    """What the command line uses: results go to stdout, progress does not."""
    return Progress(sys.stderr)


@contextmanager
def _bar(what: str, total: float | None, stream: TextIO) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with Bars(*columns, *times, console=Console(file=stream)) as bars:  # Console heeds NO_COLOR
        task = bars.add_task(what, total=total)
        pending, last = 0.0, time.monotonic()

        def advance(amount: float) -> None:
            nonlocal pending, last
            pending += amount
            if time.monotonic() - last >= _BAR_EVERY:
                bars.advance(task, pending)
                pending, last = 0.0, time.monotonic()

        yield advance
        bars.update(task, completed=total if total is not None else bars.tasks[0].completed + pending)


@contextmanager
def _lines(what: str, total: float | None, say: Callable[[str], None]) -> Iterator[Advance]:
    start = last = time.monotonic()
    done = 0.0

    def advance(amount: float) -> None:
        nonlocal done, last
        done += amount
        now = time.monotonic()
        if now - last >= _LINE_EVERY:
            last = now
            if total:
                left = (now - start) * max(total - done, 0) / done if done else float("inf")
                say(f"{what}: {min(done / total, 1):.0%}, {_duration(left)} left")
            else:
                say(f"{what}: {_duration(now - start)} so far")

    say(f"{what} ...")
    yield advance
    say(f"{what}: done in {_duration(time.monotonic() - start)}")


def _duration(seconds: float) -> str:
    if seconds == float("inf"):
        return "unknown time"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
