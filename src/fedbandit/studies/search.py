"""Searching hyper-parameters by simulation: the grids of the appendix, and successive halving.

`race` compares candidates at a few lengths and lets the better ones run on; `best_point` searches a
grid for one configuration and keeps its choice; `tune` does so for the members of a figure, within
some minutes.
"""

import itertools
import math
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedbandit.config import Config
from fedbandit.core.errors import ConfigError, Interrupted
from fedbandit.core.files import read_json, write_json
from fedbandit.core.parts import counted, flatten
from fedbandit.core.randomness import Purpose, uniforms
from fedbandit.runs.folder import read_metrics
from fedbandit.runs.local_runner import HERE, Ended, Job, Runner


@dataclass(frozen=True)
class SearchCandidate:
    """A configuration in the race, with what is its own: the values that set it apart."""

    name: str
    config: Config
    point: dict[str, Any]


@dataclass(frozen=True)
class Standing:
    """A candidate's last step, and its running average reward there: one value a seed.

    NaN stands for a seed that diverged; such a candidate has lost, whatever the others say.
    """

    candidate: SearchCandidate
    step: int  # the last one that it was let take part in
    rounds: int  # that it has run up to there: fewer, if its own run is shorter than the step
    rewards: tuple[float, ...]
    statuses: tuple[str, ...]

    @property
    def score(self) -> float:
        """The mean over seeds; a candidate that diverged with any seed has lost."""
        mean = float(np.mean(self.rewards)) if self.rewards else math.nan
        return -math.inf if math.isnan(mean) else mean


def rungs(rounds: int, factor: int, shortest: int) -> list[int]:
    """The rounds after which candidates are compared: the last, and earlier ones down to the
    shortest.

    Examples:
        >>> rungs(1500, factor=3, shortest=100)
        [167, 500, 1500]
    """
    steps = [rounds]
    while math.ceil(steps[0] / factor) >= shortest:
        steps.insert(0, math.ceil(steps[0] / factor))
    return steps


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
    folder: Callable[[SearchCandidate, int], Path],
    steps: Sequence[int],
    factor: int = 3,
    *,
    runner: Runner = HERE,
    deadline: float | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> list[Standing]:
    """The standings of candidates, best first: by the rounds they were given, then by their reward
    there.

    After each of `steps` rounds the best `1/factor` of the candidates run on, from where they were
    paused; the others lose their checkpoints. Within a deadline (of `time.monotonic`) each step has
    its share of the time, so that the last one is reached. `Interrupted` is raised on Ctrl-C; the
    same call resumes.
    """
    alive, final = list(candidates), list[Standing]()
    ends = _shares(len(candidates), steps, factor, deadline)
    for number, step in enumerate(steps):
        places = [(candidate, seed) for candidate in alive for seed in seeds]
        jobs = [
            Job(c.config.with_values({"seed": seed}), folder(c, seed), until=step)
            for c, seed in places
        ]
        outcomes = runner.run(jobs, deadline=ends[number])
        if any(end.status == "interrupted" for end in outcomes) or (
            deadline is None and any(end.status == "not run" for end in outcomes)
        ):
            raise Interrupted(
                "stopped before the search was finished; run the same command again to resume"
            )
        per_seed = len(seeds)
        grouped = [outcomes[i * per_seed : (i + 1) * per_seed] for i in range(len(alive))]
        standings = [
            _standing(c, seeds, folder, step, group)
            for c, group in zip(alive, grouped, strict=True)
        ]
        ran = [s for s in standings if "not run" not in s.statuses]
        if not ran:  # out of time; what the step before said has to do
            return sorted(final, key=_order)
        final = [s for s in final if s.candidate not in [p.candidate for p in ran]] + ran
        ranked = sorted(ran, key=lambda s: -s.score)
        last = number == len(steps) - 1
        keep = len(ranked) if last else math.ceil(len(ranked) / factor)
        alive = [s.candidate for s in ranked[:keep] if s.score > -math.inf]
        for lost in ranked[keep:]:
            for seed in seeds:
                shutil.rmtree(folder(lost.candidate, seed) / "checkpoints", ignore_errors=True)
        rest = "" if last else f", {len(alive)} continue{'s' if len(alive) == 1 else ''}"
        size = f"{counted(step, 'round')}: {counted(len(ran), 'candidate')}"
        say(f"{size}, best {ranked[0].score:.4f}{rest}")
        if not alive:
            break
    return sorted(final, key=_order)


