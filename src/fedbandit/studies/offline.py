"""Federated training from logs alone: the rounds of a simulation, on feedback that others logged.

Nothing acts here. The objective says how the log's choices are allowed for: unweighted, weighted,
or doubly robust.
"""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedbandit import objectives
from fedbandit.acting import Chosen
from fedbandit.assembly.experiment import Experiment, build_experiment
from fedbandit.config import Config
from fedbandit.core.errors import refuse
from fedbandit.core.parts import resolve
from fedbandit.core.prediction import Prediction
from fedbandit.core.process import Stopwatch
from fedbandit.data.dataset import FederatedDataset
from fedbandit.engines import ThreadEngine
from fedbandit.evaluation.logs import RowScores, log_of, with_estimated_propensities
from fedbandit.events import Events
from fedbandit.federated.clients import Broadcast, ClientWork
from fedbandit.federated.cohorts import FixedCohorts
from fedbandit.federated.pipeline import Memories
from fedbandit.federated.round import Engine, Phase, run_round


@dataclass(frozen=True)
class LoggedWork(ClientWork):
    """Clients whose events are those of their log; `predicted` is the reward model of an objective
    with targets.
    """

    predicted: RowScores | None = None

    def act(
        self,
        clients: np.ndarray,
        broadcast: Broadcast,
        watch: Stopwatch | None = None,
        memory: Mapping[int, Memories] | None = None,
    ) -> Events:
        """The logged events of a chunk of clients: a random part of each log where `max_examples`
        says so.
        """
        with (watch or Stopwatch())("data"):
            visits = self.plan.visits(self.split, clients, broadcast.round)
            log = log_of(self.split)
            actions = np.asarray(log.actions[visits.rows], np.int64)
            rewards = np.asarray(log.rewards[visits.rows], np.float32)
            propensities = np.asarray(
                log.propensities[visits.rows], next(iter(broadcast.received.values())).dtype
            )
            targets, contexts = None, self.split.contexts(visits.rows)
            if self.estimator is not None:
                assert self.predicted is not None
                shown = contexts.candidates
                bounds = None if shown is None else shown.bounds
                prediction = Prediction(self.predicted(visits.rows), bounds=bounds)
                chosen = Chosen(prediction, actions, propensities)
                targets = self._targets(self.estimator, chosen, rewards)
            return Events(
                bounds=visits.bounds,
                contexts=contexts,
                actions=actions,
                rewards=rewards,
                propensities=propensities,
                versions=visits.versions,
                fresh=visits.fresh,
                targets=targets,
                weights=self._counts(visits, None, broadcast),
            )


@dataclass(frozen=True)
class Trained:
    """A model trained from logs, and the metrics of its rounds (`reward` is what the log earned)."""

    experiment: Experiment
    weights: np.ndarray
    rounds: list[dict[str, Any]]


def train_from_logs(
    config: Config,
    dataset: FederatedDataset,
    *,
    start: np.ndarray | None = None,
    clients: range | None = None,
    engine: Engine | None = None,
    estimate_propensities: bool = False,
) -> Trained:
    """Train the configuration's model for its `rounds` on logs, from `start` weights.

    `clients` are those whose logs train (None: all). `estimate_propensities` puts estimates from
    the log itself, for each half of the clients from the other half, in the place of what it
    recorded: right if the log chose by nothing but what is in it.
    """
    if estimate_propensities:
        logged = with_estimated_propensities(dataset.train, dataset.header.num_actions)
        dataset = replace(dataset, train=logged)
    if engine is None:
        with closing(ThreadEngine(None if config.threads == "auto" else config.threads)) as own:
            return train_from_logs(config, dataset, start=start, clients=clients, engine=own)
    experiment = _experiment(config, dataset)
    refuse(
        (
            clients is not None and experiment.privacy is not None,
            "privacy.mechanism: the epsilon is that of cohorts drawn from all clients, not from some",
        )
    )
    start = experiment.initial_weights() if start is None else start
    pool = clients or range(dataset.train.num_clients)
    phase = experiment.bandit
    if phase.work.estimator is not None:
        predicted = _cross_fitted(config, dataset, start, pool, engine)
        work = phase.work
        assert isinstance(work, LoggedWork)
        phase = replace(phase, work=replace(work, predicted=predicted))
    if clients is not None:
        phase = replace(phase, cohorts=_cohorts(config, clients))
    weights, rounds = _train(phase, start, config.rounds, engine)
    return Trained(experiment, weights, rounds)


