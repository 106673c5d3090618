"""MLPs, and linear models on dense features, trained by hand: what automatic differentiation gives, in less time.

A loss on the chosen action moves one column of a linear model, so a client works on the columns of its actions alone.
Knows nothing of rounds, policies or the server.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedbandit.acting.predictors import single_threaded_torch
from fedbandit.core.contexts import Features
from fedbandit.events import Events
from fedbandit.federated.learners.base import (
    ClientSettings,
    Drift,
    clipped_sum_of,
    drift_of,
)
from fedbandit.federated.pipeline import DenseSum, UpdateSum, clip_factor
from fedbandit.models.base import Layout
from fedbandit.models.kernels import dense_kernels as kernels
from fedbandit.models.kernels.dense import Layers, Network, Rows, dense_features, rows_of
from fedbandit.objectives import Pointwise


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
        added = drift_of(drift, client)
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


@dataclass(frozen=True)
class DenseLearner:
    """Trains the built-in `mlp`, or `linear` on dense features, with losses over all actions."""

    layout: Layout
    objective: Pointwise
    settings: ClientSettings
    normalised: bool  # contexts are scaled to length one, as `linear` has them
    chunk_events: ClassVar[int] = 256

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
            return Layers(
                self.layout, self._rows(events.contexts.shared, weights.dtype), weights.dtype
            )

        return trained_by_hand(network, self.objective, self.settings, weights, events, pull, drift)

    def _rows(self, contexts: Features, dtype: np.dtype) -> Rows:
        return rows_of(contexts, self.layout.shapes[0][1][0], self.normalised, dtype)


@dataclass(frozen=True)
class ChosenLearner(DenseLearner):
    """What losses on the chosen action share: an action's weights stand together, and only chosen ones are touched."""

    def _logged(self, events: Events, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Actions, rewards, and how much each event counts."""
        importance = self.objective.weights(np.asarray(events.propensities, dtype), events.weights)
        return events.actions, np.asarray(events.rewards, dtype), importance

    def _how(self, dtype: np.dtype) -> tuple[bool, np.ndarray, int, int]:
        """What the kernels have to know of objective and settings."""
        return (
            self.objective.logistic,
            self._steps.astype(dtype),
            self.settings.batch_size,
            self.settings.epochs,
        )

    @cached_property
    def _steps(self) -> np.ndarray:
        """For each number of events in a batch: the learning rate times the constant in front of weight · error."""
        num_actions = self.layout.shapes[-1][1][0]
        factors = [
            self.objective.factor(events, num_actions)
            for events in range(1, self.settings.batch_size + 1)
        ]
        return self.settings.learning_rate * np.array([0.0, *factors])


@dataclass(frozen=True)
class ChosenLinearLearner(ChosenLearner):
    """Trains `weight [features, K]` and `bias [K]` on the columns of the chosen actions."""

    def train(
        self, weights: np.ndarray, events: Events, clip_norm: float, pull: float = 0.0
    ) -> tuple[UpdateSum, np.ndarray]:
        single_threaded_torch()
        assert isinstance(events.contexts.shared, np.ndarray)
        x = dense_features(events.contexts.shared, self.normalised, weights.dtype).numpy()
        top = _Top(self.layout, weights)
        norms = np.zeros(events.num_clients)
        pulled = weights.dtype.type(self.settings.learning_rate * pull)
        logged, how = self._logged(events, weights.dtype), self._how(weights.dtype)
        kernels.train_linear(x, events.bounds, *logged, *how, clip_norm, pulled, *top.arrays, norms)
        return DenseSum(top.total()), norms


@dataclass(frozen=True)
class ChosenMlpLearner(ChosenLearner):
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
        x = self._rows(events.contexts.shared, weights.dtype)
        params = self.layout.split(torch.from_numpy(weights))
        received = x.times(params["dense1"], params["dense1_bias"], 0, len(events))
        moved = torch.zeros_like(
            received
        )  # the first layer is now its weights - x' moved; its bias likewise
        top = _Top(self.layout, weights)
        norms = np.zeros(events.num_clients)
        (actions, rewards, importance), how = (
            self._logged(events, weights.dtype),
            self._how(weights.dtype),
        )
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


class _Top:
    """The layer that scores actions, a row an action with its bias last; the sum of updates, and room for a client."""

    def __init__(self, layout: Layout, weights: np.ndarray) -> None:
        self._layout = layout
        *_, weight, bias = layout.split(weights).values()
        self._rows = np.ascontiguousarray(np.concatenate([weight, bias[None]]).T)  # [K, width + 1]
        self._total = np.zeros_like(self._rows)
        self._work, self._columns = np.empty_like(self._rows), np.empty(len(bias), np.int64)
        slot_of = np.full(len(bias), -1, np.int64)
        self.arrays = (self._rows, self._total, self._work, self._columns, slot_of)

    def add(self, used: int, factor: float) -> None:
        """Add a client's update, times a factor, to the sum."""
        self._total[self._columns[:used]] += self._total.dtype.type(factor) * self._work[:used]

    def total(self) -> np.ndarray:
        """The sum as a flat vector of the whole model, the other layers zero."""
        summed = np.zeros(self._layout.size, self._total.dtype)
        *_, weight, bias = self._layout.split(summed).values()
        weight[:], bias[:] = self._total[:, :-1].T, self._total[:, -1]
        return summed
