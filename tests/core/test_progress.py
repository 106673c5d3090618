"""Progress: a bar on a terminal, plain lines otherwise; either with rate and time left."""

import io
import re

import pytest

from fedbandit.core import progress
from fedbandit.core.progress import SILENT, ProgressReporter


class Terminal(io.StringIO):
    def isatty(self):
        return True


def work(reporter, total=100):
    with reporter.task("Writing examples", total) as advance:
        for _ in range(100):
            advance(1)


def test_plain_lines_name_the_task_and_the_time_left(monkeypatch):
    monkeypatch.setattr(progress, "_LINE_EVERY", 0.0)
    stream = io.StringIO()
    work(ProgressReporter(stream))
    *lines, last = stream.getvalue().splitlines()
    assert lines[0] == "Writing examples  1%"
    found = [
        re.fullmatch(r"Writing examples  (\d+)%  [\d,]+ examples/s  0 s left", line)
        for line in lines[1:]
    ]
    assert [int(match[1]) for match in found] == list(range(6, 100, 5))
    assert last == "Writing examples  took 0 s"
    assert "\x1b" not in stream.getvalue()


def test_between_the_first_line_and_the_last_there_is_time():
    stream = io.StringIO()
    work(ProgressReporter(stream))
    assert [line.split("  ")[1] for line in stream.getvalue().splitlines()] == ["1%", "took 0 s"]


def test_without_a_total_lines_tell_how_much_was_done():
    stream = io.StringIO()
    with ProgressReporter(stream).task("Downloading", unit="B") as advance:
        advance(2.5e6)
    assert re.fullmatch(r"Downloading  2\.5 MB  [\d,.]+ MB/s", stream.getvalue().splitlines()[0])


def test_neither_what_was_done_before_nor_the_first_step_counts_for_the_rate(monkeypatch):
    """The first step compiles kernels and opens files: 100 times that would frighten anybody."""
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    stream = io.StringIO()
    with ProgressReporter(stream).task("round", 40, unit="rounds", done=30) as advance:
        now = 9.0
        advance(1, "31/40  reward 1")
        now = 15.0
        advance(3, "34/40  reward 1")
        now = 20.0
    assert stream.getvalue().splitlines() == [
        "round 31/40  reward 1  78%",
        "round 34/40  reward 1  85%  0.5 rounds/s  12 s left",
        "round 34/40  reward 1  took 20 s",
    ]


@pytest.mark.parametrize("colour", [True, False])
def test_a_terminal_gets_a_bar(monkeypatch, colour):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if not colour:
        monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    work(ProgressReporter(stream))
    assert "Writing examples" in stream.getvalue()
    assert "100%" in stream.getvalue()
    assert "examples/s  0 s left" in stream.getvalue()
    assert ("\x1b[38;" in stream.getvalue() or "\x1b[3" in stream.getvalue()) == colour


def test_silence_is_silent(capsys):
    work(SILENT)
    SILENT.say("nothing")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (75, "1 min 15 s"), (3700, "1 h 01 min")]
)
def test_durations_read_well(seconds, text):
    assert progress._duration(seconds) == text