def _shares(
    candidates: int, steps: Sequence[int], factor: int, deadline: float | None
) -> list[float | None]:
    """When each step has to have started its last job."""
    if deadline is None:
        return [None] * len(steps)
    now, total = time.monotonic(), cost(candidates, steps, factor)
    return [
        now + (deadline - now) * cost(candidates, steps[: i + 1], factor) / total
        for i in range(len(steps))
    ]


def _order(standing: Standing) -> tuple[float, float]:
    return (-standing.step if standing.score > -math.inf else 0, -standing.score)


def _standing(
    candidate: SearchCandidate,
    seeds: Sequence[int],
    folder: Callable[[SearchCandidate, int], Path],
    step: int,
    ends: Sequence[Ended],
) -> Standing:
    rewards, rounds = [], step
    for seed, end in zip(seeds, ends, strict=True):
        value = None
        if end.status in ("finished", "paused"):
            lines = read_metrics(folder(candidate, seed))[:step]
            value, rounds = lines[-1]["running_reward"], len(lines)
        rewards.append(math.nan if value is None else float(value))
    return Standing(candidate, step, rounds, tuple(rewards), tuple(end.status for end in ends))


Grid = Mapping[str, Sequence[Any]]


_SHORT = re.compile(r"^\s*([0-9.eE+-]+?)\s*\.\.\s*([0-9.eE+-]+)\s*$")


# Appendix A.2. The server's grid is Adam's.
RATES: dict[str, Grid] = {
    "emnist": {"client.learning_rate": "0.01..0.5", "server.learning_rate": "0.0005..0.05"},
    "so": {"client.learning_rate": "0.02..5", "server.learning_rate": "0.0002..0.05"},
}


# The paper does not print one for SGD, whose steps are a hundred times smaller than Adam's at the same rate.
SGD_SERVER_RATES = "0.05..5"


# Appendix A.1; FALCON's mu is {0.01, 0.1, 1} K / 0.05, as the paper rounds it for its 62 and 50 actions.
_FALCON_MU = {"emnist": (12, 124, 1240), "so": (10, 100, 1000)}


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
    if not 0 < low <= high < math.inf:
        raise ConfigError(
            f"{text!r}: expected two positive ends, smaller first, for example 0.02..5"
        )
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    values = [float(f"{digit}e{decade}") for decade in decades for digit in (1, 2, 5)]
    inside = [value for value in values if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]
    if not inside:
        raise ConfigError(f"{text!r}: no value {{1, 2, 5}}·10^n lies between these ends")
    return inside


def appendix(family: str, config: Config) -> dict[str, list[Any]]:
    """The paper's grid for a configuration: learning rates, and the exploration parameters of its
    policy.
    """
    if family not in RATES:
        raise ConfigError(f"appendix: should be {' or '.join(RATES)}, not {family!r}")
    grid = {key: values_of(key, values) for key, values in RATES[family].items()}
    if config.server.optimizer == "sgd":
        grid["server.learning_rate"] = values_of("", SGD_SERVER_RATES)
    exploration: dict[str, Grid] = {
        "softmax": {"policy.beta": (0.02, 0.05, 0.1)},
        "epsilon-greedy": {"policy.epsilon": (0.05, 0.1)},
        "falcon": {"policy.mu": _FALCON_MU[family], "policy.gamma": (1000, 5000)},
    }
    return grid | {
        key: list(values) for key, values in exploration.get(config.policy.name, {}).items()
    }


def values_of(key: str, values: Any) -> list[Any]:
    """The values of one axis: a list, a single value, or the short form."""
    if isinstance(values, str) and ".." in values:
        return one_two_five(values)
    if isinstance(values, list | tuple):
        if not values:
            raise ConfigError(f"{key}: the grid has no values")
        return list(values)
    return [values]


