"""Run folders as plain values: what was configured and measured, and which runs belong together.

Knows the files of a run, not what makes them: it imports nothing that runs. Tables are Arrow's.
"""

import json
import math
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from fedbandit.core.errors import DataError, needing
from fedbandit.core.files import (
    lines_in,
    object_in,
    open_regular,
    parse_toml,
    read_json,
    read_object,
    read_small,
    shallow,
    write_atomically,
)
from fedbandit.core.identity import (
    MADE_FROM,
    WHERE_COMPUTED,
    lines_of_rounds,
    owners,
    reading,
    require_run,
    run_in,
)
from fedbandit.core.parts import flatten, in_short
from fedbandit.results.plots import COLOURS, policy_of

_DEEPEST = 20  # levels of objects in a line of metrics; runs write one
Columns = Mapping[str, Sequence[Any]]
"""Values by name, one a round; None where a round has none."""
Arrays = Mapping[str, np.ndarray]
"""The same in float64, [rounds] each; NaN where a round has none."""


def arrow_table(columns: Columns) -> Any:
    """A `pyarrow.Table` of columns of plain values.

    Whole numbers among fractions become fractions; lists, and values of mixed kinds, become JSON
    text.
    """
    with needing("a table"):
        import pyarrow as pa
    return pa.table({name: _column(pa, values) for name, values in columns.items()})


def columns_of(lines: Sequence[Mapping[str, Any]], prefix: str = "") -> dict[str, list[Any]]:
    """Lines as columns, with a name for every key that any line has; None where one lacks it.

    A part of an object has a dot in its name. `ValueError` for what is nested too deeply.

    Examples:
        >>> columns_of([{"round": 1, "clients": {"p50": 0.5}}, {"round": 2}])
        {'round': [1, 2], 'clients.p50': [0.5, None]}
    """
    if prefix.count(".") > _DEEPEST:
        raise ValueError("nested too deeply")
    columns: dict[str, list[Any]] = {}
    for name in dict.fromkeys(chain.from_iterable(lines)):
        values = [line.get(name) for line in lines]
        kinds = {type(value) for value in values}
        if list in kinds:
            shallow({name: [value for value in values if type(value) is list]})
        if dict in kinds:
            parts = [value if type(value) is dict else {} for value in values]
            columns |= columns_of(parts, f"{prefix}{name}.")
            values = [None if type(value) is dict else value for value in values]
        if kinds != {dict} and kinds != {dict, type(None)}:
            columns[f"{prefix}{name}"] = values
    return columns


_MANY = 500  # lines, from which on Arrow reads them; loading it costs more than it saves before
_PLAIN = ("null", "bool", "int64", "double", "string")  # types that Arrow reads as Python does


def _parsed(lines: Sequence[bytes]) -> dict[str, list[Any]]:
    """The columns of lines of JSON (`columns_of`): many and plain ones by Arrow, four times as fast."""
    deep = (line.count(b"{") > _DEEPEST or line.count(b"[") > _DEEPEST for line in lines)
    if len(lines) < _MANY or find_spec("pyarrow") is None or any(deep):
        return columns_of([object_in(line) for line in lines])
    import pyarrow as pa
    from pyarrow import compute
    from pyarrow import json as arrow

    text = b"".join(lines)
    try:
        table = arrow.read_json(pa.BufferReader(text), arrow.ReadOptions(block_size=len(text) + 1))
        while any(pa.types.is_struct(kind) for kind in table.schema.types):
            table = table.flatten()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        table = pa.table({})  # damaged, or of mixed kinds: Python says which
    plain = {str(getattr(kind, "value_type", kind)) for kind in table.schema.types} <= {*_PLAIN}
    numbers = [column for column in table.columns if column.type == pa.float64()]
    # Whole numbers beyond 64 bits are fractions, or infinite, for Arrow.
    beyond = any((compute.max(compute.abs(c)).as_py() or 0) >= 2**63 for c in numbers)
    if len(table) != len(lines) or not plain or beyond:
        return columns_of([object_in(line) for line in lines])
    return {name: table[name].to_pylist() for name in table.column_names}


def write_table(
    rows: Sequence[Mapping[str, Any]], path: Path, kinds: Sequence[str] = (".parquet", ".csv")
) -> list[Path]:
    """The rows as Parquet and as CSV beside it; a column is there if any row has it."""
    from pyarrow import csv, parquet

    table = arrow_table(columns_of(rows))
    writers = {".parquet": parquet.write_table, ".csv": csv.write_csv}
    path.parent.mkdir(parents=True, exist_ok=True)
    targets = [path.with_suffix(kind) for kind in kinds]
    for target in targets:
        write_atomically(target, partial(writers[target.suffix], table))
    return targets


