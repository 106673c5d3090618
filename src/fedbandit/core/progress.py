"""Telling a person how far a long job is: a bar on a terminal, plain lines when piped, both with
rate and time left.

Knows nothing of what the job does; `SILENT` is for library calls and tests.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol, TextIO

_LINE_EVERY = 5.0  # seconds between plain lines, at least
_LINES = 20  # of a job whose length is known, about as many at most
_BAR_EVERY = 0.1  # seconds between updates of a bar


class Advance(Protocol):
    """Call with how much was done since the last call, and how things stand in a few words."""

    def __call__(self, amount: float, note: str = "") -> None: ...


@dataclass(frozen=True)
class ProgressReporter:
    """Reports tasks one after the other to a stream; without a stream, silent."""

    stream: TextIO | None

    def say(self, text: str) -> None:
        """One plain line."""
        if self.stream is not None:
            print(text, file=self.stream, flush=True)

    @contextmanager
    def task(
        self, what: str, total: float | None = None, *, unit: str = "examples", done: float = 0
    ) -> Iterator[Advance]:
        """Report one task. `total` and `done`, what was done earlier, are in units; the unit "B"
        stands for bytes.
        """
        if self.stream is None:
            yield lambda amount, note="": None
            return
        tally = _Tally(what, total, unit, done, done, time.monotonic())

        def advance(amount: float, note: str = "") -> None:
            tally.add(amount, note)
            show()

        with _bar(tally, self.stream) if self.stream.isatty() else _lines(tally, self.say) as show:
            yield advance


SILENT = ProgressReporter(None)


_quiet: ContextVar[bool] = ContextVar("quiet", default=False)


def to_stderr() -> ProgressReporter:
    """The reporter of the command line: results go to stdout, progress does not."""
    return SILENT if _quiet.get() else ProgressReporter(sys.stderr)


@contextmanager
def quietly(quiet: bool = True) -> Iterator[None]:
    """Within it `to_stderr` is silent, as `--quiet` asks for."""
    token = _quiet.set(quiet)
    try:
        yield
    finally:
        _quiet.reset(token)


@dataclass
class _Tally:
    """The progress of one task, and when it began."""

    what: str
    total: float | None
    unit: str
    earlier: float
    done: float
    started: float
    note: str = ""
    first: tuple[float, float] | None = (
        None  # done and seconds after the first step, which compiles and opens files
    )

    def seconds(self) -> float:
        return time.monotonic() - self.started

    def add(self, amount: float, note: str) -> None:
        self.done, self.note = self.done + amount, note
        if self.first is None and amount:
            self.first = self.done, self.seconds()

    def facts(self) -> list[str]:
        """Share, rate and time left, the last two from the second step on; without a total the
        amount and the rate.
        """
        if not self.total:
            rate = (self.done - self.earlier) / max(self.seconds(), 1e-9)
            return [self._amount(self.done), f"{self._amount(rate)}/s"]
        share = f"{min(self.done / self.total, 1):.0%}"
        if self.first is None or self.done <= self.first[0]:
            return [share]
        rate = (self.done - self.first[0]) / max(self.seconds() - self.first[1], 1e-9)
        return [
            share,
            f"{self._amount(rate)}/s",
            f"{_duration(max(self.total - self.done, 0) / rate)} left",
        ]

    def _amount(self, number: float) -> str:
        """A number with its unit; bytes in MB."""
        number, unit = (number / 1e6, "MB") if self.unit == "B" else (number, self.unit)
        return f"{number:,.{0 if number >= 10 else 1}f} {unit}"


@contextmanager
def _bar(tally: _Tally, stream: TextIO) -> Iterator[Callable[[], None]]:
    """A bar on a terminal, redrawn a few times a second."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[facts]}"))
    with Bars(*columns, console=Console(file=stream)) as bars:  # Console heeds NO_COLOR
        task = bars.add_task(tally.what, total=tally.total, facts="")
        last = -float("inf")

        def show(every: float = _BAR_EVERY) -> None:
            nonlocal last
            if tally.seconds() - last >= every:
                last = tally.seconds()
                bars.update(
                    task, completed=tally.done, facts="  ".join([*tally.facts(), tally.note])
                )

        yield show
        show(every=0)


@contextmanager
def _lines(tally: _Tally, say: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Plain lines, seldom enough for a log file."""
    last_seconds = last_done = -float(
        "inf"
    )  # the first call is told immediately: the job has begun

    def line(*facts: str) -> None:
        say("  ".join([f"{tally.what} {tally.note}".rstrip(), *facts]))

    def show() -> None:
        nonlocal last_seconds, last_done
        enough = tally.done - last_done >= (tally.total or 0) / _LINES
        if enough and tally.seconds() - last_seconds >= _LINE_EVERY:
            last_seconds, last_done = tally.seconds(), tally.done
            line(*tally.facts())

    yield show
    line(f"took {_duration(tally.seconds())}")


def _duration(seconds: float) -> str:
    """Seconds in words: 12 s, 3 min 05 s, 2 h 07 min."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours} h {minutes:02d} min"
        if hours
        else f"{minutes} min {rest:02d} s"
        if minutes
        else f"{rest} s"
    )
