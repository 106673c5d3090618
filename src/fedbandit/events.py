"""The log record of bandit feedback. Knows nothing of how it came about."""

from dataclasses import dataclass

import numpy as np

from fedbandit.core.contexts import Contexts


@dataclass(frozen=True)
class Events:
    """What clients log: contexts, actions, rewards, propensities and the model version that chose. One row an event.

    The events of one client stand together: client i owns rows bounds[i]:bounds[i + 1].
    """

    bounds: np.ndarray  # int64 [clients + 1]
    contexts: Contexts
    actions: np.ndarray  # int64 [n]
    rewards: np.ndarray  # float32 [n]
    propensities: np.ndarray  # float [n]: the probability with which the action was drawn
    versions: np.ndarray  # int32 [n]: the deployed model that chose
    fresh: (
        np.ndarray
    )  # bool [n]: made in the current period; older ones were already counted in the reward
    targets: np.ndarray | None = (
        None  # float32 [n, K]: every action's reward, where supervision gives it
    )
    weights: np.ndarray | None = (
        None  # [n]: how much an event counts in training; [n, H] for each head of an ensemble
    )

    def __len__(self) -> int:
        return len(self.actions)

    @property
    def num_clients(self) -> int:
        return len(self.bounds) - 1

    def of_client(self, index: int) -> "Events":
        """The events of one client alone."""
        first, last = int(self.bounds[index]), int(self.bounds[index + 1])
        rows = slice(first, last)
        return Events(
            bounds=np.array([0, last - first]),
            contexts=self.contexts.slice(first, last),
            actions=self.actions[rows],
            rewards=self.rewards[rows],
            propensities=self.propensities[rows],
            versions=self.versions[rows],
            fresh=self.fresh[rows],
            targets=None if self.targets is None else self.targets[rows],
            weights=None if self.weights is None else self.weights[rows],
        )
