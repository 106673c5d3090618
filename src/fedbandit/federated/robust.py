"""Aggregation that one hostile client cannot steer: a rule over single updates in place of their
mean.

A rule of your own is a value with `combine`. It needs every client's update by itself, so it cannot
work under privacy or with secure sums, and one update per client is held in memory.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any, ClassVar, Protocol

import numpy as np

from fedbandit.core.errors import ConfigError
from fedbandit.federated.pipeline import IndividualUpdates, UpdateSum, Vectors
from fedbandit.federated.server import Accumulator, PlainMean

_BLOCK = 1 << 12  # coordinates at a time: sorting needs a copy of what it sorts


class Rule(Protocol):
    """From single updates to the one that the server learns from."""

    def combine(self, updates: np.ndarray) -> np.ndarray:
        """The update [P] from those of the accepted clients [clients, P], clipped; at least one."""
        ...


@dataclass(frozen=True)
class TrimmedMean:
    """The mean of each coordinate without its largest and its smallest values (Yin et al., 2018).

    `trim` is the share of clients that is left out at each end, rounded up: at least one client, if
    there are three.

    Examples:
        >>> TrimmedMean(trim=0.2).combine(np.array([[1.0], [2.0], [3.0], [4.0], [1e9]]))
        array([3.])
    """

    trim: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.trim < 0.5:
            raise ValueError(f"trim must be above 0 and below 0.5, not {self.trim}")

    def dropped(self, clients: int) -> int:
        """Clients trimmed at each end."""
        return min(ceil(self.trim * clients - 1e-9), (clients - 1) // 2)

    def combine(self, updates: np.ndarray) -> np.ndarray:
        out, count = self.dropped(len(updates)), len(updates)

        def middle(block: np.ndarray) -> np.ndarray:
            return np.asarray(
                np.sort(block, axis=1)[:, out : count - out].mean(axis=1, dtype=np.float64)
            )

        return _by_blocks(updates, middle)


@dataclass(frozen=True)
class Median:
    """The median of each coordinate; between the two middle values where the number of clients is
    even.

    Examples:
        >>> Median().combine(np.array([[1.0], [2.0], [1e9]]))
        array([2.])
    """

    def combine(self, updates: np.ndarray) -> np.ndarray:
        return _by_blocks(updates, lambda block: np.median(block.astype(np.float64), axis=1))


BUILT_IN: dict[str, Callable[..., Any]] = {
    "mean": PlainMean,
    "trimmed-mean": TrimmedMean,
    "median": Median,
}


@dataclass(frozen=True)
class Robust(PlainMean):
    """The aggregation that a rule makes: what reaches `mean` is combined already."""

    rule: Rule

    keep_individual_updates: ClassVar[bool] = True

    def accumulator(self, zeros: Vectors) -> Accumulator:
        return _Collected(self, zeros)

    def mean(self, total: np.ndarray, accepted: int, number: int, clip_norm: float) -> np.ndarray:
        return total

    def combined(self, updates: Sequence[np.ndarray | None], like: np.ndarray) -> np.ndarray:
        """The rule's update from single ones, each like `like`; None is the update of a client
        without events.
        """
        if not updates:
            return np.zeros_like(like)
        stacked = np.zeros((len(updates), like.size), like.dtype)
        for row, update in zip(stacked, updates, strict=True):
            if update is not None:
                row[:] = update.reshape(-1)
        found = np.asarray(self.rule.combine(stacked))
        if found.shape != (like.size,) or found.dtype.kind != "f":
            made = f"{type(self.rule).__name__}.combine made {found.dtype} {found.shape}"
            raise ConfigError(f"aggregation.name: {made} of updates {like.dtype} ({like.size},)")
        return found.astype(like.dtype, copy=False).reshape(like.shape)


@dataclass
class _Collected:
    """Every client's updates, until all of them can be combined."""

    aggregation: Robust
    zeros: Vectors
    updates: dict[str, list[np.ndarray | None]] = field(default_factory=dict)

    def add(self, sums: Mapping[str, UpdateSum], accepted: int) -> None:
        for name in self.zeros:
            sent = sums[name]
            if not isinstance(sent, IndividualUpdates) or len(sent.updates) != accepted:
                raise ValueError(
                    "adds up its updates; aggregation.name needs them from pipeline.collect"
                )
            self.updates.setdefault(name, []).extend(sent.updates)

    def totals(self) -> Vectors:
        return {
            name: self.aggregation.combined(self.updates.pop(name, []), like)
            for name, like in self.zeros.items()
        }


def _by_blocks(updates: np.ndarray, combine: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Apply `combine` to blocks [coordinates, clients], whose rows lie together in memory."""
    found = np.empty(updates.shape[1], updates.dtype)
    for start in range(0, len(found), _BLOCK):
        found[start : start + _BLOCK] = combine(
            np.ascontiguousarray(updates[:, start : start + _BLOCK].T)
        )
    return found
