"""What clients send: their change of the weights, clipped and summed over a chunk of clients; dense or not."""

from dataclasses import dataclass
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
        from fedbandit.federated.sparse_kernels import add_rows

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
        from fedbandit.federated.sparse_kernels import add_entries

        add_entries(self.entries, self.values, total)
        total[-len(self.bias) :] += self.bias


def clip_factor(norm: float, clip_norm: float) -> float:
    """What a client's update is multiplied with so that its norm is at most the clip norm."""
    return min(1.0, clip_norm / norm) if norm > 0 else 1.0
