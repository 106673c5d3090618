"""Scoring on a device with a linear model: numpy alone, and for text the same bits as the simulator's kernel."""

from collections.abc import Callable

import numpy as np

from fedbandit.deploy.contexts import Context

Scorer = Callable[[Context], np.ndarray]
"""The score of every action for one context: [K]."""

_SMALLEST_NORM = 1e-12  # what torch's normalize divides by at least


def linear_scorer(weight: np.ndarray, bias: np.ndarray) -> Scorer:
    """Scores by `weight` [features, K] and `bias` [K]; dense features are L2-normalised, as in training."""

    def scores(context: Context) -> np.ndarray:
        if context.ids is None:
            x = context.values.reshape(-1).astype(weight.dtype)
            return x / max(float(np.linalg.norm(x)), _SMALLEST_NORM) @ weight + bias
        terms = context.values.astype(weight.dtype)[:, None] * weight[context.ids]
        # A sum over the first axis adds row by row, from the bias on: the order in which the simulator's kernel adds.
        return np.add.reduce(np.concatenate([bias[None], terms]), axis=0)

    return scores
