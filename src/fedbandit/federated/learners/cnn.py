"""The FedAvg CNN trained by hand: the same updates as automatic differentiation up to rounding, in
less time.

The second convolution goes through Winograd tiles, what is left is matrix products. Clients of a
chunk train abreast: the large dense layer stays as received, is multiplied with all their
mini-batches at once, and of what a client adds to it only the factors are kept. Knows nothing of
rounds, policies or the server.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedbandit.acting.predictors import single_threaded_torch
from fedbandit.events import Events
from fedbandit.federated.learners.base import ClientSettings
from fedbandit.federated.learners.mlp import Errors, NetworkLearner
from fedbandit.federated.pipeline import DenseSum, UpdateSum, clip_factor
from fedbandit.models.base import Layout
from fedbandit.models.kernels.networks import (
    LARGE,
    CnnNetwork,
    Convolutions,
    Network,
    Room,
    descend_output,
    images_of,
)
from fedbandit.objectives import Pointwise

# clients in training at a time: enough rows for the large layer's products to run at full speed
_ABREAST = 4
# events of a client, over all epochs, whose factors are kept; beyond, their products cost more
_MOST_STEPS = 512


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
    """What the clients of a chunk have added to the large layer: the sum over rows of inputs x
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
        """One step of every member; the large layer is multiplied with the batches of all at once."""
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
        """What the client's steps so far have added to the large layer."""
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
