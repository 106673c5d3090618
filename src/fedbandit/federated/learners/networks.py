"""Networks trained by hand: what automatic differentiation gives up to rounding, in less time.

MLPs: a loss on the chosen action moves one column of the last layer, so a client works on the
columns of its actions alone. The FedAvg CNN: the second convolution goes through Winograd tiles,
what is left is matrix products. Clients of a chunk train abreast: the large dense layer stays as
received, is multiplied with all their mini-batches at once, and of a client's change of it only
the factors are kept. Knows nothing of rounds, policies or the server.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedbandit.acting.predictors import single_threaded_torch
from fedbandit.core.contexts import Features
from fedbandit.events import Events
from fedbandit.federated.learners.base import (
    Batches,
    ClientSettings,
    KernelLearner,
    Local,
    how_of,
    logged_of,
)
from fedbandit.federated.learners.linear import Top
from fedbandit.federated.pipeline import DenseSum, UpdateSum, clip_factor
from fedbandit.models.base import Layout
from fedbandit.models.kernels import dense_kernels as kernels
from fedbandit.models.kernels.networks import (
    LARGE,
    CnnNetwork,
    Convolutions,
    Layers,
    Network,
    Room,
    Rows,
    descend_output,
    images_of,
    rows_of,
)
from fedbandit.objectives import Pointwise

# clients in training at a time: enough rows for the large layer's products to run at full speed
_ABREAST = 4
# events of a client, over all epochs, whose factors are kept; beyond, their products cost more
_MOST_STEPS = 512


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


@dataclass(frozen=True)
class CnnLearner(NetworkLearner):
    """Trains `fedbandit.models.builtin.cnn` with any of the built-in objectives; one thread per
    chunk.
    """

    chunk_events: ClassVar[int] = 512

    def train(
        self, weights: np.ndarray, events: Events, clip_norm: float, proximal: float = 0.0
    ) -> tuple[UpdateSum, np.ndarray]:
        largest = self.settings.epochs * np.diff(events.bounds).max(initial=0)
        if proximal or largest > _MOST_STEPS:
            return super().train(weights, events, clip_norm, proximal)
        return self._train_abreast(weights, events, clip_norm)

    def network(self, weights: np.ndarray, events: Events) -> Network:
        images, batch = images_of(events.contexts.shared, weights.dtype), self.settings.batch_size
        return CnnNetwork(self.layout, images, batch, batch)

    @torch.no_grad()
    def _train_abreast(
        self, weights: np.ndarray, events: Events, clip_norm: float
    ) -> tuple[UpdateSum, np.ndarray]:
        """As the updates are summed elsewhere, but the large layer's are never made one by one."""
        single_threaded_torch()
        images = images_of(events.contexts.shared, weights.dtype)
        group = _Abreast(
            self.layout, images, torch.from_numpy(weights), events, self.objective, self.settings
        )
        norms = np.zeros(events.num_clients)
        for member in group.finished():
            norms[member.client] = norm = member.norm()
            group.add(member, clip_factor(norm, clip_norm) if np.isfinite(norm) else 0.0)
        return DenseSum(group.total().numpy()), norms


@dataclass(frozen=True)
class _Factors:
    """The change of the large layer by the clients of a chunk: the sum over rows of inputs x
    moves.
    """

    inputs: Tensor  # [steps, 3136]
    moves: Tensor  # [steps, 512]

    def rows(self, first: int, last: int) -> "_Factors":
        return _Factors(self.inputs[first:last], self.moves[first:last])


class _Abreast:
    """The clients of a chunk in training, some at a time; the next one begins when one has
    finished.
    """

    def __init__(
        self,
        layout: Layout,
        images: np.ndarray,
        received: Tensor,
        events: Events,
        objective: Pointwise,
        settings: ClientSettings,
    ) -> None:
        large = [name for name, _ in layout.shapes].index(LARGE)
        sizes = [prod(shape) for _, shape in layout.shapes]
        self._at = slice(
            sum(sizes[:large]), sum(sizes[: large + 1])
        )  # of the large layer in the weights
        self._received = received
        self._dense = layout.split(received)[LARGE]
        self._small = torch.cat([received[: self._at.start], received[self._at.stop :]])
        self._small_total = torch.zeros_like(self._small)

        def room_for(rows: int) -> _Factors:
            return _Factors(
                *(torch.empty((rows, side), dtype=received.dtype) for side in self._dense.shape)
            )

        self._kept, self._bounds = room_for(settings.epochs * len(events)), events.bounds
        clients, batch = np.flatnonzero(np.diff(events.bounds)), settings.batch_size
        self._clients = iter(clients.tolist())
        small = Layout(tuple(part for part in layout.shapes if part[0] != LARGE))
        errors = Errors(objective, events, images.dtype, dict(layout.shapes)["dense2_bias"][0])
        room = Room(images, batch)
        self._members = [
            _Member(small, self._kept, room, errors, settings) for _ in clients[:_ABREAST]
        ]
        self._batches = room_for(len(self._members) * batch)

    def finished(self) -> Iterator["_Member"]:
        """Each client when it has finished its epochs; its place is given to the next one after
        that.
        """
        training = [member for member in self._members if self._begin(member)]
        while training:
            self._step(training)
            for member in list(training):
                if member.done:
                    yield member
                    if not self._begin(member):
                        training.remove(member)

    def add(self, member: "_Member", factor: float) -> None:
        """Add a client's update, times a factor, to the sum; 0 leaves it out, whatever it holds."""
        added = member.added()
        if factor == 0:
            added.inputs.zero_()
            added.moves.zero_()
            return
        added.moves.mul_(-factor)
        self._small_total.add_(member.weights, alpha=factor)

    def total(self) -> Tensor:
        """The sum over all clients that were added."""
        total, at = torch.empty_like(self._received), self._at
        torch.mm(self._kept.inputs.T, self._kept.moves, out=total[at].view_as(self._dense))
        total[: at.start] = self._small_total[: at.start]
        total[at.stop :] = self._small_total[at.start :]
        return total

    def _begin(self, member: "_Member") -> bool:
        """Give the next client to a member; False if there is none."""
        client = next(self._clients, None)
        if client is None:
            return False
        member.begin(client, int(self._bounds[client]), int(self._bounds[client + 1]), self._small)
        return True

    def _step(self, training: list["_Member"]) -> None:
        """One step of every member; the large layer meets the batches of all at once."""
        places, rows = [], 0
        for member in training:
            size = member.next_batch()
            places.append(slice(rows, rows + size))
            rows += size
        features, hidden = self._batches.inputs[:rows], self._batches.moves[:rows]
        for member, place in zip(training, places, strict=True):
            member.convolve(features[place])
        torch.mm(features, self._dense, out=hidden)
        for member, place in zip(training, places, strict=True):
            hidden[place] = member.answer(features[place], hidden[place])
        gradient = torch.mm(hidden, self._dense.T)
        for member, place in zip(training, places, strict=True):
            member.descend(features[place], gradient[place], hidden[place])


