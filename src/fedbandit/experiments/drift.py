"""Drift as a study: several policies in a world that changes, how far each falls and how soon it recovers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedbandit.config import Config
from fedbandit.data import FederatedDataset
from fedbandit.evaluation.recovery import Recovery, recoveries
from fedbandit.experiments.plots import draw_curves
from fedbandit.experiments.presets import preset
from fedbandit.simulation.simulate import simulate


@dataclass(frozen=True)
class DriftStudy:
    """What changes when, and who is compared; learning rates are those of the paper's `scratch` tables."""

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


@dataclass(frozen=True)
class Outcome:
    """One policy: its rewards by round, [seeds, rounds], and what each change did in each seed."""

    policy: str
    rewards: np.ndarray
    recovered: list[list[Recovery]]

    def lines(self, window: int) -> list[str]:
        """A line for each change, means over seeds."""
        said = []
        for position in range(len(self.recovered[0])):
            each = [one[position] for one in self.recovered]
            back = [found.rounds for found in each if found.rounds is not None]
            rounds = f"{np.mean(back):6.0f}" if len(back) == len(each) else f"{len(back)} of {len(each)}"
            figures = [np.mean([getattr(found, name) for found in each]) for name in ("before", "fall", "last", "lost")]
            before, fall, last, lost = figures
            said.append(
                f"{self.policy:<15} {each[0].change:6d} {before:8.3f} {fall:8.3f} {rounds:>9} {last:8.3f} {lost:8.1f}"
            )
        return said


HEADING = f"{'policy':<15} {'change':>6} {'before':>8} {'fall':>8} {'recovery':>9} {'at end':>8} {'lost':>8}"
LEGEND = "recovery: rounds until the mean of 10 is back at nine tenths; lost: reward below before, summed over rounds"


def members(study: DriftStudy, dataset: FederatedDataset) -> dict[str, Config]:
    """The configuration of each policy, as the paper has it for this kind of data, in the study's world."""
    family = "so" if dataset.header.kind == "sparse" else "emnist"
    world = {
        "scenario": "drift",
        "drift.kind": study.kind,
        "drift.at": list(study.at),
        "rounds": study.rounds,
        "deploy_every": study.deploy_every,
        "clients_per_round": study.clients_per_round,
        "client.max_examples": study.max_examples,
        **dict(study.settings),
    }
    return {policy: preset(f"{family}-scratch-{policy}").with_values(world) for policy in study.policies}


def outcome_of(study: DriftStudy, policy: str, rewards: np.ndarray) -> Outcome:
    """What the changes did to a policy, from its rewards by round, [seeds, rounds]."""
    return Outcome(policy, rewards, [recoveries(curve, study.at, window=study.window) for curve in rewards])


def play(
    study: DriftStudy, dataset: FederatedDataset, told: Callable[[Outcome], Any] = lambda o: None
) -> list[Outcome]:
    """Run every policy and seed; `told` hears of each policy as it is done."""
    outcomes = []
    for policy, config in members(study, dataset).items():
        curves = [simulate(config.with_values({"seed": s}), dataset).collect()["reward"] for s in range(study.seeds)]
        outcomes.append(outcome_of(study, policy, np.array(curves)))
        told(outcomes[-1])
    return outcomes


def draw(study: DriftStudy, outcomes: Sequence[Outcome], path: Path, title: str, note: str = "") -> Path:
    """The reward of each round, averaged over the last rounds and over seeds, with a band of one standard deviation."""
    return draw_curves(
        {outcome.policy: _smooth(outcome.rewards, study.window) for outcome in outcomes},
        path,
        title=title,
        ylabel=f"reward, mean of {study.window} rounds",
        note=note,
        changes=study.at,
    )


def _smooth(rewards: np.ndarray, window: int) -> np.ndarray:
    """Means over the last `window` rounds, [seeds, rounds]; not a number before there are so many."""
    kernel = np.ones(window) / window
    means = np.array([np.convolve(curve, kernel, mode="valid") for curve in rewards])
    return np.pad(means, ((0, 0), (window - 1, 0)), constant_values=np.nan)
