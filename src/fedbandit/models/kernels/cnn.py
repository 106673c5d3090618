"""The FedAvg CNN with all its layers: forward, back, and a step of descent.

The second convolution goes through Winograd tiles, the rest is matrix products.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fedbandit.models.base import Layout
from fedbandit.models.kernels.convolutions import Convolutions, Room

LARGE = "dense1"


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


def descend_output(p: Mapping[str, Tensor], hidden: Tensor, errors: Tensor, rate: float) -> Tensor:
    """A step of the last layer and of the hidden units' bias; the gradient of the hidden units [b, 512]."""
    gradient = torch.mm(errors, p["dense2"].T).mul_(hidden > 0)
    p["dense2"].addmm_(hidden.T, errors, alpha=-rate)
    p["dense2_bias"].sub_(errors.sum(0), alpha=rate)
    p["dense1_bias"].sub_(gradient.sum(0), alpha=rate)
    return gradient


def images_of(contexts: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """[n, H, W] or [n, H, W, C] as [n, H, W, C] of the weights' type."""
    if contexts.ndim == 3:
        contexts = contexts[..., None]
    return np.ascontiguousarray(contexts, dtype)