class _Member:
    """One client in training: its small layers, and the factors of what its steps have added to the
    large one.

    A step adds features x hidden gradient to the large layer, of rank 16 where the layer has 1.6
    million entries. What the steps so far do to a batch follows from products with their factors,
    and so does the norm of the update.
    """

    def __init__(
        self, small: Layout, kept: _Factors, room: Room, errors: Errors, settings: ClientSettings
    ) -> None:
        self.client = -1
        self.weights = room.zeros(small.size)  # all layers but the large one
        self._kept, self._errors, self._settings = kept, errors, settings
        self._params = small.split(self.weights)
        self._convolutions = Convolutions(self._params, room, settings.batch_size)
        self._first = self._last = self._epoch = (
            0  # the client's events, and the epochs it has finished
        )
        self._kept_from = self._kept_to = 0  # its rows among the factors
        self._begin = self._end = 0  # its batch, among the chunk's events
        self._square = 0.0  # of the norm of what it has added to the large layer
        self._by_inputs = room.zeros(0)  # the batch's products with the inputs of the steps so far

    def begin(self, client: int, first: int, last: int, received: Tensor) -> None:
        """Start with a client, whose events are first:last of the chunk's."""
        self.client, self._first, self._last, self._epoch = client, first, last, 0
        self._kept_from = self._kept_to = self._settings.epochs * first
        self._end, self._square = first, 0.0
        self._received = received
        self.weights.copy_(received)
        self._convolutions.changed()

    @property
    def done(self) -> bool:
        return self._end == self._last and self._epoch == self._settings.epochs - 1

    def next_batch(self) -> int:
        """Go on to the next mini-batch, and tell its size."""
        if self._end == self._last:
            self._epoch += 1
            self._end = self._first
        self._begin, self._end = self._end, min(self._end + self._settings.batch_size, self._last)
        return self._end - self._begin

    def added(self) -> _Factors:
        """The client's change of the large layer so far."""
        return self._kept.rows(self._kept_from, self._kept_to)

    def convolve(self, features: Tensor) -> None:
        self._convolutions.forward(self._begin, features)

    def answer(self, features: Tensor, hidden: Tensor) -> Tensor:
        """From the received layer's products to the gradient of the hidden units, with a step of
        the last layer.
        """
        p = self._params
        hidden.add_(p["dense1_bias"])
        if self._kept_to > self._kept_from:
            added = self.added()
            self._by_inputs = torch.mm(features, added.inputs.T)
            hidden.addmm_(self._by_inputs, added.moves, alpha=-1)
        hidden.relu_()
        scores = torch.addmm(p["dense2_bias"], hidden, p["dense2"])
        return descend_output(
            p, hidden, self._errors(scores, self._begin, self._end), self._settings.learning_rate
        )

    def descend(self, features: Tensor, gradient: Tensor, hidden_gradient: Tensor) -> None:
        """The step of all that is below the hidden units; `gradient` is what the received layer
        makes of theirs.
        """
        rate = self._settings.learning_rate
        if self._kept_to > self._kept_from:
            added = self.added()
            by_moves = torch.mm(hidden_gradient, added.moves.T)
            gradient.addmm_(by_moves, added.inputs, alpha=-1)
            self._square += 2 * rate * float(by_moves.mul_(self._by_inputs).sum())
        alike = torch.mm(features, features.T).mul_(torch.mm(hidden_gradient, hidden_gradient.T))
        self._square += rate**2 * float(alike.sum())
        now = self._kept.rows(self._kept_to, self._kept_to + len(features))
        now.inputs.copy_(features)
        torch.mul(hidden_gradient, rate, out=now.moves)
        self._kept_to += len(features)
        self._convolutions.descend(features, gradient, rate)

    def norm(self) -> float:
        """The norm of the client's update; the small layers hold their change from here on."""
        change = self.weights.sub_(self._received)
        return float(np.sqrt(max(self._square, 0.0) + float(change.square().sum())))
