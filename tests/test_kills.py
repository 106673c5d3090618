"""A short form of `scripts/kills.py`: a study that was killed ends with the bytes of one that was not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "kills.py"


@pytest.mark.slow
def test_killed_studies_end_with_the_same_bytes_and_counting_resumes(tmp_path):
    results = tmp_path / "kills.json"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    for kills, study in ((2, "sweep"), (4, "bakeoff")):
        command = [sys.executable, SCRIPT, results, "--kills", str(kills), "--study", study]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
    histories = json.loads(results.read_text())["histories"]
    assert sum(sum(one["kills"].values()) for one in histories) >= 2
    assert not any(one["differ"] for one in histories)
