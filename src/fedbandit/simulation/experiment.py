"""From a configuration to the parts of a run, checked against each other and against the data before work starts."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedbandit import objectives, policies
from fedbandit.components import construct, resolve
from fedbandit.config import ClippingConfig, Config
from fedbandit.data import FederatedDataset
from fedbandit.data.ragged import Ragged
from fedbandit.errors import ConfigError
from fedbandit.federated import optimizers
from fedbandit.federated.client import ClientWork
from fedbandit.federated.clipping import AdaptiveClipping, Clipping, FixedClipping
from fedbandit.federated.learners import ClientSettings, Learner, Untrained, make_learner
from fedbandit.federated.visits import PopulationVisits, SimpleVisits, VisitPlan
from fedbandit.models import DataSpec, Layout, Model, build_model
from fedbandit.objectives import Objective, Pointwise
from fedbandit.policies import Greedy, Policy
from fedbandit.randomness import Purpose, bits
from fedbandit.rewards import RewardTable
from fedbandit.simulation import scenarios
from fedbandit.simulation.cohorts import FixedCohorts
from fedbandit.simulation.loop import Phase
from fedbandit.simulation.scenarios import Scenario, Stage


@dataclass(frozen=True)
class Experiment:
    """All parts of a run: a bandit phase, and the pre-training phase before it where the scenario has one."""

    config: Config
    dataset: FederatedDataset
    model: Model
    layout: Layout
    bandit: Phase
    pretraining: Phase | None

    def initial_weights(self) -> np.ndarray:
        """The model before anything has been learned; runs that share a pre-training share it too."""
        seed = self.config.seed if self.pretraining is None else self.config.pretraining.seed
        return self.layout.flatten(self.model.init(seed), np.dtype(self.config.dtype))


def build_experiment(config: Config, dataset: FederatedDataset) -> Experiment:
    """Build every part that the configuration names; a part that does not fit is refused with the path of its key."""
    header = dataset.header
    if header.logged:
        raise ConfigError("data.source: holds logged feedback; a simulation needs labels to make rewards from")
    spec = DataSpec.of(header)
    model = build_model(config.model.name, spec, config.model.parameters)
    layout = Layout.of(model.init(config.seed))
    policy = _policy(config)
    scenario = construct("scenario", resolve("scenario", config.scenario, scenarios.BUILT_IN), {}, header)
    objective = _objective(config, policy, scenario, header.num_actions)
    pretrained = config.pretraining.clients if scenario.pretraining is not None else 0
    pool = _bandit_pool(config, dataset, pretrained)

    learner: Learner = make_learner(model, layout, objective, _settings(config))
    _check_scores(learner, layout.flatten(model.init(config.seed), np.dtype(config.dtype)), spec)
    bandit = Phase(
        work=ClientWork(
            split=dataset.train,
            plan=_visits(config),
            policy=policy,
            learner=learner if config.training else Untrained(learner),
            seed=config.seed,
        ),
        cohorts=FixedCohorts(pool, config.clients_per_round, config.seed),
        scenario=scenario,
        optimizer=_optimizer("server", config.server.optimizer, config.server.parameters),
        clipping=_clipping(config.clipping),
        deploy_every=config.deploy_every,
    )
    supervised = None
    if scenario.pretraining is not None:
        supervised = _pretraining_phase(config, dataset, model, layout, scenario.pretraining)
    return Experiment(config, dataset, model, layout, bandit, supervised)


def _pretraining_phase(
    config: Config, dataset: FederatedDataset, model: Model, layout: Layout, rewards: RewardTable
) -> Phase:
    """Supervised training on the first clients: the same rounds, a greedy policy, a loss over all actions."""
    chosen = config.pretraining
    seed = int(bits(chosen.seed, Purpose.PRETRAINING))
    objective = objectives.SUPERVISED[chosen.objective]()
    _check_range("pretraining.objective", objective, rewards)
    rate = chosen.client_learning_rate or config.client.learning_rate
    server = {"learning_rate": chosen.server_learning_rate or config.server.learning_rate}
    optimizer = chosen.server_optimizer or config.server.optimizer
    if optimizer == config.server.optimizer:
        server = {**config.server.parameters, **server}
    return Phase(
        work=ClientWork(
            split=dataset.train,
            plan=SimpleVisits(seed, deploy_every=1, max_examples=config.client.max_examples),
            policy=Greedy(),
            learner=make_learner(model, layout, objective, _settings(config, rate)),
            seed=seed,
            supervised=True,
        ),
        cohorts=FixedCohorts(range(chosen.clients), config.clients_per_round, seed),
        scenario=Scenario((Stage(rewards),)),
        optimizer=_optimizer("pretraining", optimizer, server),
        clipping=_clipping(config.clipping),
        deploy_every=1,
    )


def _policy(config: Config) -> Policy:
    make = resolve("policy.name", config.policy.name, policies.BUILT_IN)
    return construct("policy", make, config.policy.parameters)


def _objective(config: Config, policy: Policy, scenario: Scenario, num_actions: int) -> Objective:
    make = resolve("objective.name", config.objective.name, objectives.BUILT_IN)
    parameters = config.objective.parameters
    if isinstance(make, type) and issubclass(make, objectives.WeightedRegression):
        parameters.setdefault("scale", policies.importance_scale(policy, num_actions))
    objective = construct("objective", make, parameters)
    for stage in scenario.stages:
        _check_range("objective.name", objective, stage.rewards)
    return objective


def _check_range(path: str, objective: Objective, rewards: RewardTable) -> None:
    if isinstance(objective, Pointwise) and objective.logistic and rewards.highest > 1:
        raise ConfigError(f"{path}: cross-entropy needs rewards in [0, 1]; here they reach {rewards.highest:.3g}")


def _bandit_pool(config: Config, dataset: FederatedDataset, pretrained: int) -> range:
    """The clients of the bandit phase: everybody but the initial ones."""
    pool = range(pretrained, dataset.train.num_clients)
    if pretrained and config.clients_per_round > pretrained:
        asked = config.clients_per_round
        raise ConfigError(f"clients_per_round: {asked} is more than the {pretrained} pre-training clients")
    if config.clients_per_round > len(pool):
        beside = f" beside the {pretrained} of pre-training" if pretrained else ""
        raise ConfigError(
            f"clients_per_round: {config.clients_per_round} is more than the {max(0, len(pool))} clients"
            f" that {dataset.header.name} has{beside}"
        )
    return pool


def _visits(config: Config) -> VisitPlan:
    if config.mode == "simple":
        return SimpleVisits(config.seed, config.deploy_every, config.client.max_examples)
    return PopulationVisits(config.seed, config.deploy_every, **config.population.model_dump())


def _optimizer(path: str, name: str, parameters: dict[str, Any]) -> optimizers.ServerOptimizer:
    return construct(path, resolve(f"{path}.optimizer", name, optimizers.BUILT_IN), parameters)


def _clipping(config: ClippingConfig) -> Clipping:
    if not config.enabled:
        return FixedClipping(math.inf)
    if config.norm is not None:
        return FixedClipping(config.norm)
    return AdaptiveClipping(0.8 if config.quantile is None else config.quantile, config.initial, config.rate)


def _settings(config: Config, learning_rate: float | None = None) -> ClientSettings:
    rate = config.client.learning_rate if learning_rate is None else learning_rate
    return ClientSettings(rate, config.client.batch_size, config.client.epochs)


def _check_scores(learner: Learner, weights: np.ndarray, spec: DataSpec) -> None:
    """Score one blank context, so that a model that does not fit the data is refused now and not in round 1."""
    blank: Any = np.zeros((1, *spec.shape), np.float32)
    if spec.kind == "sparse":
        blank = Ragged(np.array([0, 1]), np.zeros(1, np.int32), np.ones(1, np.float32))
    try:
        shape = learner.scores(weights, blank).shape
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, AssertionError) as error:
        raise ConfigError(f"model.name: the model cannot score contexts of shape {spec.shape}: {error}") from error
    if shape != (1, spec.num_actions):
        raise ConfigError(f"model.name: the model scores {shape[-1]} actions, the data set has {spec.num_actions}")
