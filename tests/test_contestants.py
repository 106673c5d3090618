"""The benchmark's processes: one that never answers ends with one line, and the others are measured."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def contestants(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks import contestants

    (tmp_path / "peers").mkdir()
    monkeypatch.setattr(contestants, "HERE", tmp_path)
    return contestants


def write(tmp_path, name, text):
    (tmp_path / "peers" / name).write_text(text, encoding="utf-8")


def test_a_contestant_that_never_answers_is_ended_and_named(contestants, monkeypatch, tmp_path):
    monkeypatch.setattr(contestants, "LONGEST_WAIT", 2.0)
    pid = tmp_path / "pid"
    write(
        tmp_path, "stuck.py",
        "import os, sys, subprocess, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(pid)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "time.sleep(600)\n",
    )  # fmt: skip
    write(
        tmp_path, "quick.py",
        "import sys\nprint('ready', flush=True)\n"
        "for _ in sys.stdin: print('{\"seconds\": 0.5}', flush=True)\n",
    )  # fmt: skip
    made = [contestants.Contestant(name, f"{name}.py", ()) for name in ("stuck", "quick")]
    found = contestants.take_turns(made, 2, tmp_path / "logs")
    log = tmp_path / "logs" / "stuck.log"
    assert found["stuck"].error == f"no answer within 2 s; see {log}"
    assert found["quick"].error is None
    assert found["quick"].wall == [0.5, 0.5]
    for process in pid.read_text().split():
        assert _ended(int(process))


def _ended(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"
