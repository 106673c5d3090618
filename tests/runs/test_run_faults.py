"""A file operation of a run fails, whichever it is: one line or none, nothing good is lost, and a resume is exact."""

import errno
import os

import pytest
from run_faults import swept


@pytest.mark.parametrize(
    ("every", "least"), [(45, 2), pytest.param(9, 9, marks=pytest.mark.slow)], ids=["few", "more"]
)
def test_some_operations_of_a_run_fail(tiny_text, tmp_path, every, least):
    found = swept(tiny_text, tmp_path, every, errno.ENOSPC)
    assert found["problems"] == []
    assert found["tried"] >= least


@pytest.mark.slow
@pytest.mark.skipif(
    "FEDBANDIT_FULL_SWEEP" not in os.environ, reason="set FEDBANDIT_FULL_SWEEP; it takes minutes"
)
def test_every_operation_of_a_run_fails(tiny_text, tmp_path):
    found = swept(tiny_text, tmp_path, 1, errno.ENOSPC, errno.EIO, errno.EMFILE)
    assert found["problems"] == []
    assert set(found["kinds"]) == {
        "flush",
        "fsync",
        "mkdir",
        "open",
        "replace",
        "truncate",
        "unlink",
        "write",
    }
    assert found["tried"] > found["operations"]
