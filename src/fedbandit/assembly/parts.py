"""The parts that simulations and deployments share, from what a configuration names.

A part of a user's own that is something else than it should be is refused here, not somewhere in
round 1.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from fedbandit import algorithms, compression, objectives
from fedbandit.acting.predictors import is_linear
from fedbandit.config import Config
from fedbandit.core.contexts import Candidates, Contexts, Features
from fedbandit.core.errors import EXTRA_OF, ConfigError, FedbanditError, refuse
from fedbandit.core.identity import place_of
from fedbandit.core.parts import construct, in_bytes, resolve
from fedbandit.core.ragged import Ragged
from fedbandit.engines import RayEngine, ThreadEngine
from fedbandit.federated import server as optimizers
from fedbandit.federated.algorithm import Algorithm, RoundFacts, deployed_model, remembers
from fedbandit.federated.cohorts import Cohorts, sampled_cohorts
from fedbandit.federated.learners.make_learner import Trainable
from fedbandit.federated.pipeline import (
    AdaptiveClipping,
    CompressionStage,
    FixedClipping,
    Vectors,
    described,
    zeros_to_send,
)
from fedbandit.federated.robust import Robust
from fedbandit.federated.round import Engine
from fedbandit.federated.server import NoOpOptimizer, PlainMean
from fedbandit.models import DataSpec, Layout
from fedbandit.objectives import Objective, TargetObjective
from fedbandit.policies import (
    Policy,
    Prediction,
    Progress,
    ask,
    check_probabilities,
    make_policy,
    rule_at,
)
from fedbandit.privacy.accounting import Ledger
from fedbandit.privacy.plan import PrivacyPlan

_MISTAKES = (ValueError, TypeError, LookupError, AttributeError)


@contextmanager
def tried(what: str, mistakes: tuple[type[Exception], ...] = _MISTAKES) -> Iterator[None]:
    """Try a part before round 1; a mistake in it becomes a `ConfigError` that begins with
    `what`.
    """
    try:
        yield
    except FedbanditError:
        raise
    except mistakes as error:
        raise ConfigError(f"{what}: {error}") from error
    except (Exception, SystemExit) as error:
        package = (getattr(error, "name", None) or "").partition(".")[0]
        if (place := place_of(error)) is None or package in EXTRA_OF:  # which the command names
            raise
        raise ConfigError(f"{what}: {place}: {type(error).__name__}: {error}") from error


_METHODS = {
    "environment": ("rewards", "expected"),
    "objective": ("loss",),
    "algorithm": ("init", "broadcast", "train", "step", "model"),
    "compression": ("encode", "decode"),
    "aggregation": ("combine",),
}  # that a part of each section must have


def build_part(
    config: Config, section: str, *leading: Any, told: Mapping[str, Any] | None = None
) -> Any:
    """The part that a section names, built in or a user's own; refused if a method is missing.

    `leading` and `told` are as in `construct`: what comes from elsewhere than the configuration.
    """
    path, make, parameters = config.part(section)
    part = construct(section, make, parameters, *leading, told=told)
    if make not in (compression.no_compression, PlainMean):  # these stand for no part at all
        require_methods(path, part, *_METHODS[section])
    return part


def build_policy(config: Config) -> Policy:
    """The policy that the configuration names."""
    policy = make_policy(config.policy.name, config.policy.parameters)
    require_methods("policy.name", policy, "probabilities")
    return policy


def try_policy(config: Config, policy: Policy, data: DataSpec, acting: Trainable) -> None:
    """Ask the policy about two blank decisions of the model that acts, before round 1."""
    contexts = blank_decisions(data)
    prediction = _blank_prediction(config, acting, contexts, data.num_actions)
    num_actions = prediction.num_actions
    later = Progress(1, config.deploy_every, 1000, num_actions)
    with tried(f"policy.name: {config.policy.name} does not give probabilities"):
        for progress in (Progress(actions=num_actions), later):
            rule = rule_at(policy, progress)
            first, again = (ask(rule, prediction, None, contexts) for _ in range(2))
            check_probabilities(first, prediction)
            if not np.array_equal(first, again):
                raise ValueError(
                    "it gives others when asked again; draw nothing, or from a generator with a"
                    " seed"
                )


def blank_decisions(data: DataSpec) -> Contexts:
    """Two decisions without any features, with as many candidates as usual where there are some."""
    if data.items is None:
        return Contexts(_blank_features(data.kind, data.shape, 2))
    shown = round(data.items.shown)
    features = _blank_features(data.items.kind, data.items.shape, 2 * shown)
    candidates = Candidates(np.array([0, shown, 2 * shown]), np.arange(2 * shown), features)
    return Contexts(_blank_features(data.kind, data.shape, 2), candidates)


def _blank_features(kind: str, shape: tuple[int, ...], rows: int) -> Features:
    """Rows of features that hold nothing: dense zeros, or no entries."""
    if kind == "dense":
        return np.zeros((rows, *shape), np.float32)
    return Ragged(np.zeros(rows + 1, np.int64), np.zeros(0, np.int32), np.zeros(0, np.float32))


def _blank_prediction(
    config: Config, acting: Trainable, contexts: Contexts, num_actions: int
) -> Prediction:
    """The model's prediction for two blank decisions with equally many actions: [2, K].

    Where it would take torch, which a server does without, zeros stand for its scores.
    """
    model, dtype, shown = acting.model, np.dtype(config.dtype), contexts.candidates
    if model.predict is not None or is_linear(model):
        with tried(f"model.name: {acting.described['name']} does not predict"):
            found = acting.predictor(light=True).predict(acting.initial(0, dtype), contexts)
            return found if shown is None else next(iter(found.blocks()))[2]
    blank = np.zeros((2, num_actions if shown is None else int(shown.counts[0])), dtype)
    heads = np.repeat(blank[:, None], model.heads, axis=1) if model.heads else None
    return Prediction(blank, heads=heads)


def build_algorithm(
    config: Config,
    optimizer: optimizers.ServerOptimizer,
    data: DataSpec,
    layout: Layout,
    objective: Objective,
    plan: PrivacyPlan | None = None,
    on_devices: bool = False,
) -> Algorithm:
    """The federated algorithm with the server's optimiser; where clients do not train, FedAvg.

    It is told about data, trained weights and objective, where it asks for them, and whether it
    runs `on_devices`.
    """
    path, name = "algorithm.name", config.algorithm.name
    told = {
        "data": data,
        "layout": layout,
        "objective": objective,
        "seed": config.seed,
        "plan": plan,
        "on_devices": on_devices,
    }
    algorithm: Algorithm = build_part(config, "algorithm", optimizer, told=told)
    sends = getattr(algorithm, "sends", None)
    if not (isinstance(sends, Mapping) and sends):
        raise ConfigError(f"{path}: {name} does not say in `sends` what clients send")
    for sent, one in described(sends).items():
        if one.scale is not None and not 0 < one.scale < math.inf:
            raise ConfigError(
                f"{path}: the scale of {sent!r} in `sends` must be positive or None, not"
                f" {one.scale}"
            )
    unclipped = [sent for sent, one in described(sends).items() if one.scale is None]
    if unclipped and config.privacy.mechanism != "none":
        raise ConfigError(
            f"{path}: {name} sends {unclipped[0]!r} without a scale, so that it is not clipped and"
            " noise cannot hide"
            " it; it cannot be private"
        )
    return algorithm if config.training else algorithms.FedAvg(NoOpOptimizer())


def acting_model(
    algorithm: Algorithm, trainable: Trainable, data: DataSpec, freezes: bool
) -> Trainable:
    """The model that acts with what the algorithm deploys: the trained one, unless it names
    another.
    """
    described = deployed_model(algorithm, trainable.described)
    if described == dict(trainable.described):
        return trainable
    kind = type(algorithm).__name__
    if freezes:
        raise ConfigError(f"model.freeze: {kind} deploys a model of its own, of which no part can")
    return Trainable.of(described, data)


def acting_model_of(config: Config, data: DataSpec) -> Trainable:
    """The model that acts in runs of this configuration, for who only reads what they have
    written.
    """
    trainable = Trainable.of(config.model.described, data)
    if not (config.training and hasattr(config.part("algorithm")[1], "deploys")):
        return trainable
    objective, _ = build_objective(config, lambda: 1.0)
    algorithm = build_algorithm(config, NoOpOptimizer(), data, trainable.layout, objective)
    return acting_model(algorithm, trainable, data, freezes=False)


def try_algorithm(
    name: str, algorithm: Algorithm, weights: np.ndarray, deployed: int | None = None
) -> None:
    """One step on a copy of the weights, so that what an algorithm returns is looked at before
    round 1.

    `deployed` is the length of what it deploys, where that is not the length of the weights.
    """
    kind = type(algorithm).__name__

    def vectors(member: str, found: Any, *needed: str) -> Vectors:
        if not (
            isinstance(found, dict)
            and all(isinstance(value, np.ndarray) for value in found.values())
        ):
            raise ConfigError(f"algorithm.name: {kind}.{member} must return arrays by name")
        for vector in needed:
            if vector not in found:
                raise ConfigError(f"algorithm.name: {kind}.{member} returns no {vector!r}")
        return found

    expected = weights.shape if deployed is None else (deployed,)

    def like_weights(member: str, found: Any) -> None:
        if not (
            isinstance(found, np.ndarray)
            and (found.shape, found.dtype) == (expected, weights.dtype)
        ):
            made = (
                f"{found.dtype} {found.shape}"
                if isinstance(found, np.ndarray)
                else type(found).__name__
            )
            raise ConfigError(
                f"algorithm.name: {kind}.{member} gives {made}, the model has {weights.dtype}"
                f" {expected}"
            )

    if name in algorithms.BUILT_IN:
        return
    with tried(f"algorithm.name: {kind} cannot take a step"):
        kept = vectors("init", algorithm.init(weights.copy()))
        vectors("broadcast", algorithm.broadcast(kept), "weights")
        like_weights("model", algorithm.model(kept))
        mean = zeros_to_send(algorithm.sends, weights)
        moved = vectors("step", algorithm.step(kept, mean, RoundFacts(1, 1, 1)), *kept)
        like_weights("step", algorithm.model(moved))


def build_stages(config: Config) -> tuple[CompressionStage, ...]:
    """The stages that compress updates; none unless a configuration names one."""
    stage = build_part(config, "compression")
    return () if stage is None else (stage,)


def build_aggregation(config: Config, algorithm: Algorithm, weights: np.ndarray) -> PlainMean:
    """The mean, or a rule over single updates; refused where nobody may see these, or where they
    take too much.
    """
    path, name = "aggregation.name", config.aggregation.name
    made = build_part(config, "aggregation")
    if name == "mean":
        return PlainMean()
    if config.privacy.mechanism != "none":
        mechanism = f"privacy.mechanism = {config.privacy.mechanism!r}"
        hidden = f"{mechanism} adds noise to the sum and vouches for nothing else"
        raise ConfigError(f"{path}: {name} needs single updates; {hidden}")
    own = sum(zeros.nbytes for zeros in zeros_to_send(algorithm.sends, weights).values())
    needed, limit = config.clients_per_round * own, config.aggregation.memory_limit
    if needed > limit:
        each = f"{config.clients_per_round:,} clients of {own:,} bytes"
        raise ConfigError(
            f"aggregation.memory_limit: {name} holds every update of a round, {each}:"
            f" {in_bytes(needed)} in all; the"
            f" limit is {in_bytes(limit)}"
        )
    rule = Robust(made)
    with tried(f"{path}: {name} cannot combine updates"):
        rule.combined([np.ones(3, weights.dtype), None], np.zeros(3, weights.dtype))
    return rule


def check_memory(config: Config, algorithm: Algorithm, clients: int, weights: np.ndarray) -> None:
    """Refuse an algorithm whose clients would remember more than the limit allows."""
    taking_part = min(clients, config.rounds * config.clients_per_round)
    needed, limit = (
        taking_part * remembers(algorithm, weights.nbytes),
        config.algorithm.memory_limit,
    )
    if needed > limit:
        raise ConfigError(
            f"algorithm.memory_limit: {config.algorithm.name} remembers a vector of"
            f" {weights.nbytes:,} bytes for each"
            f" of {taking_part:,} clients, {in_bytes(needed)} in all; the limit is"
            f" {in_bytes(limit)}"
        )


def check_personal(config: Config, algorithm: Algorithm) -> None:
    """Refuse personal models where what a client held in the past is not known."""
    if not hasattr(algorithm, "personal"):
        return
    name = config.algorithm.name
    refuse(
        (
            config.mode == "population",
            "mode: population mode computes caches again when they are needed, and what a client"
            f" of {name} held in the past is not known; set mode = simple",
        ),
        (
            config.gate.confidence is not None,
            "gate.confidence: the gate weighs the deployed model, and clients of"
            f" {name} act with their own",
        ),
    )


def build_objective(config: Config, scale: Callable[[], float]) -> tuple[Objective, dict[str, Any]]:
    """The objective, and the parameters it was made with; `scale()` is that of importance weights
    unless one is set.
    """
    _, make, parameters = config.part("objective")
    weighted = isinstance(make, type) and issubclass(make, objectives.WeightedRegression)
    if weighted and "scale" not in parameters:
        chosen = config.objective.model_copy(update={"scale": scale()})
        config = config.model_copy(update={"objective": chosen})
    return build_part(config, "objective"), config.objective.parameters


def target_objective(
    objective: Any, num_actions: int, dtype: np.dtype[Any]
) -> TargetObjective | None:
    """The objective where it estimates every action's reward, asked for two events; None
    elsewhere.
    """
    if not hasattr(objective, "targets"):
        return None
    kind, blank = type(objective).__name__, np.zeros((2, num_actions), dtype)
    log = np.zeros(2, np.int64), np.ones(2, np.float32), np.ones(2, dtype)
    with tried(f"objective.name: {kind}.targets gives no targets"):
        found = np.asarray(objective.targets(Prediction(blank), *log))
    if found.shape != blank.shape or found.dtype.kind != "f":
        made = f"{found.dtype} {found.shape} of 2 events and {num_actions} actions"
        raise ConfigError(f"objective.name: {kind}.targets makes {made}")
    estimator: TargetObjective = objective
    return estimator


def build_optimizer(path: str, name: str, parameters: dict[str, Any]) -> optimizers.ServerOptimizer:
    """The server's optimiser of that name; `path` is the key that names it."""
    make = resolve(path, name, optimizers.BUILT_IN)
    optimizer: optimizers.ServerOptimizer = construct(path.partition(".")[0], make, parameters)
    require_methods(path, optimizer, "init", "step")
    return optimizer


