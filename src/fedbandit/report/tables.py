"""Sections of a report: chart data, tables of outcomes and parameters, facts about the data,
commands.

Each function makes one section of the page as HTML, from groups of runs that differ in their seed
alone. `MetricsFile` follows a file of metrics, for reports and for the live page.
"""

import json
import math
import os
import shlex
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from fedbandit.core.errors import FedbanditError
from fedbandit.core.files import object_in, open_regular
from fedbandit.core.parts import counted, flatten, in_short
from fedbandit.data import open_dataset
from fedbandit.data.info import describe
from fedbandit.privacy.reporting import in_one_line
from fedbandit.results.differences import (
    Difference,
    Differences,
    differences,
    standard_error,
    with_error,
)
from fedbandit.results.plots import styles_of_best
from fedbandit.results.reading import readable
from fedbandit.runs.folder import beside_reward
from fedbandit.runs.index import Problem, RunGroup

Columns = Mapping[str, np.ndarray]  # values by name, one a round; NaN where a round has none


_PLAIN = ("running_reward", "propensity", "epsilon")


_BLOCK = 1 << 20


_LONGEST_LINE = 64 << 20


_LARGEST = 1e100  # a mean of larger numbers would overflow


_MOST_NAMES = 64  # of held-out metrics


_REMEMBERED = 256  # bytes before the offset, by which a file that was replaced is known


@dataclass
class MetricsFile:
    """A run's `metrics.jsonl`, followed: `follow` reads what was appended since the last call.

    A file that was replaced, or cut back to a checkpoint, is read again from its beginning; it is
    known by its inode, its size and the bytes before the last position. `problem` says why a
    damaged file is not shown. `columns` has the values by name, float64 [rounds], NaN where a round
    has none.
    """

    path: Path
    problem: str | None = None  # why the file cannot be shown, until it is another file
    rounds: int = 0
    _offset: int = 0
    _stamp: tuple[int, ...] = ()
    _before: bytes = b""
    _values: dict[str, array] = field(default_factory=dict)  # type: ignore[type-arg] # arrays are not generic before 3.12
    _columns: tuple[int, Columns] = (-1, {})

    def follow(self, most: int | None = None) -> int:
        """Read what was appended, at most about `most` bytes; the bytes that were read."""
        try:
            with open_regular(self.path) as file:
                found = os.fstat(file.fileno())
                stamp = (found.st_ino, found.st_size, found.st_mtime_ns)
                if stamp == self._stamp and (
                    self.problem is not None or self._offset == found.st_size
                ):
                    return 0
                file.seek(max(0, self._offset - len(self._before)))
                replaced = self._stamp[:1] not in ((), stamp[:1]) or found.st_size < self._offset
                if (
                    self.problem is not None
                    or replaced
                    or file.read(len(self._before)) != self._before
                ):
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
    def columns(self) -> Columns:
        """The values of every metric by name, float64 [rounds]."""
        if self._columns[0] != self.rounds:
            values = {
                name: np.array(self._values.get(name, self._missing()), float)
                for name in (*_PLAIN, "worst_decile")
            }
            values["worst_decile"] = _running_mean(values["worst_decile"])
            held_out = {
                name: np.array(kept, float)
                for name, kept in self._values.items()
                if name not in values
            }
            self._columns = self.rounds, {**values, **held_out}
        return self._columns[1]

    def _read(self, file: Any, most: int | None) -> int:
        taken, rest = 0, b""
        while block := file.read(_BLOCK):
            taken += len(block)
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                try:
                    self._take(line)
                except (ValueError, OverflowError) as error:
                    self.problem = f"line {self.rounds + 1} of {self.path.name} is damaged: {error}"
                    self._values = {}
                    return taken
                self._offset += len(line) + 1
                self._before = (line + b"\n")[-_REMEMBERED:]
            if len(rest) > _LONGEST_LINE:
                self.problem = f"{self.path.name} has a line of more than {_LONGEST_LINE >> 20} MB"
                return taken
            if most is not None and taken >= most:
                break
        return taken

    def _take(self, line: bytes) -> None:
        values = object_in(line)
        if type(values.get("round")) is not int or values["round"] != self.rounds + 1:
            raise ValueError("it is not of this round")
        spread = values.get("client_reward") or {}
        if not isinstance(spread, Mapping):
            raise ValueError("client_reward is not an object")
        numbers = {name: _number(name, values.get(name)) for name in _PLAIN}
        numbers["worst_decile"] = _number("worst_decile", spread.get("worst_decile"))
        numbers |= {
            name: _number(name, value) for name, value in values.items() if name.startswith("test_")
        }
        for name in numbers.keys() - self._values.keys():
            if len(self._values) > _MOST_NAMES:
                raise ValueError("it has too many metrics")
            self._values[name] = self._missing()
        for name, column in self._values.items():
            column.append(numbers.get(name, np.nan))
        self.rounds += 1

    def _missing(self) -> "array[float]":
        return array("d", [np.nan]) * self.rounds


