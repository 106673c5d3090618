"""The examples that a reader starts from are run as they stand."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.slow
def test_the_study_runs_and_can_be_run_again(tmp_path):
    """A whole study in about twenty lines: two policies, two seeds, a table, a picture, an off-policy estimate."""
    code = [
        line
        for line in (EXAMPLES / "study.py").read_text(encoding="utf-8").splitlines()
        if line.strip() and not line.startswith("#")
    ]
    assert len(code) <= 25
    said = []
    for _ in range(2):  # the second time its runs are there already
        ended = subprocess.run(
            [sys.executable, str(EXAMPLES / "study.py")],
            cwd=tmp_path,
            env={**os.environ, "PYTHONWARNINGS": "error"},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr[-2000:]
        said.append(ended.stdout)
    assert said[0] == said[1]
    for policy in ("softmax", "greedy"):
        assert f"\n{policy} " in f"\n{said[0]}"
    assert "events of 3200 clients" in said[0]
    assert (tmp_path / "study.png").read_bytes().startswith(b"\x89PNG")
