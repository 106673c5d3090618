"""The device's door for what a server asks: types, ranges and the device's own limits, before anything is done.

What a newer server adds is ignored unless it says that it is required. Knows nothing of logs or of learners.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from fedbandit.core.errors import DataError
from fedbandit.deploy.device.device_identity import is_mark, is_token
from fedbandit.deploy.device.participation import MostAgreed
from fedbandit.deploy.messages import protocol_problem
from fedbandit.deploy.secure_sums import MOST_EVENTS, ReportBounds, SecureMinimum

_CLIENT = ("learning_rate", "batch_size", "epochs")
_LEARNING = ("objective", "objective_parameters", "client", "dtype", "algorithm", "freeze")
_FACTS = (
    "protocol",
    "required",
    "token",
    "round",
    "space",
    "version",
    "counted",
    "settled",
    "clip_norm",
    "bounds",
)
_PRIVACY = ("rounds", "separation", "turns", "epsilon", "delta")
_UNDERSTOOD = {
    *_FACTS,
    *("learning", "rule", "estimator", "limit", "zeros", "model"),
    *(f"learning.{name}" for name in _LEARNING),
    *(f"learning.client.{name}" for name in _CLIENT),
    *("bounds.events", "bounds.reward"),
    *("privacy", *(f"privacy.{name}" for name in _PRIVACY)),
}


@dataclass(frozen=True)
class Limits:
    """The most that a device does for a server, whatever the server says. An app may set others."""

    epochs: int = 1000
    batch_size: int = 1_000_000
    learning_rate: float = 1e4
    clip_norm: float = 1e6
    reward: float = 1e9  # the bound of a reward that a server may ask for
    private: MostAgreed = field(
        default_factory=MostAgreed
    )  # the largest privacy plan that it agrees to
    secure: SecureMinimum = field(
        default_factory=SecureMinimum
    )  # the least that it hides among in a secure sum


@dataclass(frozen=True)
class Task:
    """A request to train, checked."""

    token: str
    space: str
    clip_norm: float
    learning: dict[str, Any]  # what this device understands of how to train
    bounds: ReportBounds  # of what is reported


def check_understood(facts: Mapping[str, Any]) -> None:
    """Refuse a request whose protocol is no number, or that requires what this device does not know."""
    if problem := protocol_problem(facts):
        raise DataError(f"the server's request: {problem}")
    required = facts.get("required", [])
    if not (isinstance(required, list) and all(isinstance(name, str) for name in required)):
        raise _wrong("required", "not a list of names")
    for name in required:
        if name not in _UNDERSTOOD:
            raise _wrong(
                "required", f"{name[:50]!r}, which this device does not know; update its fedbandit"
            )


def read_task(facts: Mapping[str, Any], limits: Limits) -> Task:
    """What a request to train says, within the limits of this device."""
    return Task(
        token=read_token(facts),
        space=read_space(facts),
        clip_norm=_positive("clip_norm", _given(facts, "clip_norm"), limits.clip_norm),
        learning=read_learning(facts, limits),
        bounds=read_bounds(facts, limits),
    )


def read_token(facts: Mapping[str, Any]) -> str:
    """The token of the attempt at a round."""
    token = _given(facts, "token")
    if not is_token(token):
        raise _wrong("token", "not a short text")
    return str(token)


def read_round(facts: Mapping[str, Any]) -> int:
    """The number of the round."""
    number = _given(facts, "round")
    if not is_mark(number):
        raise _wrong("round", "not a count")
    return int(number)


def read_settled(facts: Mapping[str, Any]) -> list[str]:
    """The tokens of earlier attempts whose sums the server has counted."""
    settled = facts.get("settled", [])
    if not (isinstance(settled, list) and all(is_token(token) for token in settled)):
        raise _wrong("settled", "not a list of tokens")
    return settled


def read_space(facts: Mapping[str, Any]) -> str:
    """What the server's actions and features mean."""
    return _text(facts, "space")


