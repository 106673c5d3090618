"""MLPs trained by hand: what automatic differentiation gives, in less time.

A loss on the chosen action moves one column of the last layer, so a client works on the columns of its actions alone.
Knows nothing of rounds, policies or the server.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from fedbandit.core.prediction import Prediction
from fedbandit.core.ragged import Ragged
from fedbandit.data.dataset import Contexts
from fedbandit.events import Events
from fedbandit.federated.learners import dense_kernels as kernels
from fedbandit.federated.learners import sparse_kernels
from fedbandit.federated.learners.base import (
    ClientSettings,
    Drift,
    clipped_sum_of,
    single_threaded_torch,
)
from fedbandit.federated.learners.dense_linear import Top, how_of, logged_of
from fedbandit.federated.pipeline import DenseSum, UpdateSum, clip_factor
from fedbandit.models.base import Layout
from fedbandit.objectives import Pointwise

_SCORE_ROWS = 4096  # contexts scored at a time: one large product a chunk, and bounded memory for a whole split


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


def trained_by_hand(
    make_network: Callable[[int], Network],
    objective: Pointwise,
    settings: ClientSettings,
    weights: np.ndarray,
    events: Events,
    pull: float,
    drift: Drift | None,
) -> Iterator[np.ndarray | None]:
    """Each client's update; it lies in the network's working copy, and is gone when the next one is asked for."""
    single_threaded_torch()
    start, size, rate = torch.from_numpy(weights), settings.batch_size, settings.learning_rate
    network = make_network(size)
    errors = Errors(objective, events, weights.dtype, network.num_actions)
    for client in range(events.num_clients):
        first, last = int(events.bounds[client]), int(events.bounds[client + 1])
        if first == last:
            yield None
            continue
        added = None if drift is None else drift(client)
        with torch.no_grad():
            network.load(start)
            for _ in range(settings.epochs):
                for begin in range(first, last, size):
                    end = min(begin + size, last)
                    before = network.weights.clone() if pull else None
                    network.descend(errors(network.forward(begin, end), begin, end), rate)
                    if before is not None:
                        network.weights.sub_(before.sub_(start), alpha=rate * pull)
                    if added is not None:
                        network.weights.sub_(torch.from_numpy(added), alpha=rate)
                    if before is not None or added is not None:
                        network.changed()
            delta = network.weights.sub_(start)
        yield delta.numpy()


class Errors:
    """The derivative of the loss with respect to the scores of a mini-batch."""

    def __init__(
        self, objective: Pointwise, events: Events, dtype: np.dtype, num_actions: int
    ) -> None:
        self._objective = objective
        self._weights = torch.from_numpy(
            objective.weights(events.propensities.astype(dtype), events.weights)
        )
        self._actions = torch.from_numpy(events.actions)[:, None]
        if objective.supervised:
            assert events.targets is not None
            self._rewards = torch.from_numpy(events.targets.astype(dtype))
        else:
            self._rewards = torch.from_numpy(events.rewards.astype(dtype))[:, None]
        self._num_actions = num_actions

    def __call__(self, scores: Tensor, begin: int, end: int) -> Tensor:
        objective, actions = self._objective, self._actions[begin:end]
        answers = scores if objective.supervised else scores.gather(1, actions)
        if objective.logistic:
            answers = torch.sigmoid(answers)
        errors = (answers - self._rewards[begin:end]) * self._weights[begin:end, None]
        errors *= objective.factor(end - begin, self._num_actions)
        return (
            errors
            if objective.supervised
            else torch.zeros_like(scores).scatter_(1, actions, errors)
        )


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
class _DenseRows:
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
class _SparseRows:
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


class _Layers:
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


def _part(contexts: Contexts, begin: int, end: int) -> Contexts:
    return contexts.slice(begin, end) if isinstance(contexts, Ragged) else contexts[begin:end]


def _layers_of(layout: Layout, weights: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Weight and bias of each layer, as views."""
    arrays = list(layout.split(weights).values())
    return list(zip(arrays[::2], arrays[1::2], strict=True))


