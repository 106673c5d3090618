"""The parts that simulations and deployments share, from what a configuration names: policy, objective, optimiser.

A part of a user's own that is something else than it should be is refused here, not somewhere in round 1.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from fedbandit import objectives, policies
from fedbandit.components import construct, resolve
from fedbandit.config import Config
from fedbandit.errors import ConfigError
from fedbandit.federated import optimizers
from fedbandit.objectives import Objective
from fedbandit.policies import Policy


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
