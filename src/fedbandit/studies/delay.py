"""The cost of delayed deployment: regret measured in a realisable world, beside the paper's bounds.

`fedbandit theory` runs the same rounds with different deployment periods, in a world whose mean
rewards are linear in the context, so that the regret of every event is known exactly.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from math import nan
from pathlib import Path
from typing import Any

import numpy as np

from fedbandit.config import Config
from fedbandit.data.embedded.realizable import RealizableEnvironment, features_of, realizable
from fedbandit.engines import ThreadEngine
from fedbandit.evaluation.metrics import best_value, policy_value
from fedbandit.evaluation.theory import (
    Setting,
    centralised_regret,
    epsilon_greedy_per_event,
    falcon_per_event,
    federated_regret,
    is_vacuous,
)
from fedbandit.federated.round import Engine
from fedbandit.models import Layout
from fedbandit.results.plots import COLOURS, OTHER_COLOURS, empty_figure, save_picture
from fedbandit.simulation.simulate import RoundEvents, simulate


@dataclass(frozen=True)
class DelayMeasurement:
    """One run with a deployment period: the mean regret per event, and the oracle's error."""

    deploy_every: int
    samples: int  # events in a full period
    periods: int
    regret: float  # per event, in reward
    last_regret: float  # of the model deployed last
    optimization_error: (
        float  # ε_fed, in squared reward: mean over the deployments after which rounds follow
    )


