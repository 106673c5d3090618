"""Regret: of a run against the best of its class, and what delayed deployment adds to it.

`fedbandit regret` finds the best model of a run's class by full-information training. `fedbandit
theory` runs the same rounds with different deployment periods, in a world whose mean rewards are
linear in the context, so that the regret of every event is known exactly, beside the bounds.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from math import inf, isnan, nan
from pathlib import Path
from typing import Any

import numpy as np

from fedbandit.algorithms import FedAvg
from fedbandit.assembly.experiment import Experiment
from fedbandit.assembly.parts import build_optimizer
from fedbandit.config import Config
from fedbandit.core.errors import refuse
from fedbandit.core.process import Stopwatch
from fedbandit.core.progress import SILENT, ProgressReporter
from fedbandit.data.embedded.realizable import RealizableEnvironment, features_of, realizable
from fedbandit.engines import ThreadEngine
from fedbandit.environments import Scenario
from fedbandit.evaluation.logs import LinearSums, linear_sums
from fedbandit.evaluation.metrics import Regret, best_value, expected_rewards, policy_value
from fedbandit.federated.cohorts import FixedCohorts
from fedbandit.federated.learners.base import ClientSettings
from fedbandit.federated.pipeline import AdaptiveClipping
from fedbandit.federated.round import Engine, Phase, run_round
from fedbandit.federated.server import PlainMean
from fedbandit.federated.visit_plans import SimpleVisits
from fedbandit.models import Layout
from fedbandit.objectives import FullInformation
from fedbandit.policies import Greedy, Policy, rule_at
from fedbandit.results.differences import text_table
from fedbandit.results.plots import COLOURS, OTHER_COLOURS, empty_figure, save_picture
from fedbandit.simulation import RoundEvents, simulate
from fedbandit.theory import (
    Setting,
    centralised_regret,
    epsilon_greedy_per_event,
    falcon_per_event,
    federated_regret,
    longest_useful_period,
)


def estimated_regret(
    experiment: Experiment,
    weights: np.ndarray,
    best: np.ndarray,
    round_number: int = 1,
    events: int = 0,
) -> Regret:
    """The regret of the experiment's policy with these weights against the greedy policy of the
    `best` weights, both flat float arrays [P].

    Both act in the world as it is in round `round_number`. `events` is how many had been logged by
    then, which a policy with a schedule needs to know.
    """
    work = experiment.bandit.work
    stage = work.world.stage(round_number)
    rewards = expected_rewards(work.split, work.world, work.num_actions, round_number)
    clients = experiment.bandit.cohorts.pool

    def value(policy: Policy, model: np.ndarray) -> float:
        predict = work.predictions(model)
        return policy_value(work.split, clients, policy, predict, rewards, stage.available)

    progress = experiment.bandit.progress(round_number, events)
    reference, ours = value(Greedy(), best), value(rule_at(work.policy, progress), weights)
    return Regret(max(reference, ours), ours, reference_beaten=ours > reference)


def best_in_class(
    experiment: Experiment,
    engine: Engine,
    *,
    rounds: int,
    round_number: int = 1,
    client_learning_rate: float | None = None,
    start: np.ndarray | None = None,
    keep_every: int = 10,
) -> np.ndarray:
    """The flat weights [P] whose greedy policy earns most among those that full-information training
    on all clients passes.

    All of its `rounds` are in the world as it is in the experiment's round `round_number`; every
    `keep_every` rounds the greedy policy is valued, exactly, over all clients.
    """
    rate = 1.0 if client_learning_rate is None else client_learning_rate
    refuse(
        (rounds < 1, f"rounds: must be at least 1, not {rounds}"),
        (not 0 < rate < inf, f"learning_rate: must be positive, not {rate:g}"),
    )
    phase = _full_information(experiment, round_number, client_learning_rate)
    stage, clients = phase.scenario.stage(1), phase.cohorts.pool
    rewards = expected_rewards(
        phase.work.split, stage.environment, phase.work.num_actions, round_number
    )
    state = phase.start(experiment.initial_weights() if start is None else start)
    best, best_value = state.weights, -np.inf
    for number in range(1, rounds + 1):
        state, _metrics = run_round(phase, state, engine, Stopwatch())
        if number % keep_every and number != rounds:
            continue
        weights = state.weights
        predict = phase.work.predictions(weights)
        value = policy_value(phase.work.split, clients, Greedy(), predict, rewards, stage.available)
        if value > best_value:
            best, best_value = weights, value
    return best


def _full_information(
    experiment: Experiment, round_number: int, client_learning_rate: float | None
) -> Phase:
    """A phase with every action's reward in sight: same clients, same server optimiser, the rewards
    of one round.

    Nothing of what holds the run itself back: the best of a class knows no noise, no gate, no norm
    that a plan fixed.
    """
    config, bandit = experiment.config, experiment.bandit
    rate = (
        client_learning_rate
        or config.pretraining.client_learning_rate
        or config.client.learning_rate
    )
    settings = ClientSettings(rate, config.client.batch_size, config.client.epochs)
    work = replace(
        bandit.work,
        plan=SimpleVisits(config.seed, deploy_every=1, max_examples=config.client.max_examples),
        policy=Greedy(),
        predictor=experiment.trainable.predictor(config.device),
        learner=experiment.trainable.learner(FullInformation(), settings, config.device),
        algorithm=FedAvg(
            build_optimizer("server.optimizer", config.server.optimizer, config.server.parameters)
        ),
        world=Scenario((replace(bandit.scenario.stage(round_number), from_round=1),)),
        stages=(),
        freezing=None,
        per_version_importance=False,
        with_regret=False,
        supervised=True,
        estimator=None,
        recipe=None,
    )
    pool = bandit.cohorts.pool
    return Phase(
        work=work,
        cohorts=FixedCohorts(pool, min(config.clients_per_round, len(pool)), config.seed),
        clipping=AdaptiveClipping(),
        deploy_every=1,
        aggregation=PlainMean(),
        gate=None,
    )


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
    phase, layout = simulation.experiment.bandit, simulation.experiment.acting.layout
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

    sums: LinearSums  # X'X [K, d + 1, d + 1] and X'r [K, d + 1]
    rewards: float  # sum of squared rewards
    events: int

    @classmethod
    def empty(cls, environment: RealizableEnvironment) -> "LeastSquares":
        """The sums of a log without events."""
        features, k = environment.weight.shape
        return cls(LinearSums.empty(k, features + 1), 0.0, 0)

    def with_events(
        self, contexts: np.ndarray, actions: np.ndarray, rewards: np.ndarray
    ) -> "LeastSquares":
        """The sums with further events: contexts float64 [n, d], actions [n], rewards [n]."""
        x, earned = np.column_stack([contexts, np.ones(len(contexts))]), rewards.astype(np.float64)
        sums = self.sums + linear_sums(x, actions, earned, len(self.sums.gram))
        squared = self.rewards + float((earned**2).sum())
        return LeastSquares(sums, squared, self.events + len(rewards))

    def excess(self, layout: Layout, weights: np.ndarray) -> float:
        """By how much the mean squared error of a linear model on this log exceeds the smallest
        possible one.
        """
        params = layout.split(weights.astype(np.float64))
        ours = np.vstack([params["weight"], params["bias"]]).T
        best = np.stack(
            [
                np.linalg.lstsq(s, p, rcond=None)[0]
                for s, p in zip(self.sums.gram, self.sums.moments, strict=True)
            ]
        )
        return max(0.0, self._error(ours) - self._error(best))

    def _error(self, coefficients: np.ndarray) -> float:
        """The mean squared error of linear models, coefficients [K, d + 1], on the log."""
        gram, moments = self.sums.gram, self.sums.moments
        fitted = np.einsum("ka,kab,kb->", coefficients, gram, coefficients)
        squares = float(fitted - 2 * (coefficients * moments).sum() + self.rewards)
        return squares / max(1, self.events)


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
    """Lengths of runs, deployment periods, and the constants of the bounds."""

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
        """The setting of the bounds; without an error that of a perfect oracle."""
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
    """Bounds for one deployment period, per event and in reward."""

    federated: float  # eq. 9 over the run, of ε-greedy; it says nothing from 1 on
    centralised: float  # eq. 10
    last: Mapping[
        str, float
    ]  # for the model deployed last, by policy; NaN where none was ever trained


@dataclass(frozen=True)
class DelayRow:
    """One deployment period: measurements by policy beside the bounds."""

    deploy_every: int
    samples: int
    periods: int
    measured: Mapping[str, PolicyRegret]
    bounds: RegretBounds
    perfect: RegretBounds  # with an oracle that solves every regression exactly

    def rows(self) -> list[dict[str, Any]]:
        """A row for each policy: what was measured, and the bounds with the measured error."""
        of_run = {"eq_9": self.bounds.federated, "eq_10": self.bounds.centralised}
        return [
            {
                "deploy_every": self.deploy_every,
                "samples": self.samples,
                "periods": self.periods,
                "policy": policy,
                "regret": float(one.whole.mean()),
                "regret_sd": _spread(one.whole),
                "last_regret": float(one.last.mean()),
                "optimization_error": one.optimization_error,
                "bound_of_last": None if isnan(last := self.bounds.last[policy]) else last,
                **(of_run if policy == "epsilon-greedy" else dict.fromkeys(of_run)),
            }
            for policy, one in self.measured.items()
        ]


_SHOWN = {
    "deploy_every": ("every", "d"), "periods": ("periods", "d"), "policy": ("policy", ""),
    "regret": ("regret", ".4f"), "regret_sd": ("± sd", ".4f"), "last_regret": ("last", ".4f"),
    "optimization_error": ("ε_fed", ".5f"), "bound_of_last": ("bound", ".3f"),
    "eq_9": ("eq. 9", ".3f"), "eq_10": ("eq. 10", ".3f"),
}  # fmt: skip
_LEGEND = """regret: per event over the run; last, bound: of the model deployed last;
ε_fed: error of the oracle; eq. 9 and eq. 10: bounds of ε-greedy over the run,
federated and centralised. A bound above 1 says nothing. Constants are dropped:
compare shapes, not heights."""


def in_words(study: DelayStudy, found: Sequence[DelayRow]) -> str:
    """A table of measurements beside bounds, with its legend, and the longest useful period."""
    lines = [[head for head, _ in _SHOWN.values()]]
    for row in (row for one in found for row in one.rows()):
        row["policy"] = _SHORT[row["policy"]]
        cells = [(row[key], kind) for key, (_, kind) in _SHOWN.items()]
        lines.append(["-" if value is None else format(value, kind) for value, kind in cells])
    per_round = found[0].samples // found[0].deploy_every
    longest = longest_useful_period(study.setting(), per_round * study.rounds)
    beyond = "for every period" if longest is None else f"beyond {longest / per_round:g} rounds"
    said = f"with a perfect oracle eq. 9 is vacuous {beyond}"
    return "\n".join([text_table(lines, left=(2,)), _LEGEND, said])


def run_study(study: DelayStudy, progress: ProgressReporter = SILENT) -> list[DelayRow]:
    """Measure every deployment period of the study, with every policy and seed."""
    total, rows = len(study.deploy_every) * len(_SHORT) * study.seeds, []
    with (
        closing(ThreadEngine(1)) as engine,
        progress.task("theory", total, unit="runs") as advance,
    ):

        def run(policy: str, every: int, seed: int) -> DelayMeasurement:
            world = realizable(seed, actions=ACTIONS)
            measured = measure(study.config(policy, every, seed), world, engine)
            advance(1)
            return measured

        for every in study.deploy_every:
            found = {
                policy: [run(policy, every, seed) for seed in range(study.seeds)]
                for policy in _SHORT
            }
            rows.append(_row(study, found))
    return rows


def _row(study: DelayStudy, found: Mapping[str, Sequence[DelayMeasurement]]) -> DelayRow:
    """The measurements of one period beside the bounds, with the measured error and with none."""
    measured = {policy: PolicyRegret.of(each) for policy, each in found.items()}
    first = found["epsilon-greedy"][0]
    bounds = partial(_bounds, study, first.samples, first.periods)
    errors = {policy: one.optimization_error for policy, one in measured.items()}
    exact = bounds(dict.fromkeys(errors, 0.0))
    every, samples, periods = first.deploy_every, first.samples, first.periods
    return DelayRow(every, samples, periods, measured, bounds(errors), exact)


def _bounds(
    study: DelayStudy, samples: int, periods: int, errors: Mapping[str, float]
) -> RegretBounds:
    """The bounds per event of one period, with these errors of the oracle."""
    setting, events = study.setting(errors["epsilon-greedy"]), samples * periods
    federated = federated_regret(setting, samples, periods)
    trainings = periods - 1  # the model deployed last has not seen the period that it serves
    last = {
        policy: bound(study.setting(errors[policy]), samples, trainings) if trainings else nan
        for policy, bound in _PER_EVENT.items()
    }
    centralised = centralised_regret(setting, samples, periods)
    return RegretBounds(federated / events, centralised / events, last)


def draw(study: DelayStudy, rows: Sequence[DelayRow], path: Path) -> Path:
    """Bounds on the left and measurements on the right, saved by the path's suffix.

    Above over the whole run, below for the model deployed last. Grey marks bounds that say nothing.
    """
    figure = empty_figure(10, 8)
    panels = figure.subplots(2, 2, sharex=True)
    (whole_bounds, whole), (last_bounds, last) = panels
    every = [row.deploy_every for row in rows]

    def bound(axes: Any, of: Callable[[RegretBounds], float], label: str, **style: Any) -> None:
        """With the measured error of the oracle, and dotted with none."""
        axes.plot(every, [of(row.bounds) for row in rows], "-", label=label, **style)
        exact, hollow = [of(row.perfect) for row in rows], {"mfc": "w", **style}
        axes.plot(every, exact, ":", label=f"{label}, exact oracle", **hollow)

    def measured(axes: Any, values: Sequence[np.ndarray], **style: Any) -> None:
        means, spreads = [float(one.mean()) for one in values], [_spread(one) for one in values]
        axes.errorbar(every, means, spreads, fmt="o-", capsize=3, **style)

    own, label = {"color": _COLOURS["epsilon-greedy"], "marker": "o"}, "ε-greedy, federated (eq. 9)"
    bound(whole_bounds, lambda b: b.federated, label, **own)
    own, label = {"color": _CENTRALISED, "marker": "s"}, "ε-greedy, centralised (eq. 10)"
    bound(whole_bounds, lambda b: b.centralised, label, **own)
    for policy, name in _NAMES.items():
        own = {"color": _COLOURS[policy]}
        if policy != "falcon-schedule":  # the bound is FALCON's, whatever its γ
            of = partial(_last_bound, policy)
            bound(last_bounds, of, f"{name}, federated", marker="o", **own)
        own["label"] = f"{name}, γ = {study.gamma:g}" if policy == "falcon" else name
        measured(whole, [row.measured[policy].whole for row in rows], **own)
        measured(last, [row.measured[policy].last for row in rows], **own)
    titles = ("mean over the run", "an event of the model deployed last")
    for (left, right), title in zip(panels, titles, strict=True):
        lines = [line.get_ydata() for line in left.get_lines()]
        top = 1.25 * max(1.0, *(float(np.nanmax([*values, 0.0])) for values in lines))
        left.axhspan(1, top, color="#e6e6e6", zorder=0)  # rewards lie in [0, 1]
        left.set_title(f"Bounds, {title} (grey: vacuous)", fontsize=10)
        left.set_ylim(top=top)
        right.set_title(f"Measured, {title}", fontsize=10)
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


def _last_bound(policy: str, bounds: RegretBounds) -> float:
    return bounds.last[policy]


def _spread(values: np.ndarray) -> float:
    """The standard deviation over seeds; 0 for a single one."""
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0
