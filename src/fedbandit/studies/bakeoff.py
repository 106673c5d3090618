"""`fedbandit bakeoff`: contenders crossed with situations, tuned with equal effort, run on fresh
seeds.

A TOML file says what to cross; docs/bakeoff.md describes it. Everything is a function of that file:
killed and resumed, a bake-off writes the same bytes. `fedbandit.report.bakeoff` writes the page.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from fedbandit.assembly.experiment import build_experiment
from fedbandit.config import Config, read_toml
from fedbandit.core.errors import ConfigError, refuse
from fedbandit.core.files import read_json, write_json
from fedbandit.core.parts import counted, flatten, nearest
from fedbandit.data import open_dataset
from fedbandit.engines import ThreadEngine
from fedbandit.federated.pipeline import zeros_to_send
from fedbandit.presets import load
from fedbandit.runs.folder import read_metrics
from fedbandit.runs.local_runner import HERE, Runner
from fedbandit.runs.reporting import no_model_acts
from fedbandit.simulation import simulate
from fedbandit.studies.compare import folder_name, run_members
from fedbandit.studies.search import (
    FACTOR,
    SPENDS_PRIVACY,
    Choice,
    Search,
    best_points,
    cost,
    points,
    search_steps,
    values_of,
)
from fedbandit.studies.sweeps import spec_of

Entry = dict[
    str, Any
]  # settings of one value of an axis; `start` and `tune` have their own meaning
Axes = dict[str, dict[str, Entry]]
_PROBE_ROUNDS = 20
_MOST_PROBES = (
    100  # of cells; with more of them, each value of each axis is probed once a situation
)


class BakeoffSpec(BaseModel):
    """The contents of a bake-off's TOML file, checked.

    `situations` and `contenders` hold axes (`rule`, `regime`, ...), an axis its values by name, and
    a value its settings. A value may name another preset to `start` from, and what to `tune`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    start: str  # the preset or TOML file that every run starts from
    situations: Annotated[Axes, Field(min_length=1)]
    contenders: Annotated[Axes, Field(min_length=1)]
    cross: list[dict[str, str | list[str]]] = []  # which values meet; without any, all
    set: dict[str, Any] = {}  # changes to every run
    seeds: Annotated[int, Field(ge=2)] = 5  # 0, 1, 2, ...; tuning has another
    tries: Annotated[int, Field(ge=1)] = 8  # points that every contender is tuned with
    extend: Annotated[int, Field(ge=0)] = 0  # steps beyond the grid's edge
    against: str | None = None  # the contender that differences are taken from
    along: str | None = None  # the axis of situations along which a picture shows rewards
    title: str = "Bake-off"
    note: str = ""  # for the page: what was reduced, and why


@dataclass(frozen=True)
class Cell:
    """One contender in one situation: its values by axis, its configuration, what is tuned."""

    situation: Mapping[str, str]
    contender: Mapping[str, str]
    config: Config
    grid: Mapping[str, Sequence[Any]]

    @property
    def where(self) -> str:
        """The situation in words: `questions, scratch`."""
        return ", ".join(self.situation.values())

    @property
    def who(self) -> str:
        """The contender in words: `softmax, regression, fedavg`."""
        return ", ".join(self.contender.values())

    @property
    def name(self) -> str:
        """The folder of its runs, below `runs` and `tuning`."""
        parts = self.situation.values(), self.contender.values()
        return "/".join(folder_name("-".join(part)) for part in parts)

    @property
    def tries(self) -> int:
        """The points of its grid, its own values included; 0 where nothing is tuned."""
        return len(points(self.grid)) if self.grid else 0


@dataclass(frozen=True)
class Bakeoff:
    """A bake-off that was run, as far as it has come: what tables and pictures are made from."""

    spec: BakeoffSpec
    cells: Sequence[Cell]
    choices: Mapping[str, Choice]  # of the cells that were tuned, by name
    rows: Sequence[Mapping[str, Any]]  # one for each cell and seed
    paces: Mapping[str, Sequence[float]]  # CPU seconds of a round and of a start, by cell


def read_bakeoff(path: Path) -> BakeoffSpec:
    """Read and check a bake-off's TOML file; a wrong value is refused with its key."""
    return spec_of(BakeoffSpec, read_toml(path), f"{path}: ")


def cells_of(spec: BakeoffSpec) -> list[Cell]:
    """Every cell of the cross, situation by situation; a name that no axis has is refused."""
    axes = {**spec.situations, **spec.contenders}
    refuse(
        (
            len(axes) < len(spec.situations) + len(spec.contenders),
            "contenders: an axis has the name of one of the situations",
        )
    )
    wanted = [_block(number, block, axes) for number, block in enumerate(spec.cross, start=1)]
    cells = []
    for chosen in itertools.product(*axes.values()):
        values = dict(zip(axes, chosen, strict=True))
        if wanted and not any(all(values[k] in v for k, v in block.items()) for block in wanted):
            continue
        cells.append(_cell(spec, axes, values))
    refuse((not cells, "cross: no contender is left"))
    known = {"against": {cell.who for cell in cells}, "along": set(spec.situations)}
    for key, names in known.items():
        if (named := getattr(spec, key)) is not None and named not in names:
            raise ConfigError(f"{key}: there is no {named!r}{nearest(named, names)}")
    return cells


