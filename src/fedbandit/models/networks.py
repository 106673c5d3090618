"""Neural networks for dense contexts: the FedAvg CNN for images, and a small MLP for anything."""

from typing import Any

import numpy as np

from fedbandit.errors import ConfigError
from fedbandit.models.base import DataSpec, Model, Params
from fedbandit.models.initial import glorot_normal, glorot_uniform
from fedbandit.randomness import Purpose, generator


def cnn(data: DataSpec) -> Model:
    """The FedAvg CNN: two 5x5 convolutions (32, 64), each pooled by 2, a dense layer of 512, one score per action.

    Kernels are kept as [height, width, in, out] and dense weights as [in, out], in the order Keras has.
    """
    if data.kind != "dense" or len(data.shape) not in (2, 3):
        raise ConfigError(f"model.name: the cnn needs images, the data set has {data.kind} contexts of {data.shape}")
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

        x = x.reshape(-1, height, width, channels).permute(0, 3, 1, 2)  # channels last in memory, as oneDNN likes it
        for layer in ("conv1", "conv2"):
            kernel = params[layer].permute(3, 2, 0, 1)
            x = conv2d(x, kernel, params[f"{layer}_bias"], padding=2)
            x = relu(max_pool2d(x, 2))  # the same as relu first, on a quarter of the values
        x = x.permute(0, 2, 3, 1).flatten(1)
        x = relu(x @ params["dense1"] + params["dense1_bias"])
        return x @ params["dense2"] + params["dense2_bias"]

    return Model(init, scores, kernel="cnn")


def mlp(data: DataSpec, hidden: int = 128) -> Model:
    """One hidden layer of relu units on dense features."""
    if data.kind != "dense":
        raise ConfigError("model.name: the mlp needs dense features; use linear for sparse text")
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

        x = relu(x.flatten(1) @ params["dense1"] + params["dense1_bias"])
        return x @ params["dense2"] + params["dense2_bias"]

    return Model(init, scores)
