"""From a configuration to the parts of a run, checked against each other and against the data
before work starts.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedbandit import objectives
from fedbandit.acting import Predictor
from fedbandit.algorithms import FedAvg
from fedbandit.assembly.parts import (
    acting_model,
    blank_decisions,
    build_aggregation,
    build_algorithm,
    build_clipping,
    build_cohorts,
    build_objective,
    build_optimizer,
    build_part,
    build_policy,
    build_stages,
    check_memory,
    check_personal,
    pretraining_clipping,
    pretraining_cohort,
    target_objective,
    tried,
    try_algorithm,
    try_policy,
)
from fedbandit.assembly.privacy import build_ledger
from fedbandit.config import Config
from fedbandit.core.errors import ConfigError, DataError
from fedbandit.core.identity import WHERE_COMPUTED, file_digests, loaded_digests, require_sources
from fedbandit.core.parts import construct, resolve
from fedbandit.core.randomness import Purpose, Secret, bits
from fedbandit.data import EMBEDDED, FederatedDataset, open_dataset
from fedbandit.data.dataset import Header
from fedbandit.environments import Environment, Met, Scenario, Stage, highest
from fedbandit.environments.scenarios import BUILT_IN as SCENARIOS
from fedbandit.environments.scenarios import drift
from fedbandit.federated.clients import ClientWork, Recipe
from fedbandit.federated.cohorts import FixedCohorts
from fedbandit.federated.learners.base import ClientSettings
from fedbandit.federated.learners.make_learner import Trainable
from fedbandit.federated.round import Phase
from fedbandit.federated.server import PlainMean
from fedbandit.federated.visit_plans import PopulationVisits, SimpleVisits, VisitPlan
from fedbandit.models import DataSpec, Freezing, Layout
from fedbandit.objectives import Objective, Pointwise, WeightedRegression
from fedbandit.policies import Greedy, Policy, importance_scale
from fedbandit.privacy.accounting import Ledger
from fedbandit.privacy.discrete import DeviceNoise
from fedbandit.privacy.noise import (
    RELEASE,
    SECURE,
    Grid,
    GridMean,
    GridNoise,
    PrivateMean,
    SimulatedNoise,
)
from fedbandit.privacy.plan import PrivacyPlan

if TYPE_CHECKING:
    from fedbandit.evaluation.gate import Gate


@dataclass(frozen=True)
class Experiment:
    """All parts of a run: a bandit phase, and the pre-training phase before it where the scenario
    has one.
    """

    config: Config
    dataset: FederatedDataset
    trainable: Trainable  # the model that is trained, whole
    acting: Trainable  # the one that is deployed; the same unless the algorithm deploys another
    bandit: Phase
    pretraining: Phase | None
    initial: np.ndarray = field(repr=False)  # weights before anything has been learned
    privacy: Ledger | None = None  # what a private run spends, and on what
    files: Mapping[str, str] = field(default_factory=dict)  # read by its parts, with their digests
    secret: Secret | None = None  # what its cohorts come from, where the seed must not tell

    @property
    def rounds(self) -> int:
        """The rounds of the bandit phase: as configured, or fewer where a privacy budget ends
        before.
        """
        return self.config.rounds if self.privacy is None else self.privacy.last_round

    @property
    def layout(self) -> Layout:
        """Of the trained weights; what is deployed has `acting.layout`."""
        return self.trainable.layout

    def initial_weights(self) -> np.ndarray:
        """The model before anything has been learned; runs that share a pre-training share it
        too.
        """
        return self.initial.copy()

    def with_secret(self, secret: Secret) -> "Experiment":
        """The same, with cohorts and correlated noise drawn from a secret."""
        assert self.privacy is not None
        aggregation = self.bandit.aggregation
        if isinstance(aggregation, GridMean):
            aggregation = replace(aggregation, noise=aggregation.noise.with_secret(secret))
        cohorts = self.privacy.plan.cohorts(self.bandit.cohorts.pool, secret)
        before, plan = self.pretraining, self.privacy.pretraining
        if before is not None and plan is not None:
            own = Secret(secret.bits(Purpose.PRETRAINING))
            before = replace(before, cohorts=plan.cohorts(before.cohorts.pool, own))
        bandit = replace(self.bandit, cohorts=cohorts, aggregation=aggregation)
        return replace(self, bandit=bandit, pretraining=before, secret=secret)


def build_experiment(config: Config, dataset: FederatedDataset) -> Experiment:
    """Build every part that the configuration names; a part that does not fit is refused with the
    path of its key.
    """
    header = dataset.header
    if header.logged:
        raise ConfigError(
            "data.source: holds logged feedback; a simulation needs labels to make rewards from"
        )
    data = DataSpec.of(header)
    trainable = Trainable.of(config.model.described, data)
    policy = build_policy(config)
    scenario = _scenario(config, dataset)
    objective = _objective(config, policy, scenario, header)
    pretrained = config.pretraining.clients if scenario.pretraining is not None else 0
    pool = _bandit_pool(config, dataset, pretrained)
    ledger = build_ledger(config, len(pool), pretrained > 0)
    seed = config.seed if scenario.pretraining is None else config.pretraining.seed
    initial = trainable.initial(seed, np.dtype(config.dtype))
    bandit, acting = _bandit_phase(
        config, dataset, trainable, initial, policy, objective, scenario, pool, ledger
    )
    supervised = None
    if scenario.pretraining is not None:
        supervised = _pretraining_phase(config, dataset, trainable, scenario.pretraining, ledger)
    read = (
        trainable.model,
        acting.model,
        policy,
        objective,
        scenario,
        bandit.work.algorithm,
        *bandit.work.stages,
    )
    files = file_digests(read, config.data.files)
    bandit = _with_recipe(bandit, config, dataset, "bandit", files)
    if supervised is not None:
        supervised = _with_recipe(supervised, config, dataset, "pretraining", files)
    found = Experiment(
        config, dataset, trainable, acting, bandit, supervised, initial, ledger, files
    )
    system = ledger is not None and config.privacy.noise != "seed"
    return found.with_secret(Secret.fresh()) if system else found


def _bandit_phase(
    config: Config,
    dataset: FederatedDataset,
    trainable: Trainable,
    weights: np.ndarray,
    policy: Policy,
    objective: Objective,
    scenario: Scenario,
    pool: range,
    ledger: Ledger | None,
) -> tuple[Phase, Trainable]:
    """The rounds in which clients act with what was deployed and train on what they logged.

    Beside them the model that acts in them.
    """
    header, scheduled = dataset.header, hasattr(policy, "at")
    freezing = Freezing.of(trainable.layout, config.model.freeze) if config.model.freeze else None
    learner = trainable.learner(objective, _settings(config), config.device, freezing)
    optimizer = build_optimizer(
        "server.optimizer", config.server.optimizer, config.server.parameters
    )
    layout, data = trainable.layout if freezing is None else freezing.trainable, DataSpec.of(header)
    plan = None if ledger is None else ledger.plan
    algorithm = build_algorithm(config, optimizer, data, layout, objective, plan)
    acting = acting_model(algorithm, trainable, data, freezing is not None)
    check_personal(config, algorithm)
    try_policy(config, policy, data, acting)
    predictor = acting.predictor(config.device)
    _check_scores(predictor, acting.initial(0, weights.dtype), header)
    trained = weights if freezing is None else freezing.pick(weights)
    deployed = None if acting is trainable else acting.layout.size
    try_algorithm(config.algorithm.name, algorithm, trained, deployed)
    check_memory(config, algorithm, len(pool), trained)
    aggregation = _aggregation(
        config, dataset, ledger, build_aggregation(config, algorithm, trained)
    )
    weighted = (
        isinstance(objective, WeightedRegression) and "scale" not in config.objective.parameters
    )
    phase = Phase(
        work=ClientWork(
            split=dataset.train,
            plan=_visits(config),
            policy=policy,
            predictor=predictor,
            learner=learner,
            training=config.training,
            algorithm=algorithm,
            seed=config.seed,
            num_actions=header.typical_actions,
            world=scenario,
            stages=build_stages(config),
            freezing=freezing,
            heads=trainable.model.heads,
            with_regret=config.environment.name != "labels",
            per_version_importance=weighted and (scheduled or header.items is not None),
            estimator=target_objective(objective, header.typical_actions, weights.dtype),
            reduction=trainable.reduction(objective, getattr(algorithm, "exact_sums", False)),
            step=_step(config, ledger is not None),
        ),
        cohorts=build_cohorts(config, pool, ledger),
        clipping=build_clipping(config, algorithm),
        deploy_every=config.deploy_every,
        aggregation=aggregation,
        gate=_gate(config, policy, pool, ledger),
        planned_events=_planned_events(config) if scheduled and ledger is not None else None,
    )
    return phase, acting


def _planned_events(config: Config) -> int:
    """The events that a round of a private run counts as: a schedule must not depend on how many
    there really were.
    """
    most = config.client.max_examples
    if config.mode == "population":
        most = min(config.population.events_per_period, most or config.population.events_per_period)
    if most is None:
        raise ConfigError(
            f"client.max_examples: missing; the schedule of {config.policy.name} counts events,"
            " and in a private run"
            " these are the planned ones"
        )
    return config.clients_per_round * most


def make_work(phase: str, **made_from: Any) -> ClientWork:
    """The work of a phase, made from a recipe on another machine: the same data and parts.

    `made_from` has the configuration, path and fingerprint of the data, `sources`, the digests of
    the user's own code that is to be executed, and `files`, those of what the parts read; a machine
    that has others is refused.
    """
    experiment = _experiment_from(json.dumps(made_from))
    found = experiment.bandit if phase == "bandit" else experiment.pretraining
    assert found is not None
    return found.work


@lru_cache(maxsize=1)
def _experiment_from(recipe: str) -> Experiment:
    given = json.loads(recipe)
    chosen = Config.build(given["config"])
    require_sources(chosen.part_names(), given["sources"])
    dataset = open_same_data(chosen.data.source, given["path"], given["fingerprint"])
    made = build_experiment(chosen, dataset)
    for file, digest in made.files.items():
        if given["files"].get(file) != digest:
            raise ConfigError(
                f"{file}: holds other bytes on this machine than where the run was started"
            )
    return made


def open_same_data(source: str, path: str, fingerprint: str) -> FederatedDataset:
    """The data set of the driver as it lies on this machine; an embedded one is made where it is
    missing.
    """
    made_here = source in EMBEDDED and not Path(path).exists()
    dataset = open_dataset(source) if made_here else FederatedDataset.open(path)
    if dataset.header.fingerprint != fingerprint:
        raise DataError(
            f"{dataset.path}: holds other data on this machine than where the run was started"
        )
    return dataset


def _with_recipe(
    phase: Phase, config: Config, dataset: FederatedDataset, name: str, files: Mapping[str, str]
) -> Phase:
    """A phase whose work workers elsewhere can make; data in memory cannot be opened elsewhere."""
    if dataset.path is None:
        return phase
    arguments = {
        "config": config.model_dump(exclude={"threads", "engine"}),
        "path": str(Path(dataset.path).absolute()),
        "fingerprint": dataset.header.fingerprint,
        "phase": name,
        "sources": loaded_digests(config.part_names()),
        "files": dict(files),
    }
    recipe = Recipe(f"{__name__}:{make_work.__name__}", json.dumps(arguments))
    return replace(phase, work=replace(phase.work, recipe=recipe))


def _pretraining_phase(
    config: Config,
    dataset: FederatedDataset,
    trainable: Trainable,
    environment: Environment,
    ledger: Ledger | None,
) -> Phase:
    """Supervised training on the first clients: the same rounds, a greedy policy, a loss over all
    actions.
    """
    chosen, pool = config.pretraining, range(config.pretraining.clients)
    plan = ledger and ledger.pretraining
    seed = int(bits(chosen.seed, Purpose.PRETRAINING))
    objective = objectives.SUPERVISED[chosen.objective](chosen.reduction)
    _check_range("pretraining.objective", objective, environment)
    rate = chosen.client_learning_rate or config.client.learning_rate
    return Phase(
        work=ClientWork(
            split=dataset.train,
            plan=SimpleVisits(seed, deploy_every=1, max_examples=_pretraining_examples(config)),
            policy=Greedy(),
            predictor=trainable.predictor(config.device),
            learner=trainable.learner(objective, _settings(config, rate), config.device),
            algorithm=FedAvg(
                build_optimizer("pretraining.server_optimizer", *pretraining_server(config))
            ),
            seed=seed,
            num_actions=dataset.header.typical_actions,
            world=Scenario((Stage(environment),)),
            heads=trainable.model.heads,
            supervised=True,
            step=_step(config, plan is not None),
        ),
        cohorts=plan.cohorts(pool, seed)
        if plan
        else FixedCohorts(pool, pretraining_cohort(config), seed),
        clipping=pretraining_clipping(config),
        deploy_every=1,
        aggregation=_private_mean(
            config,
            plan,
            seed,
            _pretrained_from(config, dataset),
            ledger.tolerance if ledger else None,
        )
        if plan
        else PlainMean(),
    )


def _pretraining_examples(config: Config) -> int | None:
    """The examples of a client that pre-training uses at a time; None for all."""
    most = config.pretraining.max_examples
    return config.client.max_examples if most == "same" else None if most == "all" else most


def pretraining_server(config: Config) -> tuple[str, dict[str, Any]]:
    """The server's optimiser in pre-training and its parameters; where nothing is said, those of
    the bandit phase.
    """
    name = config.pretraining.server_optimizer or config.server.optimizer
    rate = config.pretraining.server_learning_rate or config.server.learning_rate
    inherited = config.server.parameters if name == config.server.optimizer else {}
    return name, {**inherited, "learning_rate": rate}


def _scenario(config: Config, dataset: FederatedDataset) -> Scenario:
    """The stages of the scenario, in the environment that the configuration names."""
    header, chosen = dataset.header, config.environment
    _check_candidates(config, header)
    make = resolve("scenario", config.scenario, {**SCENARIOS, "drift": drift})
    if make is drift:
        scenario = construct("drift", make, config.drift.model_dump(), header)
    else:
        scenario = construct("scenario", make, {}, header)
    if not isinstance(scenario, Scenario):
        raise ConfigError(
            f"scenario: {config.scenario} gives {type(scenario).__name__}, not a Scenario"
        )

    def over(labels: Environment) -> Environment:
        return build_part(config, "environment", labels, header)  # type: ignore[no-any-return]

    before = scenario.pretraining
    scenario = replace(
        scenario,
        stages=tuple(replace(s, environment=over(s.environment)) for s in scenario.stages),
        pretraining=None if before is None else over(before),
        missing=chosen.missing,
        delay=chosen.delay,
    )
    periods = _visits(config).remembered()
    if chosen.delay >= periods:
        raise ConfigError(
            f"environment.delay: {chosen.delay} periods, but clients keep events of {periods};"
            " population mode with a larger population.cache_size keeps more"
        )
    if ":" in chosen.name:
        _try_environment(scenario, dataset)
    return scenario


def _check_candidates(config: Config, header: Header) -> None:
    """Refuse what is about fixed actions where every decision has candidates of its own."""
    if header.items is None:
        return
    if config.scenario in SCENARIOS and config.scenario not in ("scratch", "init"):
        raise ConfigError(f"scenario: {config.scenario} shifts fixed actions; {header.name} has"
                          " candidates, which take scratch or init")  # fmt: skip
    worlds = ("linear", "logistic", "preferences")
    if config.scenario == "drift" and config.environment.name not in worlds:
        raise ConfigError("scenario: drift over candidates changes tastes; set environment.name to"
                          f" {', '.join(worlds)}")  # fmt: skip


def _try_environment(scenario: Scenario, dataset: FederatedDataset) -> None:
    """Ask a user's environment about two examples, so that a mistake shows before round 1."""
    rows = np.arange(min(2, dataset.train.num_examples))
    met = Met.at_rows(dataset.train, rows, dataset.header.typical_actions)
    kind = type(scenario.stages[0].environment).__name__
    with tried(f"environment.name: {kind} cannot pay"):
        scenario.rewards(met, np.zeros(len(rows), np.int64))
        scenario.observed(met, np.zeros(len(rows), np.int64))
        supervised = Scenario((Stage(scenario.pretraining),)) if scenario.pretraining else None
        if supervised and supervised.expected(met) is None:
            raise ValueError("pre-training needs expected rewards")


