"""Forward passes: from flat weights and contexts to a `Prediction`, one predictor for each kind of model.

Loads neither torch nor numba until a model needs them; knows nothing of rules, clients or training.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

import numpy as np

from fedbandit.core.contexts import Contexts, Features, rows_between
from fedbandit.core.errors import ConfigError
from fedbandit.core.loops import Loops
from fedbandit.core.prediction import Prediction
from fedbandit.core.ragged import Ragged
from fedbandit.models.base import Layout, Model

sparse_loops = Loops(
    "fedbandit.models.kernels.sparse_plain", "fedbandit.models.kernels.sparse_kernels"
)
_SMALLEST_NORM = 1e-12  # torch's `normalize` divides by at least this


class Predictor(Protocol):
    """Predicts with any weights of one model."""

    def predict(self, weights: np.ndarray, contexts: Contexts) -> Prediction:
        """Scores of every action, and more where the model knows it: mean [n, K]."""
        ...


def make_predictor(
    model: Model, layout: Layout, device: str = "cpu", *, light: bool = False
) -> Predictor:
    """The fastest predictor for a model; all give the same scores up to rounding.

    A `light` one never compiles, and needs numpy alone where the model is linear: for devices.
    """
    if model.predict is not None:
        return OwnPredictor(model, layout)
    if model.rows is not None:
        one_action = replace(model, rows=None)
        return RowsPredictor(model.rows, make_predictor(one_action, layout, device, light=light))
    if light and model.kernel in ("sparse-linear", "dense-linear"):
        one: Predictor = PlainLinear(layout)
        return HeadsPredictor(one, model.heads) if model.heads else one
    if light:
        return TorchPredictor(model, layout)
    if device == "cpu" and model.kernel == "sparse-linear":
        one = SparseLinear(layout)
        return HeadsPredictor(one, model.heads) if model.heads else one
    if device == "cpu" and model.kernel == "dense-linear" and not model.heads:
        return DenseLinear(layout)
    if device == "cpu" and model.kernel == "cnn":
        return CnnPredictor(layout)
    if device == "cpu" and model.kernel in ("mlp", "sparse-mlp"):
        return LayersPredictor(layout)
    return TorchPredictor(model, layout, device)


@dataclass(frozen=True)
class OwnPredictor:
    """A model's own `predict(params, contexts)`, with parameters as numpy arrays by name."""

    model: Model
    layout: Layout

    def predict(self, weights: np.ndarray, contexts: Contexts) -> Prediction:
        assert self.model.predict is not None
        return self.model.predict(self.layout.split(weights), contexts)


@dataclass(frozen=True)
class RowsPredictor:
    """A linear model over candidates: one with a single action, over the rows that they become."""

    rows: Callable[[Contexts], Ragged]
    one: Predictor

    def predict(self, weights: np.ndarray, contexts: Contexts) -> Prediction:
        assert contexts.candidates is not None
        found = self.one.predict(weights, Contexts(self.rows(contexts)))
        return Prediction(found.mean[:, 0], bounds=contexts.candidates.bounds)


@dataclass(frozen=True)
class SparseLinear:
    """`weight [words, K]` and `bias [K]` over rows of (word, value), by compiled loops."""

    layout: Layout

    def predict(self, weights: np.ndarray, contexts: Contexts) -> Prediction:
        x = contexts.shared
        assert isinstance(x, Ragged)
        weight, bias = _linear(self.layout, weights)
        out = np.empty((len(x), len(bias)), weights.dtype)
        values = np.asarray(x.values, weights.dtype)
        sparse_loops.scores(weight, bias, x.offsets, x.ids, values, out)
        return Prediction(out)


@dataclass(frozen=True)
class DenseLinear:
    """`weight [features, K]` and `bias [K]` over dense contexts of length one, by compiled loops.

    A row's scores do not depend on its neighbours.
    """

    layout: Layout
    rows: int = 4096  # scored at a time: bounds the memory of a whole split

    def predict(self, weights: np.ndarray, contexts: Contexts) -> Prediction:
        from fedbandit.models.kernels import dense_kernels

        weight, bias = _linear(self.layout, weights)
        scores = np.empty((len(contexts), len(bias)), weights.dtype)
        for start in range(0, len(contexts), self.rows):
            block = rows_between(contexts.shared, start, start + self.rows)
            x = unit_features(block, weights.dtype)
            dense_kernels.scores(x, weight, bias, scores[start : start + self.rows])
        return Prediction(scores)


@dataclass(frozen=True)
class PlainLinear:
    """`weight [features, K]` and `bias [K]` over dense or sparse contexts, in numpy, row by row.

    A row's scores do not depend on its neighbours. Sparse ones have the bits of `SparseLinear`.
    """

    layout: Layout

    def predict(self, weights: np.ndarray, contexts: Contexts) -> Prediction:
        weight, bias = _linear(self.layout, weights)
        out = np.empty((len(contexts), len(bias)), weights.dtype)
        with np.errstate(over="ignore", invalid="ignore"):  # callers look whether scores are finite
            for i in range(len(contexts)):
                if isinstance(contexts.shared, Ragged):
                    row = contexts.shared.slice(i, i + 1)
                    terms = np.asarray(row.values, weight.dtype)[:, None] * weight[row.ids]
                    # Adds row by row from the bias on: the order in which the compiled loop adds.
                    np.add.reduce(np.concatenate([bias[None], terms]), axis=0, out=out[i])
                else:
                    x = unit_features(contexts.shared[i : i + 1], weight.dtype)
                    out[i] = x[0] @ weight + bias
        return Prediction(out)


