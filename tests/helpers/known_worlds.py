"""Logs whose truth is known: a small world of contexts, actions and clients, logged by one policy, asked about another.

Contexts are few, so every expectation can be computed exactly.
"""

from dataclasses import dataclass

import numpy as np

from fedbandit.evaluation.metrics import Regret, best_value, policy_value
from fedbandit.ope import Records

CONTEXTS, ACTIONS = 5, 4


def exact_regret(split, truth, clients, policy, predictions):
    """The regret of a policy against the best one, from the true mean rewards of rows."""
    ours = policy_value(split, clients, policy, predictions, truth)
    return Regret(best_value(split, truth, clients), ours)


@dataclass(frozen=True)
class World:
    """Mean rewards and two policies, [contexts, actions] each; contexts are equally likely."""

    means: np.ndarray
    logging: np.ndarray
    target: np.ndarray

    @property
    def truth(self) -> float:
        """What the target policy earns."""
        return float((self.target * self.means).sum(axis=1).mean())

    def log(
        self,
        seed: int,
        clients: int = 50,
        events: int = 20,
        model: np.ndarray | None = None,
        claimed: np.ndarray | None = None,
        client_spread: float = 0.0,
    ) -> Records:
        """One log; `model` is what a reward model says of every action, `claimed` what the log says it did."""
        rng = np.random.default_rng(seed)
        n = clients * events
        x = rng.integers(0, CONTEXTS, n)
        actions = (
            (rng.random(n)[:, None] > np.cumsum(self.logging[x], axis=1))
            .sum(axis=1)
            .clip(max=ACTIONS - 1)
        )
        taste = np.repeat(client_spread * rng.choice([-1.0, 1.0], clients), events)
        rewards = (rng.random(n) < self.means[x, actions] + taste).astype(float)
        claimed = self.logging if claimed is None else claimed
        return Records(
            clients=np.arange(clients),
            bounds=np.arange(clients + 1) * events,
            rewards=rewards,
            propensities=claimed[x, actions],
            target=self.target[x, actions],
            predicted=None if model is None else model[x, actions],
            expected=None if model is None else (self.target * model).sum(axis=1)[x],
        )


def world(seed: int = 0, floor: float = 0.05) -> World:
    """A logging policy that explores at least `floor`, and a target that likes other actions."""
    rng = np.random.default_rng(seed)
    means = rng.uniform(0.2, 0.8, (CONTEXTS, ACTIONS))
    logging = floor + (1 - ACTIONS * floor) * rng.dirichlet(np.ones(ACTIONS), CONTEXTS)
    target = rng.dirichlet(0.5 * np.ones(ACTIONS), CONTEXTS)
    return World(means, logging, target)
