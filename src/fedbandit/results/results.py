"""Results: the rounds of one run or of many as arrays, tables, pictures and a summary. Reads runs,
never makes them.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np

from fedbandit.core.errors import ConfigError, DataError, needing
from fedbandit.core.parts import counted, flatten, nearest
from fedbandit.results import reading as labels
from fedbandit.results.differences import (
    Differences,
    differences,
    standard_error,
    text_table,
    with_error,
)
from fedbandit.results.plots import curves_figure, require_picture, save_picture
from fedbandit.results.reading import RunRecord, arrow_table, read_record, run_folders

_SHOWN_NOTES = 5


@dataclass(frozen=True, repr=False)
class Results:
    """Measurements of runs, round by round: of one run, of a sweep, or of every run in some
    folders.

    A metric is an array by its name, `[rounds]` for one run and `[runs, rounds]` for several. A
    part of a nested metric has a dot in its name. NaN stands where a round has no value.

    Examples:
        >>> from fedbandit import preset, simulate
        >>> config = preset("so-scratch-softmax").with_values({"rounds": 2, "clients_per_round": 4})
        >>> results = simulate(config).collect()
        >>> results
        <Results: softmax-seed-0, 2 rounds>
        >>> results["running_reward"].shape, results["client_reward.p50"].shape
        ((2,), (2,))

        Several results are joined into one; then its length is the number of runs, and iterating gives them one by one.

        >>> other = simulate(config.with_values({"policy.name": "greedy"})).collect()
        >>> both = Results.concat([results, other])
        >>> both
        <Results: 2 runs of 2 configurations (softmax, greedy), 2 rounds>
        >>> both["running_reward"].shape, [one.runs[0].name for one in both]
        ((2, 2), ['softmax-seed-0', 'greedy-seed-0'])
    """

    runs: tuple[RunRecord, ...]
    left_out: tuple[str, ...] = field(
        default=()
    )  # folders that could not be read, each with the reason

    def __post_init__(self) -> None:
        object.__setattr__(self, "runs", _with_names_of_their_own(self.runs))

    @classmethod
    def open(cls, *folders: Path | str) -> "Results":
        """The runs in or below the folders, as far as they have come.

        Folders that cannot be read are left out and named in `problems`, as are runs that have not
        ended.

        Examples:
            >>> import tempfile
            >>> from fedbandit import preset, run
            >>> config = preset("so-scratch-greedy").with_values({"rounds": 2, "clients_per_round": 4})
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     finished = run(config, f"{folder}/greedy")
            ...     paused = run(config.with_values({"seed": 1}), f"{folder}/seed 1", until=1)
            ...     found = Results.open(folder)
            >>> found
            <Results: 2 runs of greedy, 1 to 2 rounds; 1 problem>
            >>> found.problems
            ('seed 1: unfinished, after 1 of 2 rounds',)
        """
        return cls.read(
            run_folders([Path(folder) for folder in folders]), ", ".join(map(str, folders))
        )

    @classmethod
    def read(cls, folders: Iterable[tuple[Path, str]], where: str = "") -> "Results":
        """The runs in these very folders, each with the name it is to have."""
        runs, left_out = [], []
        for path, name in folders:
            try:
                runs.append(read_record(path, name))
            except DataError as error:
                left_out.append(str(error))
        if not runs and not left_out:
            raise DataError(f"{where}: there are no runs")
        return cls(tuple(runs), tuple(left_out))

    def labelled(self, labels: Mapping[str, str]) -> "Results":
        """The same runs, with names of your own for their configurations: labels by run name."""
        named = (replace(run, label=labels.get(run.name, run.label)) for run in self.runs)
        return Results(tuple(named), self.left_out)

    @classmethod
    def concat(cls, results: Iterable["Results"]) -> "Results":
        """All runs of several results in one; of equal names, later ones get a number."""
        every = list(results)
        return cls(
            tuple(run for one in every for run in one.runs),
            tuple(text for one in every for text in one.left_out),
        )

    def __len__(self) -> int:
        return len(self.runs)

    def __iter__(self) -> Iterator["Results"]:
        return (Results((run,)) for run in self.runs)

    def __contains__(self, metric: object) -> bool:
        return metric in self.metrics

    @overload
    def __getitem__(self, key: str) -> np.ndarray: ...
    @overload
    def __getitem__(self, key: int | slice) -> "Results": ...
    def __getitem__(self, key: str | int | slice) -> "np.ndarray | Results":
        """The values of a metric; or with a number or a slice, the results of those runs."""
        if not isinstance(key, str):
            chosen = self.runs[key]
            return Results(chosen if isinstance(chosen, tuple) else (chosen,))
        self._require(key)
        lengths = {run.name: run.rounds for run in self.runs}
        if len(set(lengths.values())) > 1:
            short, long = (
                min(lengths, key=lambda name: lengths[name]),
                max(lengths, key=lambda name: lengths[name]),
            )
            raise DataError(
                f"{key}: the runs have different numbers of rounds ({short} {lengths[short]}, {long} {lengths[long]});"
                " take them one by one, or use to_pandas()"
            )
        values = np.array([run.values(key) for run in self.runs])
        return values[0] if len(self.runs) == 1 else values

    def __repr__(self) -> str:
        if not self.runs:
            return f"<Results: no runs{self._said_problems()}>"
        counts = [run.rounds for run in self.runs]
        fewest, most = min(counts), max(counts)
        rounds = counted(most, "round") if fewest == most else f"{fewest} to {most} rounds"
        what = self.runs[0].name
        if len(self) > 1:
            names = list(self._groups)
            shown = ", ".join([*names[:4], *(["..."] if len(names) > 4 else [])])
            what = f"{len(self)} runs of {shown if len(names) == 1 else f'{len(names)} configurations ({shown})'}"
        return f"<Results: {what}, {rounds}{self._said_problems()}>"

    @cached_property
    def metrics(self) -> tuple[str, ...]:
        """The names of everything that any round measured, as columns of the table have them."""
        return tuple(dict.fromkeys(name for run in self.runs for name in run.columns))

    @property
    def problems(self) -> tuple[str, ...]:
        """Folders that could not be read, and runs that failed or have not ended, in one line each."""
        return (
            *self.left_out,
            *(f"{run.name}: {run.status}" for run in self.runs if run.status is not None),
        )

    def where(self, settings: Mapping[str, Any]) -> "Results":
        """The runs whose configuration has these values, by dotted key:
        `results.where({"policy.name": "greedy"})`.

        Examples:
            >>> from fedbandit import preset, simulate
            >>> config = preset("so-scratch-greedy").with_values({"rounds": 1, "clients_per_round": 4})
            >>> results = Results.concat(simulate(config.with_values({"seed": seed})).collect() for seed in range(3))
            >>> results.where({"seed": 2})
            <Results: greedy-seed-2, 1 round>
        """
        known = dict.fromkeys(key for run in self.runs for key in flatten(run.config))
        for key in settings:
            if key not in known:
                raise ConfigError(f"{key}: no run has such a setting{nearest(key, known)}")
        chosen = [
            run
            for run in self.runs
            if all(flatten(run.config).get(k) == v for k, v in settings.items())
        ]
        return Results(tuple(chosen))

    def folder(self, option: str = "results") -> Path:
        """The folder of the one run that these results are of; `ConfigError` if there is none."""
        folders = [run.folder for run in self.runs]
        if len(folders) != 1 or folders[0] is None:
            said = "take the results of one run that lies in a folder, as `run` makes it"
            raise ConfigError(f"{option}: {said}")
        return folders[0]

    def export(self, out: Path | str, **options: Any) -> Path:
        """Write the trained model of this run to a file for apps: see `fedbandit.export`."""
        import fedbandit

        return Path(fedbandit.export(self.folder(), out, **options))

    def to_arrow(self, *, timings: bool = False) -> Any:
        """A `pyarrow.Table` with one row per run and round, and one column per metric.

        Before the metrics come the run's name, its configuration in short, its seed, and every
        setting that differs between the runs (one whose name is a metric's too has `config.` before
        it). `timings` adds where the seconds went, for runs in folders. Lists are JSON text.
        """
        settings = [labels.settings_of(run.config) for run in self.runs]
        differing = [key for key in labels.differing(settings) if key != "seed"]
        names = {key: f"config.{key}" if key in self.metrics else key for key in differing}
        label_of = {i: label for label, members in self._groups.items() for i in members}
        tables: list[dict[str, Sequence[Any]]] = []
        for i, run in enumerate(self.runs):
            about = {"run": run.name, "configuration": label_of[i], "seed": run.seed}
            about |= {column: settings[i].get(key) for key, column in names.items()}
            spent = run.seconds() if timings else {}
            tables.append({name: [value] * run.rounds for name, value in about.items()})
            tables[-1] |= {**run.columns, **{f"seconds.{name}": spent[name] for name in spent}}
        joined: dict[str, list[Any]] = {name: [] for table in tables for name in table}
        for table, run in zip(tables, self.runs, strict=True):
            for name, values in joined.items():
                values += table.get(name) or [None] * run.rounds
        return arrow_table(joined)

    def to_pandas(self, *, timings: bool = False) -> Any:
        """The table of `to_arrow` as a `pandas.DataFrame`.

        Examples:
            >>> from fedbandit import preset, simulate
            >>> config = preset("so-scratch-greedy").with_values({"rounds": 2, "clients_per_round": 4})
            >>> frame = simulate(config).collect().to_pandas()
            >>> frame[["run", "seed", "round", "clients"]]
                         run  seed  round  clients
            0  greedy-seed-0     0      1        4
            1  greedy-seed-0     0      2        4
        """
        with needing("to_pandas"):
            return self.to_arrow(timings=timings).to_pandas()

    def plot(
        self,
        metric: str = "running_reward",
        path: Path | str | None = None,
        *,
        title: str | None = None,
    ) -> Any:
        """A matplotlib figure of a metric over rounds: one curve per configuration, with a band
        over its seeds.

        With a path, which ends in .png or .svg, the figure is saved there too.

        Examples:
            >>> from fedbandit import preset, simulate
            >>> config = preset("so-scratch-greedy").with_values({"rounds": 2, "clients_per_round": 4})
            >>> simulate(config).collect().plot("reward").axes[0].get_ylabel()
            'reward'
        """
        self._require(metric)
        if path is not None:
            require_picture(Path(path))
        words = "running average reward" if metric == "running_reward" else metric.replace("_", " ")
        data = sorted(
            {str(run.environment["data"]) for run in self.runs if "data" in run.environment}
        )
        periods = {run.config.get("deploy_every") for run in self.runs}
        seeds = {len(runs) for runs in self._comparable.values()}
        over = f"{seeds.pop()} seeds" if len(seeds) == 1 else "seeds"
        curves = {label: _curves(runs, metric) for label, runs in self._comparable.items()}
        figure = curves_figure(
            curves,
            title=title or (f"{words} on {', '.join(data)}" if data else words),
            ylabel=words,
            deploy_every=periods.pop() if len(periods) == 1 else None,
            note="" if over == "1 seeds" else f"mean over {over}, ± one standard deviation",
        )
        if path is not None:
            save_picture(figure, Path(path))
        return figure

    def summary(self) -> "ResultsSummary":
        """One row per configuration, best first: runs, rounds, the final running reward with its
        standard error, held-out metrics.

        Numbers are over the finished runs of a configuration, or while none is finished over those
        that have come furthest. The others are named in the notes below the table.

        Examples:
            >>> from fedbandit import preset, simulate
            >>> config = preset("so-scratch-greedy").with_values({"rounds": 2, "clients_per_round": 4})
            >>> row = simulate(config).collect().summary().rows[0]
            >>> row["configuration"], row["runs"], row["rounds"], list(row)[3:]
            ('greedy', 1, 2, ['running_reward', 'standard_error', 'test_recall_at_5'])
        """
        rows = [_summary_row(label, runs) for label, runs in self._comparable.items()]
        rows.sort(
            key=lambda row: -math.inf if row["running_reward"] is None else row["running_reward"]
        )
        return ResultsSummary(rows[::-1], self.problems)

    def differences(
        self, metric: str = "running_reward", against: str | None = None
    ) -> Differences:
        """The last value of a metric beside that of one configuration: paired by seed, with a 95%
        interval.

        `against` is a configuration as `summary()` names it, by default the best one. Only finished
        runs count.

        Examples:
            >>> from fedbandit import preset, simulate
            >>> config = preset("so-scratch-greedy").with_values({"rounds": 2, "clients_per_round": 4})
            >>> results = Results.concat(simulate(config.with_values({"seed": seed})).collect() for seed in range(3))
            >>> results.differences().in_words()
            'greedy alone: nothing to compare it with'
        """
        self._require(metric)
        if against is not None and against not in self._groups:
            raise ConfigError(
                f"against: no configuration is called {against!r}{nearest(against, self._groups)}"
            )
        rewards = {}
        for label, runs in self._comparable.items():
            last = {run.seed: run.last(metric) for run in runs}
            rewards[label] = {seed: value for seed, value in last.items() if not math.isnan(value)}
        return differences(rewards, against)

    @cached_property
    def _groups(self) -> dict[str, list[int]]:
        """The runs of each configuration by its label; in them seeds alone differ."""
        if all(run.label is not None for run in self.runs):
            groups: dict[str, list[int]] = {}
            for i, run in enumerate(self.runs):
                groups.setdefault(str(run.label), []).append(i)
            return groups
        data = [labels.made_from(run.environment) for run in self.runs]
        return labels.grouped([run.config for run in self.runs], data)

    @cached_property
    def _comparable(self) -> dict[str, list[RunRecord]]:
        """The runs of each configuration that may be averaged: finished ones of one length, or
        else the longest.
        """
        chosen = {}
        for label, of in self._groups.items():
            runs = [self.runs[i] for i in of]
            ended = [run for run in runs if run.status is None] or runs
            longest = max(run.rounds for run in ended)
            chosen[label] = [run for run in ended if run.rounds == longest]
        return chosen

    def _require(self, metric: str) -> None:
        if metric not in self.metrics:
            parts = [name for name in self.metrics if name.startswith(f"{metric}.")]
            hint = f"; it has parts: {', '.join(parts)}" if parts else nearest(metric, self.metrics)
            raise DataError(f"{metric}: no round has such a metric{hint}")

    def _said_problems(self) -> str:
        return f"; {counted(len(self.problems), 'problem')}" if self.problems else ""


@dataclass(frozen=True, repr=False)
class ResultsSummary:
    """The rows of `Results.summary()` as plain dictionaries; printed, it is a table."""

    rows: list[dict[str, Any]]
    notes: Sequence[str] = ()

    def __repr__(self) -> str:
        held_out = list(
            dict.fromkeys(key for row in self.rows for key in row if key not in _SUMMARY)
        )
        heads = [
            "configuration",
            "runs",
            "rounds",
            "running reward",
            *(key.replace("_", " ") for key in held_out),
        ]
        lines = [
            [
                row["configuration"],
                str(row["runs"]),
                str(row["rounds"]),
                with_error(_number(row["running_reward"]), row["standard_error"]),
                *(_number(row.get(key)) for key in held_out),
            ]
            for row in self.rows
        ]
        text = text_table([heads, *lines])
        for note in self.notes[:_SHOWN_NOTES]:
            text += f"\nnote: {note}"
        more = len(self.notes) - _SHOWN_NOTES
        return f"{text}\nnote: and {more} more" if more > 0 else text


_SUMMARY = ("configuration", "runs", "rounds", "running_reward", "standard_error")


def _summary_row(label: str, runs: Sequence[RunRecord]) -> dict[str, Any]:
    final = [value for run in runs if not math.isnan(value := run.last("running_reward"))]
    row: dict[str, Any] = {
        "configuration": label,
        "runs": len(runs),
        "rounds": max(run.rounds for run in runs),
        "running_reward": float(np.mean(final)) if final else None,
        "standard_error": standard_error(final) if len(final) > 1 else None,
    }
    names = dict.fromkeys(name for run in runs for name in run.columns)
    for name in (name for name in names if name.startswith("test_") or name == "epsilon"):
        values = [value for run in runs if not math.isnan(value := run.last(name))]
        row[name] = float(np.mean(values)) if values else None
    return row


def _curves(runs: Sequence[RunRecord], metric: str) -> np.ndarray:
    """[seeds, rounds] with NaN where a run has no such round, or no value in it."""
    most = max((run.columns["round"][-1] for run in runs if run.rounds), default=0)
    curves = np.full((len(runs), most), np.nan)
    for curve, run in zip(curves, runs, strict=True):
        if run.rounds:
            curve[np.array(run.columns["round"]) - 1] = run.values(metric)
    return curves[[bool(run.rounds) for run in runs]]


def _with_names_of_their_own(runs: tuple[RunRecord, ...]) -> tuple[RunRecord, ...]:
    named: dict[str, RunRecord] = {}
    for run in runs:
        number, name = 1, run.name
        while name in named:
            number, name = number + 1, f"{run.name} ({number + 1})"
        named[name] = run if number == 1 else replace(run, name=name)
    return tuple(named.values())


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
