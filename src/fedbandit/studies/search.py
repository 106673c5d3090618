"""Tuning by simulation: grids, successive halving, and choices that are kept.

`race` compares candidates at a few lengths and lets the better ones run on; `best_points` tunes the
members of a study on grids of their own. Figures, sweeps, bake-offs and advice all search here.
"""

import hashlib
import json
import math
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from fedbandit.config import Config
from fedbandit.core.errors import ConfigError, refuse
from fedbandit.core.files import read_json, write_json
from fedbandit.core.parts import counted, flatten, in_short
from fedbandit.core.randomness import Purpose, uniforms
from fedbandit.runs.folder import read_metrics
from fedbandit.runs.index import ELIMINATED
from fedbandit.runs.local_runner import HERE, Ended, Job, OnEnd, Runner, nobody
from fedbandit.studies.compare import Say, quiet, run_jobs

Grid = Mapping[str, Sequence[Any]]
TUNING_SEED = 1_000_000  # of searches; what is reported has the seeds 0, 1, 2 and so on
FACTOR = 3  # one in this many candidates runs on
_SHORT = re.compile(r"^\s*([0-9.eE+-]+?)\s*\.\.\s*([0-9.eE+-]+)\s*$")


@dataclass(frozen=True)
class SearchCandidate:
    """A configuration in a race: its name, and `point`, the values that set it apart."""

    name: str
    config: Config
    point: dict[str, Any]


@dataclass(frozen=True)
class Standing:
    """A candidate after its last step, with its running average reward there: one value a seed.

    NaN stands for a seed that diverged. `rounds` are fewer than `step` where the run itself ends
    earlier, for example when a privacy budget is spent.
    """

    candidate: SearchCandidate
    step: int
    rounds: int
    rewards: tuple[float, ...]
    statuses: tuple[str, ...]

    @property
    def score(self) -> float:
        """The mean over seeds; minus infinity where any of them diverged."""
        mean = float(np.mean(self.rewards)) if self.rewards else math.nan
        return -math.inf if math.isnan(mean) else mean


Folders = Callable[[SearchCandidate, int], Path]


@dataclass(frozen=True)
class Race:
    """Candidates that run with the same seeds and are compared after each of `steps` rounds.

    The best `1/factor` of them run on from where they were paused; the others lose their
    checkpoints. `folder(candidate, seed)` is where a run lies. With nine candidates, steps
    [100, 300, 900] and factor 3, nine run for 100 rounds, three for 300, one for 900: successive
    halving (Jamieson and Talwalkar, 2016), which spends most rounds on those that do well.
    """

    candidates: Sequence[SearchCandidate]
    seeds: Sequence[int]
    folder: Folders
    steps: Sequence[int]
    factor: int = FACTOR

    def jobs(self, alive: Sequence[SearchCandidate], step: int) -> Iterator[Job]:
        """The runs of a step: those still in the race, each with every seed."""
        for one in alive:
            for seed in self.seeds:
                config = one.config.with_values({"seed": seed})
                yield Job(config, self.folder(one, seed), until=step)

    def standings(
        self, alive: Sequence[SearchCandidate], step: int, ended: Iterator[Ended]
    ) -> list[Standing]:
        """The standings after a step, best first; candidates that had no time are left out."""
        found = []
        for one in alive:
            own = [next(ended) for _ in self.seeds]
            if any(end.status == "not run" for end in own):
                continue
            rewards, rounds = [], step
            for seed, end in zip(self.seeds, own, strict=True):
                value = None
                if end.status in ("finished", "paused"):
                    lines = read_metrics(self.folder(one, seed))[:step]
                    value, rounds = lines[-1]["running_reward"], len(lines)
                rewards.append(math.nan if value is None else float(value))
            statuses = tuple(end.status for end in own)
            found.append(Standing(one, step, rounds, tuple(rewards), statuses))
        return sorted(found, key=lambda s: -s.score)

    def eliminate(self, candidate: SearchCandidate) -> None:
        """Mark a loser's runs, which need no checkpoints any more."""
        for place in (self.folder(candidate, seed) for seed in self.seeds):
            shutil.rmtree(place / "checkpoints", ignore_errors=True)
            (place / ELIMINATED).touch()