@dataclass(frozen=True)
class HeadsPredictor:
    """An ensemble whose members lie one after the other in the weights."""

    one: Predictor
    heads: int

    def predict(self, weights: np.ndarray, contexts: Contexts) -> Prediction:
        parts = np.split(weights, self.heads)
        return of_heads(np.stack([self.one.predict(p, contexts).mean for p in parts], axis=1))


@dataclass(frozen=True)
class LayersPredictor:
    """The built-in `mlp`, as matrix products of torch."""

    layout: Layout
    rows: int = 4096  # scored at a time: one large product a chunk, bounded memory for a split

    def predict(self, weights: np.ndarray, contexts: Contexts) -> Prediction:
        torch = single_threaded_torch()
        from fedbandit.models.kernels.dense import Layers, rows_of

        features, blocks = self.layout.shapes[0][1][0], []
        with torch.no_grad():
            for block in _blocks(contexts.shared, self.rows):
                rows = rows_of(block, features, weights.dtype)
                network = Layers(self.layout, rows, weights.dtype)
                network.load(torch.from_numpy(weights))
                blocks.append(network.forward(0, len(block)).numpy())
        return Prediction(np.concatenate(blocks) if blocks else np.zeros((0, 1), weights.dtype))


@dataclass(frozen=True)
class CnnPredictor:
    """The FedAvg CNN through Winograd tiles."""

    layout: Layout
    rows: int = 256  # images scored at a time: enough for the dense layers to be worth reading once

    def predict(self, weights: np.ndarray, contexts: Contexts) -> Prediction:
        torch = single_threaded_torch()
        from fedbandit.models.kernels.cnn import CnnNetwork, images_of
        from fedbandit.models.kernels.convolutions import BLOCK

        assert isinstance(contexts.shared, np.ndarray)
        rows = min(len(contexts), self.rows)
        images = images_of(contexts.shared, weights.dtype)
        with torch.no_grad():
            network = CnnNetwork(self.layout, images, rows, min(rows, BLOCK))
            network.load(torch.from_numpy(weights))
            scores = np.empty((len(contexts), network.num_actions), weights.dtype)
            for start in range(0, len(contexts), self.rows):
                stop = min(start + self.rows, len(contexts))
                scores[start:stop] = network.forward(start, stop).numpy()
        return Prediction(scores)


@dataclass(frozen=True)
class TorchPredictor:
    """Any model by its own `scores`, on any torch device."""

    model: Model
    layout: Layout
    device: str = "cpu"
    rows: int = 256  # scored at a time: enough to keep a core busy, few enough for its cache

    def predict(self, weights: np.ndarray, contexts: Contexts) -> Prediction:
        if (
            self.device != "cpu"
            and isinstance(contexts.shared, Ragged)
            and self.model.kernel is None
        ):
            raise ConfigError(
                f"model.name: on device {self.device} only the built-in models take sparse features"
            )
        torch = single_threaded_torch()
        params = self.layout.split(torch.from_numpy(weights).to(self.device))
        with torch.no_grad():
            blocks = [
                self.model.scores(params, model_input(block, weights.dtype, self.device))
                .cpu()
                .numpy()
                for block in _decisions(contexts, self.rows)
            ]
        if contexts.candidates is not None:
            scores = np.concatenate(blocks) if blocks else np.zeros(0, weights.dtype)
            return Prediction(scores, bounds=contexts.candidates.bounds)
        none = np.zeros((0, 1, 1) if self.model.heads else (0, 1), weights.dtype)
        scores = np.concatenate(blocks) if blocks else none
        return of_heads(scores) if self.model.heads else Prediction(scores)


def of_heads(scores: np.ndarray) -> Prediction:
    """The prediction of an ensemble from the scores of its members: [n, heads, K]."""
    return Prediction(scores.mean(axis=1), heads=scores)


def single_threaded_torch() -> Any:
    """Torch with one intra-op thread in the calling thread: torch keeps the number per thread.

    The number changes the bits. Chunks are the unit of parallel work; threads inside them would
    only get in the way.
    """
    import torch

    torch.set_num_threads(1)
    return torch


def model_input(contexts: Contexts, dtype: np.dtype, device: str = "cpu") -> Any:
    """Decisions as a model's `scores` takes them: a tensor or sparse rows; over candidates both sides."""
    import torch

    if contexts.candidates is not None or isinstance(contexts.shared, Ragged):
        return contexts if contexts.candidates is not None else contexts.shared
    return torch.from_numpy(np.ascontiguousarray(contexts.shared, dtype)).to(device)


def unit_features(features: Features, dtype: np.dtype) -> np.ndarray:
    """Dense contexts scaled to length one: [n, features] of the weights' type."""
    assert isinstance(features, np.ndarray)
    x = np.ascontiguousarray(features.reshape(len(features), prod(features.shape[1:])), dtype)
    with np.errstate(over="ignore"):
        lengths = np.sqrt(np.square(x).sum(axis=1, keepdims=True))
    return np.asarray(x / np.maximum(lengths, dtype.type(_SMALLEST_NORM)))


def _linear(layout: Layout, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weight [features, K] and bias [K]; of an ensemble's layout the shapes of its first member."""
    (_, shape), (_, (actions,)) = layout.shapes[:2]
    return weights[:-actions].reshape(shape), weights[-actions:]


def _decisions(contexts: Contexts, rows: int) -> Iterator[Contexts]:
    for start in range(0, len(contexts), rows):
        yield contexts.slice(start, min(start + rows, len(contexts)))


def _blocks(features: Features, rows: int) -> Iterator[Features]:
    for start in range(0, len(features), rows):
        yield rows_between(features, start, min(start + rows, len(features)))
