"""Building a part of an experiment from a name and parameters: a built-in one, or
`my_package.my_module:MyThing`.

A wrong name or parameter is refused with the path of the key, before any work starts.
"""

import difflib
import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from math import inf
from typing import Any

from fedbandit.core.errors import ConfigError, DataError, FedbanditError, MissingExtra, needing
from fedbandit.core.identity import import_module, place_of

_NAME = re.compile(r"[A-Za-z_][\w.]*(:[A-Za-z_]\w*)?", re.ASCII)
_trusted: ContextVar[frozenset[str]] = ContextVar("trusted", default=frozenset())


def is_code(name: str) -> bool:
    """Whether a name is that of code, `module:Name`, and not of something built in."""
    return ":" in name and _NAME.fullmatch(name) is not None


@contextmanager
def trusting(*names: str) -> Iterator[None]:
    """Let files from elsewhere name this code within the block: `module:Name`, or a whole `module`.

    Examples:
        >>> from fedbandit.core.parts import require_trust
        >>> with trusting("my_models:TwoTower"):
        ...     require_trust(["linear", "my_models:TwoTower"], "model.safetensors")
        >>> require_trust(["my_models:TwoTower"], "model.safetensors")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        fedbandit.core.errors.DataError: model.safetensors: names 'my_models:TwoTower', ...
    """
    for name in names:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"--trust: should be module:Name, not {name!r}")
    token = _trusted.set(_trusted.get() | set(names))
    try:
        yield
    finally:
        _trusted.reset(token)


def require_trust(
    names: Iterable[str], where: str, trusted: Collection[str] = (), remedy: str = "--trust"
) -> None:
    """Refuse a file that names code which nobody here has trusted, before any of it is executed.

    `trusted` stands beside what `trusting` allows; the message says how to allow the rest.
    """
    allowed = _trusted.get() | set(trusted)
    for name in names:
        if ":" in name and not allowed & {name, name.partition(":")[0]}:
            raise DataError(
                f"{where}: names {name!r}, code that this program does not trust; if you do, add"
                f" {remedy} {name}"
            )


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
    except (Exception, SystemExit) as error:  # whatever a user's own file does when it is read
        raise ConfigError(f"{path}: cannot import {module_name}: {error}") from error
    if not hasattr(module, attribute):
        raise ConfigError(f"{path}: {module_name} has no {attribute}")
    return getattr(module, attribute)


def construct(
    path: str,
    make: Callable[..., Any],
    parameters: Mapping[str, Any],
    *leading: Any,
    told: Mapping[str, Any] | None = None,
) -> Any:
    """Call `make(*leading, **parameters)`, refusing unknown keys and wrong types with their path.

    `told` holds values for parameters that `make` may have and that no configuration can set.
    """
    accepted = check_keys(path, make, parameters, len(leading))
    facts = {name: value for name, value in (told or {}).items() if name in accepted}
    if clash := [key for key in parameters if key in facts]:
        raise ConfigError(f"{path}.{clash[0]}: unknown key; it is not for a configuration to set")
    values = {key: _typed(f"{path}.{key}", make, key, value) for key, value in parameters.items()}
    try:
        return make(*leading, **facts, **values)
    except TypeError as error:
        signature = inspect.signature(make).parameters
        missing = [
            k
            for k in accepted
            if k not in values
            and k not in facts
            and signature[k].default is inspect.Parameter.empty
        ]
        if missing:
            raise ConfigError(f"{path}.{missing[0]}: missing") from None
        raise ConfigError(f"{path}: {error}") from None
    except ValueError as error:
        named = any(str(error).startswith((f"{key} ", f"{key}:")) for key in accepted)
        raise ConfigError(f"{path}.{error}" if named else f"{path}: {error}") from None
    except (Exception, SystemExit) as error:
        if isinstance(error, FedbanditError) or (place := place_of(error)) is None:
            raise
        said = f"{place}: {type(error).__name__}: {error}"
        name = f"{make.__module__}:{getattr(make, '__qualname__', make)}"
        raise ConfigError(f"{path}: {name} cannot be made: {said}") from error


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
    """Whether a value is of a plain type beyond doubt; whatever is not is looked at more
    closely.
    """
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


_RANGES: dict[str, Callable[[float], bool]] = {
    "positive": lambda value: 0 < value < inf,
    "at least 0": lambda value: 0 <= value < inf,
    "at least 1": lambda value: 1 <= value < inf,
    "from 0 to 1": lambda value: 0 <= value <= 1,
    "at least 0 and below 1": lambda value: 0 <= value < 1,
    "above 0 and at most 1": lambda value: 0 < value <= 1,
    "between 0 and 1": lambda value: 0 < value < 1,
}


def require(part: object, **ranges: str) -> None:
    """Refuse a part whose numbers are out of range: `ValueError` names the first; None is none.

    Examples:
        >>> from types import SimpleNamespace
        >>> require(SimpleNamespace(rate=0.5, keep=2.0), rate="positive", keep="above 0 and at most 1")
        Traceback (most recent call last):
        ValueError: keep must be above 0 and at most 1, not 2.0
    """
    for name, wanted in ranges.items():
        value = getattr(part, name)
        if value is not None and not _RANGES[wanted](value):
            raise ValueError(f"{name} must be {wanted}, not {value}")


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"client": {"learning_rate": 0.1}}` becomes `{"client.learning_rate": 0.1}`; keys may be
    dotted already.

    Keys are interned: the rows of a large sweep share them.
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= (
            flatten(value, f"{prefix}{key}.")
            if isinstance(value, Mapping)
            else {sys.intern(f"{prefix}{key}"): value}
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
