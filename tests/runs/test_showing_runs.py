"""Many runs together say how far they have come and how long the rest will take."""

import io
import json
import re
import threading

import pytest
from builders import random_text
from small_runs import small_config

from fedbandit.core import progress
from fedbandit.core.progress import ProgressReporter
from fedbandit.runs import local_runner, reporting
from fedbandit.runs.local_runner import Job, LocalRunner
from fedbandit.runs.reporting import showing_runs


@pytest.fixture(autouse=True)
def looks_when_it_ends(monkeypatch):
    """No look in between, so that what is said does not depend on the machine's speed."""
    monkeypatch.setattr(reporting, "_LOOK_SECONDS", 3600.0)


def record(folder, rounds):
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"round": number}) for number in range(1, rounds + 1)]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def test_rounds_of_all_runs_count(tmp_path):
    stream = io.StringIO()
    a, b, c = (tmp_path / name for name in "abc")
    record(a, 10)
    with showing_runs({a: 10, b: 10, c: 20}, ProgressReporter(stream)):
        record(b, 6)
        (c / "error.json").parent.mkdir()
        (c / "error.json").write_text("{}")  # it has no more to come
    first, last = stream.getvalue().splitlines()
    assert first == "runs 2/3  90%"
    assert re.fullmatch(r"runs 2/3  took \d+ s", last)


def test_looks_go_on_while_runs_do(tmp_path, monkeypatch):
    monkeypatch.setattr(reporting, "_LOOK_SECONDS", 0.001)
    monkeypatch.setattr(progress, "_LINE_EVERY", 0.0)  # a look before the record has its line, too
    looked, runs = threading.Event(), reporting._Runs

    class Watched(runs):
        def look(self):
            found = super().look()
            if self.seen[tmp_path / "a"] == 5:
                looked.set()
            return found

    monkeypatch.setattr(reporting, "_Runs", Watched)
    stream = io.StringIO()
    with showing_runs({tmp_path / "a": 10}, ProgressReporter(stream)):
        record(tmp_path / "a", 5)
        assert looked.wait(60)
    assert "50%" in stream.getvalue()


@pytest.mark.parametrize("lines", [b"", b"{torn", b"[]\n", b'{"round": "x"}\n'])
def test_what_cannot_be_read_is_no_progress_and_no_error(tmp_path, lines):
    (tmp_path / "metrics.jsonl").write_bytes(lines)
    stream = io.StringIO()
    with showing_runs({tmp_path: 4}, ProgressReporter(stream)):
        pass
    assert "0/1  0%" in stream.getvalue()


def test_a_runner_shows_pre_training_and_runs_and_nothing_where_all_is_done(tmp_path, monkeypatch):
    data = random_text()
    monkeypatch.setattr(local_runner, "dataset_of", lambda job: data)
    monkeypatch.setenv("FEDBANDIT_CACHE", str(tmp_path / "cache"))
    config = small_config(rounds=3, scenario="init", pretraining__rounds=2, pretraining__clients=6)
    jobs = [Job(config.with_values({"seed": seed}), tmp_path / f"seed-{seed}") for seed in range(2)]
    stream = io.StringIO()
    LocalRunner(1, ProgressReporter(stream)).run(jobs)
    said = stream.getvalue()
    assert re.search(r"^pre-training  50%$", said, re.MULTILINE)
    assert re.search(r"^runs 2/2  100%", said, re.MULTILINE)
    again = io.StringIO()
    LocalRunner(1, ProgressReporter(again)).run(jobs)
    assert again.getvalue() == ""