def require_methods(path: str, part: object, *names: str) -> None:
    """Refuse a part that lacks one of these methods."""
    for name in names:
        if not callable(getattr(part, name, None)):
            raise ConfigError(f"{path}: {type(part).__name__} has no method `{name}`")


_QUANTILE, _INITIAL = 0.8, 1.0
_PRIVATE_QUANTILE, _PRIVATE_INITIAL = 0.5, 0.1


def build_clipping(
    config: Config, algorithm: Algorithm | None = None
) -> FixedClipping | AdaptiveClipping:
    """The clipping of updates, with or without privacy.

    An algorithm of exact sums is not clipped by default: a norm or a quantile has to be set.
    """
    chosen, private = config.clipping, config.privacy.mechanism != "none"
    asked = private or any((chosen.norm, chosen.quantile, chosen.initial))
    if not chosen.enabled or (getattr(algorithm, "exact_sums", False) and not asked):
        return FixedClipping(math.inf)
    if chosen.norm is not None:
        return FixedClipping(chosen.norm)
    quantile, initial = (_PRIVATE_QUANTILE, _PRIVATE_INITIAL) if private else (_QUANTILE, _INITIAL)
    return AdaptiveClipping(chosen.quantile or quantile, chosen.initial or initial, chosen.rate)


def pretraining_clipping(config: Config) -> FixedClipping | AdaptiveClipping:
    """The clipping of pre-training: that of the bandit phase, unless it has its own norm, or
    none.
    """
    chosen = config.pretraining.clip_norm
    if chosen == "same":
        return build_clipping(config)
    if chosen == "adaptive":
        return AdaptiveClipping(_QUANTILE, _INITIAL, config.clipping.rate)
    return FixedClipping(math.inf if chosen == "none" else chosen)