def _column(pa: Any, values: Sequence[Any]) -> Any:
    kinds = {type(value) for value in values if value is not None}
    beyond = any(
        type(value) is int and abs(value) >= 2**63 for value in values
    )  # what no column of numbers holds
    if kinds == {int, float} and not beyond:
        return pa.array([None if value is None else float(value) for value in values])
    if len(kinds) > 1 or kinds & {list, tuple, dict} or beyond:
        return pa.array([None if value is None else json.dumps(value) for value in values])
    return pa.array(values) if kinds else pa.nulls(len(values), pa.float64())


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


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that identify a run, by dotted key; what is not set, and where it is computed,
    is left out.
    """
    flat = flatten({key: value for key, value in config.items() if key not in WHERE_COMPUTED})
    return {key: value for key, value in flat.items() if value is not None}


def made_from(environment: Mapping[str, Any]) -> str | None:
    """The inputs of a run beside its configuration: data, the user's own source and files, the
    results number.
    """
    found = {key: environment[key] for key in MADE_FROM if environment.get(key)}
    return json.dumps(found, sort_keys=True) if found else None


def grouped(
    configs: Sequence[Mapping[str, Any]], data: Sequence[str | None]
) -> dict[str, list[int]]:
    """The positions of the runs of each configuration, by label and sorted by seed.

    Runs of one group differ in nothing but their seed; `data` says what else each run was made from
    (`made_from`). Labels are the policy's name and the fewest values that tell two of a name apart.
    """
    groups: dict[str, list[int]] = {}
    settings = [settings_of(config) for config in configs]
    for position, (values, fingerprint) in enumerate(zip(settings, data, strict=True)):
        identity = {key: value for key, value in values.items() if key != "seed"}
        if fingerprint is not None:  # the same data may lie in several places
            identity["data.source"] = fingerprint
        groups.setdefault(json.dumps(identity, sort_keys=True), []).append(position)
    labels = _labels([settings[members[0]] for members in groups.values()])
    order = {name: place for place, name in enumerate(COLOURS)}
    named = sorted(
        zip(labels, groups.values(), strict=True),
        key=lambda group: (order.get(policy_of(group[0]) or "", len(order)), group[0]),
    )
    return {
        label: sorted(members, key=lambda i: settings[i].get("seed", 0)) for label, members in named
    }


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys whose values are not the same everywhere; what a reader thinks of first comes first."""
    every = sorted(dict.fromkeys(key for values in settings for key in values), key=_place)
    return [key for key in every if len({json.dumps(values.get(key)) for values in settings}) > 1]


