"""The built-in models: linear on dense or sparse features (text, tables), the FedAvg CNN, and a small MLP."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from fedbandit.core.errors import ConfigError
from fedbandit.core.parts import construct, resolve
from fedbandit.core.randomness import Purpose, bits, generator
from fedbandit.models.base import DataSpec, Model, Params, glorot_normal, glorot_uniform
from fedbandit.models.candidates import PARTS, candidate_rows

if TYPE_CHECKING:
    import torch


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


def _over_candidates(data: DataSpec, features: Sequence[str], buckets: int) -> Model:
    assert data.items is not None
    rows, width = candidate_rows(prod(data.shape), prod(data.items.shape), features, buckets)

    def init(seed: int) -> dict[str, np.ndarray]:
        return {"weight": np.zeros((width, 1)), "bias": np.zeros(1)}

    def scores(params: Params, x: Any) -> Any:
        return _products(params["weight"], rows(x))[:, 0] + params["bias"]

    return Model(init, scores, kernel="sparse-linear", rows=rows)


def _dense(data: DataSpec) -> Model:
    features = int(np.prod(data.shape))

    def init(seed: int) -> dict[str, np.ndarray]:
        return {
            "weight": np.zeros((features, data.num_actions)),
            "bias": np.zeros(data.num_actions),
        }

    def scores(params: Params, x: Any) -> Any:
        import torch

        x = torch.nn.functional.normalize(x.flatten(1), dim=1)
        return torch.addmm(params["bias"], x, params["weight"])

    return Model(init, scores, kernel="dense-linear")


def _sparse(data: DataSpec) -> Model:
    (words,) = data.shape

    def init(seed: int) -> dict[str, np.ndarray]:
        weight = glorot_uniform(generator(seed, Purpose.MODEL), (words, data.num_actions))
        return {"weight": weight, "bias": np.zeros(data.num_actions)}

    def scores(params: Params, x: Any) -> Any:
        return _products(params["weight"], x) + params["bias"]

    return Model(init, scores, kernel="sparse-linear")


def _products(weight: "torch.Tensor", x: Any) -> Any:
    """What a layer's weights make of each context: dense ones, or sparse ones as ids and values."""
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


def linear_heads(data: DataSpec, heads: int = 10) -> Model:
    """An ensemble of linear models: in training each event counts Poisson(1) times for each head, so heads differ."""
    if heads < 2:
        raise ConfigError(f"model.heads: an ensemble has at least 2, not {heads}")
    one = linear(data)

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

    return Model(init, scores, kernel=one.kernel, heads=heads)


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

    def init(seed: int) -> dict[str, np.ndarray]:
        shapes = {
            "conv1": (5, 5, channels, 32),
            "conv2": (5, 5, 32, 64),
            "dense1": (flat, 512),
            "dense2": (512, data.num_actions),
        }
        params = {}
        for layer, (name, shape) in enumerate(shapes.items()):
            params[name] = glorot_normal(generator(seed, Purpose.MODEL, layer), shape)
            params[f"{name}_bias"] = np.zeros(shape[-1])
        return params

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

    return Model(init, scores, kernel="cnn")


def mlp(data: DataSpec, hidden: int = 128) -> Model:
    """One hidden layer of relu units on dense or sparse features."""
    if hidden < 1:
        raise ConfigError(f"model.hidden: must be at least 1, not {hidden}")
    features = int(np.prod(data.shape))

    def init(seed: int) -> dict[str, np.ndarray]:
        params: dict[str, np.ndarray] = {}
        for layer, shape in enumerate([(features, hidden), (hidden, data.num_actions)], start=1):
            params[f"dense{layer}"] = glorot_uniform(generator(seed, Purpose.MODEL, layer), shape)
            params[f"dense{layer}_bias"] = np.zeros(shape[1])
        return params

    def scores(params: Params, x: Any) -> Any:
        from torch.nn.functional import relu

        x = relu(_products(params["dense1"], x) + params["dense1_bias"])
        return x @ params["dense2"] + params["dense2_bias"]

    return Model(init, scores, kernel="sparse-mlp" if data.kind == "sparse" else "mlp")


BUILT_IN = {"linear": linear, "linear-heads": linear_heads, "cnn": cnn, "mlp": mlp}


def build_model(name: str, data: DataSpec, parameters: Mapping[str, Any] | None = None) -> Model:
    """The model of that name: built in, or `my_package.my_module:my_model`, a `Model` or a function that makes one."""
    found = resolve("model.name", name, BUILT_IN)
    if isinstance(found, Model):
        if parameters:
            raise ConfigError(
                f"model.{next(iter(parameters))}: {name} is a finished model and takes no parameters"
            )
        return found
    if data.items is not None and found in (linear_heads, cnn, mlp):
        raise ConfigError(f"model.name: {name} scores fixed actions; this data has candidates")
    model = construct("model", found, parameters or {}, data)
    if not isinstance(model, Model):
        raise ConfigError(
            f"model.name: {name} made a {type(model).__name__}, not a fedbandit.models.Model"
        )
    return model
