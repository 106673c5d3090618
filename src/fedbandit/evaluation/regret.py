"""Federated regret (eq. 4): how much more the best policy of the class earns, averaged over clients; best minus ours.

The best of the class is found by full-information training, or known where the environment is realisable.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from fedbandit.data.dataset import Split
from fedbandit.data.realizable import RealizableEnvironment
from fedbandit.engines import Engine
from fedbandit.errors import ConfigError
from fedbandit.evaluation.ope.logs import RowScores
from fedbandit.federated.aggregation import PlainMean
from fedbandit.federated.clipping import AdaptiveClipping
from fedbandit.federated.cohorts import FixedCohorts
from fedbandit.federated.learners import ClientSettings, make_learner
from fedbandit.federated.visits import SimpleVisits
from fedbandit.objectives import FullInformation
from fedbandit.policies import Greedy, Policy
from fedbandit.rewards import Rewards
from fedbandit.simulation.experiment import Experiment
from fedbandit.simulation.loop import Phase, play_round
from fedbandit.simulation.scenarios import Scenario
from fedbandit.timing import Stopwatch

_ROWS = 4096


@dataclass(frozen=True)
class Regret:
    """Expected rewards per event, averaged over clients, each client counting the same."""

    best: float
    ours: float
    reference_beaten: bool = False  # ours earned more than full-information training found: then `best` is ours

    @property
    def value(self) -> float:
        return self.best - self.ours


def policy_value(
    split: Split,
    clients: Sequence[int],
    policy: Policy,
    scores: RowScores,
    rewards: RowScores,
    available: np.ndarray | None = None,
) -> float:
    """The expected reward of a policy, exact over its choices: mean over clients of the mean over their examples.

    `available` [K] says which actions exist; None: all.
    """
    chosen = np.asarray(clients)
    sizes = split.sizes()[chosen]
    chosen, sizes = chosen[sizes > 0], sizes[sizes > 0]
    starts = np.repeat(split.offsets[chosen] - (np.cumsum(sizes) - sizes), sizes)
    rows, share = starts + np.arange(len(starts)), np.repeat(1 / sizes, sizes)
    total = 0.0
    for start in range(0, len(rows), _ROWS):
        block = slice(start, start + _ROWS)
        probabilities = policy.probabilities(np.asarray(scores(rows[block]), np.float64), available)
        total += float(share[block] @ (probabilities * rewards(rows[block])).sum(axis=1))
    return total / len(chosen)


def exact_regret(
    environment: RealizableEnvironment, clients: Sequence[int], policy: Policy, scores: RowScores
) -> Regret:
    """Against the truth of a realisable environment, in expectation over rewards too."""
    split, truth = environment.dataset.train, environment.mean_rewards
    best = policy_value(split, clients, Greedy(), truth, truth)
    return Regret(best, policy_value(split, clients, policy, scores, truth))


def estimated_regret(experiment: Experiment, weights: np.ndarray, best: np.ndarray, round_number: int = 1) -> Regret:
    """The regret of the experiment's policy with these weights, against the greedy policy of the `best` weights.

    Both in the world as it is in round `round_number`.
    """
    work = experiment.bandit.work
    stage = experiment.bandit.scenario.stage(round_number)
    rewards = table_rewards(work.split, stage.rewards)
    clients = experiment.bandit.cohorts.pool

    def value(policy: Policy, model: np.ndarray) -> float:
        scores = lambda rows: work.learner.scores(model, work.split.contexts(rows))  # noqa: E731
        return policy_value(work.split, clients, policy, scores, rewards, stage.available)

    reference, ours = value(Greedy(), best), value(work.policy, weights)
    return Regret(max(reference, ours), ours, reference_beaten=ours > reference)


def table_rewards(split: Split, rewards: Rewards) -> RowScores:
    """The reward of every action in rows of a labelled split."""
    return lambda rows: rewards.matrix(split.labels.take(rows), np.searchsorted(split.offsets, rows, side="right") - 1)


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
    """The weights whose greedy policy earns most among those that full-information training on all clients passes.

    All of its `rounds` are in the world as it is in the experiment's round `round_number`.
    """
    if rounds < 1:
        raise ConfigError(f"rounds: must be at least 1, not {rounds}")
    if client_learning_rate is not None and not 0 < client_learning_rate < inf:
        raise ConfigError(f"learning_rate: must be positive, not {client_learning_rate:g}")
    phase = _full_information(experiment, round_number, client_learning_rate)
    stage, clients = phase.scenario.stage(1), phase.cohorts.pool
    rewards = table_rewards(phase.work.split, stage.rewards)
    state = phase.start(experiment.initial_weights() if start is None else start)
    best, best_value = state.weights, -np.inf
    for number in range(1, rounds + 1):
        state, _metrics = play_round(phase, state, engine, Stopwatch())
        if number % keep_every and number != rounds:
            continue
        weights = state.weights
        scores = lambda rows: phase.work.learner.scores(weights, phase.work.split.contexts(rows))  # noqa: B023, E731
        value = policy_value(phase.work.split, clients, Greedy(), scores, rewards, stage.available)
        if value > best_value:
            best, best_value = weights, value
    return best


def _full_information(experiment: Experiment, round_number: int, client_learning_rate: float | None) -> Phase:
    """A phase with every action's reward in sight: same clients, same server optimiser, the rewards of one round.

    Nothing of what holds the run itself back: the best of a class knows no noise, no gate, no norm that a plan fixed.
    """
    config, bandit = experiment.config, experiment.bandit
    rate = client_learning_rate or config.pretraining.client_learning_rate or config.client.learning_rate
    settings = ClientSettings(rate, config.client.batch_size, config.client.epochs)
    work = replace(
        bandit.work,
        plan=SimpleVisits(config.seed, deploy_every=1, max_examples=config.client.max_examples),
        policy=Greedy(),
        learner=make_learner(experiment.model, experiment.layout, FullInformation(), settings, config.device),
        supervised=True,
        doubly_robust=None,
    )
    pool = bandit.cohorts.pool
    return Phase(
        work=work,
        cohorts=FixedCohorts(pool, min(config.clients_per_round, len(pool)), config.seed),
        scenario=Scenario((replace(bandit.scenario.stage(round_number), from_round=1),)),
        optimizer=bandit.optimizer,
        clipping=AdaptiveClipping(),
        deploy_every=1,
        aggregation=PlainMean(),
        gate=None,
    )
