"""Taking turns in a folder, by its own lock or, where there is no `fcntl`, by SQLite's."""

import subprocess
import sys
import threading
import time

import pytest

from fedbandit.core import process as locks

PROCESS = """
import sys
from fedbandit.core import process as locks
if sys.argv[2] == "sqlite":
    locks.fcntl = None
from pathlib import Path
folder = Path(sys.argv[1])
for _ in range(100):
    with locks.alone_in(folder):
        count = int((folder / "count").read_text())
        (folder / "count").write_text(str(count + 1))
"""


@pytest.fixture(params=["flock", "sqlite"])
def way(request, monkeypatch):
    if request.param == "sqlite":
        monkeypatch.setattr(locks, "fcntl", None)
    return request.param


def test_processes_take_turns(tmp_path, way):
    (tmp_path / "count").write_text("0")
    running = [
        subprocess.Popen([sys.executable, "-c", PROCESS, str(tmp_path), way]) for _ in range(3)
    ]
    assert [process.wait(60) for process in running] == [0, 0, 0]
    assert (tmp_path / "count").read_text() == "300"


def test_threads_take_turns(tmp_path, way):
    inside, most = [], []

    def work() -> None:
        for _ in range(5):
            with locks.alone_in(tmp_path):
                inside.append(1)
                most.append(len(inside))
                time.sleep(0.001)
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(most), max(most)) == (20, 1)


def test_a_block_that_fails_lets_go(tmp_path, way):
    with pytest.raises(RuntimeError), locks.alone_in(tmp_path):
        raise RuntimeError
    with locks.alone_in(tmp_path):
        pass


def test_who_holds_it_too_long_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "fcntl", None)
    monkeypatch.setattr(locks, "_PATIENCE", 0.05)
    with (
        locks.alone_in(tmp_path),
        pytest.raises(TimeoutError, match="locked"),
        locks.alone_in(tmp_path),
    ):
        pass