def _block(number: int, block: Mapping[str, str | list[str]], axes: Axes) -> dict[str, list[str]]:
    """The values that a `[[cross]]` table names, by axis, each a list; refused where unknown."""
    found = {}
    for axis, chosen in block.items():
        refuse((axis not in axes, f"cross {number}: no axis {axis!r}{nearest(axis, axes)}"))
        found[axis] = [chosen] if isinstance(chosen, str) else chosen
        for value in found[axis]:
            refuse(
                (
                    value not in axes[axis],
                    f"cross {number}.{axis}: no {value!r}{nearest(value, axes[axis])}",
                )
            )
    return found


def _cell(spec: BakeoffSpec, axes: Axes, values: Mapping[str, str]) -> Cell:
    """One cell: its settings are start, `set`, situations, contenders, later ones before earlier.

    Its grid is the union of what its values `tune`. Held-out data is looked at once, at the end.
    """
    entries = {axis: axes[axis][value] for axis, value in values.items()}
    start, settings, grid = spec.start, flatten(spec.set), dict[str, Any]()
    for axis, entry in entries.items():
        start = entry.get("start", start)
        grid |= flatten(entry.get("tune", {}))
        settings |= flatten({k: v for k, v in entry.items() if k not in ("start", "tune")})
        refuse(
            (
                not isinstance(start, str),
                f"{axis}.{values[axis]}.start: should be a preset or a TOML file",
            )
        )
    config = load(start).with_values(settings)
    config = config.with_values({"evaluate_every": config.rounds})
    return Cell(
        {axis: values[axis] for axis in spec.situations},
        {axis: values[axis] for axis in spec.contenders},
        config,
        {key: values_of(key, given) for key, given in grid.items()},
    )


def run_bakeoff(
    spec: BakeoffSpec,
    out: Path,
    *,
    runner: Runner = HERE,
    say: Callable[[str], None] = print,
    most_hours: float | None = None,
    dry_run: bool = False,
) -> Iterator[Bakeoff]:
    """Run the bake-off into `out`, or resume it; yields what is known after each situation.

    Every cell is built and checked before the first round. The cost is measured first and said;
    more than `most_hours` core-hours are refused. With `dry_run` that is all.
    """
    cells = cells_of(spec)
    sizes = _sizes(cells)
    if any(cell.config.privacy.mechanism != "none" for cell in cells):
        say(SPENDS_PRIVACY)
    if hint := no_model_acts({f"{cell.where}: {cell.who}": cell.config for cell in cells}):
        say(hint)
    paces = _paces(spec, cells, out, say)
    rounds, runs, seconds = _cost(spec, cells, paces)
    hours = seconds / 3600
    where, who = len({cell.where for cell in cells}), len({cell.who for cell in cells})
    say(
        f"{counted(len(cells), 'cell')} ({counted(where, 'situation')}, {counted(who, 'contender')}):"
        f" {runs:,} runs, {rounds:,} rounds, about {hours:.2f} core-hours"
        " as measured here"
    )
    if dry_run:
        return
    if most_hours is not None and hours > most_hours:
        raise ConfigError(
            f"about {hours:.1f} core-hours are more than {most_hours:g}; --yes starts it"
        )
    choices: dict[str, Choice] = {}
    table: list[dict[str, Any]] = []
    for situation, group in itertools.groupby(cells, key=lambda cell: cell.where):
        here = list(group)
        say(f"{situation}: tuning {counted(sum(bool(cell.grid) for cell in here), 'contender')}")
        tuned = {cell.name: cell for cell in here if cell.grid}
        search = Search((out / "tuning").joinpath, runner, say, spec.tries, spec.extend)
        choices |= best_points(
            {name: cell.config for name, cell in tuned.items()},
            {name: cell.grid for name, cell in tuned.items()},
            search,
        )
        members = {
            cell.name: cell.config.with_values(choices[cell.name].point if cell.grid else {})
            for cell in here
        }
        say(f"{situation}: {counted(spec.seeds, 'seed')} each")
        run_members(
            members,
            range(spec.seeds),
            (out / "runs").joinpath,
            runner=runner,
        )
        for cell in here:
            for seed in range(spec.seeds):
                folder = out / "runs" / cell.name / f"seed-{seed}"
                table.append(_row(cell, seed, folder, sizes[cell.name]))
        yield Bakeoff(spec, cells, choices, table, paces)


