"""Models, the facts about data that shape them, their parameters as one flat vector, and initial weights.

Initial weights have the forms of Keras, since the published learning rates were tuned with them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod, sqrt
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedbandit.core.contexts import Contexts, ItemSpec
from fedbandit.core.errors import ConfigError
from fedbandit.core.parts import nearest
from fedbandit.core.prediction import Prediction
from fedbandit.core.ragged import Ragged
from fedbandit.data.dataset import Header

if TYPE_CHECKING:
    import torch

Params = dict[str, "torch.Tensor"]
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class DataSpec:
    """The facts about the data from which a model takes its shape.

    Examples:
        >>> from fedbandit import open_dataset
        >>> DataSpec.of(open_dataset("topics").header)
        DataSpec(kind='sparse', shape=(10000,), num_actions=50, items=None)
    """

    kind: Literal["dense", "sparse"]
    shape: tuple[int, ...]  # of one context; for sparse text (words,)
    num_actions: int  # fixed ones; 0 over candidates
    items: ItemSpec | None = None  # of the candidates, where actions are not fixed

    @classmethod
    def of(cls, header: Header) -> "DataSpec":
        return cls(header.kind, header.shape, header.num_actions, header.items)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "DataSpec":
        """From what `dataclasses.asdict` and JSON made of one."""
        items = found["items"]
        if items is not None:
            items = ItemSpec(**{**items, "shape": tuple(items["shape"])})
        return cls(found["kind"], tuple(found["shape"]), found["num_actions"], items)


def _no_scores(params: Params, x: Any) -> "torch.Tensor":
    raise ConfigError("model.name: the model has no `scores`, so gradients cannot train it")


@dataclass(frozen=True)
class Model:
    """`init(seed)` makes named arrays; `scores(params, x)` scores all actions with tensors of the same names.

    `kernel` names a faster way to train exactly this model; without one, automatic differentiation
    does it. A model with `heads` is an ensemble: its scores are [n, heads, K]. A model with
    `predict(params, contexts) -> Prediction` acts by it, with numpy parameters, and can so say how
    sure it is (`width`); it needs `scores` only where gradients train it. `files()` lists what the
    functions have read from disk: a run is resumed only while these files hold the same bytes.
    `shapes` has the shapes of what `init` makes, where they are known before anything is made: a
    device refuses a file whose arrays do not fit them, however large the model that it names.

    Over candidates `scores` is given the `Contexts` and returns one score for each row of theirs, [m].

    Examples:
        >>> import numpy as np, torch
        >>> def scores(params, x):  # a linear model without a bias, of dense contexts
        ...     return x.flatten(1) @ params["weight"]
        >>> model = Model(init=lambda seed: {"weight": np.zeros((4, 3))}, scores=scores)
        >>> model.scores({"weight": torch.ones(4, 3)}, torch.ones(2, 2, 2)).shape
        torch.Size([2, 3])
    """

    init: Callable[[int], dict[str, np.ndarray]]
    scores: Callable[[Params, Any], "torch.Tensor"] = _no_scores
    kernel: Literal["sparse-linear", "dense-linear", "mlp", "sparse-mlp", "cnn"] | None = None
    heads: int = 0
    predict: Callable[[dict[str, np.ndarray], Any], Prediction] | None = None
    rows: Callable[[Contexts], Ragged] | None = None  # candidates as rows of a linear model
    files: Callable[[], Iterable[str]] = tuple
    shapes: Shapes | None = None


@dataclass(frozen=True)
class Layout:
    """Names and shapes of parameters in the order in which they lie in one flat vector."""

    shapes: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, arrays: dict[str, np.ndarray]) -> "Layout":
        return cls(tuple((name, tuple(array.shape)) for name, array in arrays.items()))

    @property
    def size(self) -> int:
        return sum(prod(shape) for _, shape in self.shapes)

    def flatten(self, arrays: dict[str, np.ndarray], dtype: np.dtype) -> np.ndarray:
        """One vector from named arrays."""
        return np.concatenate(
            [np.asarray(arrays[name], dtype).reshape(-1) for name, _ in self.shapes]
        )

    def split(self, vector: Any) -> dict[str, Any]:
        """Named views into a flat vector, of numpy or of torch."""
        views, start = {}, 0
        for name, shape in self.shapes:
            stop = start + prod(shape)
            views[name] = vector[start:stop].reshape(shape)
            start = stop
        return views


@dataclass(frozen=True)
class Freezing:
    """Parameters that stay as they are: the others make up a shorter vector, which is all that is trained and sent."""

    layout: Layout
    frozen: tuple[str, ...]

    @classmethod
    def of(cls, layout: Layout, names: Iterable[str]) -> "Freezing":
        """Freeze parameters by name; a layer's name freezes its bias, too."""
        known, frozen = [name for name, _ in layout.shapes], set()
        for name in names:
            if name not in known:
                raise ConfigError(
                    f"model.freeze: the model has no parameter {name!r}{nearest(name, known)}"
                )
            frozen |= {name, f"{name}_bias"} & set(known)
        if frozen == set(known):
            raise ConfigError("model.freeze: nothing would be left to train")
        return cls(layout, tuple(name for name in known if name in frozen))

    @property
    def trainable(self) -> Layout:
        """The layout of the parameters that are trained."""
        return Layout(
            tuple((name, shape) for name, shape in self.layout.shapes if name not in self.frozen)
        )

    def pick(self, whole: np.ndarray) -> np.ndarray:
        """The trainable part of a whole vector."""
        views = self.layout.split(whole)
        return np.concatenate([views[name].reshape(-1) for name, _ in self.trainable.shapes])

    def join(self, part: np.ndarray, whole: np.ndarray | None) -> np.ndarray:
        """The whole vector with this trainable part."""
        assert whole is not None
        joined = whole.astype(part.dtype)
        views, parts = self.layout.split(joined), self.trainable.split(part)
        for name, values in parts.items():
            views[name][...] = values
        return joined


# The standard deviation of a unit normal cut off at two standard deviations; Keras divides by it.
_TRUNCATED_STD = 0.87962566103423978


def glorot_uniform(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Uniform in ±sqrt(6 / (fan in + fan out)); the last two axes are in and out, those before them a kernel."""
    limit = sqrt(6 / sum(_fans(shape)))
    return rng.uniform(-limit, limit, shape)


def glorot_normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Normal with variance 2 / (fan in + fan out), redrawn beyond two standard deviations."""
    values = rng.standard_normal(shape)
    while (outside := np.abs(values) > 2).any():
        values[outside] = rng.standard_normal(int(outside.sum()))
    return values * sqrt(2 / sum(_fans(shape))) / _TRUNCATED_STD


def _fans(shape: tuple[int, ...]) -> tuple[int, int]:
    kernel = prod(shape[:-2])
    return kernel * shape[-2], kernel * shape[-1]