def _labels(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The policy's name (or "baseline"), then the fewest values that tell two of the same name
    apart.
    """
    names = [
        str(values.get("policy.name", "?")) if values.get("training", True) else "baseline"
        for values in settings
    ]
    keys = {
        name: _telling_apart(
            [values for other, values in zip(names, settings, strict=True) if other == name]
        )
        for name in set(names)
    }
    labels = [
        _label(name, keys[name], values) for name, values in zip(names, settings, strict=True)
    ]
    # Of the same settings on other data under the same name nothing but a number is left to say.
    return [
        label if labels.count(label) == 1 else f"{label} ({labels[: i + 1].count(label)})"
        for i, label in enumerate(labels)
    ]


def _label(name: str, keys: Sequence[str], values: Mapping[str, Any]) -> str:
    """The rule with its own parameters, then whatever else sets it apart: `softmax beta=0.1, not
    private`.
    """
    own = [_said(key, values.get(key)) for key in keys if key.startswith("policy.")]
    others = [_said(key, values.get(key)) for key in keys if not key.startswith("policy.")]
    return ", ".join([" ".join([name, *own]), *others])


def _telling_apart(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys that together differ between any two; what a reader thinks of first comes first."""
    every = dict.fromkeys(key for values in settings for key in values if key != "seed")
    chosen: list[str] = []
    kinds = [""] * len(settings)
    for key in sorted(every, key=_place):
        finer = [
            f"{kind}|{values.get(key)!r}" for kind, values in zip(kinds, settings, strict=True)
        ]
        if len(set(finer)) > len(set(kinds)):
            chosen.append(key)
            kinds = finer
    return chosen


def _place(key: str) -> int:
    return next(
        (place for place, start in enumerate(_TELLING) if key.startswith(start)), len(_TELLING)
    )


_NONE = {
    "privacy.mechanism": "not private",
    "compression.name": "not compressed",
}  # what "none" of something is


def readable(key: str, value: Any) -> Any:
    """A value as a table shows it: "none" of something says of what."""
    return _NONE.get(key, value) if value == "none" else value


def _said(key: str, value: Any) -> str:
    """A name says what it is; a number does not."""
    if isinstance(value, str):
        return str(readable(key, value))
    name = key.removeprefix("policy.").replace("learning_rate", "rate")
    return f"default {name}" if value is None else f"{name}={in_short(value)}"


@dataclass(frozen=True)
class RunRecord:
    """One run: its name, its configuration and the metrics of its rounds, as columns by name.

    `ended` is False where rounds are missing.
    """

    name: str
    config: Mapping[str, Any]
    columns: Columns  # of the lines of metrics.jsonl
    summary: Mapping[str, Any] | None = None  # summary.json of a finished run
    environment: Mapping[str, Any] = field(
        default_factory=dict
    )  # versions, and the data's name and fingerprint
    error: str | None = None  # what the run failed with
    folder: Path | None = None  # None: it is in memory alone
    ended: bool = True  # False: rounds are missing
    label: str | None = None  # what a user calls its configuration; None: what sets it apart

    @property
    def rounds(self) -> int:
        """The number of rounds that were measured."""
        return len(self.columns.get("round", ()))

    def values(self, metric: str) -> np.ndarray:
        """A metric in every round, float64 [rounds]; NaN where a round has no value."""
        found = self.columns.get(metric, [None] * self.rounds)
        if not {type(value) for value in found} <= {int, float, bool, type(None)}:
            raise DataError(f"{metric}: is not a number; to_pandas() has it")
        return np.array(found, float)

    def last(self, metric: str) -> float:
        """The last value of a metric; NaN if it has none."""
        values = self.values(metric)
        known = values[~np.isnan(values)]
        return float(known[-1]) if len(known) else math.nan

    @property
    def seed(self) -> int:
        """The seed of the bandit phase."""
        return int(self.config.get("seed", 0))

    @property
    def status(self) -> str | None:
        """The fault of a run in a few words; None if it is finished."""
        after = f"after {self.rounds} of {self.config.get('rounds', '?')} rounds"
        if self.error is not None:
            return f"failed {after}: {self.error}"
        return None if self.ended else f"unfinished, {after}"

    def seconds(self) -> Columns:
        """Where the time of each round went, as columns; none for a run in memory."""
        if self.folder is None or not (self.folder / "timings.jsonl").exists():
            return {}
        with reading(self.folder / "timings.jsonl"):
            found = read_columns(self.folder / "timings.jsonl", run_in(self.folder))
        place = {number: i for i, number in enumerate(found.pop("round", []))}
        places = [place.get(number) for number in self.columns["round"]]
        return {
            name: [None if i is None else values[i] for i in places]
            for name, values in found.items()
        }


def run_folders(folders: Iterable[Path]) -> Iterator[tuple[Path, str]]:
    """Every run folder in or below the folders with its name from there, in the order of their
    paths.

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
    """The summary of a finished run, None if there is none; `ValueError` if it is not what a run
    writes.

    `DataError` if it cannot be read: then it is not known whether the run is finished.
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
    if (
        type(rounds) is not int
        or rounds < 1
        or not (reward is None or type(reward) in (int, float))
    ):
        raise ValueError(f"{path}: damaged: it does not say what the run came to")
    return found


def read_columns(path: Path, run: str) -> dict[str, list[Any]]:
    """The metrics or timings of a run as columns; a block of lines at a time, so that a hundred
    thousand rounds take about a second.
    """
    columns: dict[str, list[Any]] = {}
    rounds = 0
    for block in lines_of_rounds(path, run):
        found = _parsed(block)
        for name in [*columns, *(name for name in found if name not in columns)]:
            columns.setdefault(name, [None] * rounds).extend(found.get(name) or [None] * len(block))
        rounds += len(block)
    return columns


def read_record(path: Path, name: str) -> RunRecord:
    """The run in a folder, as far as it has come; `DataError` where a file is damaged, or of another run."""
    try:
        run = run_in(path)
        config = parse_toml(read_small(path / "config.toml"))
        if not all(type(config.get(name, 0)) is int for name in ("seed", "rounds")):
            raise ValueError("config.toml: seed and rounds should be whole numbers")
        metrics = owners(path / "metrics.jsonl")
        columns = read_columns(metrics, run) if metrics.exists() else {}
        rounds = columns.get("round", [None] if columns else [])
        for number, found in enumerate(rounds, start=1):
            if type(found) is not int or found != number:
                raise ValueError(f"metrics.jsonl: line {number} is not of round {number}")
        summary = read_summary(owners(path / "summary.json"))
        if summary is not None:
            require_run(path / "summary.json", summary.get("run"), run)
            if summary["rounds"] != len(rounds):
                raise ValueError(f"summary.json: of round {summary['rounds']}, not of the last one")
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: damaged: {error}") from None
    failure = read_json(path / "error.json")
    return RunRecord(
        name=name,
        config=config,
        columns=columns,
        summary=summary,
        environment=read_json(path / "environment.json") or {},
        error=None
        if failure is None or summary is not None
        else str(failure.get("error", "failed")),
        folder=path,
        ended=summary is not None,
    )


_SHOWN = ("running_reward", "propensity", "epsilon", "client_reward.worst_decile")
_BLOCK = 4096  # lines that are parsed together
_LARGEST = 1e100  # a mean of larger numbers would overflow
_MOST_NAMES = 64  # of held-out metrics
_REMEMBERED = 256  # bytes before the offset, by which a file that was replaced is known


@dataclass
class MetricsFile:
    """A run's `metrics.jsonl`, followed: `follow` reads what was appended since the last call.

    A file that was replaced, or cut back to a checkpoint, is read again from its beginning; it is
    known by its inode, its size and the bytes before the last position. `problem` says why a
    damaged file is not shown. `columns` has what charts show, float64 [rounds], NaN where a round
    has no value; all else is passed over, so that many long runs can be followed.
    """

    path: Path
    problem: str | None = None  # why the file cannot be shown, until it is another file
    rounds: int = 0
    _offset: int = 0
    _stamp: tuple[int, ...] = ()
    _before: bytes = b""
    _values: dict[str, array] = field(default_factory=dict)  # type: ignore[type-arg] # arrays are not generic before 3.12

    def follow(self, most: int | None = None) -> int:
        """Read what was appended, at most about `most` bytes; the bytes that were read."""
        try:
            with open_regular(self.path) as file:
                found = os.fstat(file.fileno())
                stamp = (found.st_ino, found.st_size, found.st_mtime_ns)
                if stamp == self._stamp and (self.problem or self._offset == found.st_size):
                    return 0
                file.seek(max(0, self._offset - len(self._before)))
                same = self._stamp[:1] in ((), stamp[:1]) and found.st_size >= self._offset
                if self.problem or not same or file.read(len(self._before)) != self._before:
                    self.__init__(self.path)  # type: ignore[misc] # another file, or cut back to an older checkpoint
                    file.seek(0)
                self._stamp = stamp
                return self._read(file, most)
        except FileNotFoundError:
            self.__init__(self.path)  # type: ignore[misc]
        except OSError as error:
            self.problem = f"{self.path.name} cannot be read: {error.strerror}"
        return 0

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """The values of every metric by name, float64 [rounds]."""
        return {name: np.array(values, float) for name, values in self._values.items()}

    def _read(self, file: IO[bytes], most: int | None) -> int:
        """Take the complete lines from here on, a block at a time; the bytes that were read."""
        taken, lines, block = 0, lines_in(file), list[bytes]()
        try:
            while (most is None or taken < most) and (block := list(islice(lines, _BLOCK))):
                self._take(block)
                size, last = sum(map(len, block)), block[-1]
                self._offset, taken = self._offset + size, taken + size
                self._before, block = last[-_REMEMBERED:], []
        except (ValueError, OverflowError) as error:
            self.problem = f"{self.path.name} has {error}"
            self._find_damage(block)
        return taken

    def _take(self, lines: Sequence[bytes]) -> None:
        """Add the rounds of some lines, all or none; `ValueError` where one is not what a run
        measures.
        """
        if lines and not self.rounds and object_in(lines[0]).keys() == {"run"}:
            lines = lines[1:]  # which `read_runs` has looked at
        found = _parsed(lines)
        rounds = found.get("round", [])
        if rounds != [*range(self.rounds + 1, self.rounds + len(lines) + 1)] or bool in map(
            type, rounds
        ):
            raise ValueError("it is not of this round")
        if "client_reward" in found:
            raise ValueError("client_reward is not an object")
        named = dict.fromkeys(
            [*self._values, *_SHOWN, *(n for n in found if n.startswith("test_"))]
        )
        if len(named) > _MOST_NAMES:
            raise ValueError("it has too many metrics")
        added = {name: _numbers(name, found.get(name, [None] * len(lines))) for name in named}
        for name, values in added.items():
            missing = array("d", [math.nan]) * self.rounds
            self._values.setdefault(name, missing).frombytes(values.tobytes())
        self.rounds += len(lines)

    def _find_damage(self, lines: Sequence[bytes]) -> None:
        """Say which of some lines is damaged, and how."""
        for line in lines:
            try:
                self._take([line])
            except (ValueError, OverflowError) as error:
                self.problem = f"line {self.rounds + 1} of {self.path.name} is damaged: {error}"
                self._values = {}
                return


def _numbers(name: str, values: Sequence[Any]) -> np.ndarray:
    """A column of a file of metrics, NaN for none; `ValueError` for what no run measures."""
    if {type(value) for value in values} <= {int, float, type(None)}:
        found = np.array(values, float)
        known = np.isfinite(found)
        if not (np.abs(found[known]) > _LARGEST).any():
            return np.where(known, found, math.nan)
    raise ValueError(f"{name:.40} is not a number that a run measures")