def _objective(config: Config, policy: Policy, scenario: Scenario, header: Header) -> Objective:
    """The objective of the bandit phase, with the scale of importance weights that its rule
    asks for.
    """
    # A rule that changes with every deployment, or sees another K, brings its own scale to each
    # event.
    own = hasattr(policy, "at") or header.items is not None
    scale = 1.0 if own else importance_scale(policy, header.num_actions)
    objective, _ = build_objective(config, lambda: scale)
    for stage in scenario.stages:
        _check_range("objective.name", objective, stage.environment)
    return objective


def _check_range(path: str, objective: Objective, environment: Environment) -> None:
    """Refuse cross-entropy where an environment pays more than 1."""
    most = highest(environment)
    if isinstance(objective, Pointwise) and objective.logistic and most > 1:
        raise ConfigError(
            f"{path}: cross-entropy needs rewards in [0, 1]; here they reach {most:.3g}"
        )


def _bandit_pool(config: Config, dataset: FederatedDataset, pretrained: int) -> range:
    """The clients of the bandit phase: everybody but the initial ones."""
    there = dataset.train.num_clients
    pool = range(pretrained, there)
    name = dataset.header.name
    if pretrained and (asked := pretraining_cohort(config)) > pretrained:
        raise ConfigError(
            f"clients_per_round: {asked} is more than the {pretrained} pre-training clients;"
            f" {_fewer(there)}"
        )
    if (asked := config.clients_per_round) > len(pool):
        if pretrained:
            left = f"leave {max(0, len(pool))} for the bandit phase"
            of = f"{pretrained} of the {there} clients of {name} {left}"
            raise ConfigError(
                f"pretraining.clients: {of}, and a round takes {asked}; {_fewer(there)}"
            )
        works = f"set at most {there}, for example --set clients_per_round={max(1, there // 2)}"
        raise ConfigError(
            f"clients_per_round: {asked} is more than the {there} clients that {name} has; {works}"
        )
    return pool


