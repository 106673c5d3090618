"""A model's view of the actions and the progress of a run: what an exploration rule decides by."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

Drawn = tuple[np.ndarray, np.ndarray] | None
"""Actions int64 [n] and their probabilities [n]; None where only the plain form works."""


@dataclass(frozen=True)
class Prediction:
    """A model's view of n decisions: the score of every action, and how sure it is where it knows.

    Over candidates the arrays are flat, one entry per candidate row, and `bounds` says which rows
    a decision has. Rules never see that form: `blocks` gives them decisions with equally many
    candidates as if their actions were fixed.

    Examples:
        >>> Prediction(np.array([[0.1, 0.7]])).mean.shape
        (1, 2)
        >>> shown = Prediction(np.array([0.1, 0.7, 0.3, 0.2, 0.9]), bounds=np.array([0, 2, 5]))
        >>> [(rows.tolist(), block.mean.tolist()) for rows, _, block in shown.blocks()]
        [([0], [[0.1, 0.7]]), ([1], [[0.3, 0.2, 0.9]])]
    """

    mean: np.ndarray  # [n, K]; over candidates [m]
    heads: np.ndarray | None = None  # [n, H, K], the scores of an ensemble's members; [m, H]
    width: np.ndarray | None = None  # [n, K], one standard deviation; [m]
    bounds: np.ndarray | None = None  # int64 [n + 1], over candidates

    def __len__(self) -> int:
        return len(self.mean) if self.bounds is None else len(self.bounds) - 1

    @property
    def num_actions(self) -> int:
        """K of fixed actions, and of a block of decisions with equally many candidates."""
        return int(self.mean.shape[-1])

    def astype(self, dtype: type) -> "Prediction":
        """The same in another number type."""
        return self._with(lambda array: np.asarray(array, dtype))

    def put(self, rows: np.ndarray, other: "Prediction") -> None:
        """Overwrite some decisions with those of another prediction of the same kind."""
        at = rows if self.bounds is None else entries_of(self.bounds, rows)
        for mine, others in zip(self._arrays(), other._arrays(), strict=True):
            if mine is not None:
                mine[at] = others

    def like(self, n: int, bounds: np.ndarray | None = None) -> "Prediction":
        """A prediction of the same kind for n decisions, over candidates with these bounds:
        zeros.
        """
        length = n if bounds is None else int(bounds[-1])
        blank = self._with(lambda array: np.zeros((length, *array.shape[1:]), array.dtype))
        return replace(blank, bounds=bounds)

    def finite(self) -> np.ndarray:
        """Which decisions hold finite numbers only: bool [n]."""
        checks = [
            np.isfinite(a).all(axis=tuple(range(1, a.ndim)))
            for a in self._arrays()
            if a is not None
        ]
        sound: np.ndarray = np.logical_and.reduce(checks)
        if self.bounds is None:
            return sound
        return np.asarray(over_actions(~sound, self.bounds) == 0)

    def blocks(self) -> Iterator[tuple[np.ndarray, np.ndarray, "Prediction"]]:
        """Decisions with equally many candidates together, never padded: a row's sum keeps its
        bits.

        Which decisions int64 [b], their entries int64 [b, k], and their prediction [b, k].
        """
        assert self.bounds is not None
        counts = np.diff(self.bounds)
        for k in np.unique(counts):
            rows = np.flatnonzero(counts == k)
            at = self.bounds[rows][:, None] + np.arange(k)
            heads = None if self.heads is None else self.heads[at].transpose(0, 2, 1)
            yield (
                rows,
                at,
                Prediction(self.mean[at], heads, None if self.width is None else self.width[at]),
            )

    def _arrays(self) -> tuple[np.ndarray | None, ...]:
        """Mean, heads and width, as far as the model gives them."""
        return self.mean, self.heads, self.width

    def _with(self, change: Callable[[np.ndarray], np.ndarray]) -> "Prediction":
        """The same prediction with every array changed."""
        mean, heads, width = (None if a is None else change(a) for a in self._arrays())
        assert mean is not None
        return Prediction(mean, heads, width, self.bounds)


def entries_of(bounds: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The entries of some decisions over candidates, one decision after the other: int64."""
    counts = np.diff(bounds)[rows]
    starts = np.cumsum(counts) - counts
    return np.asarray(np.repeat(bounds[rows] - starts, counts) + np.arange(counts.sum()))


def at_actions(
    values: np.ndarray, actions: np.ndarray, bounds: np.ndarray | None = None
) -> np.ndarray:
    """The value of each decision's action: [n] of [n, K], or of [m] with the bounds of
    candidates.
    """
    if bounds is not None:
        return np.asarray(values[bounds[:-1] + actions])
    return np.take_along_axis(values, actions[:, None], axis=1)[:, 0]


def best_action(values: np.ndarray, bounds: np.ndarray | None = None) -> np.ndarray:
    """The largest value of each decision: [n] of [n, K], or of [m] with the bounds of
    candidates.
    """
    if bounds is None:
        return np.asarray(values.max(axis=1))
    return np.maximum.reduceat(values, bounds[:-1]) if len(values) else np.zeros(0, values.dtype)


def over_actions(values: np.ndarray, bounds: np.ndarray | None = None) -> np.ndarray:
    """The sum over each decision's actions: [n] of [n, K], or of [m] with the bounds of
    candidates.
    """
    if bounds is None:
        return np.asarray(values.sum(axis=1))
    owners = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    return np.bincount(owners, values, minlength=len(bounds) - 1)


@dataclass(frozen=True)
class Progress:
    """The progress of a run when a version was deployed: what a schedule is a function of."""

    version: int = 0
    rounds: int = 0
    events: int = 0  # logged so far; under privacy the number that was planned
    actions: int = 0  # that there are
