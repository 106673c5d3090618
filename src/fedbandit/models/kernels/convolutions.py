"""The two convolutions of the FedAvg CNN for one client: forth, back, and a step of descent.

Matrix products, and the kernels of `winograd` between them. Knows nothing of dense layers, losses or rounds.
"""

from collections.abc import Mapping
from math import prod

import numpy as np
import torch
from torch import Tensor

from fedbandit.models.kernels import winograd
from fedbandit.models.kernels.winograd import NARROW, PATCH, TILE, WIDE

BLOCK = 8  # images that go through the convolutions together, so that their tiles stay in the cache


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
        """The tiles of so many images, in and out."""
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
