"""The built-in models: linear on dense or sparse features, two towers over candidates, the FedAvg CNN,
a small MLP.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedbandit.core.contexts import Contexts
from fedbandit.core.errors import ConfigError
from fedbandit.core.parts import construct, resolve
from fedbandit.core.prediction import Prediction
from fedbandit.core.ragged import Ragged
from fedbandit.core.randomness import Purpose, bits, generator
from fedbandit.models.base import DataSpec, Model, Params, Shapes, glorot_normal, glorot_uniform
from fedbandit.models.candidates import PARTS, candidate_rows, unit_entries
from fedbandit.models.kernels import sparse_loops
from fedbandit.models.statistics import linear_statistics

if TYPE_CHECKING:
    import torch

_MOST_HEADS = 10_000


def linear(
    data: DataSpec, features: Sequence[str] | None = None, buckets: int | None = None
) -> Model:
    """A score per action, linear in the context: L2-normalised dense features (zero at first) or sparse ones.

    Over candidates it is linear in `features`: of the "item", of the "shared" context, and in their
    crosses "shared*item", which are hashed into `buckets` weights (2**18) where there are more.
    """
    if data.items is not None:
        return _over_candidates(data, features or PARTS, buckets or 2**18)
    if features is not None or buckets is not None:
        raise ConfigError("model.features: applies only to candidates; this data has fixed actions")
    return _sparse(data) if data.kind == "sparse" else _dense(data)


def linear_width(
    data: DataSpec, features: Sequence[str] | None = None, buckets: int | None = None
) -> Model:
    """The model `linear` with a precision beside each weight, which tells how sure its scores are.

    The squared width of a score is Σ x² / precision over the features x of its action, with 1 for
    the bias. It acts and is never trained: `diag-newton` deploys it, with its curvature as precision.
    """
    one = linear(data, features, buckets)

    def init(seed: int) -> dict[str, np.ndarray]:
        arrays = one.init(seed)
        return arrays | {f"{name}_precision": np.ones_like(a) for name, a in arrays.items()}

    shapes = dict(one.shapes or {})
    shapes |= {f"{name}_precision": shape for name, shape in shapes.items()}
    return replace(one, init=init, shapes=shapes)


def _over_candidates(data: DataSpec, features: Sequence[str], buckets: int) -> Model:
    assert data.items is not None
    rows, width = candidate_rows(prod(data.shape), prod(data.items.shape), features, buckets)

    def scores(params: Params, x: Any) -> Any:
        return _products(params["weight"], rows(x))[:, 0] + params["bias"]

    shapes = _linear_shapes(width, 1)
    return Model(_zeros(shapes), scores, "sparse-linear", rows=rows, shapes=shapes)


def _linear_shapes(features: int, actions: int) -> Shapes:
    return {"weight": (features, actions), "bias": (actions,)}


def _zeros(shapes: Shapes) -> Callable[[int], dict[str, np.ndarray]]:
    """The `init` of a model that starts from zero."""
    return lambda seed: {name: np.zeros(shape) for name, shape in shapes.items()}


def _dense(data: DataSpec) -> Model:
    shapes = _linear_shapes(prod(data.shape), data.num_actions)

    def scores(params: Params, x: Any) -> Any:
        import torch

        x = torch.nn.functional.normalize(x.flatten(1), dim=1)
        return torch.addmm(params["bias"], x, params["weight"])

    return Model(_zeros(shapes), scores, kernel="dense-linear", shapes=shapes)


def _sparse(data: DataSpec) -> Model:
    (words,) = data.shape

    def init(seed: int) -> dict[str, np.ndarray]:
        weight = glorot_uniform(generator(seed, Purpose.MODEL), (words, data.num_actions))
        return {"weight": weight, "bias": np.zeros(data.num_actions)}

    def scores(params: Params, x: Any) -> Any:
        return _products(params["weight"], x) + params["bias"]

    shapes = _linear_shapes(words, data.num_actions)
    return Model(init, scores, kernel="sparse-linear", shapes=shapes)


def _products(weight: "torch.Tensor", x: Any) -> Any:
    """Products of a layer's weights and contexts: dense ones, or sparse ones as ids and values."""
    import torch

    if isinstance(x, torch.Tensor):
        return x.flatten(1) @ weight
    ids, offsets = (
        torch.as_tensor(a.astype(np.int64)).to(weight.device) for a in (x.ids, x.offsets)
    )
    values = torch.as_tensor(x.values).to(weight)
    return torch.nn.functional.embedding_bag(
        ids, weight, offsets, mode="sum", per_sample_weights=values, include_last_offset=True
    )


