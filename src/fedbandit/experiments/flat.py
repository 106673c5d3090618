"""Nested values as flat ones with dotted keys: the form in which users name values, and tables name columns."""

from collections.abc import Mapping
from typing import Any


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"client": {"learning_rate": 0.1}}` becomes `{"client.learning_rate": 0.1}`; keys may be dotted already."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def in_short(value: Any) -> str:
    """A value as short as it can be said."""
    return f"{value:g}" if isinstance(value, float) else "-" if value is None else str(value)
