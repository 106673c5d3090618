"""A program ends with whoever started it, with all that it has started; and a restart finds what is left."""

import os
import signal
import subprocess
import sys
import time

import pytest
from ending_processes import lives

from fedbandit.core.errors import ConfigError
from fedbandit.deploy.flower.processes import (
    MARK,
    alone,
    end_leftovers,
    ended_by_signals,
    marked,
    start,
    stop,
)

DEAF = (
    "import signal, time; [signal.signal(s, signal.SIG_IGN) for s in (1, 2, 15)]; time.sleep(600)"
)
PROGRAM = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {DEAF!r}], start_new_session=True)
print("WARNING :   a first line", flush=True)
print("\\x1b[92mINFO \\x1b[0m:      a second line", flush=True)
time.sleep(600)
"""
SUPERVISOR = f"""
import sys, time
from pathlib import Path
from fedbandit.deploy.flower.processes import start
start(["python", "-c", {PROGRAM!r}], Path(sys.argv[1]), Path(sys.argv[1]) / "log")
time.sleep(600)
"""
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs signals")


def wait_until(holds, what, seconds=60):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def all_there(home):
    """The guard, the program and the child of the program."""
    wait_until(lambda: len(marked(home)) == 3, "three processes")
    return marked(home)


@pytest.fixture
def home(tmp_path):
    yield tmp_path / "home"
    for process in marked(tmp_path / "home"):
        process.kill()


def test_a_child_in_a_session_of_its_own_is_ended_too(home):
    program = start(["python", "-c", PROGRAM], home, home / "log")
    there = all_there(home)
    stop(program, home)
    assert program.returncode is not None
    assert not any(lives(process) for process in there)
    assert marked(home) == []


def test_what_a_program_says_is_in_the_log_with_its_time(home):
    program = start(["python", "-c", PROGRAM], home, home / "log")
    wait_until(
        lambda: (home / "log").exists() and (home / "log").read_text().count("\n") == 2, "two lines"
    )
    stop(program, home)
    first, second = (home / "log").read_text().splitlines()
    assert '"level": "warning", "message": "a first line"' in first
    assert '"level": "info", "message": "a second line"' in second
    assert first.startswith('{"time": "20')


def test_a_program_does_not_outlive_a_supervisor_that_is_killed(home):
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISOR, str(home)])
    try:
        all_there(home)
    finally:
        supervisor.kill()
        supervisor.wait()
    wait_until(lambda: marked(home) == [], "an end of all processes")


def test_a_program_whose_helper_was_killed_is_ended(home):
    """A SuperNode whose `flower-superexec` is gone stays in reach, and never answers again."""
    helper = [sys.executable, "-c", "import time; time.sleep(600)", "bin/flower-superexec"]
    text = f"import subprocess, time; subprocess.Popen({helper!r}); time.sleep(600)"
    program = start(["python", "-c", text], home, home / "log")
    there = all_there(home)
    time.sleep(5.0)  # long enough for the guard to know it
    assert program.poll() is None
    next(process for process in there if "bin/flower-superexec" in process.cmdline()[-1:]).kill()
    wait_until(lambda: program.poll() is not None, "an end of the program")
    assert marked(home) == []
    said = (home / "log").read_text()
    assert "flower-superexec has ended, and without it no app would run" in said


def test_a_restart_ends_what_is_left_and_nothing_else(home):
    """Guard and supervisor are killed together, and the program is frozen: nobody is there to end it."""
    elsewhere = {**os.environ, MARK: str(home) + "-2"}
    foreign = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], env=elsewhere
    )
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISOR, str(home)])
    try:
        there = all_there(home)
        guard = next(process for process in there if "processes.py" in " ".join(process.cmdline()))
        for process in there:
            if process != guard:
                process.suspend()
        supervisor.kill()
        guard.kill()
        supervisor.wait()
        assert len(marked(home)) >= 2
        said = []
        end_leftovers(home, said.append, patience=0.5)
        assert marked(home) == []
        assert "left behind" in said[0]
        assert foreign.poll() is None
        end_leftovers(home, said.append)
        assert len(said) == 1
    finally:
        supervisor.kill()
        supervisor.wait()
        foreign.kill()
        foreign.wait()


def test_a_folder_has_one_supervisor_at_a_time(tmp_path):
    home = tmp_path / "state" / "flower"
    with alone(home, "deploy server"):
        second = alone(home, "deploy server")
        with pytest.raises(
            ConfigError, match="state: another `deploy server` is running for this folder"
        ):
            second.__enter__()
    with alone(home, "deploy server"):
        pass


def terminated(cleaned):
    with ended_by_signals():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        finally:
            cleaned.append(True)


def test_sigterm_ends_a_command_as_ctrl_c_does():
    cleaned = []
    with pytest.raises(SystemExit) as ended:
        terminated(cleaned)
    assert (ended.value.code, cleaned) == (143, [True])
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
