"""Changes of a world, laid over any environment: actions that trade places, groups of clients."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedbandit.core.randomness import Purpose, uniforms
from fedbandit.environments.met import Environment, Met, highest


@dataclass(frozen=True)
class Renamed:
    """An environment whose actions have traded places: action a pays what `roles[a]` paid."""

    environment: Environment
    roles: np.ndarray  # int64 [K], a permutation

    @property
    def highest(self) -> float:
        return highest(self.environment)

    def rewards(self, met: Met, actions: np.ndarray) -> np.ndarray:
        return self.environment.rewards(met, self.roles[actions])

    def expected(self, met: Met) -> np.ndarray | None:
        means = self.environment.expected(met)
        return None if means is None else means[:, self.roles]


@dataclass(frozen=True)
class Liked:
    """An environment whose rewards are worth more to some clients than to others.

    Half of the clients belong to the first group, half of the others to the second, and so on;
    the last two groups are alike.
    """

    environment: Environment
    worth: np.ndarray  # float32 [groups, K]: factors of the rewards of each action
    seed: int = 0

    @property
    def highest(self) -> float:
        return highest(self.environment) * float(self.worth.max())

    def groups(self, clients: np.ndarray) -> np.ndarray:
        """The group of each client: int64 [n]."""
        smaller = 0.5 ** np.arange(1, len(self.worth))
        draws = uniforms(self.seed, Purpose.GROUPS, clients)
        return np.asarray((draws[:, None] < smaller).sum(axis=1))

    def rewards(self, met: Met, actions: np.ndarray) -> np.ndarray:
        factors = self.worth[self.groups(met.clients), actions]
        return np.asarray(self.environment.rewards(met, actions) * factors)

    def expected(self, met: Met) -> np.ndarray | None:
        means = self.environment.expected(met)
        return None if means is None else means * self.worth[self.groups(met.clients)]


def changed_like(labels: Environment, environment: Environment) -> Environment:
    """An environment with the changes that a scenario has laid over its tables.

    A class of your own that has changes like these keeps what it changes in a field `environment`.
    """
    layer: Any = labels
    if not hasattr(layer, "environment"):
        return environment
    changed: Environment = replace(layer, environment=changed_like(layer.environment, environment))
    return changed