@dataclass(frozen=True)
class DenseLearner:
    """Predicts with and trains the built-in `mlp`, with losses over all actions."""

    layout: Layout
    objective: Pointwise
    settings: ClientSettings
    chunk_events: ClassVar[int] = 256

    def predict(self, weights: np.ndarray, contexts: Contexts) -> Prediction:
        single_threaded_torch()
        blocks = [
            self._scores(weights, _part(contexts, start, min(start + _SCORE_ROWS, len(contexts))))
            for start in range(0, len(contexts), _SCORE_ROWS)
        ]
        return Prediction(np.concatenate(blocks) if blocks else np.zeros((0, 1), weights.dtype))

    @torch.no_grad()
    def _scores(self, weights: np.ndarray, contexts: Contexts) -> np.ndarray:
        network = _Layers(self.layout, self._rows(contexts, weights.dtype), weights.dtype)
        network.load(torch.from_numpy(weights))
        scores: np.ndarray = network.forward(0, len(contexts)).numpy()
        return scores

    def train(
        self, weights: np.ndarray, events: Events, clip_norm: float, pull: float = 0.0
    ) -> tuple[UpdateSum, np.ndarray]:
        return clipped_sum_of(
            self.updates(weights, events, pull), np.zeros_like(weights), events, clip_norm
        )

    def updates(
        self, weights: np.ndarray, events: Events, pull: float = 0.0, drift: Drift | None = None
    ) -> Iterator[np.ndarray | None]:
        def network(_: int) -> Network:
            return _Layers(self.layout, self._rows(events.contexts, weights.dtype), weights.dtype)

        return trained_by_hand(network, self.objective, self.settings, weights, events, pull, drift)

    def _rows(self, contexts: Contexts, dtype: np.dtype) -> Rows:
        """The contexts in the weights' type."""
        if isinstance(contexts, Ragged):
            assert contexts.values is not None
            values = np.asarray(contexts.values, dtype)
            return _SparseRows(replace(contexts, values=values), self.layout.shapes[0][1][0])
        return _DenseRows(self._features(contexts, dtype))

    def _features(self, contexts: Contexts, dtype: np.dtype) -> Tensor:
        """[n, features] of the weights' type."""
        assert isinstance(contexts, np.ndarray)
        width = prod(contexts.shape[1:])
        return torch.from_numpy(np.ascontiguousarray(contexts.reshape(len(contexts), width), dtype))


@dataclass(frozen=True)
class ChosenMlpLearner(DenseLearner):
    """Trains the built-in `mlp` without ever copying its first layer.

    A step adds a multiple of each context to that layer, and the multiples are kept. What they do to the hidden units,
    and the norm of the update, follow from the products of all pairs of a client's contexts; the layer's update is
    made once for the whole chunk.
    """

    def train(
        self, weights: np.ndarray, events: Events, clip_norm: float, pull: float = 0.0
    ) -> tuple[UpdateSum, np.ndarray]:
        _, hidden = self.layout.shapes[0][1]
        if (
            np.diff(events.bounds).max(initial=0) > 2 * hidden
        ):  # all pairs of events would be the larger part
            return super().train(weights, events, clip_norm, pull)
        single_threaded_torch()
        x = self._rows(events.contexts, weights.dtype)
        params = self.layout.split(torch.from_numpy(weights))
        received = x.times(params["dense1"], params["dense1_bias"], 0, len(events))
        moved = torch.zeros_like(
            received
        )  # the first layer is now its weights - x' moved; its bias likewise
        top = Top(self.layout, weights)
        norms = np.zeros(events.num_clients)
        actions, rewards, importance = logged_of(events, self.objective, weights.dtype)
        num_actions = self.layout.shapes[-1][1][0]
        how = how_of(self.objective, self.settings, num_actions, weights.dtype)
        pulled = weights.dtype.type(self.settings.learning_rate * pull)
        for client in range(events.num_clients):
            rows = slice(int(events.bounds[client]), int(events.bounds[client + 1]))
            if rows.start == rows.stop:
                continue
            own = moved[rows]
            pairs = x.pairs(rows.start, rows.stop)
            log = actions[rows], rewards[rows], importance[rows]
            used, square = kernels.train_hidden(
                pairs.numpy(), received[rows].numpy(), own.numpy(), *log, *how, pulled, *top.arrays
            )
            norms[client] = norm = float(
                (torch.mm(pairs, own).mul_(own).sum() + square).clamp_(min=0).sqrt()
            )
            if not np.isfinite(norm):
                own.zero_()
                continue
            factor = clip_factor(norm, clip_norm)
            own.mul_(-factor)
            top.add(used, factor)
        summed = top.total()
        views = self.layout.split(summed)
        x.add_outer(torch.from_numpy(views["dense1"]), moved, 0, len(events), 1.0)
        torch.sum(moved, 0, out=torch.from_numpy(views["dense1_bias"]))
        return DenseSum(summed), norms