def points(grid: Grid) -> list[dict[str, Any]]:
    """Every point of the product of a grid's axes, the last axis changing fastest.

    Examples:
        >>> points({"a": [1, 2], "b": [3]})
        [{'a': 1, 'b': 3}, {'a': 2, 'b': 3}]
    """
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def on_edge(point: Mapping[str, Any], grid: Grid) -> list[str]:
    """The axes on which a point has the smallest or largest of three or more numbers.

    A better value may lie beyond an edge, which is worth a warning.

    Examples:
        >>> on_edge({"rate": 1.0}, {"rate": [0.1, 0.3, 1.0]})
        ['rate']
    """
    edges = []
    for key, values in grid.items():
        numbers = [
            value
            for value in values
            if isinstance(value, int | float) and not isinstance(value, bool)
        ]
        if len(numbers) >= 3 and point[key] in (min(numbers), max(numbers)):
            edges.append(key)
    return edges


TUNING_SEED = 1_000_000


FACTOR = 3


@dataclass(frozen=True)
class Search:
    """Where a search runs and keeps its choice, its deadline (of `time.monotonic`), where it
    reports.

    With `tries` it looks at that many points, however long it takes.
    """

    folder: Path
    deadline: float | None
    runner: Runner = HERE
    say: Callable[[str], None] = print
    tries: int | None = None


def best_point(name: str, config: Config, grid: Grid, search: Search) -> dict[str, Any]:
    """The point of the grid that did best on the tuning seed, the configuration's own values among
    them.

    A choice once made is kept: with more time a search could choose another, and the runs made with
    it would be lost.
    """
    kept = search.folder / "choice.json"
    if (chosen := kept_choice(kept, config)) is not None:
        return chosen
    flat = flatten(config.model_dump())
    published = {axis: flat[axis] for axis in grid}
    others = [_candidate(config, point) for point in points(grid) if point != published]
    every = [_candidate(config, published), *_shuffled(others)][
        : search.tries
    ]  # as many as asked, or time allows
    standings = race(
        every,
        [TUNING_SEED],
        lambda candidate, seed: search.folder / candidate.name,
        search_steps(config),
        FACTOR,
        runner=search.runner,
        deadline=search.deadline,
        say=lambda text: search.say(f"  {text}"),
    )
    point = standings[0].candidate.point if standings else published
    edges = on_edge(
        point, {axis: sorted({*values, published[axis]}) for axis, values in grid.items()}
    )
    search.folder.mkdir(parents=True, exist_ok=True)
    write_json(
        kept,
        {
            "point": point,
            "published": published,
            "on_edge": edges,
            "grid_points": len(every),
            "looked_at": len(standings),
            "seed": TUNING_SEED,
            "best": [_told(standing) for standing in standings[:10] if standing.score > -math.inf],
            "for": config.identity(),
        },
    )
    covered = (
        f"{len(standings)} of {len(every)} points of the grid, {len(standings) / len(every):.0%}"
    )
    search.say(f"  {name}: {_in_words(point)} ({covered})")
    if edges:
        lie = "lie" if len(edges) > 1 else "lies"
        search.say(
            f"  warning: {', '.join(edges)} {lie} on the edge of the grid; a better value may lie beyond it"
        )
    return point


def kept_choice(path: Path, config: Config) -> dict[str, Any] | None:
    """Cached choice of an earlier search for this configuration, or None."""
    kept = read_json(path) or {}
    try:
        same = Config.build(kept.get("for", {})).identity() == config.identity()
    except ConfigError:  # of another version, say
        return None
    point = kept.get("point")
    return point if same and isinstance(point, dict) else None


