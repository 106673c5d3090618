"""What a model says about the actions, and how far a run has come: what an exploration rule decides by."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Prediction:
    """A model's view of n contexts: the score of every action, and how sure it is where it knows.

    Examples:
        >>> Prediction(np.array([[0.1, 0.7]])).mean.shape
        (1, 2)
    """

    mean: np.ndarray  # [n, K]
    heads: np.ndarray | None = None  # [n, H, K]: the scores of an ensemble's members
    width: np.ndarray | None = None  # [n, K]: one standard deviation, where the model knows it

    def __len__(self) -> int:
        return len(self.mean)

    @property
    def num_actions(self) -> int:
        return int(self.mean.shape[-1])

    def astype(self, dtype: type) -> "Prediction":
        """The same in another number type."""
        return Prediction(*(None if a is None else np.asarray(a, dtype) for a in self._arrays()))  # type: ignore[arg-type]

    def put(self, rows: np.ndarray, other: "Prediction") -> None:
        """Overwrite some rows with those of another prediction of the same kind."""
        for mine, others in zip(self._arrays(), other._arrays(), strict=True):
            if mine is not None:
                mine[rows] = others

    def like(self, n: int) -> "Prediction":
        """A prediction of the same kind for n contexts, all zero."""
        blank = (a if a is None else np.zeros((n, *a.shape[1:]), a.dtype) for a in self._arrays())
        return Prediction(*blank)  # type: ignore[arg-type]

    def finite(self) -> np.ndarray:
        """Which rows hold finite numbers only: bool [n]."""
        checks = [
            np.isfinite(a).all(axis=tuple(range(1, a.ndim)))
            for a in self._arrays()
            if a is not None
        ]
        sound: np.ndarray = np.logical_and.reduce(checks)
        return sound

    def _arrays(self) -> tuple[np.ndarray | None, ...]:
        return self.mean, self.heads, self.width


@dataclass(frozen=True)
class Progress:
    """How far a run had come when a version was deployed: what a schedule is a function of."""

    version: int = 0
    rounds: int = 0
    events: int = 0  # logged so far; under privacy the number that was planned
    actions: int = 0  # that there are