def _number(name: str, value: Any) -> float:
    if value is None:
        return math.nan
    if type(value) not in (int, float) or (math.isfinite(value) and abs(value) > _LARGEST):
        raise ValueError(f"{name:.40} is not a number that a run measures")
    return float(value) if math.isfinite(value) else math.nan


def _running_mean(values: np.ndarray) -> np.ndarray:
    known = np.isfinite(values)
    averages: np.ndarray = np.cumsum(np.where(known, values, 0)) / np.maximum(np.cumsum(known), 1)
    return averages


_POINTS = 400  # more than a chart can show


def chart(
    title: str, name: str, groups: Mapping[str, Sequence[Columns]], deploy_every: int | None = None
) -> dict[str, Any] | None:
    """One chart of a column, a curve per group of seeds in the order given; None if no run has it."""
    curves, styles = [], styles_of_best(list(groups))
    for label, runs in groups.items():
        values = [run[name] for run in runs if name in run and np.isfinite(run[name]).any()]
        if values:
            colour, dashed = styles[label] or (None, False)
            curves.append(_curve(label, colour, dashed, values))
    if not curves:
        return None
    longest = max(int(curve["x"][-1]) for curve in curves)
    marks = (
        list(range(deploy_every, longest, deploy_every))
        if deploy_every and longest / deploy_every <= 60
        else []
    )
    return {"title": title, "series": curves, "marks": marks}


def _curve(
    label: str, colour: str | None, dashed: bool, values: Sequence[np.ndarray]
) -> dict[str, Any]:
    """The mean over seeds ± one standard deviation, as far as all of them have come where they
    still run.
    """
    length = min(len(run) for run in values)
    stacked = np.stack([run[:length] for run in values])
    rounds = np.flatnonzero(np.isfinite(stacked).all(axis=0))
    if len(rounds) > _POINTS:
        rounds = np.unique(
            np.concatenate(
                [rounds[np.linspace(0, len(rounds) - 1, _POINTS).astype(int)], rounds[-1:]]
            )
        )
    shown = stacked[:, rounds]
    mean = shown.mean(axis=0)
    spread = shown.std(axis=0, ddof=1) if len(shown) > 1 else np.zeros_like(mean)
    return {
        "label": label,
        "colour": colour,
        "dashed": dashed,
        "x": (rounds + 1).tolist(),
        "mean": _rounded(mean),
        "low": _rounded(mean - spread),
        "high": _rounded(mean + spread),
    }


def _rounded(values: np.ndarray) -> list[float]:
    return [float(f"{value:.6g}") for value in values]


def outcomes(groups: Sequence[RunGroup]) -> str:
    """The table of results: final running average of each configuration over its finished runs.

    In the order given (`ranked`), with how far each is behind the first and the 95% interval of
    that difference, and what the summaries say beside: held-out metrics, epsilon.
    """
    extra = list(
        dict.fromkeys(
            key for group in groups for run in group.finished for key in beside_reward(run.summary)
        )
    )
    beside = {one.configuration: one.difference for one in standing(groups).outcomes}
    heads = [
        "configuration",
        "running average ± s.e.",
        "behind the best",
        "95% interval",
        "seeds",
        "rounds",
    ]
    rows = []
    names = _names(groups)
    for group in groups:
        ended = group.finished
        final = np.array([_reward(run.last) for run in ended], float)
        mean = _shown(final.mean() if len(final) else np.nan)
        gap = beside.get(group.label)
        behind = ["–", "–"] if gap is None else [f"{-gap.mean:.4f}", _reversed(gap)]
        extras = [_mean([beside_reward(run.summary).get(key) for run in ended]) for key in extra]
        counts = [str(len(ended)), str(ended[0].rounds) if ended else "–"]
        rows.append(
            (
                names[group.label],
                [with_error(mean, standard_error(final)), *behind, *counts, *map(_shown, extras)],
            )
        )
    return _table([*heads, *(_in_words(key) for key in extra)], rows)


