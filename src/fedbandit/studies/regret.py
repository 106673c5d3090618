"""The federated regret of a run: its policy against the best of its class, found by full-information training."""

from dataclasses import replace
from math import inf

import numpy as np

from fedbandit.algorithms import FedAvg
from fedbandit.assembly.experiment import Experiment
from fedbandit.assembly.parts import build_optimizer
from fedbandit.core.errors import ConfigError
from fedbandit.core.process import Stopwatch
from fedbandit.environments import Scenario
from fedbandit.evaluation.metrics import Regret, expected_rewards, policy_value
from fedbandit.federated.client_logs import SimpleVisits
from fedbandit.federated.cohorts import FixedCohorts
from fedbandit.federated.learners.base import ClientSettings
from fedbandit.federated.pipeline import AdaptiveClipping
from fedbandit.federated.round import Engine, Phase, run_round
from fedbandit.federated.server import PlainMean
from fedbandit.objectives import FullInformation
from fedbandit.policies import Greedy, Policy, rule_at


def estimated_regret(
    experiment: Experiment,
    weights: np.ndarray,
    best: np.ndarray,
    round_number: int = 1,
    events: int = 0,
) -> Regret:
    """The regret of the experiment's policy with these weights, against the greedy policy of the `best` weights.

    Both in the world as it is in round `round_number`. `events` is how many had been logged by then, which a policy
    with a schedule needs to know.
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
    """The weights whose greedy policy earns most among those that full-information training on all clients passes.

    All of its `rounds` are in the world as it is in the experiment's round `round_number`.
    """
    if rounds < 1:
        raise ConfigError(f"rounds: must be at least 1, not {rounds}")
    if client_learning_rate is not None and not 0 < client_learning_rate < inf:
        raise ConfigError(f"learning_rate: must be positive, not {client_learning_rate:g}")
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
    """A phase with every action's reward in sight: same clients, same server optimiser, the rewards of one round.

    Nothing of what holds the run itself back: the best of a class knows no noise, no gate, no norm that a plan fixed.
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
        learner=experiment.trainable.learner(FullInformation(), settings, config.device),
        algorithm=FedAvg(
            build_optimizer("server.optimizer", config.server.optimizer, config.server.parameters)
        ),
        world=Scenario((replace(bandit.scenario.stage(round_number), from_round=1),)),
        stages=(),
        freezing=None,
        scaled=False,
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
