"""Networks of torch: MLPs and the FedAvg CNN forward, back, and in steps of descent.

A network is one client's working copy of the weights, with its way through mini-batches of the
chunk's contexts. MLPs take dense or sparse contexts. Of the CNN the second convolution goes through
Winograd tiles (`winograd`), the rest is matrix products. Knows nothing of losses, clients or rounds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch
from torch import Tensor

from fedbandit.core.contexts import Features
from fedbandit.core.ragged import Ragged
from fedbandit.models.base import Layout
from fedbandit.models.kernels import sparse_kernels, winograd
from fedbandit.models.kernels.winograd import NARROW, PATCH, TILE, WIDE

BLOCK = 8  # images that go through the convolutions together, so that their tiles stay in the cache
LARGE = "dense1"


@dataclass(frozen=True)
class DenseRows:
    """A chunk's dense contexts, as the first layer of a model sees them."""

    x: Tensor  # [n, features]

    def times(self, weight: Tensor, bias: Tensor, begin: int, end: int) -> Tensor:
        """Bias and products of some contexts and a layer's weights: [n, units]."""
        return torch.addmm(bias, self.x[begin:end], weight)

    def add_outer(self, weight: Tensor, errors: Tensor, begin: int, end: int, rate: float) -> None:
        """Add to a layer's weights the contexts, each times its errors [n, units] and the rate."""
        weight.addmm_(self.x[begin:end].T, errors, alpha=rate)

    def pairs(self, begin: int, end: int) -> Tensor:
        """1 and the inner product of each pair of contexts; a feature that is always 1 stands for
        the bias.
        """
        return torch.addmm(
            torch.ones((), dtype=self.x.dtype), self.x[begin:end], self.x[begin:end].T
        )


@dataclass(frozen=True)
class SparseRows:
    """The same of sparse contexts, by compiled loops over their entries."""

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


Rows = DenseRows | SparseRows


class Layers:
    """One or two dense layers with relu between them, named as the built-in models name them."""

    def __init__(self, layout: Layout, rows: Rows, dtype: np.dtype) -> None:
        self._rows, self._part = rows, (0, 0)
        self.weights = torch.from_numpy(np.empty(layout.size, dtype))
        self._layers = _layers_of(layout, self.weights)
        self.num_actions = len(self._layers[-1][1])
        self._inputs: list[Tensor] = []  # of all layers but the first

    def load(self, weights: Tensor) -> None:
        """Start again from the given flat weights."""
        self.weights.copy_(weights)

    def forward(self, begin: int, end: int) -> Tensor:
        """Scores [b, K] of some of the chunk's contexts."""
        self._part, self._inputs = (begin, end), []
        first, *others = self._layers
        x = self._rows.times(*first, begin, end)
        for weight, bias in others:
            self._inputs.append(x.relu_())
            x = torch.addmm(bias, x, weight)
        return x

    def descend(self, errors: Tensor, rate: float) -> None:
        """One step from the derivative of the loss by the scores [b, K] of the last `forward`."""
        first, *others = self._layers
        for (weight, bias), x in zip(reversed(others), reversed(self._inputs), strict=True):
            below = torch.mm(errors, weight.T).mul_(x > 0)
            weight.addmm_(x.T, errors, alpha=-rate)
            bias.sub_(errors.sum(0), alpha=rate)
            errors = below
        self._rows.add_outer(first[0], errors, *self._part, -rate)
        first[1].sub_(errors.sum(0), alpha=rate)

    def changed(self) -> None:
        """The weights have been changed from outside."""


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