def measure(config: Config, environment: RealizableEnvironment, engine: Engine) -> DelayMeasurement:
    """Run the configuration in the environment and compute the expected regret of every event.

    The deployed model acts until the next deployment, so its expected regret over all contexts is
    computed once per period. Beside it the error of the regression oracle on the very log it had.
    """
    simulation = simulate(config, environment.dataset, engine=engine)
    phase, layout = simulation.experiment.bandit, simulation.experiment.layout
    work, clients = phase.work, phase.cohorts.pool
    truth = environment.mean_rewards
    best = best_value(work.split, truth, clients)
    fit = LeastSquares.empty(environment)
    regret = lost = 0.0
    events = 0
    errors: list[float] = []
    while simulation.state.round < config.rounds:
        state = simulation.state
        if state.round % config.deploy_every == 0:
            deployed = state.deployed[max(state.deployed)]
            predict = work.predictions(deployed.weights)
            regret = best - policy_value(work.split, clients, work.rule(deployed), predict, truth)
            if state.round:
                errors.append(fit.excess(layout, deployed.weights))
        logged = RoundEvents(phase, state)()  # the very events that the round will train on
        fit = fit.with_events(features_of(logged.contexts.shared), logged.actions, logged.rewards)
        lost, events = lost + regret * len(logged), events + len(logged)
        next(iter(simulation))
    if not errors:  # one single period: the model that would have been deployed next
        errors.append(fit.excess(layout, simulation.state.weights))
    periods = -(-config.rounds // config.deploy_every)
    samples = round(events / config.rounds * config.deploy_every)
    return DelayMeasurement(
        config.deploy_every, samples, periods, lost / events, regret, float(np.mean(errors))
    )


@dataclass(frozen=True)
class LeastSquares:
    """All that a linear regression of rewards needs to know of a log, per action: sums that add.

    From X'X, X'r and r'r the squared error of any linear model follows without the log; `excess` is
    by how much it exceeds the smallest possible one (ε_fed of the paper).
    """

    squares: np.ndarray  # [K, d + 1, d + 1]
    products: np.ndarray  # [K, d + 1]
    rewards: float  # sum of squared rewards
    events: int

    @classmethod
    def empty(cls, environment: RealizableEnvironment) -> "LeastSquares":
        """The sums of a log without events."""
        features, k = environment.weight.shape
        return cls(np.zeros((k, features + 1, features + 1)), np.zeros((k, features + 1)), 0.0, 0)

    def with_events(
        self, contexts: np.ndarray, actions: np.ndarray, rewards: np.ndarray
    ) -> "LeastSquares":
        """The sums with further events: contexts float64 [n, d], actions [n], rewards [n]."""
        x = np.column_stack([contexts, np.ones(len(contexts))])
        squares, products = self.squares.copy(), self.products.copy()
        for action in np.unique(actions):
            rows = actions == action
            squares[action] += x[rows].T @ x[rows]
            products[action] += x[rows].T @ rewards[rows].astype(np.float64)
        return LeastSquares(
            squares,
            products,
            self.rewards + float((rewards.astype(np.float64) ** 2).sum()),
            self.events + len(rewards),
        )

    def excess(self, layout: Layout, weights: np.ndarray) -> float:
        """By how much the mean squared error of a linear model on this log exceeds the smallest
        possible one.
        """
        params = layout.split(weights.astype(np.float64))
        ours = np.vstack([params["weight"], params["bias"]]).T
        best = np.stack(
            [
                np.linalg.lstsq(s, p, rcond=None)[0]
                for s, p in zip(self.squares, self.products, strict=True)
            ]
        )
        return max(0.0, self._error(ours) - self._error(best))

    def _error(self, coefficients: np.ndarray) -> float:
        fitted = np.einsum("ka,kab,kb->", coefficients, self.squares, coefficients)
        return float(fitted - 2 * (coefficients * self.products).sum() + self.rewards) / max(
            1, self.events
        )


ACTIONS = 5  # of the realisable world
_NAMES = {
    "epsilon-greedy": "ε-greedy",
    "falcon": "FALCON",
    "falcon-schedule": "FALCON, γ by schedule",
}
_SHORT = {"epsilon-greedy": "ε-greedy", "falcon": "FALCON", "falcon-schedule": "schedule"}
_PER_EVENT = {
    "epsilon-greedy": epsilon_greedy_per_event,
    "falcon": falcon_per_event,
    "falcon-schedule": falcon_per_event,
}
_COLOURS = {**COLOURS, "falcon-schedule": OTHER_COLOURS[0]}
_CENTRALISED = "#000000"  # federated bounds have their policy's colour


@dataclass(frozen=True)
class DelayStudy:
    """How many rounds to run, how often to deploy, and the constants of the bounds."""

    rounds: int = 600
    deploy_every: Sequence[int] = (1, 5, 20, 60, 120, 200, 300, 600)
    seeds: int = 3
    epsilon: float = 0.1
    gamma: float = 100.0  # of FALCON without its schedule; its μ is K, as its analysis has it
    log_class: float = 45.0
    delta: float = 0.05
    clients_per_round: int = 10
    max_examples: int = 20

    def setting(self, optimization_error: float = 0.0) -> Setting:
        """What the bounds depend on; without an error of a perfect oracle."""
        return Setting(ACTIONS, self.epsilon, self.log_class, self.delta, optimization_error)

    def config(self, policy: str, every: int, seed: int) -> Config:
        """One run of one of the policies."""
        parameters = {
            "epsilon-greedy": {"epsilon": self.epsilon},
            "falcon": {"mu": ACTIONS, "gamma": self.gamma},
            "falcon-schedule": {"delta": self.delta, "complexity": self.log_class},
        }
        return Config.build(
            {
                "scenario": "scratch",
                "rounds": self.rounds,
                "deploy_every": every,
                "clients_per_round": self.clients_per_round,
                "seed": seed,
                "policy": {"name": policy, **parameters[policy]},
                "client": {"learning_rate": 0.1, "max_examples": self.max_examples},
                "server": {"learning_rate": 0.02},
            }
        )


@dataclass(frozen=True)
class PolicyRegret:
    """One policy at one deployment period, over seeds: regret per event in reward, and the oracle's
    error.
    """

    whole: np.ndarray  # [seeds]: mean over the run
    last: np.ndarray  # [seeds]: of the model deployed last
    optimization_error: float

    @classmethod
    def of(cls, found: Sequence[DelayMeasurement]) -> "PolicyRegret":
        """The measurements of one policy and period over seeds."""
        return cls(
            np.array([one.regret for one in found]),
            np.array([one.last_regret for one in found]),
            float(np.mean([one.optimization_error for one in found])),
        )


@dataclass(frozen=True)
class RegretBounds:
    """What theory says of one deployment period, per event and in reward."""

    federated: float  # eq. 9 over the run, of ε-greedy
    centralised: float  # eq. 10
    last: Mapping[
        str, float
    ]  # for the model deployed last, by policy; NaN where none was ever trained
    vacuous: bool  # eq. 9


@dataclass(frozen=True)
class DelayRow:
    """One deployment period: measurements by policy beside the bounds."""

    deploy_every: int
    samples: int
    periods: int
    measured: Mapping[str, PolicyRegret]
    bounds: RegretBounds
    perfect: RegretBounds  # with an oracle that solves every regression exactly

    def line(self) -> str:
        """What was measured."""
        said = f"{self.deploy_every:6d} {self.samples:8d} {self.periods:8d}"
        for one in self.measured.values():
            said += f"  {one.whole.mean():7.4f} ±{_spread(one.whole):.4f} {one.last.mean():7.4f}"
            said += f" {one.optimization_error:8.5f}"
        return said

    def bounds_line(self) -> str:
        """What the bounds say, with the measured ε_fed."""
        last = "".join(
            f" {'-' if np.isnan(value) else f'{value:.3f}':>14}"
            for value in self.bounds.last.values()
        )
        verdict = "  eq. 9 is vacuous" if self.bounds.vacuous else ""
        return f"{self.deploy_every:6d} {self.bounds.federated:8.3f} {self.bounds.centralised:8.3f}{last}{verdict}"


HEADING = " every  samples  periods" + "".join(
    f"{name:>9} {'±sd':<7} {'last':>7} {'ε_fed':>8}" for name in _SHORT.values()
)
BOUNDS_HEADING = " every    eq. 9   eq. 10" + "".join(
    f"{f'last, {name}':>15}" for name in _SHORT.values()
)


def run_study(
    study: DelayStudy, on_row: Callable[[DelayRow], Any] = lambda row: None
) -> list[DelayRow]:
    """Measure every deployment period of the study; `on_row` receives each row as it is done."""
    rows = []
    with closing(ThreadEngine(1)) as engine:
        for every in study.deploy_every:
            rows.append(_row(study, every, engine))
            on_row(rows[-1])
    return rows


def _row(study: DelayStudy, every: int, engine: Engine) -> DelayRow:
    found = {
        policy: [
            measure(study.config(policy, every, seed), realizable(seed, actions=ACTIONS), engine)
            for seed in range(study.seeds)
        ]
        for policy in _NAMES
    }
    measured = {policy: PolicyRegret.of(each) for policy, each in found.items()}
    first = found["epsilon-greedy"][0]
    bounds = partial(_bounds, study, first.samples, first.periods)
    errors = {policy: one.optimization_error for policy, one in measured.items()}
    return DelayRow(
        every,
        first.samples,
        first.periods,
        measured,
        bounds(errors),
        bounds(dict.fromkeys(errors, 0.0)),
    )


def _bounds(
    study: DelayStudy, samples: int, periods: int, errors: Mapping[str, float]
) -> RegretBounds:
    setting, events = study.setting(errors["epsilon-greedy"]), samples * periods
    federated = federated_regret(setting, samples, periods)
    trainings = periods - 1  # the model deployed last has not seen the period that it serves
    last = {
        policy: bound(study.setting(errors[policy]), samples, trainings) if trainings else nan
        for policy, bound in _PER_EVENT.items()
    }
    centralised = centralised_regret(setting, samples, periods)
    return RegretBounds(
        federated / events, centralised / events, last, is_vacuous(federated, samples, periods)
    )


def draw(study: DelayStudy, rows: Sequence[DelayRow], path: Path) -> Path:
    """Bounds on the left and measurements on the right, saved by the path's suffix.

    Above over the whole run, below for the model deployed last. Grey marks bounds that say nothing.
    """
    figure = empty_figure(10, 8)
    panels = figure.subplots(2, 2, sharex=True)
    (whole_bounds, whole), (last_bounds, last) = panels
    federated = _COLOURS["epsilon-greedy"]
    _bound(whole_bounds, rows, lambda b: b.federated, federated, "o", "ε-greedy, federated (eq. 9)")
    _bound(
        whole_bounds,
        rows,
        lambda b: b.centralised,
        _CENTRALISED,
        "s",
        "ε-greedy, centralised (eq. 10)",
    )
    _finish_bounds(whole_bounds, "Bounds, mean over the run")
    for policy, name in _NAMES.items():
        if policy != "falcon-schedule":  # the bound is FALCON's, whatever its γ
            _bound(
                last_bounds,
                rows,
                partial(_last_bound, policy),
                _COLOURS[policy],
                "o",
                f"{name}, federated",
            )
        shown = f"{name}, γ = {study.gamma:g}" if policy == "falcon" else name
        _measured(
            whole, rows, [row.measured[policy].whole for row in rows], _COLOURS[policy], shown
        )
        _measured(last, rows, [row.measured[policy].last for row in rows], _COLOURS[policy], shown)
    _finish_bounds(last_bounds, "Bounds, an event of the model deployed last")
    whole.set_title("Measured, mean over the run", fontsize=10)
    last.set_title("Measured, an event of the model deployed last", fontsize=10)
    every = [row.deploy_every for row in rows]
    for axes in panels.flat:
        axes.set(xscale="log", ylabel="regret per event")
        axes.set_xticks(every, [str(number) for number in every], fontsize=8)
        axes.set_xticks([], minor=True)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    for axes in panels[1]:
        axes.set_xlabel(f"rounds between deployments (of {study.rounds})")
    figure.suptitle(
        f"The cost of delay; measured over {study.seeds} seeds (± sd)\n"
        "Constants of the bounds are dropped: compare shapes, not heights",
        fontsize=11,
    )
    return save_picture(figure, path)


def _bound(
    axes: Any,
    rows: Sequence[DelayRow],
    value: Callable[[RegretBounds], float],
    colour: str,
    marker: str,
    label: str,
) -> None:
    """A bound with the measured error of the oracle, and dotted with none."""
    every = [row.deploy_every for row in rows]
    axes.plot(every, [value(row.bounds) for row in rows], f"{marker}-", color=colour, label=label)
    axes.plot(
        every,
        [value(row.perfect) for row in rows],
        f"{marker}:",
        color=colour,
        label=f"{label}, exact oracle",
        mfc="w",
    )


def _last_bound(policy: str, bounds: RegretBounds) -> float:
    return bounds.last[policy]


def _finish_bounds(axes: Any, title: str) -> None:
    top = 1.25 * max(
        1.0, *(float(np.nanmax([*line.get_ydata(), 0.0])) for line in axes.get_lines())
    )
    axes.axhspan(
        1, top, color="#e6e6e6", zorder=0
    )  # rewards lie in [0, 1]: nobody loses more than 1 an event
    axes.set_title(f"{title} (grey: vacuous)", fontsize=10)
    axes.set_ylim(top=top)


def _measured(
    axes: Any, rows: Sequence[DelayRow], values: Sequence[np.ndarray], colour: str, label: str
) -> None:
    means, spreads = [float(each.mean()) for each in values], [_spread(each) for each in values]
    axes.errorbar(
        [row.deploy_every for row in rows],
        means,
        spreads,
        fmt="o-",
        color=colour,
        capsize=3,
        label=label,
    )


def _spread(values: np.ndarray) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0
