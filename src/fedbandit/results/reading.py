"""Run folders as plain values: what was configured and measured, and which runs belong together.

Knows the files of a run, not what makes them: it imports nothing that runs. Tables are Arrow's.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from fedbandit.core.errors import DataError, FedbanditError
from fedbandit.core.files import parse_toml, read_json, read_lines, read_object, read_small, shallow
from fedbandit.core.parts import WHERE_COMPUTED, flatten, in_short
from fedbandit.results.plots import COLOURS, policy_of


def arrow_table(rows: Sequence[Mapping[str, Any]], first: Sequence[str] = ()) -> Any:
    """A `pyarrow.Table` with a column for every key that any row has, null where a row lacks it.

    Columns named `first` lead. Whole numbers among fractions become fractions; lists, and values of
    mixed kinds, become JSON text.
    """
    pa = needed("pyarrow")
    names = dict.fromkeys([*first, *(name for row in rows for name in row)])
    return pa.table({name: _column(pa, [row.get(name) for row in rows]) for name in names})


def needed(module: str) -> Any:
    """A library that not every installation has; one line says which extra brings it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise FedbanditError(f"this needs {module}: pip install 'fedbandit[simulation]'") from None


def _column(pa: Any, values: list[Any]) -> Any:
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
    """The inputs of a run beside its configuration: data, the user's own source, the results
    number.
    """
    fingerprint = environment.get("data_fingerprint")
    rest = {
        key: environment[key]
        for key in ("results", "sources")
        if environment.get(key) not in (None, 1, {})
    }
    return (
        json.dumps([fingerprint, rest], sort_keys=True)
        if rest
        else None
        if fingerprint is None
        else str(fingerprint)
    )


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
    """One run: its name, its configuration and the metrics of its rounds, nested as in the files.

    `rounds` are the lines of `metrics.jsonl`; `ended` is False where some are missing.
    """

    name: str
    config: Mapping[str, Any]
    rounds: tuple[Mapping[str, Any], ...]  # the lines of metrics.jsonl
    summary: Mapping[str, Any] | None = None  # summary.json of a finished run
    environment: Mapping[str, Any] = field(
        default_factory=dict
    )  # versions, and the data's name and fingerprint
    error: str | None = None  # what the run failed with
    folder: Path | None = None  # None: it is in memory alone
    ended: bool = True  # False: rounds are missing

    @property
    def seed(self) -> int:
        """The seed of the bandit phase."""
        return int(self.config.get("seed", 0))

    @property
    def status(self) -> str | None:
        """The fault of a run in a few words; None if it is finished."""
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
            return {
                line["round"]: {k: v for k, v in line.items() if k != "round"} for line in lines
            }
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"{self.folder / 'timings.jsonl'}: damaged: {error}") from None


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


def read_record(path: Path, name: str) -> RunRecord:
    """The run in a folder, as far as it has come; `DataError` where one of its files is damaged."""
    try:
        config = parse_toml(read_small(path / "config.toml"))
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
        error=None
        if failure is None or summary is not None
        else str(failure.get("error", "failed")),
        folder=path,
        ended=summary is not None,
    )
