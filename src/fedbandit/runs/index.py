"""Finding run folders and reading them: what each run is, how far it came, which belong together.

Reads only; a run may be written while it is read. `fedbandit report` and `watch` stand on it.
"""

import platform
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

from fedbandit.config import Config
from fedbandit.core.errors import FedbanditError
from fedbandit.core.files import (
    lines_in,
    object_in,
    open_regular,
    parse_toml,
    read_json,
    read_object,
    read_small,
)
from fedbandit.core.identity import last_rounds, owners, require_run, run_in
from fedbandit.results import reading as labels
from fedbandit.results.reading import read_summary, run_folders

Status = Literal["running", "stopped", "finished", "failed", "eliminated"]
ELIMINATED = ".eliminated"  # marks a run that a search has given up
_LOCKS = Path("/proc/locks")
_LARGEST = 1e100  # what is larger was not measured, and would overflow in a mean
# a run whose lock cannot be seen from here is taken to be running if it wrote this recently
_FRESH_SECONDS = 30.0


@dataclass(frozen=True)
class Run:
    """The state of a run folder: configuration, environment, summary and the last line of its
    metrics.
    """

    path: Path
    name: str  # the path as a user would say it, from where the search began
    id: str  # that all its files name
    config: Config
    environment: Mapping[str, Any]
    summary: Mapping[str, Any] | None
    error: str | None
    last: Mapping[str, Any]  # the last line of metrics, or nothing

    @property
    def rounds(self) -> int:
        """The number of rounds that have a line of metrics."""
        return int(self.last.get("round", 0))

    @cached_property
    def status(self) -> Status:
        """Whether it has finished, is running (its lock is held), has failed, was given up by a search
        (eliminated), or was stopped.
        """
        if self.summary is not None:
            return "finished"
        if _held(self.path / ".lock"):
            return "running"
        if self.error:
            return "failed"
        return "eliminated" if (self.path / ELIMINATED).exists() else "stopped"


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ in nothing but their seed."""

    label: str
    runs: list[Run]

    @property
    def config(self) -> Config:
        """The configuration that all have in common, but for the seed."""
        return self.runs[0].config

    @property
    def finished(self) -> list[Run]:
        """Those that can be averaged: finished, and of one length."""
        ended = [run for run in self.runs if run.summary is not None]
        longest = max((run.rounds for run in ended), default=0)
        return [run for run in ended if run.rounds == longest]

    @property
    def apart(self) -> list[Run]:
        """The others: shorter, or not finished."""
        among = {run.path for run in self.finished}
        return [run for run in self.runs if run.path not in among]


@dataclass(frozen=True)
class Problem:
    """A folder that looks like a run's and cannot be read as one."""

    name: str
    reason: str


def read_runs(
    folders: Iterable[Path], wanted: Callable[[Path], bool] = lambda path: True
) -> tuple[list[Run], list[Problem]]:
    """Every run in or below the folders in the order of their paths, and folders that cannot be
    read.

    Links that lead elsewhere are not followed. Nothing that stands in one folder keeps another
    from being read. What has not changed since it was last read is not read again.
    """
    runs, problems = [], []
    for path, name in run_folders(folders):
        try:
            if wanted(path) and (run := _run(path, name)) is not None:
                runs.append(run)
        except FileNotFoundError:
            continue  # removed meanwhile
        except (OSError, ValueError, FedbanditError) as error:
            problems.append(Problem(name, _reason(path, error)))
    return runs, problems


