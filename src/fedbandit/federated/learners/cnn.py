"""The FedAvg CNN trained by hand: the same updates as automatic differentiation up to rounding, in less time.

Convolutions go through Winograd tiles that coincide with the pooling windows, what is left is matrix products, and
dense layers are updated in place without ever making their gradient. Knows nothing of rounds, policies or the server.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedbandit.core.prediction import Prediction
from fedbandit.data.dataset import Contexts
from fedbandit.events import Events
from fedbandit.federated.learners import winograd
from fedbandit.federated.learners.base import ClientSettings, Drift, clipped_sum_of, single_threaded_torch
from fedbandit.federated.learners.winograd import NARROW, TILE, WIDE
from fedbandit.federated.pipeline import UpdateSum
from fedbandit.models.base import Layout
from fedbandit.objectives import Pointwise

_SCORE_ROWS = 256  # images scored at a time: enough for the dense layers to be worth reading once
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
        return clipped_sum_of(self.updates(weights, events, pull), np.zeros_like(weights), events, clip_norm)

    def updates(
        self, weights: np.ndarray, events: Events, pull: float = 0.0, drift: Drift | None = None
    ) -> Iterator[np.ndarray | None]:
        """Each client's update; it lies in the working copy, and is gone when the next one is asked for."""
        assert isinstance(events.contexts, np.ndarray)
        single_threaded_torch()
        start = torch.from_numpy(weights)
        size, rate = self.settings.batch_size, self.settings.learning_rate
        network = _Network(self.layout, _images(events.contexts, weights.dtype), size)
        errors = _Errors(self.objective, events, weights.dtype, network.num_actions)
        for client in range(events.num_clients):
            first, last = int(events.bounds[client]), int(events.bounds[client + 1])
            if first == last:
                yield None
                continue
            added = None if drift is None else drift(client)
            with torch.no_grad():
                network.load(start)
                for _ in range(self.settings.epochs):
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


class _Errors:
    """The derivative of the loss with respect to the scores of a mini-batch."""

    def __init__(self, objective: Pointwise, events: Events, dtype: np.dtype, num_actions: int) -> None:
        self._objective = objective
        self._weights = torch.from_numpy(objective.weights(events.propensities.astype(dtype), events.weights))
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
        return errors if objective.supervised else torch.zeros_like(scores).scatter_(1, actions, errors)


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
        torch.addmm(p["dense1_bias"], features, p["dense1"], out=hidden).relu_()
        return torch.addmm(p["dense2_bias"], hidden, p["dense2"])

    def descend(self, errors: Tensor, rate: float) -> None:
        """One step of gradient descent from the derivative of the loss by the scores [b, K] of the last `forward`."""
        p = self._params
        features, hidden = self._features[: self._here].flatten(1), self._hidden[: self._here]
        hidden_gradient = torch.mm(errors, p["dense2"].T).mul_(hidden > 0)
        feature_gradient = torch.mm(hidden_gradient, p["dense1"].T).view(-1, WIDE)
        p["dense2"].addmm_(hidden.T, errors, alpha=-rate)
        p["dense2_bias"].sub_(errors.sum(0), alpha=rate)
        p["dense1"].addmm_(features.T, hidden_gradient, alpha=-rate)
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


def _images(contexts: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """[n, H, W] or [n, H, W, C] as [n, H, W, C] of the weights' type."""
    if contexts.ndim == 3:
        contexts = contexts[..., None]
    return np.ascontiguousarray(contexts, dtype)