def rungs(rounds: int, factor: int, shortest: int) -> list[int]:
    """The rounds after which candidates are compared: the last one, and earlier ones down to
    `shortest`.

    Examples:
        >>> rungs(1500, factor=3, shortest=100)
        [167, 500, 1500]
    """
    steps = [rounds]
    while math.ceil(steps[0] / factor) >= shortest:
        steps.insert(0, math.ceil(steps[0] / factor))
    return steps


def search_steps(config: Config) -> list[int]:
    """The rungs of a configuration's search: none before two deployments, since nothing acts on
    what was learned before the first.

    Examples:
        >>> from fedbandit import preset
        >>> search_steps(preset("so-init-shift-deploy40-softmax"))
        [167, 500, 1500]
    """
    shortest = max(2 * config.deploy_every, config.rounds // 9)
    return rungs(config.rounds, FACTOR, min(config.rounds, shortest))


def cost(candidates: int, steps: Sequence[int], factor: int) -> int:
    """The rounds that a race of this many candidates runs, for one seed.

    Examples:
        >>> cost(9, [100, 300, 900], factor=3)  # 9 for 100, 3 for 200 more, 1 for 600 more
        2100
    """
    total, alive, before = 0, candidates, 0
    for step in steps:
        total += alive * (step - before)
        alive, before = math.ceil(alive / factor), step
    return total


def race(
    candidates: Sequence[SearchCandidate],
    seeds: Sequence[int],
    folder: Folders,
    steps: Sequence[int],
    factor: int = FACTOR,
    **how: Any,
) -> list[Standing]:
    """The standings of one `Race`, best first; further arguments are those of `races`."""
    return races({"": Race(candidates, seeds, folder, steps, factor)}, **how)[""]


def races(
    running: Mapping[str, Race],
    *,
    runner: Runner = HERE,
    deadline: float | None = None,
    say: Say = quiet,
    on_end: OnEnd = nobody,
) -> dict[str, list[Standing]]:
    """Run races side by side, step by step, so that many workers have something to do.

    Standings come best first: by the rounds that candidates were given, then by their reward there.
    Within a deadline (of `time.monotonic`) each step has its share of the time, so that the last
    one is reached. `Interrupted` is raised on Ctrl-C; the same call resumes.
    """
    alive = {name: list(one.candidates) for name, one in running.items()}
    final: dict[str, dict[str, Standing]] = {name: {} for name in running}
    shares = [
        sum(cost(len(one.candidates), one.steps[: i + 1], one.factor) for one in running.values())
        for i in range(max((len(one.steps) for one in running.values()), default=0))
    ]
    began = time.monotonic()
    for number, share in enumerate(shares):
        left = {n: one for n, one in running.items() if number < len(one.steps) and alive[n]}
        end = None if deadline is None else began + (deadline - began) * share / shares[-1]
        every = chain(*(one.jobs(alive[name], one.steps[number]) for name, one in left.items()))
        ended = iter(run_jobs(every, runner, deadline=end, on_end=on_end))
        for name, one in left.items():
            step, last = one.steps[number], number == len(one.steps) - 1
            ranked = one.standings(alive[name], step, ended)
            final[name] |= {standing.candidate.name: standing for standing in ranked}
            keep = len(ranked) if last else math.ceil(len(ranked) / one.factor)
            alive[name] = [s.candidate for s in ranked[:keep] if s.score > -math.inf]
            for lost in ranked[keep:]:
                one.eliminate(lost.candidate)
            if ranked:  # otherwise out of time: what the step before said has to do
                rest = f", {len(alive[name])} continue{'s' * (len(alive[name]) == 1)}"
                size = f"{counted(step, 'round')}: {counted(len(ranked), 'candidate')}"
                say(f"{size}, best {ranked[0].score:.4f}{'' if last else rest}")
    return {name: best_first(standings.values()) for name, standings in final.items()}


def best_first(standings: Iterable[Standing]) -> list[Standing]:
    """By the rounds that candidates were given, then by reward; the diverged last.

    A candidate that was kept for more rounds stands before any that was given up earlier, whatever
    the rewards: running averages of different lengths cannot be compared.
    """
    return sorted(standings, key=lambda s: (-s.step if s.score > -math.inf else 0, -s.score))


# Appendix A.2. The server's grid is Adam's.
RATES: dict[str, Grid] = {
    "emnist": {"client.learning_rate": "0.01..0.5", "server.learning_rate": "0.0005..0.05"},
    "so": {"client.learning_rate": "0.02..5", "server.learning_rate": "0.0002..0.05"},
}
# The paper prints none for SGD, whose steps are a hundred times smaller than Adam's.
_SGD_SERVER_RATES = "0.05..5"
# Appendix A.1; FALCON's mu is {0.01, 0.1, 1} K / 0.05, as rounded for 62 and 50 actions.
_FALCON_MU = {"emnist": (12, 124, 1240), "so": (10, 100, 1000)}


def appendix(family: str, config: Config) -> dict[str, list[Any]]:
    """The paper's grid for a configuration: learning rates, and the parameters of its policy.

    `family` is "emnist" or "so".

    Examples:
        >>> from fedbandit import preset
        >>> grid = appendix("so", preset("so-init-softmax"))
        >>> grid["policy.beta"], len(points(grid))
        ([0.02, 0.05, 0.1], 192)
    """
    refuse((family not in RATES, f"appendix: should be {' or '.join(RATES)}, not {family!r}"))
    grid = {key: values_of(key, values) for key, values in RATES[family].items()}
    if config.server.optimizer == "sgd":
        grid["server.learning_rate"] = values_of("", _SGD_SERVER_RATES)
    exploration: dict[str, Grid] = {
        "softmax": {"policy.beta": (0.02, 0.05, 0.1)},
        "epsilon-greedy": {"policy.epsilon": (0.05, 0.1)},
        "falcon": {"policy.mu": _FALCON_MU[family], "policy.gamma": (1000, 5000)},
    }
    own = exploration.get(config.policy.name, {})
    return grid | {key: list(values) for key, values in own.items()}


def one_two_five(text: str) -> list[float]:
    """The values {1, 2, 5}·10^n from the first to the last.

    Examples:
        >>> one_two_five("0.02..0.5")
        [0.02, 0.05, 0.1, 0.2, 0.5]
    """
    match = _SHORT.match(text)
    try:
        low, high = (float(end) for end in match.groups()) if match else (0.0, 0.0)
    except ValueError:
        low = high = 0.0
    refuse(
        (
            not 0 < low <= high < math.inf,
            f"{text!r}: expected two positive ends, smaller first, for example 0.02..5",
        )
    )
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    values = [float(f"{digit}e{decade}") for decade in decades for digit in (1, 2, 5)]
    inside = [value for value in values if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]
    refuse((not inside, f"{text!r}: no value {{1, 2, 5}}·10^n lies between these ends"))
    return inside


def values_of(key: str, values: Any) -> list[Any]:
    """The values of one axis: a list, a single value, or the short form `"0.02..5"`.

    Examples:
        >>> values_of("policy.beta", "0.05..0.5"), values_of("policy.beta", 1)
        ([0.05, 0.1, 0.2, 0.5], [1])
    """
    if isinstance(values, str) and ".." in values:
        return one_two_five(values)
    if isinstance(values, list | tuple):
        refuse((not values, f"{key}: the grid has no values"))
        return list(values)
    return [values]


def points(grid: Grid) -> list[dict[str, Any]]:
    """Every point of the product of a grid's axes, the last axis changing fastest.

    Examples:
        >>> points({"a": [1, 2], "b": [3]})
        [{'a': 1, 'b': 3}, {'a': 2, 'b': 3}]
    """
    return [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]


def on_edge(point: Mapping[str, Any], grid: Grid) -> list[str]:
    """The axes on which a point has the smallest or largest of three or more numbers.

    A better value may lie beyond an edge, which is worth a warning.

    Examples:
        >>> on_edge({"rate": 1.0}, {"rate": [0.1, 0.3, 1.0]})
        ['rate']
    """
    edges = []
    for key, values in grid.items():
        numbers = _numbers(values)
        if len(numbers) >= 3 and point.get(key) in (min(numbers), max(numbers)):
            edges.append(key)
    return edges


def beyond(point: Mapping[str, Any], grid: Grid) -> list[dict[str, Any]]:
    """The point moved one step of {1, 2, 5}·10^n outwards on each axis on whose edge it lies, and
    on all of these together.

    Examples:
        >>> beyond({"rate": 1.0}, {"rate": [0.1, 0.3, 1.0]})
        [{'rate': 2.0}]
    """
    moved: dict[str, float] = {}
    for key in on_edge(point, grid):
        value = float(point[key])
        wide = one_two_five(f"{value / 11!r}..{value * 11!r}") if value > 0 else []
        up = value == max(_numbers(grid[key]))
        further = [n for n in wide if (n > value * (1 + 1e-9) if up else n < value * (1 - 1e-9))]
        if further:
            moved[key] = min(further) if up else max(further)
    single = [{**point, key: value} for key, value in moved.items()]
    return [*single, {**point, **moved}] if len(moved) > 1 else single


def _numbers(values: Iterable[Any]) -> list[float]:
    """The numbers among the values of an axis; True and False are none."""
    return [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]


@dataclass(frozen=True)
class Search:
    """Where searches run and keep their choices, and how much they try.

    `folder(name)` is where a member's candidates and its choice lie, often `out.joinpath`. `tries`
    is the number of points that each looks at, None for the whole grid. `extend` is how often a
    best point on the edge is followed beyond it. `deadline` is of `time.monotonic`; without one,
    the same call always chooses the same.
    """

    folder: Callable[[str], Path]
    runner: Runner = HERE
    say: Callable[[str], None] = print
    tries: int | None = None
    extend: int = 0
    deadline: float | None = None


@dataclass(frozen=True)
class Choice:
    """Choice of a search for a configuration, and from how much: kept as `choice.json`."""

    point: dict[str, Any]
    looked_at: Annotated[int, Field(ge=0)] = 0  # points that were tried
    grid_points: Annotated[int, Field(ge=0)] = 0  # points that there were
    on_edge: tuple[str, ...] = ()
    reward: float | None = None  # on the tuning seed, at the last step

    @classmethod
    def read(cls, path: Path, config: Config) -> "Choice | None":
        """Cached choice of an earlier search for this configuration, or None.

        A file that was changed after it was written is not used; one written by a person needs
        `point` and `for`, the configuration's own values.
        """
        kept = read_json(path) or {}
        signed = kept.pop("digest", None)
        own = json.dumps({key: kept[key] for key in cls.__dataclass_fields__ if key in kept})
        try:
            found = TypeAdapter(cls).validate_json(own, strict=True)
            same = Config.build(kept.get("for", {})).identity() == config.identity()
        except (ConfigError, ValidationError):  # of another version, say
            return None
        return found if same and signed in (None, _digest(kept)) else None

    def in_words(self) -> str:
        """The point and the share of the grid that was looked at.

        Examples:
            >>> Choice({"policy.beta": 0.1}, looked_at=9, grid_points=36).in_words()
            'beta=0.1 (9 of 36 points of the grid, 25%)'
        """
        share = f", {self.looked_at / self.grid_points:.0%}" if self.grid_points else ""
        covered = f"{self.looked_at} of {self.grid_points} points of the grid{share}"
        return f"{point_in_words(self.point)} ({covered})"


def _digest(values: Mapping[str, Any]) -> str:
    """The digest by which a choice that was changed after it was written is known."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def best_points(
    members: Mapping[str, Config], grids: Mapping[str, Grid], search: Search
) -> dict[str, Choice]:
    """Tune every member on its own grid with the same number of tries, all of them side by side.

    A member's own values are tried first, then points of its grid in a fixed random order, all on
    `TUNING_SEED`. Choices are kept in `search.folder(NAME)/choice.json` and used again: with more
    time a search could choose another point, and the runs made with it would be lost.
    """
    found: dict[str, Choice] = {}
    open_members: dict[str, tuple[dict[str, Any], list[SearchCandidate]]] = {}
    for name, config in members.items():
        if (kept := Choice.read(search.folder(name) / "choice.json", config)) is not None:
            found[name] = kept
            continue
        flat = flatten(config.model_dump())
        published = {axis: flat[axis] for axis in grids[name] if flat.get(axis) is not None}
        others = [point for point in points(grids[name]) if point != published]
        order = np.argsort(uniforms(TUNING_SEED, Purpose.SEARCH, np.arange(len(others))))
        every = [published, *(others[i] for i in order)]
        candidates = [_candidate(config, point) for point in every]
        open_members[name] = published, candidates
    standings = _raced(
        {name: every[: search.tries] for name, (_, every) in open_members.items()}, members, search
    )
    for name, (published, every) in open_members.items():
        found[name] = _chosen(
            name, members[name], grids[name], published, standings[name], len(every), search
        )
        search.say(f"  {name}: {found[name].in_words()}")
        if edges := found[name].on_edge:
            lie = "lie" if len(edges) > 1 else "lies"
            search.say(
                f"  warning: {', '.join(edges)} {lie} on the edge of the grid;"
                " a better value may lie beyond it"
            )
    return {name: found[name] for name in members}


def _raced(
    entrants: Mapping[str, Sequence[SearchCandidate]],
    members: Mapping[str, Config],
    search: Search,
) -> dict[str, list[Standing]]:
    """The standings of each member's candidates; one member alone keeps to the deadline."""
    running = {
        name: Race(every, [TUNING_SEED], partial(_place, search, name), search_steps(members[name]))
        for name, every in entrants.items()
    }
    alone = len(running) == 1
    return races(
        running,
        runner=search.runner,
        deadline=search.deadline if alone else None,
        say=(lambda text: search.say(f"  {text}")) if alone else quiet,
    )


def _place(search: Search, name: str, candidate: SearchCandidate, seed: int) -> Path:
    """The folder of a candidate: below that of its member."""
    return search.folder(name) / candidate.name


def _chosen(
    name: str,
    config: Config,
    grid: Grid,
    published: dict[str, Any],
    standings: list[Standing],
    size: int,
    search: Search,
) -> Choice:
    """The best point, followed beyond the grid's edges where the search may, and written down."""
    looked, said, grid = len(standings), list(standings), _wider(grid, published)
    for _ in range(search.extend if standings else 0):
        new = beyond(said[0].candidate.point, grid) if said[0].score > -math.inf else []
        if not new:
            break
        for point in new:
            grid = _wider(grid, point)
        further = [_candidate(config, point) for point in new]
        said = best_first([*said, *_raced({name: further}, {name: config}, search)[name]])
        looked, size = looked + len(new), size + len(new)
    point = said[0].candidate.point if said else published
    edges = on_edge(point, grid)
    reward = said[0].score if said and said[0].score > -math.inf else None
    kept = {
        "point": point,
        "published": published,
        "on_edge": edges,
        "grid_points": size,
        "looked_at": looked,
        "reward": reward,
        "seed": TUNING_SEED,
        "best": [
            {**one.candidate.point, "rounds": one.rounds, "running_reward": one.score}
            for one in said[:10]
            if one.score > -math.inf
        ],
        "for": config.identity(),
    }
    place = search.folder(name)
    place.mkdir(parents=True, exist_ok=True)
    kept = json.loads(json.dumps(kept))  # as it will be read: lists, not tuples
    write_json(place / "choice.json", {**kept, "digest": _digest(kept)})
    return Choice(point, looked, size, tuple(edges), reward)


def _wider(grid: Grid, point: Mapping[str, Any]) -> Grid:
    """The grid with the point's values on its axes.

    Examples:
        >>> _wider({"rate": [0.1, 0.2]}, {"rate": 0.5})
        {'rate': [0.1, 0.2, 0.5]}
    """
    new = {axis: [point[axis]] for axis in grid if axis in point}
    return {axis: [*dict.fromkeys([*values, *new.get(axis, [])])] for axis, values in grid.items()}


def _candidate(config: Config, point: dict[str, Any]) -> SearchCandidate:
    """Candidates are judged by rewards: they look at held-out data only once, at the end."""
    changed = config.with_values({**point, "evaluate_every": config.rounds})
    return SearchCandidate(
        point_in_words(point).replace(" ", ",") or "unchanged", changed, dict(point)
    )


def point_in_words(point: Mapping[str, Any]) -> str:
    """A point in few characters.

    Examples:
        >>> point_in_words({"client.learning_rate": 0.5, "policy.beta": 0.1})
        'client=0.5 beta=0.1'
    """
    short = {"client.learning_rate": "client", "server.learning_rate": "server"}
    return " ".join(
        f"{short.get(key, key.removeprefix('policy.').removeprefix('algorithm.'))}={in_short(value)}"
        for key, value in point.items()
    )


SPENDS_PRIVACY = (
    "note: tuning spends privacy. Every run looks at the same clients; a run's epsilon covers that"
    " run alone, and not the choice among many"
)


def tune(
    members: Mapping[str, Config],
    family: str,
    out: Path,
    minutes: float,
    runner: Runner = HERE,
    say: Callable[[str], None] = print,
) -> dict[str, Choice]:
    """Choices on the paper's grid for the members of a figure that train, by name.

    Choices are kept in `out` and used again. Time is shared by the size of the grids, so that every
    member has as much of its grid tried as the others.
    """
    if any(config.privacy.mechanism != "none" for config in members.values()):
        say(SPENDS_PRIVACY)
    ends = time.monotonic() + 60 * minutes
    found: dict[str, Choice] = {}
    for key, config in members.items():
        if (kept := Choice.read(out / key / "choice.json", config)) is not None:
            file = out / key / "choice.json"
            say(f"{key}: chosen by an earlier search; remove {file} to search again")
            found[key] = kept
    left = {key: one for key, one in members.items() if one.training and key not in found}
    grids = {key: appendix(family, config) for key, config in left.items()}
    sizes = {key: len(points(grid)) for key, grid in grids.items()}
    for key, grid in grids.items():
        share = max(ends - time.monotonic(), 0.0) * sizes[key] / sum(sizes.values())
        say(f"tuning {key} ({share / 60:.1f} minutes)")
        search = Search(out.joinpath, runner, say, deadline=time.monotonic() + max(share, 1.0))
        found |= best_points({key: members[key]}, {key: grid}, search)
        del sizes[key]
    return found


def scaled(config: Config, scale: float) -> Config:
    """The configuration with rounds and deployment period shortened together; pre-training stays.

    A shorter pre-training would be another initial model, and rules compare differently from there.
    A shortened run looks at held-out data only at its end; after each of its short periods would be
    most of its work.

    Examples:
        >>> from fedbandit import preset
        >>> short = scaled(preset("so-init-shift-softmax"), 0.1)
        >>> short.rounds, short.deploy_every, short.pretraining.rounds
        (150, 20, 100)
    """
    if scale == 1:
        return config
    rounds = max(1, round(config.rounds * scale))
    period = max(1, round(config.deploy_every * scale))
    return config.with_values({"rounds": rounds, "deploy_every": period, "evaluate_every": rounds})
