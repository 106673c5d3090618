"""The FedAvg CNN trained by hand: the same updates as automatic differentiation up to rounding, in less time.

Convolutions go through Winograd tiles that coincide with the pooling windows, what is left is matrix products, and
dense layers are updated in place without ever making their gradient. Knows nothing of rounds, policies or the server.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedbandit.core.prediction import Prediction
from fedbandit.data.dataset import Contexts
from fedbandit.events import Events
from fedbandit.federated.learners import winograd
from fedbandit.federated.learners.base import ClientSettings, Drift, clipped_sum_of, single_threaded_torch
from fedbandit.federated.learners.dense import Errors, trained_by_hand
from fedbandit.federated.learners.winograd import NARROW, TILE, WIDE
from fedbandit.federated.pipeline import DenseSum, UpdateSum, clip_factor
from fedbandit.models.base import Layout
from fedbandit.objectives import Pointwise

_SCORE_ROWS = 256  # images scored at a time: enough for the dense layers to be worth reading once
_MOST_STEPS = 128  # events of a client, over all epochs, whose factors are kept; beyond, their products cost more
_BLOCK = 4  # images that go through the convolutions together, so that their tiles stay in the cache


@dataclass(frozen=True)
class CnnLearner:
    """Scores and trains `fedbandit.models.builtin.cnn` with any of the built-in objectives; one thread per chunk."""

    layout: Layout
    objective: Pointwise
    settings: ClientSettings
    chunk_events: ClassVar[int] = 256

    @torch.no_grad()
    def predict(self, weights: np.ndarray, contexts: Contexts) -> Prediction:
        assert isinstance(contexts, np.ndarray)
        single_threaded_torch()
        network = _Network(self.layout, _images(contexts, weights.dtype), min(len(contexts), _SCORE_ROWS))
        network.load(torch.from_numpy(weights))
        scores = np.empty((len(contexts), network.num_actions), weights.dtype)
        for start in range(0, len(contexts), _SCORE_ROWS):
            stop = min(start + _SCORE_ROWS, len(contexts))
            scores[start:stop] = network.forward(start, stop).numpy()
        return Prediction(scores)

    def train(
        self, weights: np.ndarray, events: Events, clip_norm: float, pull: float = 0.0
    ) -> tuple[UpdateSum, np.ndarray]:
        largest = self.settings.epochs * np.diff(events.bounds).max(initial=0)
        if pull or largest > _MOST_STEPS:
            return clipped_sum_of(self.updates(weights, events, pull), np.zeros_like(weights), events, clip_norm)
        return self._train_in_steps(weights, events, clip_norm)

    @torch.no_grad()
    def _train_in_steps(self, weights: np.ndarray, events: Events, clip_norm: float) -> tuple[UpdateSum, np.ndarray]:
        """As the updates are summed elsewhere, but the large layer's are never made one by one."""
        assert isinstance(events.contexts, np.ndarray)
        single_threaded_torch()
        start, rate = torch.from_numpy(weights), self.settings.learning_rate
        images, steps = _images(events.contexts, weights.dtype), self.settings.epochs * len(events)
        network = _StepNetwork(self.layout, images, self.settings.batch_size, start, steps)
        errors = Errors(self.objective, events, weights.dtype, network.num_actions)
        norms = np.zeros(events.num_clients)
        for client in range(events.num_clients):
            first, last = int(events.bounds[client]), int(events.bounds[client + 1])
            if first == last:
                continue
            network.load(start)
            for _ in range(self.settings.epochs):
                for begin in range(first, last, self.settings.batch_size):
                    end = min(begin + self.settings.batch_size, last)
                    network.descend(errors(network.forward(begin, end), begin, end), rate)
            norms[client] = norm = network.finish()
            network.keep(clip_factor(norm, clip_norm) if np.isfinite(norm) else 0.0)
        return DenseSum(network.total().numpy()), norms

    def updates(
        self, weights: np.ndarray, events: Events, pull: float = 0.0, drift: Drift | None = None
    ) -> Iterator[np.ndarray | None]:
        """Each client's update; it lies in the working copy, and is gone when the next one is asked for."""
        assert isinstance(events.contexts, np.ndarray)
        images = _images(events.contexts, weights.dtype)

        def network(batch: int) -> "_Network":
            return _Network(self.layout, images, batch)

        return trained_by_hand(network, self.objective, self.settings, weights, events, pull, drift)


