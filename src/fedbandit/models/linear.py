"""Linear models with bias: on dense features, and on sparse text without ever making it dense."""

from typing import Any

import numpy as np

from fedbandit.data.dataset import Contexts
from fedbandit.models.base import DataSpec, Model, Params
from fedbandit.models.initial import glorot_uniform
from fedbandit.randomness import Purpose, generator


def linear(data: DataSpec) -> Model:
    """A score per action, linear in the context: L2-normalised dense features (zero at first) or sparse text."""
    return _sparse(data) if data.kind == "sparse" else _dense(data)


def _dense(data: DataSpec) -> Model:
    features = int(np.prod(data.shape))

    def init(seed: int) -> dict[str, np.ndarray]:
        return {"weight": np.zeros((features, data.num_actions)), "bias": np.zeros(data.num_actions)}

    def scores(params: Params, x: Any) -> Any:
        import torch

        x = torch.nn.functional.normalize(x.flatten(1), dim=1)
        return torch.addmm(params["bias"], x, params["weight"])

    return Model(init, scores)


def _sparse(data: DataSpec) -> Model:
    (words,) = data.shape

    def init(seed: int) -> dict[str, np.ndarray]:
        weight = glorot_uniform(generator(seed, Purpose.MODEL), (words, data.num_actions))
        return {"weight": weight, "bias": np.zeros(data.num_actions)}

    def scores(params: Params, x: Contexts) -> Any:
        import torch

        assert not isinstance(x, np.ndarray)
        weight = params["weight"]
        ids, offsets = (torch.as_tensor(a.astype(np.int64)) for a in (x.ids, x.offsets))
        values = torch.as_tensor(x.values).to(weight)
        summed = torch.nn.functional.embedding_bag(
            ids, weight, offsets, mode="sum", per_sample_weights=values, include_last_offset=True
        )
        return summed + params["bias"]

    return Model(init, scores, kernel="sparse-linear")