def _reversed(gap: Difference) -> str:
    return "–" if gap.low is None or gap.high is None else f"{-gap.high:.4f} to {-gap.low:.4f}"


def standing(groups: Sequence[RunGroup]) -> Differences:
    """Rewards of all configurations over finished runs, beside the best and paired by seed."""
    rewards = {
        group.label: {
            run.config.seed: value
            for run in group.finished
            if not np.isnan(value := _reward(run.last))
        }
        for group in groups
    }
    return differences(rewards)


def ranked(groups: Sequence[RunGroup]) -> list[RunGroup]:
    """The groups, best first: those with finished runs, then the others by how well they do so far."""

    def rank(group: RunGroup) -> tuple[bool, float]:
        chosen = group.finished or group.runs
        rewards = [value for run in chosen if not np.isnan(value := _reward(run.last))]
        return bool(group.finished), float(np.mean(rewards)) if rewards else -np.inf

    return sorted(groups, key=rank, reverse=True)


def headline(groups: Sequence[RunGroup]) -> str:
    """Who came first, with how much, and whether that may be chance; nothing where no run has
    finished.
    """
    found = standing(groups)
    if not found.outcomes:
        return ""
    best = next(group for group in groups if group.label == found.outcomes[0].configuration)
    final = np.array([_reward(run.last) for run in best.finished], float)
    reward = with_error(f"{found.outcomes[0].reward:.4f}", standard_error(final))
    over = f"{counted(len(best.finished), 'seed')}, {best.finished[0].rounds} rounds"
    verdict = f"<p>{escape(found.in_words())}.</p>" if len(found.outcomes) > 1 else ""
    return (
        '<div class="headline"><p class="soft">Highest running average reward</p>'
        f'<p class="winner">{escape(best.label)} <b>{reward}</b></p><p class="soft">{over}</p>{verdict}</div>'
    )


def privacy(groups: Sequence[RunGroup]) -> str:
    """The guarantee of each private configuration, in the form that all commands print."""
    lines = []
    for group in groups:
        found = next(
            (
                run.summary["privacy"]
                for run in group.finished
                if run.summary and "privacy" in run.summary
            ),
            None,
        )
        try:
            if found is not None and found["mechanism"] != "none":
                lines.append(f"<p>{escape(group.label)}: {escape(in_one_line(found))}</p>")
        except (KeyError, TypeError, ValueError):
            lines.append(
                f"<p>{escape(group.label)}: its summary does not say what its epsilon assumes</p>"
            )
    return "".join(lines)


def apart(groups: Sequence[RunGroup]) -> str:
    """Runs that are in no average, by name: not finished, or shorter than the others of their
    configuration.
    """
    rows = [
        (
            f'<th scope="row">{escape(run.name)}</th>',
            [
                group.label,
                run.status,
                f"{run.rounds} of {run.config.rounds}",
                _shown(_reward(run.last)),
            ],
        )
        for group in groups
        for run in group.apart
    ]
    return (
        _table(["run", "configuration", "state", "rounds", "running average so far"], rows)
        if rows
        else ""
    )


def left_out(problems: Sequence[Problem]) -> str:
    """Folders that could not be read, and why."""
    lines = [f'<p class="error">{escape(one.name)}: {escape(one.reason)}</p>' for one in problems]
    return f"<section><h2>Could not be read</h2>{''.join(lines)}</section>" if lines else ""