def linear_heads(
    data: DataSpec,
    heads: int = 10,
    features: Sequence[str] | None = None,
    buckets: int | None = None,
) -> Model:
    """An ensemble of linear models: in training each event counts Poisson(1) times for each head, so heads differ.

    Over candidates its members share `features` and `buckets`, as of the model `linear`.
    """
    if heads < 2:
        raise ConfigError(f"model.heads: an ensemble has at least 2, not {heads}")
    if heads > _MOST_HEADS:
        raise ConfigError(f"model.heads: at most {_MOST_HEADS:,}, not {heads:,}")
    one = linear(data, features, buckets)

    def init(seed: int) -> dict[str, np.ndarray]:
        seeds = [seed, *(int(bits(seed, Purpose.HEADS, head)) >> 1 for head in range(1, heads))]
        arrays = [one.init(own) for own in seeds]
        return {
            f"{name}{head}": array for head, own in enumerate(arrays) for name, array in own.items()
        }

    def scores(params: Params, x: Any) -> Any:
        import torch

        names = ("weight", "bias")
        return torch.stack(
            [one.scores({n: params[f"{n}{h}"] for n in names}, x) for h in range(heads)], dim=1
        )

    each = (one.shapes or {}).items()
    shapes = {f"{name}{head}": shape for head in range(heads) for name, shape in each}
    return Model(init, scores, one.kernel, heads=heads, rows=one.rows, shapes=shapes)


def two_tower(data: DataSpec, size: int = 16) -> Model:
    """Two linear towers over candidates: a vector of `size` for the user, one for each item.

    A candidate's score is u · v + its own weight + bias: u is linear in the shared features, v and
    the own weight in the item's, both scaled to length one. It has (shared + item features) x `size`
    weights where `linear` has one for every cross. It acts in numpy and is trained by torch.
    """
    if data.items is None:
        raise ConfigError("model.name: two-tower scores candidates; this data has fixed actions")
    if size < 1:
        raise ConfigError(f"model.size: must be at least 1, not {size}")
    users, things = prod(data.shape), prod(data.items.shape)

    def init(seed: int) -> dict[str, np.ndarray]:
        towers = [(users, size), (things, size)]
        user, item = (
            glorot_uniform(generator(seed, Purpose.MODEL, layer), shape)
            for layer, shape in enumerate(towers, start=1)
        )
        return {"user": user, "item": item, "own": np.zeros((things, 1)), "bias": np.zeros(1)}

    shapes = {"user": (users, size), "item": (things, size), "own": (things, 1), "bias": (1,)}

    def scores(params: Params, x: Any) -> Any:
        import torch

        one, other = unit_entries(x.shared), unit_entries(x.candidates.features)
        owners = torch.as_tensor(np.repeat(np.arange(len(x)), x.candidates.counts))
        both = _products(params["user"], one)[owners] * _products(params["item"], other)
        return both.sum(dim=1) + _products(params["own"], other)[:, 0] + params["bias"]

    def predict(params: dict[str, np.ndarray], x: Contexts) -> Prediction:
        assert x.candidates is not None
        one, other = unit_entries(x.shared), unit_entries(x.candidates.features)
        user, item, own = (
            _numpy_products(params[name], rows)
            for name, rows in (("user", one), ("item", other), ("own", other))
        )
        owners = np.repeat(np.arange(len(x)), x.candidates.counts)
        mean = (user[owners] * item).sum(axis=1) + own[:, 0] + params["bias"]
        return Prediction(mean, bounds=x.candidates.bounds)

    return Model(init, scores, predict=predict, shapes=shapes)


def _numpy_products(weight: np.ndarray, x: Ragged) -> np.ndarray:
    """`_products` without torch; a row's products do not depend on its neighbours."""
    out = np.empty((len(x), weight.shape[1]), weight.dtype)
    values = np.asarray(x.values, weight.dtype)
    sparse_loops.scores(
        weight, np.zeros(weight.shape[1], weight.dtype), x.offsets, x.ids, values, out
    )
    return out