def _experiment(config: Config, dataset: FederatedDataset) -> Experiment:
    """The parts of a simulation from scratch, with logged events in place of acting."""
    log = log_of(dataset.train)
    make = resolve("objective.name", config.objective.name, objectives.BUILT_IN)
    kind = make if isinstance(make, type) else object  # a function's objectives are its own affair
    settings: dict[str, Any] = {"scenario": "scratch", "mode": "simple", "gate.confidence": None}
    if (
        issubclass(kind, objectives.WeightedRegression)
        and "scale" not in config.objective.parameters
    ):
        settings["objective.scale"] = float(
            np.min(log.propensities)
        )  # as for ε-greedy: the largest weight is 1
    labelled = replace(dataset, header=replace(dataset.header, logged=False))
    experiment = build_experiment(config.with_values(settings), labelled)
    lowest, highest = float(np.min(log.rewards)), float(np.max(log.rewards))
    logistic = issubclass(kind, objectives.Pointwise) and kind.logistic
    refuse(
        (
            logistic and not (lowest >= 0 and highest <= 1),
            f"objective.name: cross-entropy needs rewards in [0, 1]; here {lowest:.3g} to"
            f" {highest:.3g}",
        ),
        (
            experiment.privacy is not None and experiment.bandit.work.estimator is not None,
            f"objective.name: the reward model of {config.objective.name} would be trained without"
            " noise",
        ),
    )
    work = LoggedWork(
        **{**vars(experiment.bandit.work), "recipe": None, "per_version_importance": False}
    )
    return replace(experiment, bandit=replace(experiment.bandit, work=work))


def _cross_fitted(
    config: Config, dataset: FederatedDataset, start: np.ndarray, pool: range, engine: Engine
) -> RowScores:
    """Predicted rewards by unweighted regression, for each half of the clients from the other
    half's logs.
    """
    refuse(
        (
            len(pool) < 2,
            f"objective.name: {config.objective.name} needs two clients at least, to predict one"
            " from the other",
        )
    )
    middle = pool.start + len(pool) // 2
    plain = config.with_values({"objective.name": "regression"})
    experiment = _experiment(plain, dataset)
    halves = (range(pool.start, middle), range(middle, pool.stop))
    fitted = [
        _train(
            replace(experiment.bandit, cohorts=_cohorts(config, half)), start, config.rounds, engine
        )[0]
        for half in halves
    ]
    split, predictor = dataset.train, experiment.bandit.work.predictor

    def predict(rows: np.ndarray) -> np.ndarray:
        """Rewards of every action in these rows [n], each by the half that its client is not in."""
        contexts = split.contexts(rows)
        from_first, from_second = (predictor.predict(weights, contexts).mean for weights in fitted)
        early, shown = rows < split.offsets[middle], contexts.candidates
        early = early[:, None] if shown is None else np.repeat(early, shown.counts)
        return np.where(early, from_second, from_first)

    return predict


def _cohorts(config: Config, clients: range) -> FixedCohorts:
    """Cohorts of the configuration's size, drawn from these clients alone."""
    return FixedCohorts(clients, min(config.clients_per_round, len(clients)), config.seed)


def _train(
    phase: Phase, start: np.ndarray, rounds: int, engine: Engine
) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """The weights after some rounds from `start`, and the metrics of each round."""
    state, metrics = phase.start(start), []
    for _ in range(rounds):
        state, line = run_round(phase, state, engine, Stopwatch())
        metrics.append(line)
    return state.weights, metrics
