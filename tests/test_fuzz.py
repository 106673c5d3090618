"""A short form of `make fuzz`, and that it would notice what it looks for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


def run(*command, tmp_path):
    given = [sys.executable, *map(str, command)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    return subprocess.run(given, capture_output=True, text=True, timeout=600, env=environment)


def test_some_damages_of_every_kind(tmp_path):
    done = run(SCRIPTS / "fuzz.py", "--count", 108, "--seed", 1, "--workers", 1, tmp_path=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith(", 0 failures")
    for kind in (
        "data set, sparse",
        "checkpoint, fedavg",
        "stopped run beside a sibling, scaffold",
        "folder of sweep, sweep",
        "device log",
        "server's message, train",
        "device's report",
    ):
        assert f"\n{kind} " in done.stdout


@pytest.mark.slow
def test_some_special_files_in_the_folders_of_runs_and_studies(tmp_path):
    command = ("--special", "--count", 60, "--seed", 2, "--workers", 1)
    done = run(SCRIPTS / "fuzz.py", *command, tmp_path=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith(", 0 failures")


WRONG = """
import os, signal, sys, time
sys.path.insert(0, sys.argv[1])
import fuzz
from fuzz_kinds import Kind
from fedbandit.core.errors import DataError

fuzz.LONGEST = 1.0
damaged = lambda folder: (folder / "file").read_bytes() != b"whole"

def does(what):
    return lambda folder: what() if damaged(folder) else 1

def refuses():
    raise DataError("damaged")

kinds = {
    "signal": Kind({"file": b"whole"}, does(lambda: os.kill(os.getpid(), signal.SIGSEGV))),
    "traceback": Kind({"file": b"whole"}, does(lambda: {}["missing"])),
    "hang": Kind({"file": b"whole"}, does(lambda: time.sleep(600))),
    "memory": Kind({"file": b"whole"}, does(lambda: bytes(2 * fuzz.MEMORY))),
    "another result": Kind({"file": b"whole"}, does(lambda: 2), checked=True),
    "not checked": Kind({"file": b"whole"}, does(lambda: 2)),
    "refused": Kind({"file": b"whole"}, does(refuses), checked=True),
}
cases = fuzz.random_cases(kinds, 2 * len(kinds), 0)
for name, ended in fuzz.fuzz(kinds, fuzz.undamaged(kinds), cases, 1, 300.0).items():
    print("ended", name, "as", *(f"{how} {number}" for how, number in ended.items()))
"""


def test_what_it_looks_for_is_noticed_and_the_rest_goes_on(tmp_path):
    done = run("-c", WRONG, SCRIPTS, tmp_path=tmp_path)
    assert done.returncode == 0, done.stderr
    ended = dict(
        line.removeprefix("ended ").split(" as ")
        for line in done.stdout.splitlines()
        if " as " in line
    )
    assert ended == {
        "signal": "signal 11 2",
        "traceback": "traceback 2",
        "hang": "hang 2",
        "memory": "traceback 2",
        "another result": "another result 2",
        "not checked": "ran 2",
        "refused": "refused 2",
    }
    assert "repeat: python scripts/fuzz.py --case 'signal' 0" in done.stdout
