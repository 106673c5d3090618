"""Finding run folders and reading them: what each run is, how far it came, and which runs differ only in their seed.

Reads only; a run may be written while it is read.
"""

import contextlib
import json
import os
import platform
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

from fedbandit.config import Config, read_toml
from fedbandit.core.errors import ConfigError, DataError
from fedbandit.core.files import read_json
from fedbandit.core.parts import flatten, in_short
from fedbandit.results.plots import COLOURS, policy_of
from fedbandit.runs.folder import read_metrics

Status = Literal["running", "stopped", "finished", "failed"]
_TELLING = (
    "scenario",
    "mode",
    "deploy_every",
    "data.",
    "model.",
    "objective.",
    "server.optimizer",
    "privacy.",
    "policy.",
)
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
    for folder in folders:
        require_folder(folder)
        for place, inner, files in os.walk(folder, followlinks=False):
            if "config.toml" in files:
                inner.clear()  # a run holds no runs
                path = Path(place)
                name = str(path.relative_to(folder)) if path != folder else path.resolve().name
                if (run := read_run(path, name)) is not None:
                    yield run
            else:
                inner.sort()


def require_folder(folder: Path) -> None:
    """Refuse what is not a folder, where a folder with runs is expected."""
    if folder.is_file():
        raise DataError(f"{folder}: is a file, not a folder with runs")
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")


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
    groups: dict[str, list[Run]] = {}
    for run in runs:
        identity = {**run.config.identity(), "seed": None, "data": run.environment.get("data_fingerprint")}
        groups.setdefault(json.dumps(identity, sort_keys=True), []).append(run)
    labels = _labels([members[0].config for members in groups.values()])
    by_seed = [sorted(members, key=lambda run: run.config.seed) for members in groups.values()]
    order = {name: place for place, name in enumerate(COLOURS)}
    return sorted(
        (RunGroup(label, members) for label, members in zip(labels, by_seed, strict=True)),
        key=lambda group: (order.get(policy_of(group.label) or "", len(order)), group.label),
    )


def _labels(configs: Sequence[Config]) -> list[str]:
    """The policy's name (or "baseline"), then the fewest values that tell two of the same name apart."""
    names = [config.policy.name if config.training else "baseline" for config in configs]
    flat = [flatten(config.identity()) for config in configs]
    keys = {
        name: _telling_apart([values for other, values in zip(names, flat, strict=True) if other == name])
        for name in set(names)
    }
    return [
        " ".join([name, *(_said(key, values.get(key)) for key in keys[name])])
        for name, values in zip(names, flat, strict=True)
    ]


def _telling_apart(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys that together differ between any two; what a reader thinks of first comes first."""
    every = dict.fromkeys(key for values in configs for key in values if key != "seed")
    chosen: list[str] = []
    kinds = [""] * len(configs)
    for key in sorted(every, key=_place):
        finer = [f"{kind}|{values.get(key)!r}" for kind, values in zip(kinds, configs, strict=True)]
        if len(set(finer)) > len(set(kinds)):
            chosen.append(key)
            kinds = finer
    return chosen


def _place(key: str) -> int:
    return next((place for place, start in enumerate(_TELLING) if key.startswith(start)), len(_TELLING))


def _said(key: str, value: Any) -> str:
    """A name says what it is; a number does not."""
    if isinstance(value, str):
        return value
    return f"{key.removeprefix('policy.').replace('learning_rate', 'rate')}={in_short(value)}"


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
