import json
import os
from unittest.mock import ANY

import pytest

from fedbandit.core.files import read_json, read_lines, to_json, write_atomically, write_json


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "value.json"
    write_json(path, {"old": 1})

    def half(file):
        file.write(b'{"ne')
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, half)
    assert read_json(path) == {"old": 1}
    assert os.listdir(tmp_path) == ["value.json"]


def test_a_new_name_is_on_disk_before_the_write_returns(tmp_path, monkeypatch):
    """The content first, then the name, then the folder that holds the name."""
    done = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda fd: (done.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd))
    )
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append("named"), replace(a, b)))
    write_json(tmp_path / "value.json", {})
    assert done == [ANY, "named", str(tmp_path)]
    assert done[0].endswith(".tmp")


def test_json_holds_no_number_that_json_does_not_know():
    value = {"a": float("nan"), "b": [float("inf"), 1.5], "c": (float("-inf"),), "NaN": "NaN"}
    assert json.loads(to_json(value)) == {"a": None, "b": [None, 1.5], "c": [None], "NaN": "NaN"}


@pytest.mark.parametrize("content", [None, b"", b'{"half', b"[1]", b"\xff"])
def test_what_cannot_be_read_as_an_object_is_none(tmp_path, content):
    path = tmp_path / "value.json"
    if content is not None:
        path.write_bytes(content)
    assert read_json(path) is None


def test_a_line_that_is_being_written_is_left_out(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"round": 1}\n{"round": 2}\n{"rou')
    assert read_lines(path) == [{"round": 1}, {"round": 2}]
