"""MLPs trained by hand: what automatic differentiation gives, in less time.

A loss on the chosen action moves one column of the last layer, so a client works on the columns of
its actions alone. Knows nothing of rounds, policies or the server.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedbandit.acting.predictors import single_threaded_torch
from fedbandit.core.contexts import Features
from fedbandit.events import Events
from fedbandit.federated.learners.base import Batches, KernelLearner, Local, how_of, logged_of
from fedbandit.federated.learners.linear import Top
from fedbandit.federated.pipeline import DenseSum, UpdateSum, clip_factor
from fedbandit.models.kernels import dense_kernels as kernels
from fedbandit.models.kernels.networks import Layers, Network, Rows, rows_of
from fedbandit.objectives import Pointwise


@dataclass(frozen=True)
class NetworkLearner(KernelLearner):
    """Trains a `Network`: a working copy of the weights with a way forth and back of its own."""

    def network(self, weights: np.ndarray, events: Events) -> Network:
        """A network over the chunk's contexts, whose weights are loaded later."""
        raise NotImplementedError

    def local(self, weights: np.ndarray, events: Events) -> Local:
        single_threaded_torch()
        start, rate = torch.from_numpy(weights), self.settings.learning_rate
        network = self.network(weights, events)
        errors = Errors(self.objective, events, weights.dtype, network.num_actions)

        @torch.no_grad()
        def train(batches: Batches, proximal: float, added: np.ndarray | None) -> np.ndarray:
            network.load(start)
            for batch in batches:
                before = network.weights.clone() if proximal else None
                network.descend(errors(network.forward(*batch), *batch), rate)
                if before is not None:
                    network.weights.sub_(before.sub_(start), alpha=rate * proximal)
                if added is not None:
                    network.weights.sub_(torch.from_numpy(added), alpha=rate)
                if before is not None or added is not None:
                    network.changed()
            return network.weights.sub_(start).numpy()

        return train


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
class DenseLearner(NetworkLearner):
    """Trains the built-in `mlp`, with losses over all actions."""

    def network(self, weights: np.ndarray, events: Events) -> Network:
        rows = self._rows(events.contexts.shared, weights.dtype)
        return Layers(self.layout, rows, weights.dtype)

    def _rows(self, contexts: Features, dtype: np.dtype) -> Rows:
        return rows_of(contexts, self.layout.shapes[0][1][0], dtype)


@dataclass(frozen=True)
class ChosenMlpLearner(DenseLearner):
    """Trains the built-in `mlp` without ever copying its first layer.

    A step adds a multiple of each context to that layer, and the multiples are kept. What they do
    to the hidden units, and the norm of the update, follow from the products of all pairs of a
    client's contexts; the layer's update is made once for the whole chunk.
    """

    def train(
        self, weights: np.ndarray, events: Events, clip_norm: float, proximal: float = 0.0
    ) -> tuple[UpdateSum, np.ndarray]:
        _, hidden = self.layout.shapes[0][1]
        if (
            np.diff(events.bounds).max(initial=0) > 2 * hidden
        ):  # all pairs of events would be the larger part
            return super().train(weights, events, clip_norm, proximal)
        single_threaded_torch()
        x = self._rows(events.contexts.shared, weights.dtype)
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
        pulled = weights.dtype.type(self.settings.learning_rate * proximal)
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
