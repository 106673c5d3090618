"""Ending a process ends all that it has started, also what has moved to a session of its own."""

import os
import subprocess
import sys
import time

import pytest

from fedbandit.deploy.flower.operate import stop

PARENT = """
import subprocess, sys, time
deaf = "import signal, time; [signal.signal(s, signal.SIG_IGN) for s in (2, 15)]; print(1, flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_child_in_a_session_of_its_own_is_ended_too():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, start_new_session=True)
    with parent.stdout:
        child = int(parent.stdout.readline())
    assert os.getpgid(child) == child
    stop(parent, patience=5)
    assert parent.returncode is not None
    deadline = time.monotonic() + 30
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(child)