class _Network:
    """One client's weights, and room for a mini-batch on its way forth and back."""

    def __init__(self, layout: Layout, images: np.ndarray, batch: int) -> None:
        """`images` [n, H, W, C] are those of the chunk; at most `batch` of them go through at a time."""
        height, width, channels = images.shape[1:]
        h, w = height // 2, width // 2
        tiles = (h // 2) * (w // 2)
        block, dtype = min(_BLOCK, batch), torch.from_numpy(images[:0]).dtype

        def room(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype)

        self._images = images
        self.weights = room(layout.size)
        self._params = layout.split(self.weights)
        self.num_actions = len(self._params["dense2_bias"])
        self._kernel_to_tile = torch.from_numpy(winograd.KERNEL_TO_TILE.astype(images.dtype))
        self._tiles_per_image = tiles
        self._border = room(height + 4, width + 4, channels).numpy()
        # Kept from the way forth for the way back.
        self._patches = room(batch, h, w, TILE * channels)
        self._pooled = room(batch, h + 4, w + 4, NARROW)
        self._chosen = torch.zeros((batch, h, w, NARROW), dtype=torch.int32)
        self._features = room(batch, tiles, WIDE)
        self._chosen_tiles = torch.zeros((batch * tiles, WIDE), dtype=torch.int32)
        self._hidden = room(batch, 512)
        self._here = 0
        # Used by one block of images after the other.
        self._windows = room(block, h, w, 4 * NARROW)
        self._inputs = room(TILE * block * tiles * NARROW)
        self._outputs = room(TILE * block * tiles * WIDE)
        self._gradient = room(block, h + 4, w + 4, NARROW)
        # The kernels in the forms in which they are used, and their gradients.
        self._spread = room(TILE * channels, 4 * NARROW)
        self._spread_gradient = room(TILE * channels, 4 * NARROW)
        self._kernel_tiles = room(TILE, NARROW, WIDE)
        self._kernel_tiles_gradient = room(TILE, NARROW, WIDE)

    def load(self, weights: Tensor) -> None:
        """Start again from the given flat weights."""
        self.weights.copy_(weights)
        self.changed()

    def forward(self, begin: int, end: int) -> Tensor:
        """Scores [b, K] of some of the chunk's images."""
        p, self._here = self._params, end - begin
        for first in range(0, self._here, _BLOCK):
            self._convolve(begin, first, min(first + _BLOCK, self._here))
        features, hidden = self._features[: self._here].flatten(1), self._hidden[: self._here]
        self._hide(features, hidden)
        return torch.addmm(p["dense2_bias"], hidden, p["dense2"])

    def descend(self, errors: Tensor, rate: float) -> None:
        """One step of gradient descent from the derivative of the loss by the scores [b, K] of the last `forward`."""
        p = self._params
        features, hidden = self._features[: self._here].flatten(1), self._hidden[: self._here]
        hidden_gradient = torch.mm(errors, p["dense2"].T).mul_(hidden > 0)
        feature_gradient = self._reveal(features, hidden_gradient, rate).view(-1, WIDE)
        p["dense2"].addmm_(hidden.T, errors, alpha=-rate)
        p["dense2_bias"].sub_(errors.sum(0), alpha=rate)
        p["dense1_bias"].sub_(hidden_gradient.sum(0), alpha=rate)

        biases = torch.zeros_like(p["conv1_bias"]), torch.zeros_like(p["conv2_bias"])
        for first in range(0, self._here, _BLOCK):
            self._convolve_back(feature_gradient, biases, first, min(first + _BLOCK, self._here))
        kernel_gradient = torch.empty_like(p["conv1"])
        winograd.gather_kernel(
            self._spread_gradient.view(6, 6, *p["conv1"].shape[2:3], 4, NARROW).numpy(), kernel_gradient.numpy()
        )
        p["conv1"].sub_(kernel_gradient, alpha=rate)
        p["conv2"].view(25, -1).addmm_(self._kernel_to_tile.T, self._kernel_tiles_gradient.view(TILE, -1), alpha=-rate)
        for name, gradient in zip(("conv1_bias", "conv2_bias"), biases, strict=True):
            p[name].sub_(gradient, alpha=rate)
        self.changed()

    def _hide(self, features: Tensor, hidden: Tensor) -> None:
        """The large layer's way forth: hidden units [b, 512] from features."""
        torch.addmm(self._params["dense1_bias"], features, self._params["dense1"], out=hidden).relu_()

    def _reveal(self, features: Tensor, hidden_gradient: Tensor, rate: float) -> Tensor:
        """The large layer's way back: the features' gradient; then its step."""
        dense = self._params["dense1"]
        gradient = torch.mm(hidden_gradient, dense.T)
        dense.addmm_(features.T, hidden_gradient, alpha=-rate)
        return gradient

    def changed(self) -> None:
        p = self._params
        winograd.spread_kernel(p["conv1"].numpy(), self._spread.view(6, 6, -1, 4, NARROW).numpy())
        torch.mm(self._kernel_to_tile, p["conv2"].view(25, -1), out=self._kernel_tiles.view(TILE, -1))

    def _convolve(self, begin: int, first: int, last: int) -> None:
        """Both convolutions of images first:last of the batch that starts at image `begin`."""
        p, images = self._params, self._images[begin + first : begin + last]
        patches, pooled = self._patches[first:last], self._pooled[first:last]
        winograd.patches(images, self._border, patches.numpy())
        windows = self._windows[: last - first]
        torch.mm(patches.flatten(0, 2), self._spread, out=windows.flatten(0, 2))
        winograd.pool_windows(
            windows.numpy(), p["conv1_bias"].numpy(), pooled.numpy(), self._chosen[first:last].numpy()
        )
        inputs, outputs, rows = self._tiles(first, last)
        winograd.inputs_to_tiles(pooled.numpy(), inputs.numpy())
        torch.bmm(inputs, self._kernel_tiles, out=outputs)
        features = self._features.view(-1, WIDE)[rows]
        winograd.pool_tiles(
            outputs.numpy(), p["conv2_bias"].numpy(), features.numpy(), self._chosen_tiles[rows].numpy()
        )

    def _convolve_back(self, feature_gradient: Tensor, biases: tuple[Tensor, Tensor], first: int, last: int) -> None:
        """Add to the kernels' and biases' gradients what images first:last of the batch give."""
        inputs, outputs, rows = self._tiles(first, last)
        pooled, windows = self._pooled[first:last], self._windows[: last - first]
        gradient = self._gradient[: last - first]
        winograd.unpool_tiles(
            feature_gradient[rows].numpy(),
            self._features.view(-1, WIDE)[rows].numpy(),
            self._chosen_tiles[rows].numpy(),
            outputs.numpy(),
            biases[1].numpy(),
        )
        winograd.inputs_to_tiles(pooled.numpy(), inputs.numpy())  # cheaper to make again than to keep
        so_far = 0 if first == 0 else 1
        self._kernel_tiles_gradient.baddbmm_(inputs.mT, outputs, beta=so_far)
        torch.bmm(outputs, self._kernel_tiles.mT, out=inputs)
        winograd.tiles_to_inputs(inputs.numpy(), gradient.numpy())
        winograd.unpool_windows(
            gradient.numpy(), pooled.numpy(), self._chosen[first:last].numpy(), windows.numpy(), biases[0].numpy()
        )
        self._spread_gradient.addmm_(self._patches[first:last].flatten(0, 2).T, windows.flatten(0, 2), beta=so_far)

    def _tiles(self, first: int, last: int) -> tuple[Tensor, Tensor, slice]:
        """Room for the tiles of images first:last, in and out, and which of the batch's they are."""
        count = (last - first) * self._tiles_per_image
        inputs = self._inputs[: TILE * count * NARROW].view(TILE, count, NARROW)
        outputs = self._outputs[: TILE * count * WIDE].view(TILE, count, WIDE)
        return inputs, outputs, slice(first * self._tiles_per_image, last * self._tiles_per_image)


class _StepNetwork(_Network):
    """A network whose large layer stays as received: of what a client adds to it, only the factors are kept.

    A step adds features' x hidden gradient to the layer, of rank 16 where the layer has 1.6 million entries. What the
    steps so far do to a batch follows from products with their factors, and so does the norm of a client's update; the
    sum over clients is made once.
    """

    def __init__(self, layout: Layout, images: np.ndarray, batch: int, received: Tensor, steps: int) -> None:
        super().__init__(layout, images, batch)
        self._dense = layout.split(received)["dense1"]
        self._received = received
        sizes = [prod(shape) for _, shape in layout.shapes]
        before = sum(sizes[: [name for name, _ in layout.shapes].index("dense1")])
        self._small = slice(0, before), slice(before + self._dense.numel(), layout.size)  # all but the large layer
        self._inputs_kept = torch.zeros((steps, len(self._dense)), dtype=received.dtype)
        self._steps_kept = torch.zeros((steps, self._dense.shape[1]), dtype=received.dtype)
        self._first = self._last = 0  # the rows of this client
        self._total = torch.zeros_like(received)

    def load(self, weights: Tensor) -> None:
        for part in self._small:
            self.weights[part].copy_(weights[part])
        self._first = self._last
        self.changed()

    def forward(self, begin: int, end: int) -> Tensor:
        rows = self._inputs_kept[self._last : self._last + end - begin]
        self._features = rows.view(end - begin, self._tiles_per_image, WIDE)  # made where they are kept
        return super().forward(begin, end)

    def _hide(self, features: Tensor, hidden: Tensor) -> None:
        torch.addmm(self._params["dense1_bias"], features, self._dense, out=hidden)
        if self._last > self._first:
            inputs, steps = self._so_far()
            hidden.addmm_(torch.mm(features, inputs.T), steps, alpha=-1)
        hidden.relu_()

    def _reveal(self, features: Tensor, hidden_gradient: Tensor, rate: float) -> Tensor:
        gradient = torch.mm(hidden_gradient, self._dense.T)
        if self._last > self._first:
            inputs, steps = self._so_far()
            gradient.addmm_(torch.mm(hidden_gradient, steps.T), inputs, alpha=-1)
        torch.mul(hidden_gradient, rate, out=self._steps_kept[self._last : self._last + len(features)])
        self._last += len(features)
        return gradient

    def _so_far(self) -> tuple[Tensor, Tensor]:
        rows = slice(self._first, self._last)
        return self._inputs_kept[rows], self._steps_kept[rows]

    def finish(self) -> float:
        """The norm of the client's update; the small layers hold their change from here on."""
        inputs, steps = self._so_far()
        square = torch.mm(inputs, inputs.T).mul_(torch.mm(steps, steps.T)).sum()
        for part in self._small:
            change = self.weights[part].sub_(self._received[part])
            square += change.square().sum()
        return float(square.clamp_(min=0).sqrt())

    def keep(self, factor: float) -> None:
        """Add the client's update, times a factor, to the sum; 0 leaves it out, whatever it holds."""
        _, steps = self._so_far()
        if factor == 0:
            steps.zero_()
            self._inputs_kept[self._first : self._last].zero_()
            return
        steps.mul_(-factor)
        for part in self._small:
            self._total[part].add_(self.weights[part], alpha=factor)

    def total(self) -> Tensor:
        """The sum over all clients that were kept."""
        large = self._total[self._small[0].stop : self._small[1].start].view_as(self._dense)
        torch.mm(self._inputs_kept[: self._last].T, self._steps_kept[: self._last], out=large)
        return self._total


def _images(contexts: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """[n, H, W] or [n, H, W, C] as [n, H, W, C] of the weights' type."""
    if contexts.ndim == 3:
        contexts = contexts[..., None]
    return np.ascontiguousarray(contexts, dtype)
