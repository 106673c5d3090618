"""Ridge regression as a model that acts: scores, their widths, and draws of the parameters."""

from collections.abc import Sequence
from math import prod

import numpy as np

from fedbandit.core.contexts import Contexts, Features, unit_rows
from fedbandit.core.errors import ConfigError
from fedbandit.core.prediction import Prediction
from fedbandit.core.ragged import Ragged
from fedbandit.core.randomness import scramble
from fedbandit.models.base import DataSpec, Model, Shapes
from fedbandit.models.candidates import PARTS, candidate_rows


class FeatureMap:
    """Contexts, or candidates, as dense rows x [n, size] of float64, with a 1 for the bias at the end.

    Dense contexts are scaled to length one. Sparse rows of more than `dimensions` features are
    folded into that many by a fixed hash with signs (Weinberger et al., 2009), which keeps products
    of rows right on average; candidates become the rows of the model `linear` first.
    """

    def __init__(self, data: DataSpec, width: int, dimensions: int) -> None:
        """For rows of that many features, as a linear model of this data has them."""
        if dimensions < 1:
            raise ConfigError(f"algorithm.dimensions: must be at least 1, not {dimensions}")
        sparse = data.kind == "sparse" or data.items is not None
        self._folded = sparse and width > dimensions
        self.size = (dimensions if self._folded else width) + 1
        self.actions = max(1, data.num_actions)  # one for all candidates

    def __call__(self, features: Features) -> np.ndarray:
        """Rows x of dense contexts, or of the sparse rows of a linear model."""
        x = np.zeros((len(features), self.size))
        x[:, -1] = 1
        if isinstance(features, Ragged):
            places = features.ids.astype(np.int64)
            values = np.asarray(features.values, np.float64)
            if self._folded:
                with np.errstate(over="ignore"):
                    hashed = scramble(places.astype(np.uint64))
                places = (hashed >> np.uint64(1)).astype(np.int64) % (self.size - 1)
                values = np.where(hashed & np.uint64(1), values, -values)
            np.add.at(x, (features.row_of_entry(), places), values)
        else:
            x[:, :-1] = unit_rows(features)
        return x


def linear_statistics(
    data: DataSpec,
    features: Sequence[str] | None = None,
    buckets: int | None = None,
    dimensions: int = 64,
    draws: int = 0,
) -> Model:
    """Ridge regressions with their uncertainty: what `algorithm.name = "statistics"` deploys.

    `theta` [K, d] are the coefficients of each action (over candidates K = 1), `root` [K, d, d] has
    root' root = A⁻¹: the mean of a score is x'θ and its width sqrt(x'A⁻¹x) = |root x|. With `draws`
    the model also holds that many draws of θ, whose scores are the heads. It acts, never trains.
    """
    rows, width = None, prod(data.shape)
    if data.items is not None:
        sizes = width, prod(data.items.shape)
        rows, width = candidate_rows(*sizes, features or PARTS, buckets or 2**18)
    mapped = FeatureMap(data, width, dimensions)
    k, d = mapped.actions, mapped.size
    shapes: Shapes = {"theta": (k, d), "root": (k, d, d)}
    shapes |= {"draws": (draws, k, d)} if draws else {}

    def init(seed: int) -> dict[str, np.ndarray]:
        arrays = {"theta": np.zeros((k, d)), "root": np.tile(np.eye(d), (k, 1, 1))}
        return arrays | ({"draws": np.zeros((draws, k, d))} if draws else {})

    def predict(params: dict[str, np.ndarray], contexts: Contexts) -> Prediction:
        dtype = params["theta"].dtype
        x = mapped(contexts.shared if rows is None else rows(contexts))
        # Sums by numpy itself, one row after the other: BLAS has other bits by threads and rows.
        mean = np.einsum("nd,kd->nk", x, params["theta"].astype(np.float64))
        width, root = np.empty_like(mean), params["root"].astype(np.float64)
        for action in range(k):
            spread = np.einsum("nd,ed->ne", x, root[action])
            width[:, action] = np.sqrt(np.einsum("ne,ne->n", spread, spread))
        heads = None
        if draws:
            heads = np.einsum("nd,hkd->nhk", x, params["draws"].astype(np.float64)).astype(dtype)
        mean, width = mean.astype(dtype), width.astype(dtype)
        if contexts.candidates is None:
            return Prediction(mean, heads, width)
        heads = None if heads is None else heads[:, :, 0]
        return Prediction(mean[:, 0], heads, width[:, 0], contexts.candidates.bounds)

    return Model(init, predict=predict, shapes=shapes)
