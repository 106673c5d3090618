"""Planning how much of a tournament fits into some minutes: the pace of this machine, then lengths
and counts.

Runs are shortened first, all rules alike; fewer tries and fewer seeds come after that.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedbandit.config import Config
from fedbandit.core.errors import ConfigError
from fedbandit.core.files import read_lines
from fedbandit.engines.threads import usable_cores
from fedbandit.runs.local_runner import Job, LocalRunner, Runner
from fedbandit.studies.search import FACTOR, TUNING_SEED, scaled, search_steps

POLICIES = ("softmax", "softmax-weighted", "falcon", "epsilon-greedy", "greedy")
PERIODS = (0.2, 2.0)  # other deployment periods to try, relative to the usual one
_SEEDS = (3, 5, 10)  # the fewest, those to plan for, and the most
_FEWEST_TRIES = 3
_SHORTEST = 0.02  # of the paper's length; below it a tournament says nothing
_PROBE_ROUNDS = 30
_PRIVATE = 2.0  # times as long a private run takes, its noise and the search for it included


@dataclass(frozen=True)
class TournamentPlan:
    """The size of a tournament: the share of the paper's length, and the pairs of rates that each
    policy tries.
    """

    scale: float
    tries: int


@dataclass(frozen=True)
class Pace:
    """The speed of runs here, measured by a few short ones: seconds of a round, a run and a batch
    of runs.
    """

    round: float
    job: float  # what a run costs beside its rounds
    batch: float  # what it costs to start some runs
    workers: int

    def batch_of(self, jobs: int, rounds: int) -> float:
        """The seconds of some runs together, of this many rounds each: the last ones run beside
        nothing.
        """
        return self.batch + math.ceil(jobs / self.workers) * (self.job + rounds * self.round)


def measured(
    config: Config, folder: Path, runner: Runner, plan: Callable[[Pace], TournamentPlan | None]
) -> tuple[Runner, Pace]:
    """The runner to use and its pace.

    Runs go one after another where starting processes would take longer than the runs themselves.
    `plan` says what fits at a pace, None for nothing.
    """
    if not isinstance(runner, LocalRunner) or runner.workers == 1:
        return runner, measure_pace(config, folder, runner)
    alone = LocalRunner(1)
    one = measure_pace(config, folder / "one", alone)
    serial = plan(one)
    if serial is not None and serial.scale == 1:
        return alone, one
    several = measure_pace(config, folder / "several", runner)
    parallel = plan(several)
    if parallel is None or (serial is not None and serial.scale >= parallel.scale):
        return alone, one
    return runner, several


def measure_pace(config: Config, folder: Path, runner: Runner) -> Pace:
    """Run a few rounds, as many runs at a time as the tournament will, and take the time."""
    workers = getattr(runner, "workers", None) or usable_cores()
    short = {"rounds": _PROBE_ROUNDS, "evaluate_every": _PROBE_ROUNDS}
    if workers == 1:  # a first run in this process compiles and loads what later ones find ready
        runner.run([Job(config.with_values({**short, "seed": TUNING_SEED - 1}), folder / "first")])
    jobs = [
        Job(config.with_values({**short, "seed": TUNING_SEED + number}), folder / f"{number}")
        for number in range(workers)
    ]
    began = time.monotonic()
    ended = runner.run(jobs)
    wall = time.monotonic() - began
    rounds = [line["seconds"] for job in jobs for line in read_lines(job.folder / "timings.jsonl")]
    a_round = float(np.median(rounds)) if rounds else 0.0
    jobs_own = [max(0.0, end.seconds - _PROBE_ROUNDS * a_round) for end in ended]
    longest = max((end.seconds for end in ended), default=0.0)
    return Pace(
        a_round, float(np.mean(jobs_own)) if jobs_own else 0.0, max(0.0, wall - longest), workers
    )


def seconds_of(
    config: Config, plan: TournamentPlan, seeds: int, private: bool, pace: Pace
) -> float:
    """The seconds that a whole tournament takes, by the pace."""
    final = scaled(config, plan.scale)
    return (len(POLICIES) + _PRIVATE * private) * search_seconds(
        final, plan.tries, pace
    ) + _seeds_seconds(final, seeds, private, pace)


def search_seconds(config: Config, tries: int, pace: Pace) -> float:
    """The seconds that one policy's search takes: this many tries, fewer at every step."""
    total, alive, before = 0.0, tries, 0
    for step in search_steps(config):
        total += pace.batch_of(alive, step - before)
        alive, before = math.ceil(alive / FACTOR), step
    return total


def _seeds_seconds(config: Config, seeds: int, private: bool, pace: Pace) -> float:
    plain = sum(
        pace.batch_of(count * seeds, config.rounds) for count in (len(POLICIES) + 1, len(PERIODS))
    )
    return plain + _PRIVATE * private * pace.batch_of(seeds, config.rounds)


def plan_for(
    config: Config, seconds: float, most_tries: int, private: bool, pace: Pace
) -> TournamentPlan:
    """The longest runs with which everything fits, all tries included; fewer tries only where even
    short ones do not.

    Refused, with the minutes that it takes, where the least there is does not fit.
    """
    for tries in range(most_tries, _FEWEST_TRIES - 1, -1):
        scale = 1.0
        while scale >= _SHORTEST:
            if (
                seconds_of(config, TournamentPlan(scale, tries), _SEEDS[1], private, pace)
                <= seconds
            ):
                return TournamentPlan(scale, tries)
            scale *= 0.95
    least = TournamentPlan(_SHORTEST, _FEWEST_TRIES)
    if (needed := seconds_of(config, least, _SEEDS[0], private, pace)) <= seconds:
        return least
    raise ConfigError(
        f"--budget: a tournament on this data needs at least {math.ceil(needed / 60 + 0.5)} minutes here"
    )


def seeds_for(config: Config, seconds: float, tries: int, private: bool, pace: Pace) -> int:
    """As many seeds as the time left allows, beside the search for the private rates; the same for
    everybody.
    """
    left = seconds - _PRIVATE * private * search_seconds(config, tries, pace)
    fits = [
        n
        for n in range(_SEEDS[0], _SEEDS[2] + 1)
        if _seeds_seconds(config, n, private, pace) <= left
    ]
    return max(fits, default=_SEEDS[0])
