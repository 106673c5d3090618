"""Regret: of a run against the best of its class, and what delayed deployment adds to it.

`fedbandit regret` finds the best model of a run's class by full-information training. `fedbandit
theory` runs the same rounds with different deployment periods, in a world whose mean rewards are
linear in the context, so that the regret of every event is known exactly, beside the bounds.
"""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import product
from math import inf, isnan, nan, prod
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
from fedbandit.data.embedded import RealizableEnvironment, features_of, realizable
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
        """The expected reward of a policy with a model's weights [P], over all clients."""
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
    # ε_fed, in squared reward: mean over the deployments after which rounds follow
    optimization_error: float


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
    features, actions = environment.weight.shape
    log = LinearSums.empty(actions, features + 1)
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
                errors.append(excess_error(log, layout, deployed.weights))
        logged = RoundEvents(phase, state)()  # the very events that the round will train on
        contexts = features_of(logged.contexts.shared)
        log += linear_sums(with_ones(contexts), logged.actions, logged.rewards, actions)
        lost, events = lost + regret * len(logged), events + len(logged)
        next(iter(simulation))
    if not errors:  # one single period: the model that would have been deployed next
        errors.append(excess_error(log, layout, simulation.state.weights))
    periods = -(-config.rounds // config.deploy_every)
    samples = round(events / config.rounds * config.deploy_every)
    return DelayMeasurement(
        config.deploy_every, samples, periods, lost / events, regret, float(np.mean(errors))
    )


def with_ones(contexts: np.ndarray) -> np.ndarray:
    """Contexts [n, d] with a last column of ones, for the bias: float64 [n, d + 1].

    Examples:
        >>> with_ones(np.array([[0.5, 0.25]]))
        array([[0.5 , 0.25, 1.  ]])
    """
    return np.column_stack([contexts, np.ones(len(contexts))])


def excess_error(log: LinearSums, layout: Layout, weights: np.ndarray) -> float:
    """By how much the mean squared error of a linear model on a log exceeds the smallest possible
    one: ε_fed of the paper.

    X'X and X'r of every action are all that it takes: with the best coefficients b, those of the
    model c exceed their squared error by (c - b)'X'X(c - b).
    """
    params = layout.split(weights.astype(np.float64))
    ours = np.vstack([params["weight"], params["bias"]]).T
    sums = zip(log.gram, log.moments, strict=True)
    best = np.stack([np.linalg.lstsq(gram, moments, rcond=None)[0] for gram, moments in sums])
    squares = np.einsum("ka,kab,kb->", ours - best, log.gram, ours - best)
    return max(0.0, float(squares)) / max(1.0, float(log.gram[:, -1, -1].sum()))


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
class DelayRow:
    """One policy at one deployment period: measurements by seed, beside the bounds of one event.

    Bounds are `bound_of_last`, of the model deployed last (NaN where none was ever trained), and of
    ε-greedy over the run `eq_9`, federated, and `eq_10`, centralised. From 1 on they say nothing.
    """

    policy: str
    measured: Sequence[DelayMeasurement]
    bounds: Mapping[str, float]  # with the measured error of the oracle
    perfect: Mapping[str, float]  # with an oracle that solves every regression exactly

    def by_seed(self, name: str) -> np.ndarray:
        """What was measured, by its name: [seeds]."""
        return np.array([getattr(one, name) for one in self.measured])

    def row(self) -> dict[str, Any]:
        """What was measured, and the bounds with the measured error; None where there is none."""
        first = self.measured[0]
        known = {key: value for key, value in self.bounds.items() if not isnan(value)}
        return {
            "deploy_every": first.deploy_every,
            "samples": first.samples,
            "periods": first.periods,
            "policy": self.policy,
            "regret": float(self.by_seed("regret").mean()),
            "regret_sd": _spread(self.by_seed("regret")),
            "last_regret": float(self.by_seed("last_regret").mean()),
            "optimization_error": float(self.by_seed("optimization_error").mean()),
            **{key: known.get(key) for key in ("bound_of_last", "eq_9", "eq_10")},
        }


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
    for row in (one.row() for one in found):
        row["policy"] = _SHORT[row["policy"]]
        cells = [(row[key], kind) for key, (_, kind) in _SHOWN.items()]
        lines.append(["-" if value is None else format(value, kind) for value, kind in cells])
    first = found[0].measured[0]
    per_round = first.samples // first.deploy_every
    longest = longest_useful_period(study.setting(), per_round * study.rounds)
    beyond = "for every period" if longest is None else f"beyond {longest / per_round:g} rounds"
    said = f"with a perfect oracle eq. 9 is vacuous {beyond}"
    return "\n".join([text_table(lines, left=(2,)), _LEGEND, said])


def run_study(study: DelayStudy, progress: ProgressReporter = SILENT) -> list[DelayRow]:
    """Measure every deployment period of the study, with every policy and seed."""
    cases, seeds = list(product(study.deploy_every, _SHORT)), range(study.seeds)
    rows = []
    with (
        closing(ThreadEngine(1)) as engine,
        progress.task("theory", len(cases) * study.seeds, unit="runs") as advance,
    ):
        for every, policy in cases:
            measured = []
            for seed in seeds:
                world = realizable(seed, actions=ACTIONS)
                measured.append(measure(study.config(policy, every, seed), world, engine))
                advance(1)
            error = float(np.mean([one.optimization_error for one in measured]))
            bounds, perfect = (_bounds(study, policy, measured[0], e) for e in (error, 0.0))
            rows.append(DelayRow(policy, measured, bounds, perfect))
    return rows


def _bounds(study: DelayStudy, policy: str, of: DelayMeasurement, error: float) -> dict[str, float]:
    """The bounds of a policy by their names, with this error of the oracle."""
    setting, size = study.setting(error), (of.samples, of.periods)
    trainings = of.periods - 1  # the model deployed last has not seen the period that it serves
    last = _PER_EVENT[policy](setting, of.samples, trainings) if trainings else nan
    if policy != "epsilon-greedy":
        return {"bound_of_last": last}
    whole = {"eq_9": federated_regret(setting, *size), "eq_10": centralised_regret(setting, *size)}
    return {"bound_of_last": last, **{key: value / prod(size) for key, value in whole.items()}}


def draw(study: DelayStudy, rows: Sequence[DelayRow], path: Path) -> Path:
    """Bounds on the left and measurements on the right, saved by the path's suffix.

    Above over the whole run, below for the model deployed last. Grey marks bounds that say nothing.
    """
    figure = empty_figure(10, 8)
    panels = figure.subplots(2, 2, sharex=True)
    (whole_bounds, whole), (last_bounds, last) = panels
    every = list(study.deploy_every)

    def bound(axes: Any, policy: str, key: str, label: str, **style: Any) -> None:
        """With the measured error of the oracle, and dotted with none."""
        own = [row for row in rows if row.policy == policy]
        axes.plot(every, [row.bounds[key] for row in own], "-", label=label, **style)
        exact, hollow = [row.perfect[key] for row in own], {"mfc": "w", **style}
        axes.plot(every, exact, ":", label=f"{label}, exact oracle", **hollow)

    def measured(axes: Any, policy: str, key: str, **style: Any) -> None:
        """Means over seeds with one standard deviation."""
        values = [row.by_seed(key) for row in rows if row.policy == policy]
        means, spreads = [float(one.mean()) for one in values], [_spread(one) for one in values]
        axes.errorbar(every, means, spreads, fmt="o-", capsize=3, **style)

    own = {"color": _COLOURS["epsilon-greedy"], "marker": "o"}
    bound(whole_bounds, "epsilon-greedy", "eq_9", "ε-greedy, federated (eq. 9)", **own)
    own = {"color": _CENTRALISED, "marker": "s"}
    bound(whole_bounds, "epsilon-greedy", "eq_10", "ε-greedy, centralised (eq. 10)", **own)
    for policy, name in _NAMES.items():
        own = {"color": _COLOURS[policy]}
        if policy != "falcon-schedule":  # the bound is FALCON's, whatever its γ
            label = f"{name}, federated"
            bound(last_bounds, policy, "bound_of_last", label, marker="o", **own)
        own["label"] = f"{name}, γ = {study.gamma:g}" if policy == "falcon" else name
        measured(whole, policy, "regret", **own)
        measured(last, policy, "last_regret", **own)
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


def _spread(values: np.ndarray) -> float:
    """The standard deviation over seeds; 0 for a single one."""
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0
