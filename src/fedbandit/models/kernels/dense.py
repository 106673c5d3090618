"""One or two dense layers over dense or sparse contexts: forward, back, and a step of descent.

Knows nothing of losses, clients or rounds.
"""

from dataclasses import dataclass, replace
from math import prod
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedbandit.core.contexts import Features
from fedbandit.core.ragged import Ragged
from fedbandit.models.base import Layout
from fedbandit.models.kernels import sparse_kernels


class Network(Protocol):
    """One client's weights and its way forth and back through a mini-batch of the chunk's contexts."""

    weights: Tensor  # [P]
    num_actions: int

    def load(self, weights: Tensor) -> None:
        """Start again from the given flat weights."""
        ...

    def forward(self, begin: int, end: int) -> Tensor:
        """Scores [b, K] of some of the chunk's contexts."""
        ...

    def descend(self, errors: Tensor, rate: float) -> None:
        """One step of gradient descent from the derivative of the loss by the scores [b, K] of the last `forward`."""
        ...

    def changed(self) -> None:
        """The weights have been changed from outside."""
        ...


class Rows(Protocol):
    """A chunk's contexts, dense or sparse, as the first layer of a model sees them."""

    def times(self, weight: Tensor, bias: Tensor, begin: int, end: int) -> Tensor:
        """Bias and products of some contexts and a layer's weights: [n, units]."""
        ...

    def add_outer(self, weight: Tensor, errors: Tensor, begin: int, end: int, rate: float) -> None:
        """Add to a layer's weights the contexts, each times its errors [n, units] and the rate."""
        ...

    def pairs(self, begin: int, end: int) -> Tensor:
        """1 and the inner product of each pair of contexts: a feature that is always 1 stands for the bias."""
        ...


@dataclass(frozen=True)
class DenseRows:
    x: Tensor  # [n, features]

    def times(self, weight: Tensor, bias: Tensor, begin: int, end: int) -> Tensor:
        return torch.addmm(bias, self.x[begin:end], weight)

    def add_outer(self, weight: Tensor, errors: Tensor, begin: int, end: int, rate: float) -> None:
        weight.addmm_(self.x[begin:end].T, errors, alpha=rate)

    def pairs(self, begin: int, end: int) -> Tensor:
        return torch.addmm(
            torch.ones((), dtype=self.x.dtype), self.x[begin:end], self.x[begin:end].T
        )


@dataclass(frozen=True)
class SparseRows:
    x: Ragged
    features: int

    def times(self, weight: Tensor, bias: Tensor, begin: int, end: int) -> Tensor:
        found = torch.empty((end - begin, len(bias)), dtype=weight.dtype)
        offsets = self.x.offsets[begin : end + 1]
        sparse_kernels.scores(
            weight.numpy(), bias.numpy(), offsets, self.x.ids, self.x.values, found.numpy()
        )
        return found

    def add_outer(self, weight: Tensor, errors: Tensor, begin: int, end: int, rate: float) -> None:
        offsets, factor = self.x.offsets[begin : end + 1], errors.numpy().dtype.type(rate)
        sparse_kernels.add_rows(
            offsets, self.x.ids, self.x.values, errors.numpy(), factor, weight.numpy()
        )

    def pairs(self, begin: int, end: int) -> Tensor:
        assert self.x.values is not None
        found = np.empty((end - begin, end - begin), self.x.values.dtype)
        sparse_kernels.pairs(
            self.x.offsets[begin : end + 1], self.x.ids, self.x.values, self.features, found
        )
        return torch.from_numpy(found)


class Layers:
    """One or two dense layers with relu between them, named as the built-in models name them."""

    def __init__(self, layout: Layout, rows: Rows, dtype: np.dtype) -> None:
        self._rows, self._part = rows, (0, 0)
        self.weights = torch.from_numpy(np.empty(layout.size, dtype))
        self._layers = _layers_of(layout, self.weights)
        self.num_actions = len(self._layers[-1][1])
        self._inputs: list[Tensor] = []  # of all layers but the first

    def load(self, weights: Tensor) -> None:
        self.weights.copy_(weights)

    def forward(self, begin: int, end: int) -> Tensor:
        self._part, self._inputs = (begin, end), []
        first, *others = self._layers
        x = self._rows.times(*first, begin, end)
        for weight, bias in others:
            self._inputs.append(x.relu_())
            x = torch.addmm(bias, x, weight)
        return x

    def descend(self, errors: Tensor, rate: float) -> None:
        first, *others = self._layers
        for (weight, bias), x in zip(reversed(others), reversed(self._inputs), strict=True):
            below = torch.mm(errors, weight.T).mul_(x > 0)
            weight.addmm_(x.T, errors, alpha=-rate)
            bias.sub_(errors.sum(0), alpha=rate)
            errors = below
        self._rows.add_outer(first[0], errors, *self._part, -rate)
        first[1].sub_(errors.sum(0), alpha=rate)

    def changed(self) -> None:
        pass


def _layers_of(layout: Layout, weights: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Weight and bias of each layer, as views."""
    arrays = list(layout.split(weights).values())
    return list(zip(arrays[::2], arrays[1::2], strict=True))


def rows_of(contexts: Features, features: int, dtype: np.dtype) -> Rows:
    """Contexts of a chunk in the weights' type."""
    if isinstance(contexts, Ragged):
        values = np.asarray(contexts.values, dtype)
        return SparseRows(replace(contexts, values=values), features)
    flat = contexts.reshape(len(contexts), prod(contexts.shape[1:]))
    return DenseRows(torch.from_numpy(np.ascontiguousarray(flat, dtype)))
