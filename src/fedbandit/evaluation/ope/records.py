"""What off-policy estimators read: for every logged event, the probabilities of what was done under both policies.

Knows nothing of models, files or intervals. A device makes the records of its own log and never sends them.
"""

from dataclasses import dataclass, replace

import numpy as np

from fedbandit.errors import DataError


@dataclass(frozen=True)
class Records:
    """Logged events of some clients, in float64; client i owns rows bounds[i]:bounds[i + 1].

    `predicted` and `expected` come from a reward model, which the direct method and the doubly robust estimator need.
    """

    clients: np.ndarray  # int64 [clients]: a number that is each client's own, to address its bootstrap draws
    bounds: np.ndarray  # int64 [clients + 1]
    rewards: np.ndarray  # [n]
    propensities: np.ndarray  # [n]: with which the logging policy took the action
    target: np.ndarray  # [n]: with which the evaluated policy takes it
    predicted: np.ndarray | None = None  # [n]: the modelled reward of the action taken
    expected: np.ndarray | None = None  # [n]: the modelled reward of the evaluated policy, over its actions

    def __post_init__(self) -> None:
        for name in ("rewards", "propensities", "target", "predicted", "expected"):
            column = getattr(self, name)
            if column is None:
                continue
            if len(column) != self.bounds[-1]:
                raise DataError(f"{name}: {len(column)} values for {self.bounds[-1]} events")
            if not np.isfinite(column).all():
                raise DataError(f"{name}: event {int(np.flatnonzero(~np.isfinite(column))[0])} is not finite")
        if len(self.propensities) and not (self.propensities.min() > 0 and self.propensities.max() <= 1):
            raise DataError("propensities: must be above 0 and at most 1")
        if len(self.target) and not (self.target.min() >= 0 and self.target.max() <= 1 + 1e-6):
            raise DataError("target: probabilities must lie between 0 and 1")

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def num_clients(self) -> int:
        return len(self.bounds) - 1

    @property
    def importance(self) -> np.ndarray:
        """How much more often the evaluated policy does what was done: [n]."""
        return self.target / self.propensities

    def client(self, position: int) -> "Records":
        """The records of one client, as it would hold them."""
        rows = slice(self.bounds[position], self.bounds[position + 1])

        def part(column: np.ndarray | None) -> np.ndarray | None:
            return None if column is None else column[rows]

        return replace(
            self,
            clients=self.clients[position : position + 1],
            bounds=np.array([0, rows.stop - rows.start]),
            rewards=self.rewards[rows],
            propensities=self.propensities[rows],
            target=self.target[rows],
            predicted=part(self.predicted),
            expected=part(self.expected),
        )
