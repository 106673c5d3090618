"""Models: `init(seed) -> params` and `scores(params, x) -> [n, K]`, pure functions of a flat dict of tensors.

A model knows nothing of clients, rounds or rewards. Your own is one such function pair in a file of your own.
"""

from fedbandit.core.contexts import ItemSpec
from fedbandit.models.base import DataSpec, Freezing, Layout, Model, Params
from fedbandit.models.builtin import BUILT_IN, build_model

__all__ = [
    "BUILT_IN",
    "DataSpec",
    "Freezing",
    "ItemSpec",
    "Layout",
    "Model",
    "Params",
    "build_model",
]
