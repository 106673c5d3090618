"""The fields of a data set's header as they come from JSON: of the right type and range, or refused by name."""

import math
from collections.abc import Mapping
from typing import Any

_LARGEST = 2**62
_TYPES: dict[str, type] = {
    "name": str,
    "multilabel": bool,
    "logged": bool,
    "source": dict,
    "fingerprint": str,
}
_LISTS = ("shape", "actions", "action_counts", "published_counts", "lower_case")
_LATER: dict[str, Any] = {"published_counts": []}  # fields that the first headers did not have


def checked_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a `Header`; `ValueError` names the field that is wrong."""
    found = {**_LATER, **fields}
    needed = {*_TYPES, *_LISTS, "kind", "scale"}
    if wrong := sorted(needed ^ found.keys()):
        raise ValueError(f"{wrong[0]} is {'missing' if wrong[0] in needed else 'not a field of a header'}")
    for name, kind in _TYPES.items():
        if type(found[name]) is not kind:
            raise ValueError(f"{name} is not {'true or false' if kind is bool else f'a {kind.__name__}'}")
    for name in _LISTS:
        if not isinstance(found[name], list):
            raise ValueError(f"{name} is not a list")
    if found["kind"] not in ("dense", "sparse"):
        raise ValueError("kind is neither dense nor sparse")
    if type(found["scale"]) not in (int, float) or not math.isfinite(found["scale"]):
        raise ValueError("scale is not a finite number")
    shape, actions = found["shape"], found["actions"]
    if not _whole(shape) or math.prod(shape) > _LARGEST or (found["kind"] == "sparse" and len(shape) != 1):
        raise ValueError("shape is not that of a context")
    if not actions or not all(isinstance(action, str) for action in actions):
        raise ValueError("actions are not a list of names")
    for name in ("action_counts", "published_counts"):
        counts = found[name]
        if not _whole(counts) or (len(counts) != len(actions) and (name == "action_counts" or counts)):
            raise ValueError(f"{name} are not one whole number for each action")
    pairs = found["lower_case"]
    if not all(isinstance(pair, list) and len(pair) == 2 and _whole(pair, len(actions) - 1) for pair in pairs):
        raise ValueError("lower_case are not pairs of actions")
    sequences = {name: tuple(found[name]) for name in ("shape", "actions", "action_counts", "published_counts")}
    return {**found, **sequences, "lower_case": dict(pairs)}


def _whole(numbers: list[Any], largest: int = _LARGEST) -> bool:
    return all(type(number) is int and 0 <= number <= largest for number in numbers)