def read_version(facts: Mapping[str, Any]) -> int:
    """The version of the model that the server speaks of."""
    version = _given(facts, "version")
    if not is_mark(version):
        raise _wrong("version", "not a count")
    return int(version)


def read_mark(facts: Mapping[str, Any]) -> int | None:
    """Up to where the server has counted this device's rewards; None where it does not know the device."""
    counted = _given(facts, "counted")
    if counted is not None and not is_mark(counted):
        raise _wrong("counted", "not a count")
    return None if counted is None else int(counted)


def read_bounds(facts: Mapping[str, Any], limits: Limits) -> ReportBounds:
    """The most that the server takes as one device's report."""
    given = _section("bounds", _given(facts, "bounds"))
    events = _count("bounds.events", _given(given, "events", "bounds."), MOST_EVENTS)
    return ReportBounds(
        events, _positive("bounds.reward", _given(given, "reward", "bounds."), limits.reward)
    )


def read_learning(facts: Mapping[str, Any], limits: Limits) -> dict[str, Any]:
    """How to train: what this device understands of it, in values that can be compared and built from."""
    given = _section("learning", _given(facts, "learning"))
    client = _section("learning.client", _given(given, "client", "learning."))
    settings = {
        "learning_rate": _positive(
            "learning.client.learning_rate",
            _given(client, "learning_rate", "learning.client."),
            limits.learning_rate,
        )
    }
    for name, most in (("batch_size", limits.batch_size), ("epochs", limits.epochs)):
        if name in client:
            settings[name] = _count(f"learning.client.{name}", client[name], most)
    dtype, freeze = _text(given, "dtype", "learning."), given.get("freeze", [])
    if dtype not in ("float32", "float64"):
        raise _wrong("learning.dtype", f"{dtype[:50]!r} is not float32 or float64")
    if not (isinstance(freeze, list) and all(isinstance(name, str) for name in freeze)):
        raise _wrong("learning.freeze", "not a list of names")
    algorithm = _section("learning.algorithm", given.get("algorithm", {"name": "fedavg"}))
    _text(algorithm, "name", "learning.algorithm.")
    parameters = _section(
        "learning.objective_parameters", _given(given, "objective_parameters", "learning.")
    )
    return {
        "objective": _text(given, "objective", "learning."),
        "objective_parameters": parameters,
        "client": settings,
        "dtype": dtype,
        "algorithm": algorithm,
        "freeze": freeze,
    }


def sends_zeros(facts: Mapping[str, Any]) -> bool:
    """Whether the server asks for zeros from devices that have nothing to train on: nobody can tell who they are."""
    found = facts.get("zeros", False)
    if not isinstance(found, bool):
        raise _wrong("zeros", "not true or false")
    return found


def read_rule(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The name and parameters of the rule that would explore with a candidate."""
    rule = _section("rule", _given(facts, "rule"))
    _text(rule, "name", "rule.")
    return rule


def _wrong(name: str, what: str) -> DataError:
    return DataError(f"the server's request: {name}: {what}")


def _given(section: Mapping[str, Any], name: str, prefix: str = "") -> Any:
    if name not in section:
        raise _wrong(f"{prefix}{name}", "missing")
    return section[name]


def _section(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise _wrong(name, "not a section")
    return dict(value)


def _text(section: Mapping[str, Any], name: str, prefix: str = "") -> str:
    value = _given(section, name, prefix)
    if not isinstance(value, str):
        raise _wrong(f"{prefix}{name}", "not a text")
    return value


def _positive(name: str, value: Any, most: float) -> float:
    sound = isinstance(value, int | float) and not isinstance(value, bool)
    if not (sound and 0 < value <= most and isfinite(value)):
        raise _wrong(
            name,
            f"{str(value)[:50]!r} is not a number above 0 and at most {most:g}, this device's limit",
        )
    return float(value)


def _count(name: str, value: Any, most: int) -> int:
    if not (type(value) is int and 1 <= value <= most):
        raise _wrong(
            name, f"{str(value)[:50]!r} is not a whole number from 1 to {most}, this device's limit"
        )
    return int(value)
