"""A run folder: the exact configuration, one line of metrics a round, timings, checkpoints and a
summary.

Whatever happens to the process, the run can be resumed: lines after the newest checkpoint are cut
off and those rounds run again, to the same bytes. Every file names its run (`core/identity.py`),
and a checkpoint and a summary hold the digest of the metrics up to their round: what does not
belong together is refused and left alone.
"""

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import math
import os
import platform
import time
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any, Self

from fedbandit import __version__
from fedbandit.assembly.experiment import Experiment
from fedbandit.config import PARTS, Config, read_toml
from fedbandit.core.errors import ConfigError, DataError, FedbanditError, refuse
from fedbandit.core.files import (
    LONGEST_LINE,
    count_lines,
    object_in,
    open_regular,
    read_json,
    read_object,
    read_small,
    write_atomically,
    write_json,
    write_text,
)
from fedbandit.core.identity import (
    PRIVATE,
    RESULTS,
    owners,
    read_rounds,
    reading,
    refuse_earlier,
    require_run,
    run_id,
    run_in,
    source_digests,
)
from fedbandit.core.parts import flatten, with_defaults
from fedbandit.core.randomness import Secret
from fedbandit.federated.algorithm import Algorithm, remembers
from fedbandit.federated.memory import Memory
from fedbandit.federated.round import published
from fedbandit.federated.state import DamagedState, State, load_marked, save_state
from fedbandit.simulation import DAMAGED, note, setting_aside

_SECRET = "secret.key"
_EXACT = f"{PRIVATE}/metrics.jsonl"
_PACKAGES = ("torch", "numpy", "numba", "safetensors")


def environment_of(experiment: Experiment, secret: str | None = None) -> dict[str, Any]:
    """The contents of `environment.json`: the run's id, what it is made from beside its
    configuration, and versions.

    `secret` is the digest of what the noise of a run is drawn from, where that is not its seed.
    `parts` has every part with the defaults that it was made with. They are there to be read: what
    a default means is covered by the results number.
    """
    config, dataset = experiment.config, experiment.dataset
    environment = {
        "fedbandit": __version__,
        "results": RESULTS,
        "python": platform.python_version(),
        "machine": platform.machine(),
        **_versions(),
        "data": dataset.header.name,
        "data_fingerprint": dataset.header.fingerprint or dataset.contents_digest(),
        "sources": source_digests(config.part_names()),
        "files": experiment.files,
        "secret": secret,
        "parts": _parts(config),
    }
    return {"run": run_id(config.model_dump(), environment), **environment}


@cache
def _versions() -> dict[str, str]:
    """The versions of the packages that results may depend on; looking for them takes longer than a
    round.
    """
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):  # text and tables need no torch
            found[name] = version(name)
    return found


def refuse_another(path: Path, config: Config, environment: Mapping[str, Any]) -> None:
    """Refuse a folder that holds another run than the one that these make, or extend by rounds; it
    is only read.
    """
    made = Config.build(read_toml(path / "config.toml"), where=f"{path / 'config.toml'}: ")
    kept = _kept_environment(path / "environment.json")
    left_alone = "nothing was overwritten: use another folder"
    there, here = made.identity(), config.identity()
    private = config.privacy.mechanism != "none"
    for values, found in ((there, kept), (here, environment)):
        values["data"]["fingerprint"] = found.get("data_fingerprint")
        if not private:
            del values["data"]["source"]
    lengths = there.pop("rounds"), here.pop("rounds")
    difference = _first_difference(there, here)
    before = "already finished; " if (path / "summary.json").exists() else ""
    refuse(
        (
            difference,
            f"{path}: made by another configuration ({difference}); nothing was overwritten",
        ),
        (
            lengths[1] < lengths[0],
            f"{path}: holds a run of {lengths[0]} rounds, not {lengths[1]}; nothing was"
            " overwritten: for a shorter run use another folder",
        ),
        (
            lengths[1] > lengths[0] and private,
            f"{path}: a private run cannot be extended from {lengths[0]} to {lengths[1]} rounds:"
            f" its noise and its epsilon were planned for its length; {left_alone}",
        ),
        (
            kept.get("results") != RESULTS,
            f"{path}: {before}fedbandit computes other results since (results number"
            f" {kept.get('results')!r} there and {RESULTS} here); {left_alone}",
        ),
    )
    for key in ("sources", "files"):
        for file in [*kept[key], *environment[key]]:
            if kept[key].get(file) != environment[key].get(file):
                raise ConfigError(f"{path}: {before}{file} has changed since; {left_alone}")
    require_run(path / "environment.json", kept.get("run"), environment["run"])