def _table(heads: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Rows of a head, which is HTML, and cells, which are texts; each knows its column, for a phone
    shows it beside.
    """
    head = "".join(
        f'<th scope="col"{" class=number" * (i > 0)}>{escape(text)}</th>'
        for i, text in enumerate(heads)
    )
    body = "".join(
        f"<tr>{name}{''.join(_cell(column, cell) for column, cell in zip(heads[1:], cells, strict=True))}</tr>"
        for name, cells in rows
    )
    return f'<div class="scroll"><table class="cards"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(column: str, text: str) -> str:
    return f'<td class="number" data-head="{escape(column)}">{escape(text)}</td>'


def failures(groups: Sequence[RunGroup]) -> str:
    """Runs that died, and of what."""
    lines = [
        f'<p class="error">{escape(run.name)}: {escape(run.error)}</p>'
        for group in groups
        for run in group.runs
        if run.error and run.summary is None
    ]
    return f"<section><h2>What went wrong</h2>{''.join(lines)}</section>" if lines else ""


def parameters(groups: Sequence[RunGroup]) -> str:
    """A table of the values that differ between configurations, and the shared ones below it."""
    flat = [flatten(group.config.identity()) for group in groups]
    keys = [key for key in dict.fromkeys(key for values in flat for key in values) if key != "seed"]
    differing = [key for key in keys if len({json.dumps(values.get(key)) for values in flat}) > 1]
    shared = "\n".join(
        f"{key} = {json.dumps(flat[0].get(key))}" for key in keys if key not in differing
    )
    parts = []
    names = _names(groups)
    if differing:
        rows = [
            (names[group.label], [_value(readable(key, values.get(key))) for key in differing])
            for group, values in zip(groups, flat, strict=True)
        ]
        parts.append(_table(["configuration", *differing], rows))
    parts.append(
        f"<details><summary>What all of them share</summary><pre>{escape(shared)}</pre></details>"
    )
    return "".join(parts)


def _value(value: Any) -> str:
    return "not set" if value is None else in_short(value)


def data_facts(groups: Sequence[RunGroup]) -> str:
    """Facts about the data sets, as far as they are still where the runs found them."""
    facts = []
    for source in dict.fromkeys(group.config.data.source for group in groups):
        try:
            text = describe(open_dataset(source))
        except (FedbanditError, OSError, ValueError) as error:
            text = f"{source}: cannot be read any more ({error})"
        facts.append(f"<pre>{escape(text)}</pre>")
    return "".join(facts)


def environments(groups: Sequence[RunGroup]) -> str:
    """The versions that made the runs; every different one once."""
    found = {
        json.dumps(dict(run.environment), sort_keys=True): run.environment
        for g in groups
        for run in g.runs
    }
    texts = [
        "\n".join(f"{key} {value}" for key, value in environment.items())
        for environment in found.values()
    ]
    return "".join(f"<pre>{escape(text)}</pre>" for text in texts)


def commands(groups: Sequence[RunGroup]) -> str:
    """The commands that make the runs again, each with the configuration it needs."""
    parts = [
        "<p>Save a configuration under the name given, then run the command; each run is repeated bit for bit.</p>"
    ]
    for position, group in enumerate(groups, start=1):
        file = f"run-{position}.toml"
        lines = "\n".join(
            f"fedbandit run {file} --seed {run.config.seed} --out {shlex.quote(f'again/{run.name}')}"
            for run in group.runs
        )
        parts.append(
            f"<details><summary>{escape(group.label)}</summary><pre>{escape(lines)}</pre>"
            f'<p class="soft">{file}</p><pre>{escape(group.config.to_toml())}</pre></details>'
        )
    return "".join(parts)


def _names(groups: Sequence[RunGroup]) -> dict[str, str]:
    """The head of each configuration's row: its label behind a piece of its line."""
    heads = {}
    for label, style in styles_of_best([group.label for group in groups]).items():
        line = ""
        if style is not None:
            dash = ' stroke-dasharray="5 3"' if style[1] else ""
            line = (
                f'<svg width="22" height="8" aria-hidden="true"><path class="line" data-colour="{style[0]}"'
                f' d="M0 4H22" stroke="{style[0]}" stroke-width="4"{dash}/></svg> '
            )
        heads[label] = f'<th scope="row">{line}{escape(label)}</th>'
    return heads


def _reward(last: Mapping[str, Any]) -> float:
    reward = last.get("running_reward")
    return float("nan") if reward is None else float(reward)


def _mean(values: Sequence[Any]) -> float:
    known = [float(value) for value in values if type(value) in (int, float) and abs(value) < 1e300]
    return float(np.mean(known)) if known else float("nan")


def _shown(value: float) -> str:
    return "–" if np.isnan(value) else f"{value:.4f}"


def _in_words(key: str) -> str:
    return key.replace("_", " ")
