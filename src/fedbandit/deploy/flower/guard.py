"""Runs one of Flower's programs: its output goes to a log with times, and it never outlives who started it.

A script of its own, so that it is small and still there when the process that started it is killed. All that the
program starts carries a mark in its environment, so that nothing else is ever ended.
"""

import logging
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import IO

import psutil

from fedbandit.core.logs import rotating

MARK = "FEDBANDIT_PROCESSES_OF"  # in the environment of a program and of all that it starts: the folder it works for
PATIENCE = 8.0  # seconds that a program has to end by itself
_LOOK = 0.2  # seconds between two looks at program and parent
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_LEVEL = re.compile(r"^(?:\d\S*Z )?(DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL)\b[ :]*")
_ROUTINE = re.compile(
    r'uvicorn\.access\].*" 200$'
)  # a line for every poll of every node says nothing


def marked(folder: Path) -> list[psutil.Process]:
    """All processes that work for the folder, other than this one."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it has ended, or is somebody else's
            if process.pid != os.getpid() and process.environ().get(MARK) == str(folder):
                found.append(process)
    return found


def end_all(folder: Path, patience: float = PATIENCE) -> list[str]:
    """End whatever works for the folder, gently at first; what there was, in words."""
    there = marked(folder)
    names = [_name(process) for process in there]
    for process in there:
        with suppress(psutil.Error):
            process.terminate()
    psutil.wait_procs(there, timeout=patience)
    kill_all(folder)
    return names


def kill_all(folder: Path) -> None:
    """End whatever works for the folder, and what that starts meanwhile."""
    for _ in range(20):
        there = marked(folder)
        if not there:
            return
        for process in there:
            with suppress(psutil.Error):
                process.kill()  # works on frozen processes, too
        psutil.wait_procs(there, timeout=1.0)


def _name(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return f"{process.name()} ({process.pid})"
    return str(process.pid)


def guard(parent: int, log: Path, command: list[str]) -> int:
    """Run the command until it ends, it is to end, or the parent is gone; its exit code."""
    folder, over = Path(os.environ[MARK]), threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        over.set()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, end)
    program = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert program.stdout is not None
    writing = threading.Thread(target=_write_log, args=(program.stdout, log), daemon=True)
    writing.start()
    while program.poll() is None and os.getppid() == parent and not over.wait(_LOOK):
        pass
    if program.poll() is None:
        program.terminate()
        with suppress(subprocess.TimeoutExpired):
            program.wait(PATIENCE)
    kill_all(folder)
    code = program.wait()
    writing.join(1.0)
    return code if code >= 0 else 128 - code


def _write_log(lines: IO[bytes], path: Path) -> None:
    logger = logging.getLogger("fedbandit.program")
    logger.propagate = False
    logger.setLevel(logging.DEBUG)
    logger.addHandler(rotating(path))
    for line in lines:
        text = _COLOURS.sub("", line.decode(errors="replace")).rstrip()
        level = _LEVEL.match(text)
        text = text[level.end() :] if level else text
        if text and not _ROUTINE.search(text):
            logger.log(
                logging.getLevelNamesMapping()[level[1]] if level else logging.INFO, "%s", text
            )


if __name__ == "__main__":
    sys.exit(guard(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
