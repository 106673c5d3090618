"""Which policy to evaluate, by name: those that explore, and two that are only ever evaluated and look at no scores."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedbandit import policies
from fedbandit.core.errors import ConfigError
from fedbandit.core.parts import construct, nearest, resolve
from fedbandit.policies import Policy


@dataclass(frozen=True)
class Uniform:
    """Every available action, each as likely as the next."""

    def probabilities(self, scores: np.ndarray, available: np.ndarray | None = None) -> np.ndarray:
        given = np.ones(scores.shape) if available is None else np.broadcast_to(available, scores.shape).astype(float)
        shares: np.ndarray = given / given.sum(axis=-1, keepdims=True)
        return shares


@dataclass(frozen=True)
class Constant:
    """Always the same action; uniform over what there is where it is not available."""

    action: int

    def probabilities(self, scores: np.ndarray, available: np.ndarray | None = None) -> np.ndarray:
        chosen = np.zeros(scores.shape)
        chosen[..., self.action] = 1
        if available is None:
            return chosen
        can = np.broadcast_to(available, scores.shape)[..., self.action, None]
        return np.where(can, chosen, Uniform().probabilities(scores, available))


def target_policy(name: str, parameters: Mapping[str, Any], actions: tuple[str, ...]) -> Policy:
    """The policy of that name: `uniform`, `constant` (with `action`), a built-in one, or an import path."""
    if name == "constant":
        return Constant(_action(parameters, actions))
    make = resolve("policy", name, {**policies.BUILT_IN, "uniform": Uniform, "constant": Constant})
    policy: Policy = construct("policy", make, parameters)
    return policy


def looks_at_scores(name: str) -> bool:
    """Whether the policy of that name needs a model."""
    return name not in ("uniform", "constant")


def _action(parameters: Mapping[str, Any], actions: tuple[str, ...]) -> int:
    unknown = [key for key in parameters if key != "action"]
    if unknown:
        raise ConfigError(f"policy.{unknown[0]}: unknown key; constant takes only action")
    if "action" not in parameters:
        raise ConfigError("policy.action: missing; for example --set action=" + actions[0])
    named = str(parameters["action"])
    if named not in actions:
        raise ConfigError(f"policy.action: no action called {named!r}{nearest(named, actions)}")
    return actions.index(named)
