"""Searching a grid for the values that suit one configuration, within a deadline; a choice once made is kept.

Searches play a seed of their own, so that what is reported afterwards was not picked for being lucky.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedbandit.config import Config
from fedbandit.errors import ConfigError
from fedbandit.experiments.flat import flatten
from fedbandit.experiments.grids import Grid, on_edge, points
from fedbandit.experiments.halving import Candidate, Standing, race, rungs
from fedbandit.experiments.many import HERE, Runner
from fedbandit.files import read_json, write_json
from fedbandit.randomness import Purpose, uniforms

TUNING_SEED = 1_000_000
FACTOR = 3


@dataclass(frozen=True)
class Search:
    """Where a search plays and keeps its choice, until when (of `time.monotonic`), and who is told."""

    folder: Path
    deadline: float
    runner: Runner = HERE
    say: Callable[[str], None] = print


def best_point(name: str, config: Config, grid: Grid, search: Search) -> dict[str, Any]:
    """The point of the grid that did best on the tuning seed, the configuration's own values among them.

    A choice once made is kept: with more time a search could choose another, and what was played with it be lost.
    """
    kept = search.folder / "choice.json"
    if (chosen := kept_choice(kept, config)) is not None:
        return chosen
    flat = flatten(config.model_dump())
    published = {axis: flat[axis] for axis in grid}
    others = [_candidate(config, point) for point in points(grid) if point != published]
    every = [_candidate(config, published), *_shuffled(others)]  # as many as the time allows
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
    edges = on_edge(point, {axis: sorted({*values, published[axis]}) for axis, values in grid.items()})
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
    search.say(f"  {name}: {_in_words(point)} (of {len(standings)} of {len(every)} points of the grid)")
    if edges:
        search.say(f"  warning: {', '.join(edges)} lies on the edge of the grid; a better value may lie beyond it")
    return point


def kept_choice(path: Path, config: Config) -> dict[str, Any] | None:
    """What an earlier search has chosen for this very configuration; None if there was none."""
    kept = read_json(path) or {}
    try:
        same = Config.build(kept.get("for", {})).identity() == config.identity()
    except ConfigError:  # of another version, say
        return None
    point = kept.get("point")
    return point if same and isinstance(point, dict) else None


def search_steps(config: Config) -> list[int]:
    """When candidates are compared: never before two deployments, since until the first nobody has learned a thing."""
    return rungs(config.rounds, FACTOR, min(config.rounds, max(2 * config.deploy_every, config.rounds // 9)))


def _shuffled(candidates: list[Candidate]) -> list[Candidate]:
    """In an order that is random, and always the same: a longer budget looks at more of the same points."""
    order = np.argsort(uniforms(TUNING_SEED, Purpose.SEARCH, np.arange(len(candidates))))
    return [candidates[i] for i in order]


def _candidate(config: Config, point: dict[str, Any]) -> Candidate:
    return Candidate(_in_words(point).replace(" ", ",") or "as-it-is", config.with_values(point), point)


def _in_words(point: Mapping[str, Any]) -> str:
    short = {"client.learning_rate": "client", "server.learning_rate": "server"}
    return " ".join(f"{short.get(k, k.removeprefix('policy.'))}={v:g}" for k, v in point.items())


def _told(standing: Standing) -> dict[str, Any]:
    return {**standing.candidate.point, "rounds": standing.rounds, "running_reward": standing.score}