class Room:
    """Arrays for one block of images after the other, shared by all networks of a chunk."""

    def __init__(self, images: np.ndarray, batch: int) -> None:
        """For blocks of at most `batch` of the chunk's images [n, H, W, C]."""
        height, width, channels = images.shape[1:]
        self.images, self.dtype = images, torch.from_numpy(images[:0]).dtype
        self.channels, self.halves = channels, (height // 2, width // 2)
        self.quarters = height // 4, width // 4
        (down, rows), (across, columns) = map(winograd.tiles_over, self.quarters)
        self.padded, self.tiles_per_image = (rows, columns), down * across
        self.features = prod(self.quarters) * WIDE
        block = min(BLOCK, batch)
        self.border = self.zeros(height + 4, width + 4, channels).numpy()
        self.windows = self.zeros(block, *self.halves, 4 * NARROW)
        self.gradient = self.zeros(block, *self.padded, NARROW).numpy()
        self._inputs = self.zeros(TILE * block * self.tiles_per_image * NARROW)
        self._outputs = self.zeros(TILE * block * self.tiles_per_image * WIDE)
        self.spread_gradient = self.zeros(PATCH * channels, 4 * NARROW)
        self.kernel_tiles_gradient = self.zeros(TILE, NARROW, WIDE)
        self.kernel_to_tile = torch.from_numpy(winograd.KERNEL_TO_TILE.astype(images.dtype))

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype)

    def tiles(self, images: int) -> tuple[Tensor, Tensor]:
        """The tiles of this many images, in and out."""
        count = images * self.tiles_per_image
        inputs = self._inputs[: TILE * count * NARROW].view(TILE, count, NARROW)
        outputs = self._outputs[: TILE * count * WIDE].view(TILE, count, WIDE)
        return inputs, outputs


class Convolutions:
    """One client's convolutions: images to features, and the features' gradient to a step of descent."""

    def __init__(self, params: Mapping[str, Tensor], room: Room, kept: int) -> None:
        """`params` are the client's weights, changed in place; `kept` images at a time can go forth and back.

        More than that can go forth alone, if whole blocks are kept: each then takes the place of one before.
        """
        self._params, self._room = params, room
        self._biases = {name: params[name].numpy() for name in ("conv1_bias", "conv2_bias")}
        # Kept from the way forth for the way back.
        self._patches = room.zeros(kept, *room.halves, PATCH * room.channels)
        self._pooled = room.zeros(kept, *room.padded, NARROW).numpy()
        self._chosen = np.zeros((kept, *room.halves, NARROW), np.int32)
        self._chosen_windows = np.zeros((kept, *room.quarters, WIDE), np.int32)
        # The kernels in the forms in which they are used.
        self._spread = room.zeros(PATCH * room.channels, 4 * NARROW)
        self._kernel_tiles = room.zeros(TILE, NARROW, WIDE)

    def changed(self) -> None:
        p = self._params
        winograd.spread_kernel(p["conv1"].numpy(), self._spread.view(6, 6, -1, 4, NARROW).numpy())
        torch.mm(
            self._room.kernel_to_tile,
            p["conv2"].view(25, -1),
            out=self._kernel_tiles.view(TILE, -1),
        )

    def forward(self, begin: int, features: Tensor) -> None:
        """Fill `features` [b, ...] with those of the chunk's images from `begin` on."""
        room, in_windows = self._room, self._in_windows(features)
        for first in range(0, len(features), BLOCK):
            block = slice(first, min(first + BLOCK, len(features)))
            images = room.images[begin + block.start : begin + block.stop]
            place = first % len(self._chosen)
            at = slice(place, place + len(images))
            patches, windows, pooled = (
                self._patches[at],
                room.windows[: len(images)],
                self._pooled[at],
            )
            winograd.patches(images, room.border, patches.numpy())
            torch.mm(patches.flatten(0, 2), self._spread, out=windows.flatten(0, 2))
            winograd.pool_windows(
                windows.numpy(), self._biases["conv1_bias"], pooled, self._chosen[at]
            )
            inputs, outputs = room.tiles(len(images))
            winograd.inputs_to_tiles(pooled, inputs.numpy())
            torch.bmm(inputs, self._kernel_tiles, out=outputs)
            chosen = self._chosen_windows[at]
            winograd.pool_tiles(
                outputs.numpy(), self._biases["conv2_bias"], in_windows[block], chosen
            )

    def descend(self, features: Tensor, gradient: Tensor, rate: float) -> None:
        """One step from the gradient of the features that the last `forward` gave."""
        room, p = self._room, self._params
        biases = {name: np.zeros_like(bias) for name, bias in self._biases.items()}
        features_in, gradient_in = self._in_windows(features), self._in_windows(gradient)
        for first in range(0, len(features), BLOCK):
            block = slice(first, min(first + BLOCK, len(features)))
            here = block.stop - block.start
            pooled, windows, below = self._pooled[block], room.windows[:here], room.gradient[:here]
            inputs, outputs = room.tiles(here)
            chosen = self._chosen_windows[block]
            winograd.unpool_tiles(
                gradient_in[block],
                features_in[block],
                chosen,
                outputs.numpy(),
                biases["conv2_bias"],
            )
            winograd.inputs_to_tiles(pooled, inputs.numpy())  # cheaper to make again than to keep
            so_far = 0 if first == 0 else 1
            room.kernel_tiles_gradient.baddbmm_(inputs.mT, outputs, beta=so_far)
            torch.bmm(outputs, self._kernel_tiles.mT, out=inputs)
            winograd.tiles_to_inputs(inputs.numpy(), below)
            winograd.unpool_windows(
                below, pooled, self._chosen[block], windows.numpy(), biases["conv1_bias"]
            )
            room.spread_gradient.addmm_(
                self._patches[block].flatten(0, 2).T, windows.flatten(0, 2), beta=so_far
            )
        kernel_gradient = torch.empty_like(p["conv1"])
        winograd.gather_kernel(
            room.spread_gradient.view(6, 6, room.channels, 4, NARROW).numpy(),
            kernel_gradient.numpy(),
        )
        p["conv1"].sub_(kernel_gradient, alpha=rate)
        tiles_gradient = room.kernel_tiles_gradient.view(TILE, -1)
        p["conv2"].view(25, -1).addmm_(room.kernel_to_tile.T, tiles_gradient, alpha=-rate)
        for name, bias_gradient in biases.items():
            p[name].sub_(torch.from_numpy(bias_gradient), alpha=rate)
        self.changed()

    def _in_windows(self, features: Tensor) -> np.ndarray:
        """The large layer's inputs [b, ...] as the pooling windows that they come from: [b, h, w, 64]."""
        return features.numpy().reshape(-1, *self._room.quarters, WIDE)