def _kept_environment(path: Path) -> dict[str, Any]:
    """The contents of `environment.json`; `DataError` where it is damaged or of 0.2."""
    with reading(path):
        kept = read_object(path)
        refuse_earlier(path.parent, kept)
        for key in ("sources", "files"):
            if not isinstance(kept.get(key), dict):
                raise ValueError(f"{key} is not an object")
    return kept


def _parts(config: Config) -> dict[str, dict[str, Any]]:
    """Every part with all parameters that it was made with, defaults included."""
    found = {}
    for section, key, _, leading in PARTS:
        _, make, parameters = config.part(section)
        name = getattr(getattr(config, section), key)
        found[section] = {key: name, **with_defaults(make, parameters, leading)}
    return found


def _first_difference(there: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """The first key in which two configurations differ, in words; None: there is none."""
    there, here = flatten(there), flatten(here)
    for key in [*there, *here]:
        if there.get(key) != here.get(key):
            return f"{key} is {there.get(key)!r} there and {here.get(key)!r} here"
    return None


_KEPT_CHECKPOINTS = 2  # the newest, and one to fall back on should it be damaged
_MADE_AGAIN = "remove it, and the same command makes it again"
_PUT_BACK = "put back the file of this run, or use another folder"
_FLUSH_SECONDS = 1.0  # who follows a run sees it this late at most


class FolderBusy(ConfigError):
    """A run folder that another process holds; it is free again when that one ends."""


def _kept_secret(path: Path) -> Secret | None:
    """The secret that a run folder holds; None where there is none."""
    with reading(path / _SECRET), contextlib.suppress(FileNotFoundError):
        kept = read_small(path / _SECRET)
        if len(kept) != 32:
            raise ValueError(f"{len(kept)} bytes, not 32")
        return Secret(kept)
    return None


def _secret_digest(path: Path, drawn: Secret | None) -> str | None:
    """The digest of a run's secret for its id: of the kept one, as written down, or of a new one.

    A finished run may have lost its secret; its id stays what it was.
    """
    if drawn is None:
        return None
    kept = _kept_secret(path)
    if kept is None:
        written = (read_json(path / "environment.json") or {}).get("secret")
        return written if isinstance(written, str) else drawn.digest
    return kept.digest


class RunFolder:
    """Opens (or makes) the folder of a run and holds it locked; a folder of another run is refused
    and left alone.
    """

    def __init__(self, path: Path, experiment: Experiment) -> None:
        """Open the folder for this experiment, or make it; a folder of another run is refused."""
        self.path, self.config, self._drawn = path, experiment.config, experiment.secret
        self.environment = environment_of(experiment, _secret_digest(path, experiment.secret))
        self.run: str = self.environment["run"]
        self._check_identity()
        path.mkdir(parents=True, exist_ok=True)
        self._lock = open_regular(path / ".lock", append=True)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise ConfigError(
                    f"{path}: the file system gives no locks ({error.strerror}), without which two"
                    " processes could spoil a run; use a folder on a local disk"
                ) from None
            raise FolderBusy(f"{path}: another process is running here") from None
        self._lock.truncate(0)
        self._lock.write(
            platform.node().encode()
        )  # for those who look from another machine, where no list of locks shows it
        self._lock.flush()
        for leftover in (*path.glob(".*.tmp"), *path.glob("checkpoints/.*.tmp")):
            leftover.unlink(
                missing_ok=True
            )  # of an atomic write that was killed; nobody else writes here now
        self._files: dict[str, IO[str]] = {}
        self._flushed_at = 0.0
        self._metrics = hashlib.sha256()  # of all that is in metrics.jsonl
        self.seconds = 0.0  # of all rounds so far, over every time the run was started

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        """Give the folder back."""
        for file in self._files.values():
            file.close()
        self._lock.truncate(0)
        self._lock.close()

    def summary(self, rounds: int) -> dict[str, Any] | None:
        """The summary of a run that has finished its rounds; None if there is none, or one that has
        to be made again.

        `DataError` if it, or the metrics or timings beside it, are of another run or of another
        moment of this one.
        """
        path = self.path / "summary.json"
        try:
            found = self._read_summary()
        except ValueError as error:
            note(f"{error}; it is made again")
            return None
        if found is None or self._extends():
            return None
        if found["rounds"] != rounds:
            raise DataError(
                f"{path}: of round {found['rounds']}, and the run has {rounds}; {_MADE_AGAIN}"
            )
        for name, end in self._ends(rounds, found.get("metrics"), path.name).items():
            if (self.path / name).stat().st_size != end:
                raise DataError(f"{self.path / name}: longer than {path.name} says; {_PUT_BACK}")
        return found

    @property
    def failure(self) -> dict[str, Any] | None:
        """Why the run failed the last time (`kind`, `error`), or None."""
        return read_json(self.path / "error.json")

    def note_failure(self, kind: object, error: object, where: object) -> None:
        """Note why a run failed, at the end of a `with` block; resuming it removes the note."""
        if isinstance(error, FedbanditError):
            said = {"kind": type(error).__name__, "error": str(error)}
            with contextlib.suppress(OSError):  # the failure itself matters more than the note
                write_json(self.path / "error.json", said)

    def rounds_recorded(self) -> int:
        """The number of rounds that have a line of metrics."""
        path = self.path / "metrics.jsonl"
        with reading(path):
            return max(0, count_lines(path) - 1)

    def resume(self, algorithm: Algorithm) -> tuple[State | None, Memory | None]:
        """The state to resume from, None to start from the beginning, and what clients remember at
        that round.

        Metrics and timings are cut to it, and a run that was to have fewer rounds gets its new
        length; but everything is looked at before anything is changed. No memory where the
        algorithm's clients remember nothing.
        """
        state, marks = self._newest_checkpoint()
        rounds = state.round if state else 0
        if rounds > self.config.rounds:
            raise DataError(
                f"{self.path}: the newest checkpoint is of round {rounds}, beyond the"
                f" {self.config.rounds} of this run;"
                " put back the checkpoints of this run, or use another folder"
            )
        ends = self._ends(rounds, marks.get("metrics"), f"the checkpoint of round {rounds}")
        memory = self._memory(rounds) if remembers(algorithm) else None
        (self.path / "error.json").unlink(missing_ok=True)
        if not (self.path / "config.toml").exists():
            write_json(self.path / "environment.json", self.environment)
            write_text(self.path / "config.toml", self.config.to_toml())
        elif self._extends():
            # The summary goes first: killed in between, the run is unfinished at its old length.
            (self.path / "summary.json").unlink(missing_ok=True)
            write_text(self.path / "config.toml", self.config.to_toml())
        if self._drawn is not None:
            (self.path / PRIVATE).mkdir(mode=0o700, exist_ok=True)
        for name, end in ends.items():
            opener = None if self._drawn is None or name == "metrics.jsonl" else _for_its_owner
            # Open until close().
            self._files[name] = open(self.path / name, "a", encoding="utf-8", opener=opener)  # noqa: SIM115
            self._files[name].truncate(end)
            if end == 0:
                self._write(name, {"run": self.run})
                self._files[name].flush()
        return state, memory

    def record(self, metrics: dict[str, Any], timings: dict[str, Any]) -> None:
        """One line a round in each of the files; no times among the metrics.

        Where noise is secret, others' metrics are what may be published of the owner's.
        """
        self._write("metrics.jsonl", metrics if self._drawn is None else published(metrics))
        if _EXACT in self._files:
            self._write(_EXACT, metrics)
        self._write("timings.jsonl", timings)
        self.seconds += timings["seconds"]
        if time.monotonic() - self._flushed_at > _FLUSH_SECONDS:
            for file in self._files.values():
                file.flush()
            self._flushed_at = time.monotonic()

    def secret(self) -> Secret:
        """The secret behind the cohorts of a run with `privacy.noise = "system"`; drawn for a new run.

        The file is for its owner alone. Without it a run that has begun cannot be resumed: other
        cohorts would not keep what its accounting counts on.
        """
        kept = _kept_secret(self.path)
        if kept is not None:
            return kept
        if checkpoints(self.path):
            raise DataError(
                f"{self.path / _SECRET}: missing; without the secret of its cohorts the run cannot"
                " be resumed"
            )
        drawn = self._drawn
        assert drawn is not None

        def write(file: IO[bytes]) -> None:
            os.fchmod(file.fileno(), 0o600)  # its owner's alone, before there is anything to read
            file.write(drawn.value)

        write_atomically(self.path / _SECRET, write)
        return drawn

    def checkpoint(self, state: State, memory: Memory | None = None) -> None:
        """Keep the state; the lines and the memory that belong to it are on disk before it is."""
        if memory is not None:
            kept = [_round_of(path) for path in checkpoints(self.path)[: _KEPT_CHECKPOINTS - 1]]
            memory.keep(state.round, min([*kept, state.round]))
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        folder = self.path / "checkpoints"
        folder.mkdir(mode=0o777 if self._drawn is None else 0o700, exist_ok=True)
        save_state(
            state,
            folder / f"round-{state.round:06d}.safetensors",
            run=self.run,
            metrics=self._metrics.hexdigest(),
        )
        for old in checkpoints(self.path)[_KEPT_CHECKPOINTS:]:
            old.unlink()

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the summary, which marks the run as complete."""
        marks = {"run": self.run, "metrics": self._metrics.hexdigest()}
        if _EXACT in self._files:
            write_json(self.path / PRIVATE / "summary.json", {**summary, **marks})
        if self._drawn is not None:
            figures = [
                name for name in summary if name.startswith(("running_", "test_", "personal"))
            ]
            summary = {**summary, **dict.fromkeys(figures)}
        write_json(self.path / "summary.json", {**summary, **marks})

    def _write(self, name: str, values: Mapping[str, Any]) -> None:
        """One line of JSON; metrics also go into their digest."""
        line = json.dumps(values) + "\n"
        self._files[name].write(line)
        if name == "metrics.jsonl":
            self._metrics.update(line.encode())

    def _ends(self, rounds: int, digest: str | None, of: str) -> dict[str, int]:
        """Where the first `rounds` rounds end in metrics and timings; `digest` is that of the
        metrics, as `of` has it.

        `DataError` if they are of another run, or not what was written.
        """
        ends = {"metrics.jsonl": 0, "timings.jsonl": 0}
        if self._drawn is not None and (rounds == 0 or (self.path / _EXACT).exists()):
            ends[_EXACT] = 0
        self._metrics, self.seconds = hashlib.sha256(), 0.0
        for name in ends:
            for line, seconds in _lines_of(self.path / name, self.run, rounds):
                ends[name] += len(line)
                self.seconds += seconds
                if name == "metrics.jsonl":
                    self._metrics.update(line)
            if name == "metrics.jsonl" and rounds and digest != self._metrics.hexdigest():
                raise DataError(
                    f"{self.path / name}: not the metrics that {of} was made with; {_PUT_BACK}"
                )
        return ends

    def _memory(self, rounds: int) -> Memory:
        """The memory of clients, as it was after these rounds."""
        path = self.path / "memory.sqlite"
        if path.exists():
            open_regular(path).close()  # SQLite would wait at a pipe
        elif self._drawn is not None:
            path.touch(mode=0o600)
        memory = Memory(path, self.run)
        try:
            memory.resume(rounds)
        except BaseException:
            memory.close()
            raise
        return memory

    def _newest_checkpoint(self) -> tuple[State | None, dict[str, str]]:
        """The newest state that is what was written, with its marks. A damaged file is set aside;
        one that cannot be read, or is of another run, is an error: whatever is wrong must not cost
        a run its checkpoints.
        """
        for path in checkpoints(self.path):
            with setting_aside(path, "the one before it is used"):
                state, marks = load_marked(path)
                if state.round != _round_of(path):
                    raise DamagedState(f"{path}: damaged checkpoint: it is of round {state.round}")
                require_run(path, marks.get("run"), self.run)
                return state, marks
        damaged = sorted(path.name for path in (self.path / "checkpoints").glob(f"*{DAMAGED}"))
        if damaged and (recorded := self.rounds_recorded()):
            raise DataError(
                f"{self.path}: no checkpoint is left to resume from ({damaged[-1]}); the metrics"
                f" of {recorded} rounds"
                " are kept as they are: to start from the beginning, use another folder"
            )
        return None, {}

    def _check_identity(self) -> None:
        """Refuse a folder of another run, or of something else, before anything is written."""
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"{self.path}: is a file, not a run folder")
        if not (self.path / "config.toml").exists():
            there = self.path.iterdir() if self.path.exists() else ()
            if strangers := [file.name for file in there if not _ours(file.name)]:
                raise ConfigError(
                    f"{self.path}: holds other files ({strangers[0]}, ...); nothing was overwritten"
                )
            return
        refuse_another(self.path, self.config, self.environment)
        with contextlib.suppress(ValueError):  # a damaged summary is made again
            self._read_summary()

    def _read_summary(self) -> dict[str, Any] | None:
        """The summary, which must be of this run; `ValueError` if it is damaged."""
        if not (self.path / "summary.json").exists():
            return None
        from fedbandit.results.reading import (
            read_summary,  # with pictures and tables, which no run needs
        )

        if (found := read_summary(owners(self.path / "summary.json"))) is not None:
            require_run(self.path / "summary.json", found.get("run"), self.run, _MADE_AGAIN)
        return found

    def _extends(self) -> bool:
        """Whether the run in the folder was to have fewer rounds."""
        path = self.path / "config.toml"
        return path.exists() and read_toml(path).get("rounds") != self.config.rounds


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rounds of a run folder, one dictionary each; a torn last line of a running run is left
    out.
    """
    return read_rounds(owners(path / "metrics.jsonl"), run_in(path))


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run folder, the newest first: by their round, whatever the length of its
    number.
    """
    found = [
        path
        for path in (run / "checkpoints").glob("round-*.safetensors")
        if path.stem[6:].isdecimal()
    ]
    return sorted(found, key=_round_of, reverse=True)


def beside_reward(summary: Mapping[str, Any] | None) -> dict[str, Any]:
    """The figures of a summary beside its reward: held-out metrics, and the privacy that was
    spent.
    """
    summary = summary or {}
    privacy = summary.get("privacy")
    said = {**summary, **(privacy if isinstance(privacy, Mapping) else {})}
    return {key: value for key, value in said.items() if key.startswith(("test_", "epsilon_"))}


def _ours(name: str) -> bool:
    """Whether a run that was stopped before its first line may have left a file of this name."""
    known = (
        ".lock",
        "environment.json",
        "metrics.jsonl",
        "timings.jsonl",
        "checkpoints",
        "error.json",
        _SECRET,
        PRIVATE,
    )
    return name in known or name.endswith(".tmp") or name.startswith("memory.sqlite")


def _for_its_owner(path: str, flags: int) -> int:
    """A file that nobody else may read."""
    return os.open(path, flags, 0o600)


def _round_of(checkpoint: Path) -> int:
    """The round in a checkpoint's name."""
    return int(checkpoint.stem.removeprefix("round-"))


def _lines_of(path: Path, run: str, rounds: int) -> Iterator[tuple[bytes, float]]:
    """The first line of a file, which names the run, and those of its first rounds, each with the
    seconds that it names; timings must name some.

    None at all of a run that was killed before the first was written.
    """
    timed, file = path.name == "timings.jsonl", io.BytesIO()
    with reading(path), contextlib.suppress(FileNotFoundError):
        file = open_regular(path)  # type: ignore[assignment]
    with file:
        for number in range(rounds + 1):
            line = file.readline(LONGEST_LINE)
            if not line.endswith(b"\n"):
                if rounds == 0:
                    return
                raise DataError(
                    f"{path}: shorter than the checkpoint beside it; the folder has been changed"
                )
            with contextlib.suppress(ValueError):
                values = object_in(line)
                if number == 0:
                    require_run(path, values.get("run"), run)
                seconds = values.get("seconds") if number and timed else 0.0
                right = number == 0 or (
                    type(values.get("round")) is int and values["round"] == number
                )
                if right and isinstance(seconds, int | float) and math.isfinite(seconds):
                    yield line, float(seconds)
                    continue
            raise DataError(f"{path}: line {number + 1} is damaged; the run cannot be resumed")
