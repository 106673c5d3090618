"""Every compiled function at work with bounds checks: none reads or writes outside its arrays."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.slow
def test_no_kernel_leaves_its_arrays(tmp_path):
    environment = {
        **os.environ,
        "NUMBA_BOUNDSCHECK": "1",
        "NUMBA_CACHE_DIR": str(
            tmp_path / "numba"
        ),  # what was compiled without checks must not be found
        "FEDBANDIT_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join(
            [*(place for place in sys.path if place), str(TESTS / "data")]
        ),
    }
    command = [sys.executable, str(TESTS / "helpers" / "bounds_checked.py"), str(tmp_path / "work")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    types = json.loads(done.stdout)
    assert len(types) > 20
    assert [name for name, number in types.items() if not number] == []
