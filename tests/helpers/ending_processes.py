"""Processes that may end while they are looked at."""

import psutil

GONE = "gone"


def status(process: psutil.Process) -> str:
    """psutil's word for what the process does, or `GONE` once it has ended."""
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return GONE


def words_of(process: psutil.Process) -> list[str]:
    """The words it was started with; none once it has ended."""
    try:
        return list(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def lives(process: psutil.Process) -> bool:
    return status(process) not in (GONE, psutil.STATUS_ZOMBIE)
