"""Forward passes: from flat weights and contexts to a `Prediction`, one predictor for each kind of
model.

Loads neither torch nor numba until a model needs them; knows nothing of rules, clients or training.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from fedbandit.core.contexts import Contexts, Features, rows_between, unit_rows
from fedbandit.core.errors import ConfigError
from fedbandit.core.prediction import Prediction
from fedbandit.core.ragged import Ragged
from fedbandit.models.base import Layout, Model
from fedbandit.models.kernels import sparse_loops


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
    kernel = model.kernel if device == "cpu" else None
    sparse_or_one = light or kernel == "sparse-linear" or not model.heads
    if kernel in ("sparse-linear", "dense-linear") and sparse_or_one:
        one = LinearPredictor(layout, light)
        return HeadsPredictor(one, model.heads) if model.heads else one
    if kernel == "cnn" and not light:
        return CnnPredictor(layout)
    if kernel in ("mlp", "sparse-mlp") and not light:
        return LayersPredictor(layout)
    return TorchPredictor(model, layout, device)


def is_linear(model: Model) -> bool:
    """Whether numpy alone can predict with the model: its built-in kernel is linear."""
    return model.kernel in ("sparse-linear", "dense-linear")


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
        mean, heads, width = (
            None if part is None else part[..., 0]
            for part in (found.mean, found.heads, found.width)
        )
        assert mean is not None
        return Prediction(mean, heads, width, contexts.candidates.bounds)


@dataclass(frozen=True)
class LinearPredictor:
    """`weight [features, K]` and `bias [K]` over sparse rows, or dense contexts of length one.

    A row's scores do not depend on its neighbours. With precisions behind weight and bias in the
    layout, scores have a width. A `light` one never compiles; on sparse rows it has the same bits.
    """

    layout: Layout
    light: bool = False
    rows: int = 4096  # dense ones scored at a time: bounds the memory of a whole split

    def predict(self, weights: np.ndarray, contexts: Contexts) -> Prediction:
        # Of an ensemble's layout the shapes of its first member are taken.
        (_, shape), (_, (actions,)) = self.layout.shapes[:2]

        def scores(vector: np.ndarray, power: int) -> np.ndarray:
            weight, bias = vector[:-actions].reshape(shape), vector[-actions:]
            out = np.empty((len(contexts), actions), weights.dtype)
            self._fill(out, contexts.shared, weight, bias, power)
            return out

        if "bias_precision" not in dict(self.layout.shapes):
            return Prediction(scores(weights, 1))
        means, precisions = np.split(weights, 2)
        squares = scores(1 / precisions, 2)
        return Prediction(scores(means, 1), width=np.sqrt(squares))

    def _fill(
        self, out: np.ndarray, x: Features, weight: np.ndarray, bias: np.ndarray, power: int
    ) -> None:
        """Bias + Σ x^power · weight for every context and action, [n, K]."""
        if self.light:
            with np.errstate(over="ignore", invalid="ignore"):  # callers look whether it is finite
                for i in range(len(out)):
                    out[i] = _plain_scores(rows_between(x, i, i + 1), weight, bias, power)
        elif isinstance(x, Ragged):
            values = _power(np.asarray(x.values, weight.dtype), power)
            sparse_loops.scores(weight, bias, x.offsets, x.ids, values, out)
        else:
            from fedbandit.models.kernels import dense_kernels

            for start in range(0, len(out), self.rows):
                block = unit_rows(rows_between(x, start, start + self.rows), weight.dtype)
                to = out[start : start + self.rows]
                dense_kernels.scores(_power(block, power), weight, bias, to)


def _plain_scores(x: Features, weight: np.ndarray, bias: np.ndarray, power: int) -> np.ndarray:
    """The scores [K] of one context, in numpy."""
    if isinstance(x, Ragged):
        terms = _power(np.asarray(x.values, weight.dtype), power)[:, None] * weight[x.ids]
        # Adds row by row from the bias on, as the compiled loop does; `sum` may not.
        return np.asarray(np.add.accumulate(np.concatenate([bias[None], terms]))[-1])
    return np.asarray(_power(unit_rows(x, weight.dtype)[0], power) @ weight + bias)


def _power(x: np.ndarray, power: int) -> np.ndarray:
    """The first or second power."""
    return x if power == 1 else x * x


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
        from fedbandit.models.kernels.networks import Layers, rows_of

        features, blocks = self.layout.shapes[0][1][0], []
        with torch.no_grad():
            for block in _blocks(contexts, self.rows):
                rows = rows_of(block.shared, features, weights.dtype)
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
        from fedbandit.models.kernels.networks import BLOCK, CnnNetwork, images_of

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
                for block in _blocks(contexts, self.rows)
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
    """Decisions as a model's `scores` takes them: a tensor or sparse rows; over candidates both
    sides.
    """
    import torch

    if contexts.candidates is not None or isinstance(contexts.shared, Ragged):
        return contexts if contexts.candidates is not None else contexts.shared
    return torch.from_numpy(np.ascontiguousarray(contexts.shared, dtype)).to(device)


def _blocks(contexts: Contexts, rows: int) -> Iterator[Contexts]:
    for start in range(0, len(contexts), rows):
        yield contexts.slice(start, min(start + rows, len(contexts)))
