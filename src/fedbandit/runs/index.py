"""Finding run folders and reading them: what each run is, how far it came, and which runs differ only in their seed.

Reads only; a run may be written while it is read.
"""

import contextlib
import platform
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

from fedbandit.config import Config, read_toml
from fedbandit.core.errors import ConfigError
from fedbandit.core.files import read_json
from fedbandit.results import labels
from fedbandit.results.reading import run_folders
from fedbandit.runs.folder import read_metrics

Status = Literal["running", "stopped", "finished", "failed"]
_LOCKS = Path("/proc/locks")
_FRESH_SECONDS = 30.0  # a run whose lock cannot be seen from here is taken to be running if it wrote this recently


@dataclass(frozen=True)
class Run:
    """A run folder as it is now."""

    path: Path
    name: str  # the path as a user would say it, from where the search began
    config: Config
    environment: Mapping[str, Any]
    summary: Mapping[str, Any] | None
    error: str | None
    rounds: int  # that have a line of metrics

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The rounds' metrics; none if the file is damaged, which must not hide all other runs."""
        try:
            return read_metrics(self.path) if self.rounds else []
        except ValueError:
            return []

    @cached_property
    def status(self) -> Status:
        if self.summary is not None:
            return "finished"
        if _held(self.path / ".lock"):
            return "running"
        return "failed" if self.error else "stopped"


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ in nothing but their seed."""

    label: str
    runs: list[Run]

    @property
    def config(self) -> Config:
        return self.runs[0].config


def find_runs(folders: Iterable[Path]) -> Iterator[Run]:
    """Every run in or below the folders, in the order of their paths; links that lead elsewhere are not followed."""
    for path, name in run_folders(folders):
        if (run := read_run(path, name)) is not None:
            yield run


def read_run(path: Path, name: str) -> Run | None:
    """A run folder, or None if it is not one (any more), or was made by something we do not understand."""
    try:
        config = _config(path / "config.toml", (path / "config.toml").stat().st_mtime_ns)
    except (ConfigError, OSError):
        return None
    error = read_json(path / "error.json")
    return Run(
        path=path,
        name=name,
        config=config,
        environment=read_json(path / "environment.json") or {},
        summary=read_json(path / "summary.json"),
        error=None if error is None else str(error.get("error", "failed")),
        rounds=_lines(path / "metrics.jsonl"),
    )


@lru_cache(maxsize=10_000)
def _config(path: Path, written: int) -> Config:
    """Who follows many runs reads each configuration once."""
    return Config.build(read_toml(path), where=f"{path}: ")


def grouped(runs: Sequence[Run]) -> list[RunGroup]:
    """Runs of one configuration together, labelled by what sets each configuration apart from the others."""
    configs = [run.config.model_dump() for run in runs]
    groups = labels.grouped(configs, [run.environment.get("data_fingerprint") for run in runs])
    return [RunGroup(label, [runs[i] for i in members]) for label, members in groups.items()]


def _lines(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except OSError:
        return 0


def _held(lock: Path) -> bool:
    """Whether a process holds the lock. Looked up, never tried: trying would be in the way of a run that starts."""
    try:
        inode, holder = lock.stat().st_ino, lock.read_text(encoding="utf-8")
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

    Devices are left out: on some file systems (btrfs) the list names another one than the file does.
    """
    try:
        table = _LOCKS.read_text(encoding="ascii")
    except OSError:
        return None
    return {int(inode) for inode in re.findall(r"FLOCK .* [0-9a-f]+:[0-9a-f]+:(\d+) ", table)}


def _written(folder: Path) -> float:
    times = [0.0]
    for entry in folder.iterdir():
        with contextlib.suppress(OSError):  # gone meanwhile
            times.append(entry.stat().st_mtime)
    return max(times)
