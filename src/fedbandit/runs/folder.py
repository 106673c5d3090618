"""A run folder: the exact configuration, one line of metrics a round, timings, checkpoints and a summary.

Whatever happens to the process, the run can be resumed: lines after the newest checkpoint are cut off and those rounds
run again, to the same bytes.
"""

import contextlib
import fcntl
import importlib
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any, Self

from fedbandit import __version__
from fedbandit.config import PARTS, Config, read_toml
from fedbandit.core.errors import ConfigError, DataError
from fedbandit.core.files import (
    count_lines,
    read_json,
    read_lines,
    read_object,
    read_small,
    write_atomically,
    write_json,
    write_text,
)
from fedbandit.core.parts import resolve, with_defaults
from fedbandit.core.randomness import Secret
from fedbandit.core.sources import RESULTS, source_digests
from fedbandit.data.dataset import Header
from fedbandit.federated.algorithm import Algorithm, remembers
from fedbandit.federated.memory import Memory
from fedbandit.federated.state import DamagedState, State, load_state, save_state

_SECRET = "secret.key"
_PACKAGES = ("torch", "numpy", "numba", "safetensors")


def environment_of(config: Config, header: Header) -> dict[str, Any]:
    """What `environment.json` holds: the parts of the identity that are not in the configuration, and versions.

    `parts` has every part with the defaults that it was made with. They are there to be read: what a default means is
    covered by the results number.
    """
    return {
        "fedbandit": __version__,
        "results": RESULTS,
        "python": platform.python_version(),
        "machine": platform.machine(),
        **_versions(),
        "data": header.name,
        "data_fingerprint": header.fingerprint,
        "sources": source_digests(config.part_names()),
        "parts": _parts(config),
    }


@cache
def _versions() -> dict[str, str]:
    """The versions of the packages that results may depend on; looking for them takes longer than a round."""
    return {name: version(name) for name in _PACKAGES}


def refuse_another(path: Path, config: Config, header: Header, finished: bool) -> None:
    """Refuse a folder that holds another run than the one that these make, or extend by rounds; it is only read."""
    made = Config.build(read_toml(path / "config.toml"), where=f"{path / 'config.toml'}: ")
    kept = _kept_environment(path / "environment.json")
    there = {**made.identity(), "data": kept.get("data_fingerprint")}
    here = {**config.identity(), "data": header.fingerprint}
    lengths = there.pop("rounds"), here.pop("rounds")
    if difference := _first_difference("", there, here):
        raise ConfigError(
            f"{path}: made by another configuration ({difference}); nothing was overwritten"
        )
    if lengths[1] < lengths[0]:
        raise ConfigError(
            f"{path}: holds a run of {lengths[0]} rounds, not {lengths[1]}; nothing was overwritten: for a shorter run"
            " use another folder"
        )
    if lengths[1] > lengths[0] and config.privacy.mechanism != "none":
        raise ConfigError(
            f"{path}: a private run cannot be extended from {lengths[0]} to {lengths[1]} rounds: its noise and its"
            " epsilon were planned for its length; nothing was overwritten: use another folder"
        )
    before = "already finished; " if finished else ""
    if (
        results := kept.get("results", 1)
    ) != RESULTS:  # folders without the number are older than it
        raise ConfigError(
            f"{path}: {before}fedbandit computes other results since (results number {results!r} there and {RESULTS}"
            " here); nothing was overwritten: use another folder"
        )
    recorded = kept.get("sources")
    if not isinstance(recorded, dict):  # of a version that did not note them
        return
    current = source_digests(config.part_names())
    for file in [*recorded, *current]:
        if recorded.get(file) != current.get(file):
            raise ConfigError(
                f"{path}: {before}{file} has changed since; nothing was overwritten: use another folder"
            )


