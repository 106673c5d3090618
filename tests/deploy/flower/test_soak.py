"""A short soak: real processes killed at random, and every event and reward accounted for."""

import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[3] / "scripts" / "soak.py"


@pytest.mark.slow
def test_nothing_is_lost_and_nothing_is_doubled():
    few = [
        "--devices",
        "4",
        "--minutes",
        "0.5",
        "--pause",
        "0.2",
        "--kill-every",
        "2",
        "--kill-server-every",
        "10",
    ]
    command = [sys.executable, str(SOAK), *few]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    said = {line[:21].strip(): line[21:] for line in done.stdout.splitlines()}
    assert int(said["events made"].split()[0]) > 20
    assert int(said["rounds done"]) > 2
    assert done.stdout.count("yes  ") == 4