def _sizes(cells: Sequence[Cell]) -> dict[str, dict[str, int]]:
    """The bytes that a client sends and receives in a round, by cell; builds and so checks each."""
    open_once, found = lru_cache(maxsize=4)(open_dataset), {}
    for cell in cells:
        try:
            built = build_experiment(cell.config, open_once(cell.config.data.source))
        except ConfigError as error:
            raise ConfigError(f"{cell.where}: {cell.who}: {error}") from None
        algorithm, weights = built.bandit.work.algorithm, built.initial
        up = zeros_to_send(algorithm.sends, weights)
        down = algorithm.broadcast(algorithm.init(weights))
        found[cell.name] = {
            "bytes_sent": sum(vector.nbytes for vector in up.values()),
            "bytes_received": sum(vector.nbytes for vector in down.values()),
        }
    return found


def _cost(
    spec: BakeoffSpec, cells: Sequence[Cell], paces: Mapping[str, Sequence[float]]
) -> tuple[int, int, float]:
    """The rounds, runs and CPU seconds of a whole bake-off."""
    rounds = runs = 0
    seconds = 0.0
    for cell in cells:
        tries = min(spec.tries, cell.tries)
        own = cost(tries, search_steps(cell.config), FACTOR) + spec.seeds * cell.config.rounds
        rounds, runs = rounds + own, runs + tries + spec.seeds
        a_round, a_start = paces[cell.name]
        seconds += own * a_round + (tries + spec.seeds) * a_start
    return rounds, runs, seconds


def _paces(
    spec: BakeoffSpec, cells: Sequence[Cell], out: Path, say: Callable[[str], None]
) -> dict[str, tuple[float, ...]]:
    """CPU seconds of a round and of a start by cell, measured now or by the call that this one
    resumes; a folder of another file is refused.

    Of many cells only such are run as bring a new value into their situation; the others are taken
    to cost what the last of these did.
    """
    asked = spec.model_dump(exclude={"seeds", "title", "note", "against", "along"})
    kept = read_json(out / "plan.json") or {}
    refuse(
        (
            kept and kept.get("for") != asked,
            f"{out}: holds a bake-off of another file; use another folder",
        )
    )
    try:
        return {cell.name: tuple(map(float, kept["seconds"][cell.name])) for cell in cells}
    except (KeyError, TypeError, ValueError):
        say(f"measuring the cost of {counted(len(cells), 'cell')}")
    paces, seen, last = dict[str, tuple[float, ...]](), set[tuple[str, str]](), (0.0, 0.0)
    for cell in cells:
        values = {(cell.where, value) for value in cell.contender.values()}
        if len(cells) <= _MOST_PROBES or not values <= seen:
            seen, last = seen | values, pace_of(cell.config)
        paces[cell.name] = last
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "plan.json", {"for": asked, "seconds": paces})
    return paces


def pace_of(config: Config, clock: Callable[[], float] = time.process_time) -> tuple[float, float]:
    """Seconds of a round and of starting a run, measured by a short run: of CPU, or by the clock.

    It runs twice: the first compiles, loads, and pre-trains what all later ones share.
    """
    dataset, short = open_dataset(config.data.source), config.with_values({"rounds": _PROBE_ROUNDS})
    a_round = a_start = 0.0
    with closing(ThreadEngine(1)) as engine:
        for _ in range(2):
            began = clock()
            with simulate(short, dataset, engine=engine) as simulation:
                rounds = iter(simulation)
                next(rounds)
                a_start, began = clock() - began, clock()
                counted_rounds = sum(1 for _ in itertools.islice(rounds, _PROBE_ROUNDS - 2))
            a_round = (clock() - began) / max(1, counted_rounds)
    return round(a_round, 6), round(max(0.0, a_start - a_round), 6)


def _row(cell: Cell, seed: int, folder: Path, sizes: Mapping[str, int]) -> dict[str, Any]:
    """The table's row of one run; nothing but its names where it diverged."""
    row: dict[str, Any] = {**cell.situation, **cell.contender, "seed": seed, "reward": None}
    if not (folder / "summary.json").exists():
        return row
    lines = read_metrics(folder)
    events = np.array([line["events"] for line in lines], float)
    row["reward"] = lines[-1]["running_reward"]
    row["last_reward"] = _mean([line["reward"] for line in lines[-max(1, len(lines) // 10) :]])
    if any(line.get("regret") is not None for line in lines):
        lost = np.array([line.get("regret") or 0.0 for line in lines], float)
        row["regret"] = float((lost * events).sum() / max(1.0, events.sum()))
    for key in ("p10", "p50", "p90", "worst_decile"):
        row[f"client_{key}"] = _mean([(line["client_reward"] or {}).get(key) for line in lines])
    row |= {key: value for key, value in lines[-1].items() if key.startswith("test_")}
    row |= {key: lines[-1][key] for key in ("epsilon",) if lines[-1].get(key) is not None}
    if any(line.get("sent_bytes") is not None for line in lines):
        turns = sum(line["clients"] for line in lines)
        sizes = {**sizes, "bytes_sent": round(sum(line["sent_bytes"] for line in lines) / turns)}
    return {**row, **sizes}


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean of the values that are there; None where none is."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
