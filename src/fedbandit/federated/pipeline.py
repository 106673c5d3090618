"""What happens to a client's update on its way to the server: clipped, summed, screened."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import exp, inf
from typing import Protocol

import numpy as np


class UpdateSum(Protocol):
    """A sum of clipped client updates that can be added to a flat vector."""

    def add_to(self, total: np.ndarray) -> None: ...


@dataclass(frozen=True)
class Nothing:
    """The sum of no updates, or of such as have been added already."""

    def add_to(self, total: np.ndarray) -> None:
        pass


@dataclass(frozen=True)
class DenseSum:
    """A sum that touches every weight."""

    vector: np.ndarray  # [P]

    def add_to(self, total: np.ndarray) -> None:
        total += self.vector


@dataclass(frozen=True)
class RowSum:
    """A sum that touches only some rows of a [words, K] matrix, and the bias behind it."""

    rows: np.ndarray  # int32 [R], each once
    values: np.ndarray  # [R, K]
    bias: np.ndarray  # [K]

    def add_to(self, total: np.ndarray) -> None:
        from fedbandit.federated.learners.sparse_kernels import add_rows

        k = len(self.bias)
        add_rows(self.rows, self.values, total[:-k].reshape(-1, k))
        total[-k:] += self.bias


@dataclass(frozen=True)
class EntrySum:
    """A sum that touches only some entries of a [words, K] matrix, and the bias behind it."""

    entries: np.ndarray  # int64 [E]: word · K + action; may come more than once
    values: np.ndarray  # [E]
    bias: np.ndarray  # [K]

    def add_to(self, total: np.ndarray) -> None:
        from fedbandit.federated.learners.sparse_kernels import add_entries

        add_entries(self.entries, self.values, total)
        total[-len(self.bias) :] += self.bias


def clip_factor(norm: float, clip_norm: float) -> float:
    """What a client's update is multiplied with so that its norm is at most the clip norm."""
    return min(1.0, clip_norm / norm) if norm > 0 else 1.0


class Clipping(Protocol):
    """Where the clip norm starts and how it moves after a round."""

    @property
    def initial(self) -> float: ...

    def following(self, clip_norm: float, unclipped: float) -> float:
        """The next round's norm, given this one's and the fraction of clients whose update was not clipped."""
        ...


@dataclass(frozen=True)
class FixedClipping:
    """One norm for all rounds; infinity for no clipping."""

    norm: float = inf

    def __post_init__(self) -> None:
        if not self.norm > 0:
            raise ValueError(f"norm must be positive, not {self.norm}")

    @property
    def initial(self) -> float:
        return self.norm

    def following(self, clip_norm: float, unclipped: float) -> float:
        return clip_norm


@dataclass(frozen=True)
class AdaptiveClipping:
    """Moves the norm towards the given quantile of the update norms (Andrew et al.), here without noise."""

    quantile: float = 0.8
    initial: float = 1.0
    rate: float = 0.2

    def __post_init__(self) -> None:
        for name in ("initial", "rate"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        if not 0 < self.quantile < 1:
            raise ValueError(f"quantile must be between 0 and 1, not {self.quantile}")

    def following(self, clip_norm: float, unclipped: float) -> float:
        return clip_norm * exp(-self.rate * (unclipped - self.quantile))


@dataclass(frozen=True)
class Screened:
    """The sum of the accepted updates, clipped; who was left out, and why."""

    total: np.ndarray
    norms: np.ndarray  # float64 [accepted], before clipping
    rejected: dict[str, str]  # client -> reason

    @property
    def accepted(self) -> int:
        return len(self.norms)


def why_not(update: object, like: np.ndarray) -> str | None:
    """The reason to refuse an update to weights like `like`, or None if it is sound."""
    if not isinstance(update, np.ndarray):
        return f"not an array but {type(update).__name__}"
    if update.dtype != like.dtype:
        return f"dtype {update.dtype}, expected {like.dtype}"
    if update.shape != like.shape:
        return f"shape {update.shape}, expected {like.shape}"
    wrong = np.count_nonzero(~np.isfinite(update))
    if wrong:
        return f"{wrong} of {update.size} values are not finite"
    if not np.isfinite(np.linalg.norm(update.astype(np.float64, copy=False))):
        return "its norm is not finite"
    return None


def clipped_sum(updates: Iterable[tuple[str, object]], like: np.ndarray, clip_norm: float) -> Screened:
    """Add up the sound updates of (client, update) pairs, each clipped; a second one of the same client is refused."""
    total = np.zeros_like(like)
    norms: list[float] = []
    rejected: dict[str, str] = {}
    seen: set[str] = set()
    for client, update in updates:
        if client in seen:
            rejected[client] = "a second update in the same round"
            continue
        seen.add(client)
        if reason := why_not(update, like):
            rejected[client] = reason
            continue
        assert isinstance(update, np.ndarray)
        norm = float(np.linalg.norm(update.astype(np.float64, copy=False)))
        total += update.dtype.type(clip_factor(norm, clip_norm)) * update
        norms.append(norm)
    return Screened(total, np.array(norms), rejected)
