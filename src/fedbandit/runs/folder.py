"""A run folder: the exact configuration, one line of metrics a round, timings, checkpoints and a summary.

Whatever happens to the process, the run can be resumed: lines after the newest checkpoint are cut off and those rounds
run again, to the same bytes.
"""

import fcntl
import json
import os
import platform
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any, Self

from fedbandit import __version__
from fedbandit.config import Config, read_toml
from fedbandit.core.errors import ConfigError, DataError
from fedbandit.core.files import read_json, read_lines, write_json, write_text
from fedbandit.data.dataset import Header
from fedbandit.federated.algorithm import Algorithm, remembers
from fedbandit.federated.memory import Memory
from fedbandit.federated.state import State, load_state, save_state

_KEPT_CHECKPOINTS = 2  # the newest, and one to fall back on should it be damaged
_FLUSH_SECONDS = 1.0  # who follows a run sees it this late at most


class FolderBusy(ConfigError):
    """A run folder that another process holds; it is free again when that one ends."""


class RunFolder:
    """Opens (or makes) the folder of a run and holds it locked; a folder of another run is refused and left alone."""

    def __init__(self, path: Path, config: Config, header: Header) -> None:
        self.path, self.config, self.header = path, config, header
        self._check_identity()
        path.mkdir(parents=True, exist_ok=True)
        self._lock = open(path / ".lock", "a", encoding="utf-8")  # noqa: SIM115 - held until close()
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise FolderBusy(f"{path}: another process is running here") from None
        self._lock.truncate(0)
        self._lock.write(platform.node())  # for those who look from another machine, where no list of locks shows it
        self._lock.flush()
        for leftover in (*path.glob(".*.tmp"), *path.glob("checkpoints/.*.tmp")):
            leftover.unlink(missing_ok=True)  # of an atomic write that was killed; nobody else writes here now
        self._files: dict[str, IO[str]] = {}
        self._flushed_at = 0.0
        self.seconds = 0.0  # of all rounds so far, over every time the run was started

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._lock.truncate(0)
        self._lock.close()

    @property
    def summary(self) -> dict[str, Any] | None:
        """The summary of a finished run, or None."""
        return read_json(self.path / "summary.json")

    @property
    def failure(self) -> dict[str, Any] | None:
        """Why the run failed the last time (`kind`, `error`), or None."""
        return read_json(self.path / "error.json")

    def fail(self, error: Exception) -> None:
        """Note why the run failed; resuming it removes the note."""
        write_json(self.path / "error.json", {"kind": type(error).__name__, "error": str(error)})

    def rounds_recorded(self) -> int:
        """How many rounds have a line of metrics."""
        return len(read_metrics(self.path)) if (self.path / "metrics.jsonl").exists() else 0

    def resume(self) -> State | None:
        """The state to resume from, with metrics and timings cut to it; None to start from the beginning."""
        state = self._newest_checkpoint()
        (self.path / "error.json").unlink(missing_ok=True)
        if not (self.path / "config.toml").exists():
            write_json(self.path / "environment.json", _environment(self.header))
            write_text(self.path / "config.toml", self.config.to_toml())
        for name in ("metrics.jsonl", "timings.jsonl"):
            self._files[name] = _cut_to_round(self.path / name, state.round if state else 0)
        with open(self.path / "timings.jsonl", encoding="utf-8") as lines:
            self.seconds = sum(json.loads(line)["seconds"] for line in lines)
        return state

    def record(self, metrics: dict[str, Any], timings: dict[str, Any]) -> None:
        """One line a round in each of the two files; no times among the metrics."""
        self._files["metrics.jsonl"].write(json.dumps(metrics) + "\n")
        self._files["timings.jsonl"].write(json.dumps(timings) + "\n")
        self.seconds += timings["seconds"]
        if time.monotonic() - self._flushed_at > _FLUSH_SECONDS:
            for file in self._files.values():
                file.flush()
            self._flushed_at = time.monotonic()

    def memory(self, algorithm: Algorithm, state: State | None) -> Memory | None:
        """What clients remember, as it was at this state; None where the algorithm's clients remember nothing."""
        if not remembers(algorithm):
            return None
        memory = Memory(self.path / "memory.sqlite")
        memory.resume(state.round if state else 0)
        return memory

    def checkpoint(self, state: State, memory: Memory | None = None) -> None:
        """Keep the state; the lines and the memory that belong to it are on disk before it is."""
        if memory is not None:
            kept = [int(path.stem.removeprefix("round-")) for path in self._checkpoints()[: _KEPT_CHECKPOINTS - 1]]
            memory.keep(state.round, min([*kept, state.round]))
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        folder = self.path / "checkpoints"
        folder.mkdir(exist_ok=True)
        save_state(state, folder / f"round-{state.round:06d}.safetensors")
        for old in self._checkpoints()[_KEPT_CHECKPOINTS:]:
            old.unlink()

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the summary, which marks the run as complete."""
        write_json(self.path / "summary.json", summary)

    def _checkpoints(self) -> list[Path]:
        """Newest first."""
        return sorted((self.path / "checkpoints").glob("round-*.safetensors"), reverse=True)

    def _newest_checkpoint(self) -> State | None:
        for path in self._checkpoints():
            try:
                return load_state(path)
            except DataError:
                path.unlink()  # damaged, by a crash of the machine say; the one before it will do
        return None

    def _check_identity(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"{self.path}: is a file, not a run folder")
        if not (self.path / "config.toml").exists():
            strangers = [p.name for p in self.path.iterdir() if not _ours(p.name)] if self.path.exists() else []
            if strangers:
                raise ConfigError(f"{self.path}: holds other files ({strangers[0]}, ...); nothing was overwritten")
            return
        there = Config.build(read_toml(self.path / "config.toml"), where=f"{self.path / 'config.toml'}: ").identity()
        here = self.config.identity()
        there["data"] = (read_json(self.path / "environment.json") or {}).get("data_fingerprint")
        here["data"] = self.header.fingerprint
        if difference := _first_difference("", there, here):
            raise ConfigError(f"{self.path}: made by another configuration ({difference}); nothing was overwritten")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rounds of a run folder, one dictionary each; a torn last line of a running run is left out."""
    return read_lines(path / "metrics.jsonl")