def _fewer(there: int) -> str:
    """Values with which a run with pre-training works on this many clients."""
    if there < 2:
        return "pre-training and the bandit phase need two clients at least"
    half = there // 2
    cohort = f"--set clients_per_round={max(1, half // 2)}"
    return f"set fewer, for example --set pretraining.clients={half} {cohort}"


def _visits(config: Config) -> VisitPlan:
    """Which examples clients meet and when: a new log each round, or a lasting cache."""
    if config.mode == "simple":
        return SimpleVisits(config.seed, config.deploy_every, config.client.max_examples)
    living, most = config.population.model_dump(), config.client.max_examples
    if most is not None:
        living["events_per_period"] = min(living["events_per_period"], most)
    return PopulationVisits(config.seed, config.deploy_every, **living)


def _aggregation(
    config: Config, dataset: FederatedDataset, ledger: Ledger | None, chosen: PlainMean
) -> PlainMean:
    """The rule that makes one update of many: the chosen one, or in a private run its noisy
    mean.
    """
    if ledger is None:
        return chosen
    of = {
        **config.model_dump(exclude=set(WHERE_COMPUTED), exclude_defaults=True),
        "fingerprint": dataset.header.fingerprint,
    }
    return _private_mean(config, ledger.plan, config.seed, of, ledger.tolerance, ledger)


