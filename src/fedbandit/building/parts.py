"""The parts that simulations and deployments share, from what a configuration names.

A part of a user's own that is something else than it should be is refused here, not somewhere in round 1.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from fedbandit import objectives, policies
from fedbandit.config import Config
from fedbandit.core.errors import ConfigError
from fedbandit.core.parts import construct, resolve
from fedbandit.engines.threads import ThreadEngine
from fedbandit.federated import server as optimizers
from fedbandit.federated.cohorts import BlockCohorts, Cohorts, FixedCohorts, PoissonCohorts
from fedbandit.federated.pipeline import AdaptiveClipping, Clipping, FixedClipping
from fedbandit.federated.round import Engine
from fedbandit.objectives import Objective
from fedbandit.policies import Policy
from fedbandit.privacy.accounting import Ledger


def build_policy(config: Config, num_actions: int | None = None) -> Policy:
    """The policy, asked once for the probabilities of so many actions where their number is known."""
    make = resolve("policy.name", config.policy.name, policies.BUILT_IN)
    policy: Policy = construct("policy", make, config.policy.parameters)
    _require_methods("policy.name", policy, "probabilities")
    if num_actions is None:
        return policy
    blank = np.zeros((2, num_actions), np.dtype(config.dtype))
    try:
        policies.check_probabilities(policy.probabilities(blank, None), blank)
    except (ValueError, TypeError, IndexError, AttributeError) as error:
        raise ConfigError(f"policy.name: {config.policy.name} does not give probabilities: {error}") from error
    return policy


def build_objective(config: Config, scale: Callable[[], float]) -> tuple[Objective, dict[str, Any]]:
    """The objective, and the parameters it was made with; `scale()` is that of importance weights unless one is set."""
    make = resolve("objective.name", config.objective.name, objectives.BUILT_IN)
    parameters = config.objective.parameters
    if isinstance(make, type) and issubclass(make, objectives.WeightedRegression) and "scale" not in parameters:
        parameters["scale"] = scale()
    objective: Objective = construct("objective", make, parameters)
    _require_methods("objective.name", objective, "loss")
    return objective, parameters


def build_optimizer(path: str, name: str, parameters: dict[str, Any]) -> optimizers.ServerOptimizer:
    """The server's optimiser of that name; `path` is the key that names it."""
    make = resolve(path, name, optimizers.BUILT_IN)
    optimizer: optimizers.ServerOptimizer = construct(path.partition(".")[0], make, parameters)
    _require_methods(path, optimizer, "init", "step")
    return optimizer


def _require_methods(path: str, part: object, *names: str) -> None:
    for name in names:
        if not callable(getattr(part, name, None)):
            raise ConfigError(f"{path}: {type(part).__name__} has no method `{name}`")


_QUANTILE, _INITIAL = 0.8, 1.0
_PRIVATE_QUANTILE, _PRIVATE_INITIAL = 0.5, 0.1


def build_clipping(config: Config) -> Clipping:
    """How updates are clipped, with or without privacy."""
    chosen, private = config.clipping, config.privacy.mechanism != "none"
    if not chosen.enabled:
        return FixedClipping(math.inf)
    if chosen.norm is not None:
        return FixedClipping(chosen.norm)
    quantile, initial = (_PRIVATE_QUANTILE, _PRIVATE_INITIAL) if private else (_QUANTILE, _INITIAL)
    return AdaptiveClipping(chosen.quantile or quantile, chosen.initial or initial, chosen.rate)


def build_cohorts(config: Config, pool: range, ledger: Ledger | None) -> Cohorts:
    """Who takes part: by the plan of a private run; otherwise as asked, in cohorts of one size by default."""
    if ledger is not None:
        return ledger.plan.cohorts(pool, config.seed)
    chosen, size = config.privacy, config.clients_per_round
    if chosen.sampling == "poisson":
        return PoissonCohorts(pool, size / len(pool), config.seed)
    if chosen.sampling == "min-separation":
        separation = chosen.separation or len(pool) // size
        if separation * size > len(pool):
            raise ConfigError(f"privacy.separation: {separation}, but {len(pool)} clients allow {len(pool) // size}")
        return BlockCohorts(pool, size, separation, config.seed)
    return FixedCohorts(pool, size, config.seed)


def make_engine(config: Config, ray_address: str | None = None) -> Engine:
    """Threads of this process, or the workers of a Ray cluster: a running one by its address, or one of its own."""
    if config.engine == "ray":
        from fedbandit.engines.ray import RayEngine

        return RayEngine(address=ray_address)
    return ThreadEngine(None if config.threads == "auto" else config.threads)
