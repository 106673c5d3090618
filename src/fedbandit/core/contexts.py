"""Decisions: what is known of user and moment, and, where actions are not fixed, what could be
chosen.

Arrays only; knows nothing of data sets, models or rules.
"""

from dataclasses import dataclass
from math import prod
from typing import ClassVar, Literal

import numpy as np

from fedbandit.core.ragged import Ragged

_LEAST = 1e-12  # torch's `normalize` divides by at least this

Features = np.ndarray | Ragged
"""Dense float [n, *shape], or `Ragged` rows of (feature, value)."""


def rows_at(features: Features, rows: np.ndarray) -> Features:
    """Some rows, in the given order."""
    return features.take(rows) if isinstance(features, Ragged) else features[rows]


def rows_between(features: Features, start: int, stop: int) -> Features:
    """Rows start to stop; shares memory with the whole."""
    return features.slice(start, stop) if isinstance(features, Ragged) else features[start:stop]


def unit_rows(features: Features, dtype: np.dtype | type = np.float64) -> np.ndarray:
    """Dense rows scaled to length one: [n, features] of that type; rows of zeros stay zero.

    Sparse ones: `Ragged.unit`.

    Examples:
        >>> unit_rows(np.array([[[3.0], [4.0]], [[0.0], [0.0]]]))
        array([[0.6, 0.8],
               [0. , 0. ]])
    """
    assert isinstance(features, np.ndarray)
    x = np.ascontiguousarray(features.reshape(len(features), prod(features.shape[1:])), dtype)
    with np.errstate(over="ignore"):
        lengths = np.sqrt(np.square(x).sum(axis=1, keepdims=True))
    return np.asarray(x / np.maximum(lengths, x.dtype.type(_LEAST)))


@dataclass(frozen=True)
class ItemSpec:
    """Kind and shape of an item's features, and how many candidates decisions have."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}
    kind: Literal["dense", "sparse"]
    shape: tuple[int, ...]  # of one item; for sparse ones (features,)
    shown: float  # on average
    most: int


@dataclass(frozen=True)
class Candidates:
    """The choices at each of n decisions: decision i has the rows bounds[i]:bounds[i + 1].

    An action is a place in its decision's own list.

    Examples:
        >>> shown = Candidates(np.array([0, 2, 5]), np.array([7, 3, 3, 9, 7]), np.eye(5))
        >>> shown.counts
        array([2, 3])
        >>> shown.chosen(np.array([1, 0])).items
        array([3, 3])
    """

    bounds: np.ndarray  # int64 [n + 1]
    items: np.ndarray  # int64 [m]: which item each row is; names, logs and evaluation go by it
    features: Features  # of the m rows

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def counts(self) -> np.ndarray:
        """The number of candidates of each decision: int64 [n]."""
        return np.diff(self.bounds)

    def take(self, rows: np.ndarray) -> "Candidates":
        """Those of the given decisions, in the given order."""
        counts = self.counts[rows]
        bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        at = np.repeat(self.bounds[rows] - bounds[:-1], counts) + np.arange(bounds[-1])
        return Candidates(bounds, self.items[at], rows_at(self.features, at))

    def slice(self, start: int, stop: int) -> "Candidates":
        """Those of decisions start to stop; shares memory with the whole."""
        bounds = self.bounds[start : stop + 1]
        first, last = int(bounds[0]), int(bounds[-1])
        features = rows_between(self.features, first, last)
        return Candidates(bounds - first, self.items[first:last], features)

    def chosen(self, actions: np.ndarray) -> "Candidates":
        """The one candidate of each decision that `actions` int64 [n] names: what training
        touches.
        """
        at = self.bounds[:-1] + actions
        return Candidates(np.arange(len(at) + 1), self.items[at], rows_at(self.features, at))


@dataclass(frozen=True)
class Contexts:
    """n decisions: what is known of user and moment, and what could be chosen.

    Examples:
        >>> two = Contexts(np.zeros((2, 3)))
        >>> len(two), two.candidates is None  # the fixed actions of the data set
        (2, True)
    """

    shared: Features
    candidates: Candidates | None = None

    def __len__(self) -> int:
        return len(self.shared)

    def take(self, rows: np.ndarray) -> "Contexts":
        """Some decisions, in the given order."""
        shown = None if self.candidates is None else self.candidates.take(rows)
        return Contexts(rows_at(self.shared, rows), shown)

    def slice(self, start: int, stop: int) -> "Contexts":
        """Decisions start to stop; shares memory with the whole."""
        shown = None if self.candidates is None else self.candidates.slice(start, stop)
        return Contexts(rows_between(self.shared, start, stop), shown)

    def chosen(self, actions: np.ndarray) -> "Contexts":
        """The same decisions with the chosen candidate alone."""
        assert self.candidates is not None
        return Contexts(self.shared, self.candidates.chosen(actions))