def _private_mean(
    config: Config,
    plan: PrivacyPlan,
    seed: int,
    of: Mapping[str, Any],
    tolerance: DeviceNoise | None,
    ledger: Ledger | None = None,
) -> PrivateMean:
    """The mean by which a phase releases its sums, with noise from the operating system or from the seed.

    Seeded noise is that of everything which goes into the phase, not of the seed alone.
    """
    if config.privacy.noise == "seed":
        noise = SimulatedNoise(plan, seed, json.dumps(of, sort_keys=True))
        return PrivateMean(plan, noise, ledger)
    grid, dtype, excess = _grid(config), np.dtype(config.dtype), 1.0
    if tolerance is not None:  # all shares at once: nobody drops out
        excess = tolerance.excess(plan.clients_per_round)
    secret = GridNoise(plan.strategy, excess * plan.update_multiplier / grid.step)
    return GridMean(plan, secret, ledger, grid=grid, dtype=dtype, excess=excess)


def _grid(config: Config) -> Grid:
    """Of sums whose noise cannot be recomputed; devices' noise is that of secure sums."""
    return SECURE if config.privacy.noise == "devices" else RELEASE


def _step(config: Config, private: bool) -> float | None:
    """The step in which updates are summed; None where their floating-point sum will do."""
    return _grid(config).step if private and config.privacy.noise != "seed" else None