def beside_reward(summary: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a finished run's summary says beside its reward: held-out metrics, and the privacy that was spent."""
    said = {**(summary or {}), **((summary or {}).get("privacy") or {})}
    return {key: value for key, value in said.items() if key.startswith(("test_", "epsilon_"))}


def _ours(name: str) -> bool:
    """What a run that was stopped before its first line may have left."""
    known = (".lock", "environment.json", "metrics.jsonl", "timings.jsonl", "checkpoints", "error.json")
    return name in known or name.endswith(".tmp") or name.startswith("memory.sqlite")


def _first_difference(path: str, there: Any, here: Any) -> str | None:
    if isinstance(there, dict) and isinstance(here, dict):
        for key in [*there, *(key for key in here if key not in there)]:
            if found := _first_difference(f"{path}.{key}".lstrip("."), there.get(key), here.get(key)):
                return found
        return None
    return None if there == here else f"{path} is {there!r} there and {here!r} here"


def _cut_to_round(path: Path, rounds: int) -> IO[str]:
    """Open a file of one line a round for appending, cut to its first `rounds` lines."""
    path.touch()
    with open(path, "rb+") as file:
        for _ in range(rounds):
            if not file.readline().endswith(b"\n"):
                raise DataError(f"{path}: shorter than the checkpoint beside it; the folder has been changed")
        file.truncate(file.tell())
    return open(path, "a", encoding="utf-8")


def _environment(header: Header) -> dict[str, Any]:
    packages = ("torch", "numpy", "numba", "safetensors")
    return {
        "fedbandit": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        **{name: version(name) for name in packages},
        "data": header.name,
        "data_fingerprint": header.fingerprint,
    }
