"""The drift study: how far the reward of each policy falls after a change, and how soon it
recovers.

Its runs are in run folders and can be resumed; a policy that diverges is counted, and does not end
the study. docs/drift.md shows the three kinds of change.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedbandit.config import Config, parse_settings
from fedbandit.core.errors import ConfigError, Diverged
from fedbandit.core.files import write_json
from fedbandit.data import open_dataset
from fedbandit.evaluation.metrics import Recovery, recoveries
from fedbandit.presets import preset
from fedbandit.results.plots import draw_curves
from fedbandit.runs.folder import read_metrics
from fedbandit.runs.local_runner import HERE, Runner
from fedbandit.studies.compare import OnRunEnd, nobody, run_members

_OWN = {
    "seed": "use --seeds",
    "data.source": "use --data",
    "scenario": "it is `drift`",
    "rounds": "use --rounds, or --scale of the figure",
    "drift.at": "use --at",
    "drift.kind": "use --kind",
}


_RATES_OF = {"falcon-schedule": "falcon"}


@dataclass(frozen=True)
class DriftStudy:
    """The change, its rounds, and the policies that are compared.

    Learning rates are those of the paper's `scratch` tables. `window` is the number of rounds that
    a mean is taken over, before and after a change.
    """

    data: str = "topics"
    kind: str = "permute"
    rounds: int = 400
    at: tuple[int, ...] = (200,)
    deploy_every: int = 10
    clients_per_round: int = 32
    max_examples: int = 64
    policies: Sequence[str] = ("greedy", "epsilon-greedy", "softmax", "falcon")
    seeds: int = 3
    window: int = 10
    settings: tuple[tuple[str, Any], ...] = ()  # any further value of the configuration

    def __post_init__(self) -> None:
        for key, _ in self.settings:
            if key in _OWN:
                raise ConfigError(f"--set {key}: set by the study; {_OWN[key]}")


@dataclass(frozen=True)
class DriftOutcome:
    """One policy: its rewards by round, [seeds, rounds], what each change did in each seed, and
    seeds that diverged.
    """

    policy: str
    rewards: np.ndarray
    recovered: list[list[Recovery]]
    diverged: tuple[int, ...] = ()

    def lines(self) -> list[str]:
        """A line for each change, means over seeds, and one for the seeds that diverged."""
        said = []
        for position in range(len(self.recovered[0]) if self.recovered else 0):
            each = [one[position] for one in self.recovered]
            back = [found.rounds for found in each if found.rounds is not None]
            rounds = (
                f"{np.mean(back):6.0f}" if len(back) == len(each) else f"{len(back)} of {len(each)}"
            )
            figures = [
                np.mean([getattr(found, name) for found in each])
                for name in ("before", "fall", "last", "lost")
            ]
            before, fall, last, lost = figures
            said.append(
                f"{self.policy:<18} {each[0].change:6d} {before:8.3f} {fall:8.3f} {rounds:>9} {last:8.3f} {lost:8.1f}"
            )
        if self.diverged:
            tried = len(self.rewards) + len(self.diverged)
            said.append(f"{self.policy}: {len(self.diverged)} of {tried} seeds diverged")
        return said


def members(study: DriftStudy) -> dict[str, Config]:
    """The configuration of each policy, as the paper has it for this kind of data, in the study's
    world.
    """
    family = "so" if open_dataset(study.data).header.kind == "sparse" else "emnist"
    world = {
        "data.source": study.data,
        "scenario": "drift",
        "drift.kind": study.kind,
        "drift.at": list(study.at),
        "rounds": study.rounds,
        "deploy_every": study.deploy_every,
        "clients_per_round": study.clients_per_round,
        "client.max_examples": study.max_examples,
        **dict(study.settings),
    }
    return {policy: _member(family, policy).with_values(world) for policy in study.policies}


def _member(family: str, described: str) -> Config:
    """A policy by its name and parameters behind it, `softmax floor=0.05`, at the rates that the
    paper has for it.

    The paper has none for FALCON with its schedule, which takes those of FALCON.
    """
    name, *settings = described.split()
    config = preset(f"{family}-scratch-{_RATES_OF.get(name, name)}")
    if name in _RATES_OF:
        config = config.with_values({"policy.name": name})
    return config.with_values(parse_settings(f"policy.{setting}" for setting in settings))


def run_study(
    study: DriftStudy,
    folders: Callable[[str, int], Path],
    *,
    runner: Runner = HERE,
    on_end: OnRunEnd = nobody,
) -> list[DriftOutcome]:
    """Run what is missing of every policy and seed into `folders(policy, seed)`, and read off what
    the changes did.
    """
    outcomes = []
    for policy, curves in run_members(
        members(study), range(study.seeds), folders, runner=runner, on_end=on_end
    ).items():
        rewards = np.array([_rewards(folders(policy, seed)) for seed in curves.seeds], float)
        recovered = [recoveries(curve, study.at, window=study.window) for curve in rewards]
        outcomes.append(DriftOutcome(policy, rewards, recovered, curves.diverged))
    if not any(outcome.recovered for outcome in outcomes):
        raise Diverged("drift: every run diverged")
    return outcomes


def table(study: DriftStudy, outcomes: Sequence[DriftOutcome]) -> str:
    """A text table of falls and recoveries by policy and change, with a legend."""
    heads = f"{'policy':<18} {'change':>6} {'before':>8} {'fall':>8} {'recovery':>9} {'at end':>8} {'lost':>8}"
    legend = (
        f"recovery: rounds until the mean of {study.window} is back at nine tenths, 0 where it never fell below;"
        " lost: reward below before, summed over rounds"
    )
    return "\n".join([heads, *(line for outcome in outcomes for line in outcome.lines()), legend])


def write_numbers(
    study: DriftStudy, outcomes: Sequence[DriftOutcome], path: Path, title: str
) -> Path:
    """Write falls and recoveries of every seed as JSON, by which `fedbandit gallery` shows the
    picture beside it.
    """
    clients = f"{study.clients_per_round} clients a round, at most {study.max_examples} examples"
    note = f"{study.rounds} rounds, deploying every {study.deploy_every}; {clients} each; published rates"
    numbers = {
        "figure": "drift",
        "title": title,
        "note": note,
        "data": open_dataset(study.data).header.name,
        "text": table(study, outcomes),
        "members": {
            o.policy: [[asdict(change) for change in seed] for seed in o.recovered]
            for o in outcomes
        },
        "diverged": {o.policy: list(o.diverged) for o in outcomes if o.diverged},
    }
    write_json(path, numbers)
    return path


def draw(study: DriftStudy, outcomes: Sequence[DriftOutcome], path: Path, title: str) -> Path:
    """The reward of each round, averaged over the last rounds and over seeds, with a band of one
    standard deviation.
    """
    return draw_curves(
        {
            outcome.policy: _smooth(outcome.rewards, study.window)
            for outcome in outcomes
            if len(outcome.rewards)
        },
        path,
        title=title,
        ylabel=f"reward, mean of {study.window} rounds",
        changes=study.at,
    )


def _rewards(folder: Path) -> list[float]:
    return [np.nan if line["reward"] is None else line["reward"] for line in read_metrics(folder)]


def _smooth(rewards: np.ndarray, window: int) -> np.ndarray:
    """Means over the last `window` rounds, [seeds, rounds]; NaN before the first full window."""
    kernel = np.ones(window) / window
    means = np.array([np.convolve(curve, kernel, mode="valid") for curve in rewards])
    return np.pad(means, ((0, 0), (window - 1, 0)), constant_values=np.nan)