def pretraining_cohort(config: Config) -> int:
    """The clients that take part in a round of pre-training; a number set for it is an upper
    limit.
    """
    chosen = config.pretraining
    asked = chosen.clients_per_round
    return config.clients_per_round if asked == "same" else min(asked, chosen.clients)


def build_cohorts(config: Config, pool: range, ledger: Ledger | None) -> Cohorts:
    """Who takes part: by the plan of a private run; otherwise as asked, in cohorts of one size by
    default.
    """
    if ledger is not None:
        return ledger.plan.cohorts(pool, config.seed)
    chosen, size = config.privacy, config.clients_per_round
    separation = 1
    if chosen.sampling == "min-separation":
        separation = chosen.separation or len(pool) // size
    if separation * size > len(pool):
        raise ConfigError(
            f"privacy.separation: {separation}, but {len(pool)} clients allow {len(pool) // size}"
        )
    return sampled_cohorts(chosen.sampling or "fixed", pool, size, separation, config.seed)


def make_engine(config: Config, ray_address: str | None = None) -> Engine:
    """Threads of this process, or the workers of a Ray cluster: a running one by its address, or
    one of its own.
    """
    if config.engine == "ray":
        return RayEngine(address=ray_address)
    return ThreadEngine(None if config.threads == "auto" else config.threads)
