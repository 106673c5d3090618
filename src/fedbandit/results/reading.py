"""Run folders as plain values: what was configured, what every round measured, and what the run came to.

Reads only, a run may be written meanwhile. Knows nothing of how runs are made.
"""

import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedbandit.core.errors import DataError
from fedbandit.core.files import read_json, read_lines, read_object, read_small, shallow


@dataclass(frozen=True)
class RunRecord:
    """One run: its name, its configuration and the metrics of its rounds, nested as in the files."""

    name: str
    config: Mapping[str, Any]
    rounds: tuple[Mapping[str, Any], ...]  # the lines of metrics.jsonl
    summary: Mapping[str, Any] | None = None  # summary.json of a finished run
    environment: Mapping[str, Any] = field(default_factory=dict)  # versions, and the data's name and fingerprint
    error: str | None = None  # what the run failed with
    folder: Path | None = None  # None: it is in memory alone
    ended: bool = True  # False: rounds are missing

    @property
    def seed(self) -> int:
        return int(self.config.get("seed", 0))

    @property
    def status(self) -> str | None:
        """What is wrong with the run, in a few words; None if it is finished."""
        after = f"after {len(self.rounds)} of {self.config.get('rounds', '?')} rounds"
        if self.error is not None:
            return f"failed {after}: {self.error}"
        return None if self.ended else f"unfinished, {after}"

    def seconds(self) -> dict[int, dict[str, float]]:
        """Where the time of each round went, by the number of the round; none for a run in memory."""
        if self.folder is None or not (self.folder / "timings.jsonl").exists():
            return {}
        try:
            lines = read_lines(self.folder / "timings.jsonl")
            return {line["round"]: {k: v for k, v in line.items() if k != "round"} for line in lines}
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"{self.folder / 'timings.jsonl'}: damaged: {error}") from None


def run_folders(folders: Iterable[Path]) -> Iterator[tuple[Path, str]]:
    """Every run folder in or below the folders with its name from there, in the order of their paths.

    Links that lead elsewhere are not followed.
    """
    for folder in folders:
        require_folder(folder)
        for place, inner, files in os.walk(folder, followlinks=False):
            if "config.toml" in files:
                inner.clear()  # a run holds no runs
                path = Path(place)
                yield path, str(path.relative_to(folder)) if path != folder else path.resolve().name
            else:
                inner.sort()


def require_folder(folder: Path) -> None:
    """Refuse what is not a folder, where a folder with runs is expected."""
    if folder.is_file():
        raise DataError(f"{folder}: is a file, not a folder with runs")
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")


def read_summary(path: Path) -> dict[str, Any] | None:
    """The summary of a finished run, None if there is none; `ValueError` if it is not what a run writes.

    `DataError` if it cannot be read: then nobody knows whether the run is finished.
    """
    try:
        found = read_object(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path}: damaged: {error}") from None
    rounds, reward = found.get("rounds"), found.get("running_reward", "")
    if type(rounds) is not int or rounds < 1 or not (reward is None or type(reward) in (int, float)):
        raise ValueError(f"{path}: damaged: it does not say what the run came to")
    return found


def read_record(path: Path, name: str) -> RunRecord:
    """The run in a folder, as far as it has come; `DataError` where one of its files is damaged."""
    try:
        config = shallow(tomllib.loads(read_small(path / "config.toml").decode()))
        if not all(type(config.get(name, 0)) is int for name in ("seed", "rounds")):
            raise ValueError("config.toml: seed and rounds should be whole numbers")
        metrics = path / "metrics.jsonl"
        rounds = [shallow(line) for line in read_lines(metrics)] if metrics.exists() else []
        for number, line in enumerate(rounds, start=1):
            if type(line.get("round")) is not int or line["round"] != number:
                raise ValueError(f"metrics.jsonl: line {number} is not of round {number}")
        summary = read_summary(path / "summary.json")
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: damaged: {error}") from None
    failure = read_json(path / "error.json")
    return RunRecord(
        name=name,
        config=config,
        rounds=tuple(rounds),
        summary=summary,
        environment=read_json(path / "environment.json") or {},
        error=None if failure is None or summary is not None else str(failure.get("error", "failed")),
        folder=path,
        ended=summary is not None,
    )