def cnn(data: DataSpec) -> Model:
    """The FedAvg CNN: two 5x5 convolutions (32, 64), each pooled by 2, a dense layer of 512, one score per action.

    Kernels are kept as [height, width, in, out] and dense weights as [in, out], in the order Keras has.
    """
    if data.kind != "dense" or len(data.shape) not in (2, 3):
        raise ConfigError(
            f"model.name: the cnn needs images, the data set has {data.kind} contexts of {data.shape}"
        )
    height, width, channels = (*data.shape, 1)[:3]
    flat = (height // 4) * (width // 4) * 64
    if flat == 0:
        raise ConfigError(f"model.name: the cnn needs images of at least 4x4, not {height}x{width}")
    layers: Shapes = {
        "conv1": (5, 5, channels, 32),
        "conv2": (5, 5, 32, 64),
        "dense1": (flat, 512),
        "dense2": (512, data.num_actions),
    }

    def scores(params: Params, x: Any) -> Any:
        from torch.nn.functional import conv2d, max_pool2d, relu

        x = x.reshape(-1, height, width, channels).permute(
            0, 3, 1, 2
        )  # channels last in memory, as oneDNN likes it
        for layer in ("conv1", "conv2"):
            kernel = params[layer].permute(3, 2, 0, 1)
            x = conv2d(x, kernel, params[f"{layer}_bias"], padding=2)
            x = relu(max_pool2d(x, 2))  # the same as relu first, on a quarter of the values
        x = x.permute(0, 2, 3, 1).flatten(1)
        x = relu(x @ params["dense1"] + params["dense1_bias"])
        return x @ params["dense2"] + params["dense2_bias"]

    init = _layer_by_layer(layers, glorot_normal, first=0)
    return Model(init, scores, kernel="cnn", shapes=_with_biases(layers))


def _layer_by_layer(
    layers: Shapes, draw: Callable[..., np.ndarray], first: int
) -> Callable[[int], dict[str, np.ndarray]]:
    """The `init` of a network: drawn weights, zero biases; layers are addressed from `first` on."""

    def init(seed: int) -> dict[str, np.ndarray]:
        params = {}
        for layer, (name, shape) in enumerate(layers.items(), start=first):
            params[name] = draw(generator(seed, Purpose.MODEL, layer), shape)
            params[f"{name}_bias"] = np.zeros(shape[-1])
        return params

    return init


def _with_biases(layers: Shapes) -> Shapes:
    """The shapes of layers, each followed by that of its bias."""
    pairs = (((name, s), (f"{name}_bias", s[-1:])) for name, s in layers.items())
    return {name: s for pair in pairs for name, s in pair}


def mlp(data: DataSpec, hidden: int = 128) -> Model:
    """One hidden layer of relu units on dense or sparse features."""
    if hidden < 1:
        raise ConfigError(f"model.hidden: must be at least 1, not {hidden}")
    layers: Shapes = {"dense1": (prod(data.shape), hidden), "dense2": (hidden, data.num_actions)}

    def scores(params: Params, x: Any) -> Any:
        from torch.nn.functional import relu

        x = relu(_products(params["dense1"], x) + params["dense1_bias"])
        return x @ params["dense2"] + params["dense2_bias"]

    kernel: Literal["mlp", "sparse-mlp"] = "sparse-mlp" if data.kind == "sparse" else "mlp"
    init = _layer_by_layer(layers, glorot_uniform, first=1)
    return Model(init, scores, kernel, shapes=_with_biases(layers))


BUILT_IN = {
    "linear": linear,
    "linear-width": linear_width,
    "linear-statistics": linear_statistics,
    "linear-heads": linear_heads,
    "two-tower": two_tower,
    "cnn": cnn,
    "mlp": mlp,
}


def build_model(name: str, data: DataSpec, parameters: Mapping[str, Any] | None = None) -> Model:
    """The model of that name: built in, or `my_package.my_module:my_model`, a `Model` or a function that makes one."""
    found = resolve("model.name", name, BUILT_IN)
    if isinstance(found, Model):
        if parameters:
            raise ConfigError(
                f"model.{next(iter(parameters))}: {name} is a finished model and takes no parameters"
            )
        return found
    if data.items is not None and found in (cnn, mlp):
        raise ConfigError(f"model.name: {name} scores fixed actions; this data has candidates")
    model = construct("model", found, parameters or {}, data)
    if not isinstance(model, Model):
        raise ConfigError(
            f"model.name: {name} made a {type(model).__name__}, not a fedbandit.models.Model"
        )
    return model
