"""Linear models over candidates: each candidate of a decision becomes one sparse row.

A row holds features of the item, of the shared context, and their crosses, as the configuration
asks for; the model is then the linear one with a single action, and its kernels serve as they are.
The idea is Vowpal Wabbit's action-dependent features with quadratic terms (`-q`), and crosses beyond
the size of the weights are hashed as there (Weinberger et al. 2009).
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from fedbandit.core.contexts import Contexts, Features
from fedbandit.core.errors import ConfigError
from fedbandit.core.ragged import Ragged
from fedbandit.core.randomness import scramble

PARTS = ("item", "shared", "shared*item")


def candidate_rows(
    shared: int, item: int, parts: Sequence[str], buckets: int
) -> tuple[Callable[[Contexts], Ragged], int]:
    """A function from n decisions with m candidates to m rows, and the weights that rows reach.

    `shared` and `item` are the numbers of features. Both sides are scaled to length one before they
    are crossed, and a row to length one in the end.
    """
    for part in parts:
        if part not in PARTS:
            raise ConfigError(f"model.features: {part!r} is not one of {', '.join(PARTS)}")
    if not any("item" in part for part in parts):
        raise ConfigError("model.features: without the item, all candidates would score the same")
    sizes = {"item": item, "shared": shared, "shared*item": min(shared * item, buckets)}
    starts, width = {}, 0
    for part in parts:
        starts[part], width = width, width + sizes[part]
    hashed = shared * item > buckets

    def cross(users: np.ndarray, items: np.ndarray) -> np.ndarray:
        places = users.astype(np.int64) * item + items
        if not hashed:
            return np.asarray(places)
        with np.errstate(over="ignore"):
            hashes = scramble(places.astype(np.uint64)) % np.uint64(buckets)
        return np.asarray(hashes, np.int64)

    def rows(contexts: Contexts) -> Ragged:
        shown = contexts.candidates
        assert shown is not None
        owners = np.repeat(np.arange(len(shown)), shown.counts)
        things, people = unit_entries(shown.features), unit_entries(contexts.shared).take(owners)
        made = []
        for part in parts:
            found = {"item": things, "shared": people}.get(part)
            found = _crossed(people, things, cross) if found is None else found
            made.append(Ragged(found.offsets, found.ids + starts[part], found.values))
        return _joined(made, np.float32(len(parts) ** -0.5))

    return rows, width


def unit_entries(features: Features) -> Ragged:
    """Rows of (feature, value) of length one; dense features become rows of all of them."""
    if not isinstance(features, Ragged):
        n, width = len(features), prod(features.shape[1:])
        ids = np.tile(np.arange(width, dtype=np.int64), n)
        features = Ragged(np.arange(n + 1) * width, ids, features.reshape(-1).astype(np.float32))
    found = features.unit(np.float32)
    return Ragged(found.offsets, found.ids.astype(np.int64), found.values)


def _crossed(first: Ragged, second: Ragged, cross: Callable[..., np.ndarray]) -> Ragged:
    """Every feature of a row with every feature of the same row on the other side."""
    one, other = np.diff(first.offsets), np.diff(second.offsets)
    counts = one * other
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    row = np.repeat(np.arange(len(counts)), counts)
    inside = np.arange(offsets[-1]) - offsets[row]
    at, beside = (
        first.offsets[row] + inside // other[row],
        second.offsets[row] + inside % other[row],
    )
    values = np.asarray(first.values)[at] * np.asarray(second.values)[beside]
    return Ragged(offsets, cross(first.ids[at], second.ids[beside]), values)


def _joined(parts: Sequence[Ragged], scale: Any) -> Ragged:
    """The parts of each row one after the other, values times `scale`."""
    lengths = np.stack([np.diff(part.offsets) for part in parts])
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths.sum(axis=0))])
    ids, values = np.empty(offsets[-1], np.int32), np.empty(offsets[-1], np.float32)
    begins = offsets[:-1].copy()
    for part, length in zip(parts, lengths, strict=True):
        at = np.repeat(begins - part.offsets[:-1], length) + np.arange(part.offsets[-1])
        ids[at], values[at] = part.ids, np.asarray(part.values) * scale
        begins += length
    return Ragged(offsets, ids, values)