class CnnNetwork:
    """One client's weights, all of them changed in place, and its way through a mini-batch."""

    def __init__(self, layout: Layout, images: np.ndarray, batch: int, kept: int) -> None:
        """`images` [n, H, W, C] are those of the chunk; `batch` at most go forth at a time, `kept` also back."""
        room = Room(images, batch)
        self.weights = room.zeros(layout.size)
        self._params = layout.split(self.weights)
        self.num_actions = len(self._params["dense2_bias"])
        self._convolutions = Convolutions(self._params, room, kept)
        self._features, self._hidden = room.zeros(batch, room.features), room.zeros(batch, 512)
        self._here = 0

    def load(self, weights: Tensor) -> None:
        """Start again from the given flat weights."""
        self.weights.copy_(weights)
        self.changed()

    def changed(self) -> None:
        self._convolutions.changed()

    def forward(self, begin: int, end: int) -> Tensor:
        """Scores [b, K] of some of the chunk's images."""
        p, self._here = self._params, end - begin
        features, hidden = self._features[: self._here], self._hidden[: self._here]
        self._convolutions.forward(begin, features)
        torch.addmm(p["dense1_bias"], features, p[LARGE], out=hidden).relu_()
        return torch.addmm(p["dense2_bias"], hidden, p["dense2"])

    def descend(self, errors: Tensor, rate: float) -> None:
        """One step of gradient descent from the derivative of the loss by the scores [b, K] of the last `forward`."""
        features, hidden = self._features[: self._here], self._hidden[: self._here]
        hidden_gradient = descend_output(self._params, hidden, errors, rate)
        gradient = torch.mm(hidden_gradient, self._params[LARGE].T)
        self._params[LARGE].addmm_(features.T, hidden_gradient, alpha=-rate)
        self._convolutions.descend(features, gradient, rate)


Network = Layers | CnnNetwork


def descend_output(p: Mapping[str, Tensor], hidden: Tensor, errors: Tensor, rate: float) -> Tensor:
    """A step of the last layer and of the hidden units' bias; the gradient of the hidden units [b, 512]."""
    gradient = torch.mm(errors, p["dense2"].T).mul_(hidden > 0)
    p["dense2"].addmm_(hidden.T, errors, alpha=-rate)
    p["dense2_bias"].sub_(errors.sum(0), alpha=rate)
    p["dense1_bias"].sub_(gradient.sum(0), alpha=rate)
    return gradient


def images_of(contexts: Features, dtype: np.dtype) -> np.ndarray:
    """[n, H, W] or [n, H, W, C] as [n, H, W, C] of the weights' type."""
    assert isinstance(contexts, np.ndarray)
    if contexts.ndim == 3:
        contexts = contexts[..., None]
    return np.ascontiguousarray(contexts, dtype)
