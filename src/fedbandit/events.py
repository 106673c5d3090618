"""The log record of bandit feedback. Knows nothing of how it came about."""

from dataclasses import dataclass

import numpy as np

from fedbandit.core.contexts import Contexts
from fedbandit.core.prediction import entries_of


@dataclass(frozen=True)
class Events:
    """Logged feedback of clients: contexts, actions, rewards, propensities and the model version that chose.
    One row an event.

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
    times: np.ndarray | None = None  # int64 [n]: the round, or period, in which it happened
    available: np.ndarray | None = None  # bool [K] or [n, K]: what could be chosen; None: all
    missing: np.ndarray | None = None  # int64 [clients]: rewards of fresh events that never arrive
    regret: np.ndarray | None = None  # float64 [n]: mean reward lost against the best action
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
        """The number of clients that the events are of, those without any included."""
        return len(self.bounds) - 1

    def of_client(self, index: int) -> "Events":
        """The events of one client alone."""
        first, last = int(self.bounds[index]), int(self.bounds[index + 1])
        contexts = self.contexts.slice(first, last)
        missing = None if self.missing is None else self.missing[index : index + 1]
        return self._rows(slice(first, last), np.array([0, last - first]), contexts, missing)

    def where(self, kept: np.ndarray) -> "Events":
        """The events for which `kept` [n] holds, of the same clients."""
        rows = np.flatnonzero(kept)
        bounds = np.searchsorted(rows, self.bounds)
        return self._rows(rows, bounds, self.contexts.take(rows), self.missing)

    def sum_fresh(self, values: np.ndarray | None = None) -> np.ndarray:
        """Sums of values [n] over each client's fresh events, added in order: float64 [clients].

        Without values the number of fresh events: int64 [clients].
        """
        owners = np.repeat(np.arange(self.num_clients), np.diff(self.bounds))[self.fresh]
        chosen = None if values is None else values[self.fresh]
        return np.bincount(owners, chosen, minlength=self.num_clients)

    def _rows(
        self,
        rows: np.ndarray | slice,
        bounds: np.ndarray,
        contexts: Contexts,
        missing: np.ndarray | None,
    ) -> "Events":
        """Some events, with bounds and contexts that go with them."""
        available = self.available
        if available is not None and available.ndim == 2:
            available = available[rows]
        return Events(
            bounds=bounds,
            contexts=contexts,
            actions=self.actions[rows],
            rewards=self.rewards[rows],
            propensities=self.propensities[rows],
            versions=self.versions[rows],
            fresh=self.fresh[rows],
            times=None if self.times is None else self.times[rows],
            available=available,
            missing=missing,
            regret=None if self.regret is None else self.regret[rows],
            targets=self._targets(rows),
            weights=None if self.weights is None else self.weights[rows],
        )

    def _targets(self, rows: np.ndarray | slice) -> np.ndarray | None:
        """The targets of some events; over candidates those of their entries."""
        if self.targets is None or self.contexts.candidates is None:
            return None if self.targets is None else self.targets[rows]
        places = np.arange(len(self))[rows] if isinstance(rows, slice) else rows
        return np.asarray(self.targets[entries_of(self.contexts.candidates.bounds, places)])