def _pretrained_from(config: Config, dataset: FederatedDataset) -> dict[str, Any]:
    """Everything that goes into a pre-trained model beside its plan, and nothing of the runs that
    share it.
    """
    return {
        "fingerprint": dataset.header.fingerprint,
        "scenario": config.scenario,
        **({} if config.environment.name == "labels" else config.environment.described),
        "model": config.model.described,
        "dtype": config.dtype,
        "client": config.client.model_dump(exclude={"learning_rate"}, exclude_defaults=True),
        "rate": config.pretraining.client_learning_rate or config.client.learning_rate,
        "pretraining": config.pretraining.model_dump(exclude_defaults=True),
        "server": pretraining_server(config),
    }


def _settings(config: Config, learning_rate: float | None = None) -> ClientSettings:
    """The settings of local training; `learning_rate` replaces the one of the configuration."""
    rate = config.client.learning_rate if learning_rate is None else learning_rate
    return ClientSettings(rate, config.client.batch_size, config.client.epochs)


def _gate(config: Config, policy: Policy, pool: range, ledger: Ledger | None) -> "Gate | None":
    """The gate before deployments, where a confidence asks for one."""
    if config.gate.confidence is None:
        return None
    from fedbandit.evaluation.gate import (  # with the estimators, which few runs need
        Gate,
        why_impossible,
    )

    if reason := why_impossible(policy, private=ledger is not None):
        raise ConfigError(f"gate: {reason}")
    return Gate(pool, config.seed, **config.gate.model_dump())


def _check_scores(predictor: Predictor, weights: np.ndarray, header: Header) -> None:
    """Score blank decisions, so that a model that does not fit the data is refused before
    round 1.
    """
    blank = blank_decisions(DataSpec.of(header))
    shown, expected = blank.candidates, (2, header.num_actions)
    mistakes = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)
    with tried(f"model.name: the model cannot score contexts of shape {header.shape}", mistakes):
        shape = predictor.predict(weights, blank).mean.shape
    if shape != (expected if shown is None else (len(shown.items),)):
        said = f"scores {shape[-1]} actions, the data set has {header.num_actions}"
        if shown is not None:
            said = f"gives scores {shape} for {len(shown.items)} candidates"
        raise ConfigError(f"model.name: the model {said}")
