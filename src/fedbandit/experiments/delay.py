"""The cost of delay, as a study: bounds of section 6 beside the regret measured as the deployment period grows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedbandit.config import Config
from fedbandit.data.realizable import realizable
from fedbandit.engines import ThreadEngine
from fedbandit.evaluation.delay import Measured, measure
from fedbandit.theory import Setting, centralised_regret, federated_regret, is_vacuous

_FEDERATED, _CENTRALISED = "#0072B2", "#D55E00"


@dataclass(frozen=True)
class Study:
    """How long to play, how often to deploy, and what the bounds are told."""

    rounds: int = 600
    deploy_every: Sequence[int] = (1, 5, 20, 60, 120, 200, 300, 600)
    seeds: int = 3
    epsilon: float = 0.1
    log_class: float = 45.0
    delta: float = 0.05
    clients_per_round: int = 10
    max_examples: int = 20


@dataclass(frozen=True)
class Row:
    """One deployment period: measurements over seeds beside the bounds, all per event and in reward."""

    deploy_every: int
    samples: int
    periods: int
    measured: np.ndarray  # [seeds]
    optimization_error: float
    federated: float
    centralised: float
    vacuous: bool

    def line(self) -> str:
        spread = self.measured.std(ddof=1) if len(self.measured) > 1 else 0.0
        verdict = "  vacuous" if self.vacuous else ""
        return (
            f"{self.deploy_every:6d} {self.samples:8d} {self.periods:8d} {self.measured.mean():9.4f} ±{spread:.4f}"
            f" {self.optimization_error:9.5f} {self.federated:10.3f} {self.centralised:11.3f}{verdict}"
        )


HEADING = " every  samples  periods   measured  ±sd   ε_fed   federated centralised"


def play(study: Study, told: Callable[[Row], Any] = lambda row: None) -> list[Row]:
    """Measure every deployment period of the study; `told` hears of each row as it is done."""
    rows = []
    engine = ThreadEngine(1)
    for every in study.deploy_every:
        found = [measure(_config(study, every, seed), realizable(seed), engine) for seed in range(study.seeds)]
        rows.append(_row(study, found))
        told(rows[-1])
    engine.close()
    return rows


def _row(study: Study, found: list[Measured]) -> Row:
    first = found[0]
    error = float(np.mean([one.optimization_error for one in found]))
    setting = Setting(5, study.epsilon, study.log_class, study.delta, error)
    events = first.samples * first.periods
    federated = federated_regret(setting, first.samples, first.periods)
    return Row(
        deploy_every=first.deploy_every,
        samples=first.samples,
        periods=first.periods,
        measured=np.array([one.regret for one in found]),
        optimization_error=error,
        federated=federated / events,
        centralised=centralised_regret(setting, first.samples, first.periods) / events,
        vacuous=is_vacuous(federated, first.samples, first.periods),
    )


def _config(study: Study, every: int, seed: int) -> Config:
    return Config.build(
        {
            "scenario": "scratch",
            "rounds": study.rounds,
            "deploy_every": every,
            "clients_per_round": study.clients_per_round,
            "seed": seed,
            "policy": {"name": "epsilon-greedy", "epsilon": study.epsilon},
            "client": {"learning_rate": 0.1, "max_examples": study.max_examples},
            "server": {"learning_rate": 0.02},
        }
    )


def draw(study: Study, rows: list[Row], path: Path) -> Path:
    """Bounds on the left, measurements on the right, over the same deployment periods."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.3), layout="constrained")
    FigureCanvasAgg(figure)
    bounds, measured = figure.subplots(1, 2)
    every = [row.deploy_every for row in rows]
    exact = [_row_without_error(study, row) for row in rows]
    bounds.plot(every, [row.federated for row in rows], "o-", color=_FEDERATED, label="federated (eq. 9)")
    bounds.plot(every, [row.centralised for row in rows], "s-", color=_CENTRALISED, label="centralised (eq. 10)")
    bounds.plot(every, [row.federated for row in exact], "o:", color=_FEDERATED, label="federated, ε_fed = 0", mfc="w")
    bounds.plot(
        every, [row.centralised for row in exact], "s:", color=_CENTRALISED, label="centralised, ε_opt = 0", mfc="w"
    )
    top = 1.1 * max(1.0, *(row.federated for row in rows))
    bounds.axhspan(1, top, color="#e6e6e6", zorder=0)
    bounds.text(
        every[0], 1.01, "vacuous: no policy loses more than 1 an event", fontsize=8, color="#404040", va="bottom"
    )
    bounds.set(title="Bounds (constants dropped: compare shapes)", ylabel="regret per event", ylim=(0, top))
    values = np.array([row.measured for row in rows])
    spread = values.std(axis=1, ddof=1) if values.shape[1] > 1 else np.zeros(len(rows))
    measured.errorbar(every, values.mean(axis=1), spread, fmt="o-", color=_FEDERATED, capsize=3, label="ε-greedy")
    measured.set(title=f"Measured, {study.seeds} seeds (± sd)", ylabel="regret per event", ylim=(0, None))
    for axes in (bounds, measured):
        axes.set(xscale="log", xlabel=f"rounds between deployments (of {study.rounds})")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def _row_without_error(study: Study, row: Row) -> Row:
    setting = Setting(5, study.epsilon, study.log_class, study.delta)
    events = row.samples * row.periods
    return replace(
        row,
        federated=federated_regret(setting, row.samples, row.periods) / events,
        centralised=centralised_regret(setting, row.samples, row.periods) / events,
    )