def _run(path: Path, name: str) -> Run | None:
    """One run folder, as its files say; whatever does not belong together raises."""
    if (identified := _unchanged(path / "config.toml", _identified)) is None:
        return None
    found, config = identified
    summary = _unchanged(owners(path / "summary.json"), read_summary)
    last = _unchanged(owners(path / "metrics.jsonl"), _last_line) or {}
    for file, values in (("summary.json", summary), ("metrics.jsonl", last)):
        if values:
            require_run(path / file, values.get("run"), found)
    if summary and summary["rounds"] != last.get("round"):
        raise ValueError(f"summary.json: of round {summary['rounds']}, not of the last one")
    failure = _unchanged(path / "error.json", read_json)
    return Run(
        path=path,
        name=name,
        id=found,
        config=config,
        environment=_unchanged(path / "environment.json", read_object) or {},
        summary=summary,
        error=None if failure is None else str(failure.get("error", "failed")),
        last=last,
    )


def _unchanged(path: Path, read: Callable[[Path], Any]) -> Any:
    """The result of `read` for a file, kept until the file is another; None where there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return _read(read, path, (found.st_ino, found.st_size, found.st_mtime_ns))


@lru_cache(maxsize=1 << 16)
def _read(read: Callable[[Path], Any], path: Path, stamp: tuple[int, ...]) -> Any:
    return read(path)


def _identified(path: Path) -> tuple[str, Config]:
    """The id of the run with this configuration, which its environment must confirm."""
    try:
        return run_in(path.parent), Config.build(parse_toml(read_small(path)))
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None


def _last_line(path: Path) -> Mapping[str, Any]:
    """The last round that was recorded, with the numbers in it that every page shows."""
    lines = last_rounds(path)
    if not lines:
        return {}
    with open_regular(path) as file:
        run = object_in(next(lines_in(file), b"")).get("run")
    try:
        last = object_in(lines[-1])
    except ValueError as error:
        raise ValueError(f"the last line of {path.name} is damaged: {error}") from None
    if type(last.get("round")) is not int or not 1 <= last["round"] < 2**53:
        raise ValueError(f"the last line of {path.name} names no round")
    for name in ("reward", "running_reward"):
        value = last.get(name)
        if value is not None and (type(value) not in (int, float) or not abs(value) < _LARGEST):
            raise ValueError(f"the last line of {path.name} has a {name} that is not a number")
    return {"run": run} | {name: last.get(name) for name in ("round", "reward", "running_reward")}


def _reason(path: Path, error: Exception) -> str:
    """In one line, without the path, which is said already."""
    text = str(error)
    if isinstance(error, OSError):
        text = f"{Path(str(error.filename)).name}: {error.strerror}"
    lines = text.replace(f"{path}/", "").splitlines() or [type(error).__name__]
    return lines[0][:300]


def grouped(runs: Sequence[Run]) -> list[RunGroup]:
    """Runs of one configuration together, labelled by what sets each configuration apart from the
    others.
    """
    configs = [run.config.model_dump() for run in runs]
    groups = labels.grouped(configs, [labels.made_from(run.environment) for run in runs])
    return [RunGroup(label, [runs[i] for i in members]) for label, members in groups.items()]


def _held(lock: Path) -> bool:
    """Whether a process holds the lock. Looked up, never tried: trying would be in the way of a run
    that starts.
    """
    try:
        inode, holder = lock.stat().st_ino, read_small(lock).decode()
    except (OSError, ValueError):
        return False
    locked = _locked_inodes()
    if locked is not None and inode in locked:
        return True
    if not holder or (locked is not None and holder == platform.node()):
        return False  # given back, or its process is gone
    return time.time() - _written(lock.parent) < _FRESH_SECONDS


def _locked_inodes() -> set[int] | None:
    """The files that processes of this machine hold locks on; None where it does not say.

    Devices are left out: on some file systems (btrfs) the list names another one than the file
    does.
    """
    try:
        table = _LOCKS.read_text(encoding="ascii")
    except OSError:
        return None
    return {int(inode) for inode in re.findall(r"FLOCK .* [0-9a-f]+:[0-9a-f]+:(\d+) ", table)}


def _written(folder: Path) -> float:
    """When anything in a folder was last written."""
    times = [0.0]
    for entry in folder.iterdir():
        with suppress(OSError):  # gone meanwhile
            times.append(entry.stat().st_mtime)
    return max(times)
