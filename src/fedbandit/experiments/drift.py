"""Drift as a study: several policies in a world that changes, how far each falls and how soon it recovers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedbandit.data import FederatedDataset
from fedbandit.evaluation.recovery import Recovery, recoveries
from fedbandit.experiments.plots import styles_of
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


def play(
    study: DriftStudy, dataset: FederatedDataset, told: Callable[[Outcome], Any] = lambda o: None
) -> list[Outcome]:
    """Run every policy and seed; `told` hears of each policy as it is done."""
    outcomes = []
    family = "so" if dataset.header.kind == "sparse" else "emnist"
    for policy in study.policies:
        base = preset(f"{family}-scratch-{policy}").with_values(
            {
                "scenario": "drift",
                "drift.kind": study.kind,
                "drift.at": list(study.at),
                "rounds": study.rounds,
                "deploy_every": study.deploy_every,
                "clients_per_round": study.clients_per_round,
                "client.max_examples": study.max_examples,
                **dict(study.settings),
            }
        )
        curves = [simulate(base.with_values({"seed": s}), dataset).collect()["reward"] for s in range(study.seeds)]
        found = [recoveries(curve, study.at, window=study.window) for curve in curves]
        outcomes.append(Outcome(policy, np.array(curves), found))
        told(outcomes[-1])
    return outcomes


def draw(study: DriftStudy, outcomes: list[Outcome], path: Path, title: str) -> Path:
    """The reward of each round, averaged over the last rounds and over seeds, with a band of one standard deviation."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.3), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    kernel = np.ones(study.window) / study.window
    rounds = np.arange(study.window, study.rounds + 1)
    styles = styles_of([outcome.policy for outcome in outcomes])
    for outcome in outcomes:
        smooth = np.array([np.convolve(curve, kernel, mode="valid") for curve in outcome.rewards])
        mean, (colour, _) = smooth.mean(axis=0), styles[outcome.policy]
        spread = smooth.std(axis=0, ddof=1) if len(smooth) > 1 else np.zeros_like(mean)
        axes.plot(rounds, mean, label=outcome.policy, color=colour, linewidth=1.6)
        axes.fill_between(rounds, mean - spread, mean + spread, color=colour, alpha=0.18, linewidth=0)
    for change in study.at:
        axes.axvline(change, color="#595959", linewidth=1, linestyle=(0, (4, 2)), zorder=0)
    axes.set(title=title, xlabel="round (dashed: the world changes)", ylabel=f"reward, mean of {study.window} rounds")
    axes.set_ylim(0, None)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path
