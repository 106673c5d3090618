"""Building a part of an experiment from a name and parameters: a built-in one, or
`my_package.my_module:MyThing`.

A wrong name or parameter is refused with the path of the key, before any work starts.
"""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fedbandit.core.errors import ConfigError, MissingExtra, needing
from fedbandit.core.sources import import_module

# Keys of a configuration that say where a run is computed, and nothing about what it computes.
WHERE_COMPUTED = ("threads", "engine", "device")


def resolve(path: str, name: str, built_in: Mapping[str, Any]) -> Any:
    """The built-in thing of that name, or what an import path names."""
    if name in built_in:
        return built_in[name]
    if ":" not in name:
        raise ConfigError(f"{path}: unknown name {name!r}{nearest(name, built_in)}")
    module_name, _, attribute = name.partition(":")
    try:
        with needing(f"{path}: {module_name}"):
            module = import_module(module_name)
    except MissingExtra:
        raise
    except Exception as error:  # whatever a user's own file does when it is read
        raise ConfigError(f"{path}: cannot import {module_name}: {error}") from error
    if not hasattr(module, attribute):
        raise ConfigError(f"{path}: {module_name} has no {attribute}")
    return getattr(module, attribute)


def construct(
    path: str, make: Callable[..., Any], parameters: Mapping[str, Any], *leading: Any
) -> Any:
    """Call `make(*leading, **parameters)`, refusing unknown keys and wrong types with their path."""
    accepted = check_keys(path, make, parameters, len(leading))
    values = {key: _typed(f"{path}.{key}", make, key, value) for key, value in parameters.items()}
    try:
        return make(*leading, **values)
    except TypeError as error:
        signature = inspect.signature(make).parameters
        missing = [
            k
            for k in accepted
            if k not in values and signature[k].default is inspect.Parameter.empty
        ]
        if missing:
            raise ConfigError(f"{path}.{missing[0]}: missing") from None
        raise ConfigError(f"{path}: {error}") from None
    except ValueError as error:
        named = any(str(error).startswith((f"{key} ", f"{key}:")) for key in accepted)
        raise ConfigError(f"{path}.{error}" if named else f"{path}: {error}") from None


def check_keys(
    path: str,
    make: Callable[..., Any],
    parameters: Iterable[str],
    leading: int = 0,
    *,
    beside: Iterable[str] = (),
    others: Mapping[str, Callable[..., Any]] | None = None,
) -> list[str]:
    """Refuse parameters that `make` does not take behind its `leading` ones; those that it does
    take.

    The message names what may have been meant: a parameter, a key that stands `beside` them, or one
    of the `others` that takes it.
    """
    try:
        accepted = list(inspect.signature(make).parameters)[leading:]
    except (TypeError, ValueError):
        raise ConfigError(f"{path}: {make!r} cannot be made with parameters") from None
    for key in parameters:
        if key not in accepted:
            raise ConfigError(
                f"{path}.{key}: unknown key{_meant(key, make, [*accepted, *beside], others or {})}"
            )
    return accepted


def _meant(key: str, make: Any, known: Iterable[str], others: Mapping[str, Any]) -> str:
    """A hint for an unknown key: which other part takes it, or the nearest names."""
    takers = [name for name, other in others.items() if key in inspect.signature(other).parameters]
    if not takers:
        return nearest(key, list(dict.fromkeys(known)))
    chosen = next((f" of {name}" for name, other in others.items() if other is make), "")
    return f"{chosen}; {' and '.join(takers)} take{'s' * (len(takers) == 1)} it"


def with_defaults(
    make: Callable[..., Any], parameters: Mapping[str, Any], leading: int = 0
) -> dict[str, Any]:
    """The parameters that `make` is called with, its own defaults included where JSON can hold
    them.
    """
    try:
        known = list(inspect.signature(make).parameters.values())[leading:]
    except (TypeError, ValueError):
        return dict(parameters)
    defaults = {
        one.name: one.default
        for one in known
        if isinstance(one.default, bool | int | float | str | None)
    }
    return {**defaults, **parameters}


def nearest(word: str, known: Any) -> str:
    """A hint with the nearest known names, to put behind an "unknown" message."""
    close = difflib.get_close_matches(word, list(known), n=3, cutoff=0.5)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    return f"; known: {', '.join(known)}" if 0 < len(known) <= 12 else ""


def _is_plainly(value: Any, wanted: Any) -> bool:
    """Whether a value is of a plain type beyond doubt; whatever is not is looked at more closely."""
    return type(value) is wanted and wanted in (float, int, str, bool)


def _typed(path: str, make: Callable[..., Any], key: str, value: Any) -> Any:
    """The value as the type that the signature asks for, or an error with its path."""
    wanted = inspect.signature(make).parameters[key].annotation
    if isinstance(wanted, str):
        wanted = inspect.signature(make, eval_str=True).parameters[key].annotation
    if wanted is inspect.Parameter.empty or _is_plainly(value, wanted):
        return value
    from pydantic import (  # a device with plain parameters does without
        ConfigDict,
        TypeAdapter,
        ValidationError,
    )

    adapter = TypeAdapter(wanted, config=ConfigDict(strict=True, arbitrary_types_allowed=True))
    try:
        return adapter.validate_python(value, strict=None if isinstance(value, list) else True)
    except ValidationError as error:
        raise ConfigError(f"{path}: {error.errors()[0]['msg'].lower()}, got {value!r}") from None


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"client": {"learning_rate": 0.1}}` becomes `{"client.learning_rate": 0.1}`; keys may be
    dotted already.
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= (
            flatten(value, f"{prefix}{key}.")
            if isinstance(value, Mapping)
            else {f"{prefix}{key}": value}
        )
    return flat


def counted(number: int, noun: str) -> str:
    """A number with its noun: `1 member`, `2 members`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def in_short(value: Any) -> str:
    """A value in as few characters as possible."""
    return f"{value:g}" if isinstance(value, float) else "-" if value is None else str(value)


def in_bytes(size: float) -> str:
    """A number of bytes in the unit that suits it."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size:.0f} bytes"
