"""The door for the bytes of a model file: types, ranges, sizes and shapes, before anything is built from them.

Every failure is a `DataError` that names the file and the place. Knows nothing of how a model acts.
"""

import json
from collections.abc import Mapping
from math import isfinite, prod
from typing import Any

import numpy as np

from fedbandit.core.errors import DataError

FORMAT = "fedbandit-model"
FORMAT_VERSION = 1
LAST_VERSION = 2**53  # JSON readers everywhere agree up to here
_MOST_FEATURES = 2**31
_MOST_DIMENSIONS = 8
_DEEPEST = 4  # sections inside sections of a part's parameters
# Scores of a unit context are at most sqrt(features) times the largest weight; behind layers, sizes multiply.
_LARGEST = {"linear": 1e30, "linear-heads": 1e30}
_LARGEST_BEHIND_LAYERS = 1e6
Shapes = dict[str, tuple[int, ...]]


def read_model_file(payload: bytes, where: str) -> dict[str, Any]:
    """What a model file says, by the names of a `DeviceModel`'s fields."""
    from safetensors.numpy import load

    try:
        weights = load(payload)
        header = json.loads(payload[8 : 8 + int.from_bytes(payload[:8], "little")])
        facts = json.loads(header["__metadata__"]["model"])
    except Exception as error:  # whatever a stranger's bytes make a parser do
        raise DataError(f"{where}: not a fedbandit model: {error!r}"[:300]) from None
    if not isinstance(facts, dict):
        raise DataError(f"{where}: not a fedbandit model: a {type(facts).__name__} where facts were expected")
    if facts.get("format") != FORMAT or facts.get("format_version") != FORMAT_VERSION:
        found = (facts.get("format"), facts.get("format_version"))
        raise DataError(f"{where}: format {str(found)[:100]}, this fedbandit reads {(FORMAT, FORMAT_VERSION)}")
    if problem := _facts_problem(facts) or _weights_problem(weights, facts["model"]["name"]):
        raise DataError(f"{where}: damaged: {problem}")
    words = facts["vocabulary"]
    return {
        **{name: facts[name] for name in ("version", "kind", "policy", "model")},
        "weights": weights,
        "actions": tuple(facts["actions"]),
        "shape": tuple(facts["shape"]),
        "vocabulary": None if words is None else tuple(words),
    }


def is_version(value: object) -> bool:
    """Whether it can be the number of a model."""
    return type(value) is int and 0 <= value <= LAST_VERSION


def shapes_of(described: Mapping[str, Any], shape: tuple[int, ...], actions: int) -> Shapes | None:
    """The arrays of a built-in model, without making them; None for any other model, or if parameters are wrong."""
    name, features = described["name"], prod(shape)
    if name == "linear":
        return {"weight": (features, actions), "bias": (actions,)}
    if name == "linear-heads":
        return _of_heads(described.get("heads", 10), features, actions)
    if name == "mlp":
        hidden = described.get("hidden", 128)
        return _layers({"dense1": (features, hidden), "dense2": (hidden, actions)}) if type(hidden) is int else None
    if name == "cnn" and len(shape) in (2, 3):
        height, width, channels = (*shape, 1)[:3]
        flat = (height // 4) * (width // 4) * 64
        convolutions = {"conv1": (5, 5, channels, 32), "conv2": (5, 5, 32, 64)}
        return _layers({**convolutions, "dense1": (flat, 512), "dense2": (512, actions)})
    return None


def _layers(shapes: Shapes) -> Shapes:
    return {key: value for name, s in shapes.items() for key, value in ((name, s), (f"{name}_bias", s[-1:]))}


def _of_heads(heads: object, features: int, actions: int) -> Shapes | None:
    if not (type(heads) is int and 2 <= heads <= 10_000):
        return None
    one: Shapes = {"weight": (features, actions), "bias": (actions,)}
    return {f"{name}{head}": shape for head in range(heads) for name, shape in one.items()}


def _facts_problem(facts: Mapping[str, Any]) -> str | None:
    """What is wrong with the first fact that is wrong."""
    for name in ("version", "kind", "policy", "model", "actions", "shape", "vocabulary"):
        if name not in facts:
            return f"{name}: missing"
    if not is_version(facts["version"]):
        return "version: not a whole number from 0 to 2**53"
    if facts["kind"] not in ("dense", "sparse"):
        return "kind: not dense or sparse"
    if not _is_shape(facts["shape"], facts["kind"]):
        return "shape: not a list of positive whole numbers, or too large"
    for name in ("actions", "vocabulary"):
        if facts[name] is None and name == "vocabulary":
            continue
        if not (isinstance(facts[name], list) and all(isinstance(word, str) for word in facts[name])):
            return f"{name}: not a list of texts"
    for name in ("policy", "model"):
        if not (isinstance(facts[name], dict) and isinstance(facts[name].get("name"), str)):
            return f"{name}: not a section with a name"
        if not _is_plain(facts[name], _DEEPEST):
            return f"{name}: not made of plain finite values"
    return None


def _is_shape(shape: object, kind: str) -> bool:
    if not (isinstance(shape, list) and 1 <= len(shape) <= (1 if kind == "sparse" else _MOST_DIMENSIONS)):
        return False
    return all(type(n) is int and 1 <= n <= _MOST_FEATURES for n in shape) and prod(shape) <= _MOST_FEATURES


def _is_plain(value: object, depth: int) -> bool:
    """Whether it is a text, a truth, a finite number, or lists and sections of these."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return abs(value) < 2**63 if isinstance(value, int) else isfinite(value)
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return depth > 0 and all(_is_plain(part, depth - 1) for part in inner)
    return value is None or isinstance(value, str | bool)


def _weights_problem(weights: Mapping[str, np.ndarray], name: str) -> str | None:
    largest = _LARGEST.get(name, _LARGEST_BEHIND_LAYERS)
    for key, array in weights.items():
        if array.dtype not in (np.float32, np.float64):
            return f"{key[:50]}: {array.dtype} where float32 or float64 was expected"
        if (found := float(np.abs(array).max(initial=0))) > largest and isfinite(found):
            return f"{key[:50]}: {found:.4g} is too large; scores stay finite up to {largest:g}"
    return None