def search_steps(config: Config) -> list[int]:
    """When candidates are compared: never before two deployments, since nothing has been learned
    before the first.
    """
    return rungs(
        config.rounds, FACTOR, min(config.rounds, max(2 * config.deploy_every, config.rounds // 9))
    )


def _shuffled(candidates: list[SearchCandidate]) -> list[SearchCandidate]:
    """In an order that is random, and always the same: a longer budget looks at more of the same
    points.
    """
    order = np.argsort(uniforms(TUNING_SEED, Purpose.SEARCH, np.arange(len(candidates))))
    return [candidates[i] for i in order]


def _candidate(config: Config, point: dict[str, Any]) -> SearchCandidate:
    """Candidates are judged by their rewards, so they look at held-out data only once, at the end."""
    values = {**point, "evaluate_every": config.rounds}
    return SearchCandidate(
        _in_words(point).replace(" ", ",") or "as-it-is", config.with_values(values), point
    )


def _in_words(point: Mapping[str, Any]) -> str:
    short = {"client.learning_rate": "client", "server.learning_rate": "server"}
    return " ".join(f"{short.get(k, k.removeprefix('policy.'))}={v:g}" for k, v in point.items())


def _told(standing: Standing) -> dict[str, Any]:
    return {**standing.candidate.point, "rounds": standing.rounds, "running_reward": standing.score}


SPENDS_PRIVACY = (
    "note: tuning spends privacy. Every run looks at the same clients; a run's epsilon covers that run alone, and not"
    " the choice among many"
)


def tune(
    members: Mapping[str, Config],
    family: str,
    out: Path,
    minutes: float,
    *,
    runner: Runner = HERE,
    say: Callable[[str], None] = print,
) -> dict[str, Config]:
    """The members with the values that did best; choices once made are kept in `out` and used
    again.

    Time is shared by the size of the grids, so that every member has as much of its grid tried as
    the others.
    """
    if any(config.privacy.mechanism != "none" for config in members.values()):
        say(SPENDS_PRIVACY)
    ends = time.monotonic() + 60 * minutes
    found = {key: kept_choice(out / key / "choice.json", config) for key, config in members.items()}
    grids = {
        key: appendix(family, config)
        for key, config in members.items()
        if config.training and found[key] is None
    }
    sizes = {key: len(points(grid)) for key, grid in grids.items()}
    for key in members:
        if found[key] is not None:
            say(
                f"{key}: chosen by an earlier search; remove {out / key / 'choice.json'} to search again"
            )
    for key, grid in grids.items():
        share = max(ends - time.monotonic(), 0.0) * sizes[key] / sum(sizes.values())
        say(f"tuning {key} ({share / 60:.1f} minutes)")
        search = Search(out / key, time.monotonic() + max(share, 1.0), runner, say)
        found[key] = best_point(key, members[key], grid, search)
        del sizes[key]
    return {key: config.with_values(found[key] or {}) for key, config in members.items()}


def effort(keys: Mapping[str, str], out: Path) -> dict[str, tuple[int, int]]:
    """The number of points of its grid that each search has looked at, of how many, by label.

    Members that do not train have no entry.
    """
    found = {}
    for label, key in keys.items():
        if (kept := read_json(out / key / "choice.json")) is not None:
            found[label] = (kept["looked_at"], kept["grid_points"])
    return found


def effort_in_words(efforts: Mapping[str, tuple[int, int]]) -> str:
    """The search behind a tuned comparison; a warning where a member had few tries beside the
    others.
    """
    shares = {
        label: f"{looked} of {total} ({looked / total:.0%})"
        for label, (looked, total) in efforts.items()
    }
    counts = ", ".join(f"{label} {share}" for label, share in shares.items())
    tries = [looked for looked, _ in efforts.values()]
    uneven = [
        name
        for name, (looked, total) in efforts.items()
        if 2 * looked < total and 2 * looked < max(tries)
    ]
    text = f"grid points evaluated by tuning: {counts}"
    if uneven:
        text += f"\nwarning: {', '.join(uneven)} had less than half the tries of others; the comparison is not fair to them"
    return text


def scaled(config: Config, scale: float) -> Config:
    """The configuration with rounds and deployment period shortened together; pre-training stays.

    A shorter pre-training would be another initial model, and rules compare differently from there.
    A shortened run looks at held-out data only at its end; after each of its short periods would be
    most of its work.
    """
    if scale == 1:
        return config

    def shortened(rounds: int) -> int:
        return max(1, round(rounds * scale))

    return config.with_values(
        {
            "rounds": shortened(config.rounds),
            "deploy_every": shortened(config.deploy_every),
            "evaluate_every": shortened(config.rounds),
        }
    )
