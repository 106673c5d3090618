"""Successive halving: many candidates run a few rounds, the best of them more, the very best to the end.

A candidate that stays in the race is paused and resumed, never restarted.
"""

import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedbandit.config import Config
from fedbandit.core.errors import Interrupted
from fedbandit.core.parts import counted
from fedbandit.runs.folder import read_metrics
from fedbandit.runs.local_runner import HERE, Ended, Job, Runner


@dataclass(frozen=True)
class Candidate:
    """A configuration in the race, with what is its own: the values that set it apart."""

    name: str
    config: Config
    point: dict[str, Any]


@dataclass(frozen=True)
class Standing:
    """How far a candidate came, and its running average reward there: one value a seed, nan where it diverged."""

    candidate: Candidate
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
    """The rounds after which candidates are compared: the last round, and earlier ones down to the shortest."""
    steps = [rounds]
    while math.ceil(steps[0] / factor) >= shortest:
        steps.insert(0, math.ceil(steps[0] / factor))
    return steps


def cost(candidates: int, steps: Sequence[int], factor: int) -> int:
    """The rounds that a race of this many candidates runs, for one seed."""
    total, alive, before = 0, candidates, 0
    for step in steps:
        total += alive * (step - before)
        alive, before = math.ceil(alive / factor), step
    return total


def race(
    candidates: Sequence[Candidate],
    seeds: Sequence[int],
    folder: Callable[[Candidate, int], Path],
    steps: Sequence[int],
    factor: int = 3,
    *,
    runner: Runner = HERE,
    deadline: float | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> list[Standing]:
    """The standings, best first: by how many rounds a candidate was given, then by its running average reward there.

    Within a deadline each step has its share of the time, so that the last one is reached.
    """
    alive, final = list(candidates), list[Standing]()
    ends = _shares(len(candidates), steps, factor, deadline)
    for number, step in enumerate(steps):
        places = [(candidate, seed) for candidate in alive for seed in seeds]
        jobs = [Job(c.config.with_values({"seed": seed}), folder(c, seed), until=step) for c, seed in places]
        outcomes = runner.run(jobs, deadline=ends[number])
        if any(end.status == "interrupted" for end in outcomes) or (
            deadline is None and any(end.status == "not run" for end in outcomes)
        ):
            raise Interrupted("stopped before the search was finished; run the same command again to resume")
        per_seed = len(seeds)
        grouped = [outcomes[i * per_seed : (i + 1) * per_seed] for i in range(len(alive))]
        standings = [_standing(c, seeds, folder, step, group) for c, group in zip(alive, grouped, strict=True)]
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


def _shares(candidates: int, steps: Sequence[int], factor: int, deadline: float | None) -> list[float | None]:
    """When each step has to have started its last job."""
    if deadline is None:
        return [None] * len(steps)
    now, total = time.monotonic(), cost(candidates, steps, factor)
    return [now + (deadline - now) * cost(candidates, steps[: i + 1], factor) / total for i in range(len(steps))]


def _order(standing: Standing) -> tuple[float, float]:
    return (-standing.step if standing.score > -math.inf else 0, -standing.score)


def _standing(
    candidate: Candidate,
    seeds: Sequence[int],
    folder: Callable[[Candidate, int], Path],
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
