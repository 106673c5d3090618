"""Initial weights in the forms that Keras has, since the published learning rates were tuned with them."""

from math import prod, sqrt

import numpy as np

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
