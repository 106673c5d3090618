"""An app's context as a row of numbers: raw text by the model's vocabulary, dense features as they are.

Only these numbers are logged, and only on the device.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedbandit.data.text import tokenise


@dataclass(frozen=True)
class Context:
    """One row: float32 [*shape] where dense; for text the values [n] of the words `ids` int32 [n], ascending."""

    values: np.ndarray
    ids: np.ndarray | None = None


def bag_of_words(words: Sequence[str], index: Mapping[str, int]) -> Context:
    """Counts of the known words divided by their L2 norm: what the importers make of a sentence, without numba."""
    known = [index[word] for word in words if word in index]
    ids, counts = np.unique(np.array(known, np.int32), return_counts=True)
    squares = float((counts.astype(np.float64) ** 2).sum())
    return Context((counts / np.sqrt(max(squares, 1.0))).astype(np.float32), ids)


def text(context: object, index: Mapping[str, int] | None, words: int) -> Context:
    """A raw text, a list of its words, or a pair of (word ids, values)."""
    if isinstance(context, tuple) and len(context) == 2 and not isinstance(context[0], str):
        return _sparse_row(context[0], context[1], words)
    if index is None:
        raise ValueError("context: this model carries no vocabulary; give a pair of (word ids, values)")
    if isinstance(context, str):
        return bag_of_words(tokenise(context), index)
    if isinstance(context, Sequence) and all(isinstance(word, str) for word in context):
        return bag_of_words(context, index)
    raise ValueError(f"context: expected a text, a list of words or (word ids, values), got {type(context).__name__}")


def dense(context: object, shape: tuple[int, ...]) -> Context:
    """Features of the model's shape, or the same number of them in a flat list."""
    values = np.asarray(context, np.float32)
    if values.shape != shape and values.shape != (int(np.prod(shape)),):
        raise ValueError(f"context: expected shape {shape}, got {values.shape}")
    if not np.isfinite(values).all():
        raise ValueError("context: not all features are finite")
    return Context(values.reshape(shape))


def _sparse_row(ids: object, values: object, words: int) -> Context:
    id_array, value_array = np.asarray(ids, np.int64), np.asarray(values, np.float32)
    if id_array.ndim != 1 or id_array.shape != value_array.shape:
        raise ValueError(f"context: {id_array.shape} word ids do not go with {value_array.shape} values")
    if len(id_array) and (id_array[0] < 0 or id_array[-1] >= words or (np.diff(id_array) <= 0).any()):
        raise ValueError(f"context: word ids must ascend, each once, from 0 to {words - 1}")
    if not np.isfinite(value_array).all():
        raise ValueError("context: not all values are finite")
    return Context(value_array, id_array.astype(np.int32))