def _kept_environment(path: Path) -> dict[str, Any]:
    try:
        return read_object(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise DataError(f"{path}: damaged: {error}") from None


def _parts(config: Config) -> dict[str, dict[str, Any]]:
    found = {}
    for section, key, module, leading in PARTS:
        chosen = getattr(config, section)
        name, parameters = getattr(chosen, key), chosen.parameters
        if (section, name) != ("compression", "none"):
            make = resolve(f"{section}.{key}", name, importlib.import_module(module).BUILT_IN)
            parameters = with_defaults(make, parameters, leading)
        found[section] = {key: name, **parameters}
    return found


def _first_difference(path: str, there: Any, here: Any) -> str | None:
    if isinstance(there, dict) and isinstance(here, dict):
        for key in [*there, *(key for key in here if key not in there)]:
            if found := _first_difference(
                f"{path}.{key}".lstrip("."), there.get(key), here.get(key)
            ):
                return found
        return None
    return None if there == here else f"{path} is {there!r} there and {here!r} here"


_DAMAGED = ".damaged"  # ends the name of a checkpoint that was set aside


_KEPT_CHECKPOINTS = 2  # the newest, and one to fall back on should it be damaged


_LONGEST_LINE = 64_000_000  # bytes; what is longer was not written by a run


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
        self._lock.write(
            platform.node()
        )  # for those who look from another machine, where no list of locks shows it
        self._lock.flush()
        for leftover in (*path.glob(".*.tmp"), *path.glob("checkpoints/.*.tmp")):
            leftover.unlink(
                missing_ok=True
            )  # of an atomic write that was killed; nobody else writes here now
        self._files: dict[str, IO[str]] = {}
        self._flushed_at = 0.0
        self.seconds = 0.0  # of all rounds so far, over every time the run was started
        with contextlib.ExitStack() as opened:
            opened.callback(self.close)
            self._extend()
            opened.pop_all()

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
        """The summary of a finished run; None if there is none, or one that has to be made again."""
        if not self.finished:
            return None
        from fedbandit.results.reading import read_summary

        try:
            return read_summary(self.path / "summary.json")
        except ValueError as error:
            _say(f"{error}; it is made again")
            return None

    @property
    def failure(self) -> dict[str, Any] | None:
        """Why the run failed the last time (`kind`, `error`), or None."""
        return read_json(self.path / "error.json")

    def fail(self, error: Exception) -> None:
        """Note why the run failed; resuming it removes the note."""
        with contextlib.suppress(OSError):  # the failure itself matters more than the note
            write_json(
                self.path / "error.json", {"kind": type(error).__name__, "error": str(error)}
            )

    def rounds_recorded(self) -> int:
        """How many rounds have a line of metrics."""
        return count_lines(self.path / "metrics.jsonl")

    def resume(self) -> State | None:
        """The state to resume from, with metrics and timings cut to it; None to start from the beginning."""
        state = self._newest_checkpoint()
        rounds = state.round if state else 0
        ends = {
            name: _end_of_round(self.path / name, rounds, check)
            for name, check in (("metrics.jsonl", _check_line), ("timings.jsonl", _check_timing))
        }  # everything is looked at before anything is changed
        (self.path / "error.json").unlink(missing_ok=True)
        if not (self.path / "config.toml").exists():
            write_json(self.path / "environment.json", environment_of(self.config, self.header))
            write_text(self.path / "config.toml", self.config.to_toml())
        for name, (end, _) in ends.items():
            self._files[name] = open(self.path / name, "a", encoding="utf-8")  # noqa: SIM115 - until close()
            self._files[name].truncate(end)
        self.seconds = ends["timings.jsonl"][1]
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

    def secret(self) -> Secret:
        """What the cohorts of a run with `privacy.noise = "system"` come from; drawn for a new run.

        The file is for its owner alone. Without it a run that has begun cannot be resumed: other
        cohorts would not keep what its accounting counts on.
        """
        path = self.path / _SECRET
        try:
            kept = read_small(path)
        except FileNotFoundError:
            if checkpoints(self.path):
                raise DataError(
                    f"{path}: missing; without the secret of its cohorts the run cannot be resumed"
                ) from None
            drawn = Secret.fresh()
            write_atomically(path, lambda file: _write_for_owner(file, drawn.value))
            return drawn
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from None
        if len(kept) != 32:
            raise DataError(f"{path}: damaged: {len(kept)} bytes, not 32")
        return Secret(kept)

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
            kept = [_round_of(path) for path in checkpoints(self.path)[: _KEPT_CHECKPOINTS - 1]]
            memory.keep(state.round, min([*kept, state.round]))
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        folder = self.path / "checkpoints"
        folder.mkdir(exist_ok=True)
        save_state(state, folder / f"round-{state.round:06d}.safetensors")
        for old in checkpoints(self.path)[_KEPT_CHECKPOINTS:]:
            old.unlink()

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the summary, which marks the run as complete."""
        write_json(self.path / "summary.json", summary)

    def _newest_checkpoint(self) -> State | None:
        """The newest state that is what was written. A damaged file is set aside; one that cannot be read is an error:
        whatever is wrong with this process or this disk must not cost a run its checkpoints."""
        for path in checkpoints(self.path):
            try:
                return _state_in(path)
            except DamagedState as error:
                aside = path.with_name(f"{path.name}{_DAMAGED}")
                path.replace(aside)
                _say(f"{error}; kept as {aside.name}, and the one before it is used")
        damaged = sorted(path.name for path in (self.path / "checkpoints").glob(f"*{_DAMAGED}"))
        if damaged and (recorded := self.rounds_recorded()):
            raise DataError(
                f"{self.path}: no checkpoint is left to resume from ({damaged[-1]}); the metrics of {recorded} rounds"
                " are kept as they are: to start from the beginning, use another folder"
            )
        return None

    def _check_identity(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"{self.path}: is a file, not a run folder")
        if not (self.path / "config.toml").exists():
            strangers = (
                [p.name for p in self.path.iterdir() if not _ours(p.name)]
                if self.path.exists()
                else []
            )
            if strangers:
                raise ConfigError(
                    f"{self.path}: holds other files ({strangers[0]}, ...); nothing was overwritten"
                )
            return
        refuse_another(self.path, self.config, self.header, self.finished)

    def _extend(self) -> None:
        """Give a run that was to have fewer rounds its new length.

        The summary goes first: killed in between, the run is unfinished at its old length, and is extended again.
        """
        path = self.path / "config.toml"
        if path.exists() and read_toml(path).get("rounds") != self.config.rounds:
            (self.path / "summary.json").unlink(missing_ok=True)
            write_text(path, self.config.to_toml())

    @property
    def finished(self) -> bool:
        return (self.path / "summary.json").exists()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rounds of a run folder, one dictionary each; a torn last line of a running run is left out."""
    return read_lines(path / "metrics.jsonl")


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run folder, the newest first: by their round, whatever the length of its number."""
    found = [
        path
        for path in (run / "checkpoints").glob("round-*.safetensors")
        if path.stem[6:].isdecimal()
    ]
    return sorted(found, key=_round_of, reverse=True)


def beside_reward(summary: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a finished run's summary says beside its reward: held-out metrics, and the privacy that was spent."""
    summary = summary or {}
    privacy = summary.get("privacy")
    said = {**summary, **(privacy if isinstance(privacy, Mapping) else {})}
    return {key: value for key, value in said.items() if key.startswith(("test_", "epsilon_"))}


def _ours(name: str) -> bool:
    """What a run that was stopped before its first line may have left."""
    known = (
        ".lock",
        "environment.json",
        "metrics.jsonl",
        "timings.jsonl",
        "checkpoints",
        "error.json",
        _SECRET,
    )
    return name in known or name.endswith(".tmp") or name.startswith("memory.sqlite")


def _write_for_owner(file: IO[bytes], payload: bytes) -> None:
    os.fchmod(file.fileno(), 0o600)  # before there is anything to read
    file.write(payload)


def _round_of(checkpoint: Path) -> int:
    return int(checkpoint.stem.removeprefix("round-"))


def _state_in(checkpoint: Path) -> State:
    state = load_state(checkpoint)
    if state.round != _round_of(checkpoint):
        raise DamagedState(f"{checkpoint}: damaged checkpoint: it is of round {state.round}")
    return state


def _end_of_round(path: Path, rounds: int, check: Callable[[Any, int], float]) -> tuple[int, float]:
    """Where the first `rounds` lines of a file end, one line a round, and the sum of what `check` finds in them."""
    path.touch()
    total = 0.0
    with open(path, "rb") as file:
        for number in range(1, rounds + 1):
            line = file.readline(_LONGEST_LINE)
            if not line.endswith(b"\n"):
                raise DataError(
                    f"{path}: shorter than the checkpoint beside it; the folder has been changed"
                )
            try:
                total += check(json.loads(line), number)
            except (ValueError, RecursionError):
                raise DataError(
                    f"{path}: line {number} is damaged; the run cannot be resumed"
                ) from None
        return file.tell(), total


def _check_line(line: Any, number: int) -> float:
    if not isinstance(line, dict) or type(line.get("round")) is not int or line["round"] != number:
        raise ValueError
    return 0.0


def _check_timing(line: Any, number: int) -> float:
    _check_line(line, number)
    seconds = line.get("seconds")
    if type(seconds) not in (int, float) or not math.isfinite(seconds):
        raise ValueError
    return float(seconds)


def _say(text: str) -> None:
    """What somebody should know who did not ask for progress."""
    print(f"note: {text}", file=sys.stderr, flush=True)
