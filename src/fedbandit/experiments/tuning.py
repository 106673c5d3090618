"""Choosing learning rates and exploration parameters for each member of a comparison within a budget of minutes."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from fedbandit.config import Config
from fedbandit.experiments.grids import appendix
from fedbandit.experiments.many import HERE, Runner
from fedbandit.experiments.search import Search, best_point, kept_choice
from fedbandit.files import read_json

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
        if point is not None:
            say(f"{key}: chosen by an earlier search; remove {kept} to search again")
        if point is None and config.training:
            share = (ends - time.monotonic()) / (len(members) - number)
            say(f"tuning {key} ({max(0, share) / 60:.1f} minutes)")
            search = Search(out / key, time.monotonic() + max(share, 1.0), runner, say)
            point = best_point(key, config, appendix(family, config), search)
        chosen[key] = config.with_values(point or {})
    return chosen


def effort(keys: Mapping[str, str], out: Path) -> dict[str, tuple[int, int]]:
    """How many points of its grid each search has looked at, of how many; members that do not train have none."""
    found = {}
    for label, key in keys.items():
        if (kept := read_json(out / key / "choice.json")) is not None:
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
