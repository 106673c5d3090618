"""Progress: a bar on a terminal, plain lines otherwise."""

import io

import pytest

from fedbandit.core import progress
from fedbandit.core.progress import SILENT, Progress


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
    work(Progress(stream))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "Writing examples ..."
    assert "Writing examples: 50%, 0 s left" in lines
    assert lines[-1] == "Writing examples: done in 0 s"
    assert "\x1b" not in stream.getvalue()
    work(Progress(stream), total=None)
    assert "Writing examples: 0 s so far" in stream.getvalue()


@pytest.mark.parametrize("colour", [True, False])
def test_a_terminal_gets_a_bar(monkeypatch, colour):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if not colour:
        monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    work(Progress(stream))
    assert "Writing examples" in stream.getvalue()
    assert "100%" in stream.getvalue()
    assert ("\x1b[38;" in stream.getvalue() or "\x1b[3" in stream.getvalue()) == colour


def test_silence_is_silent(capsys):
    work(SILENT)
    SILENT.say("nothing")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (75, "1 min 15 s"), (3700, "1 h 01 min"), (float("inf"), "unknown time")]
)
def test_durations_read_well(seconds, text):
    assert progress._duration(seconds) == text
