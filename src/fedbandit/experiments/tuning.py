"""Choosing learning rates and exploration parameters for each member of a comparison within a budget of minutes.

Tuning plays seeds of its own, so that what is reported afterwards was not picked for being lucky.
"""

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedbandit.config import Config
from fedbandit.experiments.grids import appendix, on_edge, points
from fedbandit.experiments.halving import Candidate, Standing, race, rungs
from fedbandit.experiments.many import HERE, Runner
from fedbandit.files import write_json
from fedbandit.randomness import Purpose, uniforms

TUNING_SEED = 1_000_000
FACTOR = 3
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
    """The members with the values that did best; choices once made are kept in `out` and used again."""
    chosen: dict[str, Config] = {}
    if any(config.privacy.mechanism != "none" for config in members.values()):
        say(SPENDS_PRIVACY)
    ends = time.monotonic() + 60 * minutes
    for number, (key, config) in enumerate(members.items()):
        kept = out / key / "choice.json"
        point = kept_choice(kept, config)
        if point is None and config.training:
            share = (ends - time.monotonic()) / (len(members) - number)
            say(f"tuning {key} ({max(0, share) / 60:.1f} minutes)")
            point = _tune_one(key, config, family, out / key, max(share, 1.0), runner, kept, say)
        chosen[key] = config.with_values(point or {})
    return chosen


def effort(keys: Mapping[str, str], out: Path) -> dict[str, tuple[int, int]]:
    """How many points of its grid each search has looked at, of how many; members that do not train have none."""
    found = {}
    for label, key in keys.items():
        if (out / key / "choice.json").exists():
            kept = json.loads((out / key / "choice.json").read_text(encoding="utf-8"))
            found[label] = (kept["looked_at"], kept["grid_points"])
    return found


def effort_in_words(efforts: Mapping[str, tuple[int, int]]) -> str:
    """The search behind a tuned comparison; a warning where a member had few tries beside the others."""
    told = ", ".join(f"{label} {looked} of {total}" for label, (looked, total) in efforts.items())
    tries = [looked for looked, _ in efforts.values()]
    uneven = [name for name, (looked, total) in efforts.items() if 2 * looked < total and 2 * looked < max(tries)]
    text = f"points of the grid that tuning looked at: {told}"
    if uneven:
        text += (
            f"\nwarning: {', '.join(uneven)} had less than half the tries of others; the comparison is not fair to them"
        )
    return text


def search_steps(config: Config) -> list[int]:
    """When candidates are compared: never before two deployments, since until the first nobody has learned a thing."""
    return rungs(config.rounds, FACTOR, min(config.rounds, max(2 * config.deploy_every, config.rounds // 9)))


def _tune_one(
    key: str,
    config: Config,
    family: str,
    out: Path,
    seconds: float,
    runner: Runner,
    kept: Path,
    say: Callable[[str], None],
) -> dict[str, Any]:
    deadline = time.monotonic() + seconds
    steps = search_steps(config)
    grid = appendix(family, config)
    published = {axis: _value(config, axis) for axis in grid}
    first = _candidate(config, published)
    every = [first, *_shuffled([_candidate(config, p) for p in points(grid) if p != published])]
    standings = race(
        every,  # as many as the time allows
        [TUNING_SEED],
        lambda candidate, seed: out / candidate.name,
        steps,
        FACTOR,
        runner=runner,
        deadline=deadline,
        say=lambda text: say(f"  {text}"),
    )
    point = standings[0].candidate.point if standings else published
    edges = on_edge(point, {axis: sorted({*values, published[axis]}) for axis, values in grid.items()})
    _keep(kept, config, point, published, standings, len(every), edges)
    say(f"  {key}: {_in_words(point)} (of {len(standings)} of {len(every)} points of the grid)")
    if edges:
        say(f"  warning: {', '.join(edges)} lies on the edge of the grid; a better value may lie beyond it")
    return point


def pace(folder: Path) -> float:
    """The usual seconds a round of a run that has played some."""
    lines = (folder / "timings.jsonl").read_text(encoding="utf-8").splitlines()
    return float(np.median([json.loads(line)["seconds"] for line in lines])) if lines else 0.0


def _shuffled(candidates: list[Candidate]) -> list[Candidate]:
    """In an order that is random, and always the same: a longer budget looks at more of the same points."""
    order = np.argsort(uniforms(TUNING_SEED, Purpose.SEARCH, np.arange(len(candidates))))
    return [candidates[i] for i in order]


def _candidate(config: Config, point: dict[str, Any]) -> Candidate:
    return Candidate(_in_words(point).replace(" ", ",") or "as-it-is", config.with_values(point), point)


def _in_words(point: Mapping[str, Any]) -> str:
    short = {"client.learning_rate": "client", "server.learning_rate": "server"}
    return " ".join(f"{short.get(k, k.removeprefix('policy.'))}={v:g}" for k, v in point.items())


def _value(config: Config, dotted: str) -> Any:
    value: Any = config.model_dump()
    for part in dotted.split("."):
        value = value[part]
    return value


def kept_choice(path: Path, config: Config) -> dict[str, Any] | None:
    """What an earlier search has chosen for this very configuration; None if there was none."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return kept["point"] if Config.build(kept["for"]).identity() == config.identity() else None


def _keep(
    path: Path,
    config: Config,
    point: dict[str, Any],
    published: dict[str, Any],
    standings: list[Standing],
    grid_size: int,
    edges: list[str],
) -> None:
    kept = {
        "point": point,
        "published": published,
        "on_edge": edges,
        "grid_points": grid_size,
        "looked_at": len(standings),
        "seed": TUNING_SEED,
        "best": [
            {**s.candidate.point, "rounds": s.rounds, "running_reward": s.score}
            for s in standings[:10]
            if s.score > -math.inf
        ],
        "for": config.identity(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, kept)
