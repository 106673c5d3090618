"""Checks what a server asks a device: types, ranges and the device's own limits, before any work.

What a newer server adds is ignored unless it is listed as required. Knows no log and no learner.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    StrictBool,
    StrictStr,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from fedbandit.core.errors import DataError, first_problem
from fedbandit.deploy.device.device_identity import MostAgreed, Terms
from fedbandit.deploy.messages import (
    Count,
    Name,
    checked,
    is_number,
    protocol_problem,
)
from fedbandit.deploy.secure_sums import MOST_EVENTS, ReportBounds, SecureMinimum
from fedbandit.privacy.discrete import DeviceNoise

T = TypeVar("T", bound="Instructions")


@dataclass(frozen=True)
class Limits:
    """The most that a device does for a server, whatever the server says. An app may set others."""

    epochs: int = 1000
    batch_size: int = 1_000_000
    learning_rate: float = 1e4
    clip_norm: float = 1e6
    reward: float = 1e9  # the bound of a reward that a server may ask for
    events: int = MOST_EVENTS  # that one report may be about
    private: MostAgreed = field(default_factory=MostAgreed)  # the largest plan that it agrees to
    secure: SecureMinimum = field(default_factory=SecureMinimum)  # the least that it hides among


def _within_limit(value: Any, info: ValidationInfo) -> Any:
    """Refuse what is not a number above 0 and at most the device's limit of that name."""
    most = getattr(info.context, str(info.field_name))
    if isinstance(most, int):
        fine, kind = type(value) is int and 1 <= value <= most, f"a whole number from 1 to {most}"
    else:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        fine = number and 0 < value <= most and isfinite(value)
        kind = f"a number above 0 and at most {most:g}"
    if not fine:
        raise ValueError(f"{str(value)[:50]!r} is not {kind}, this device's limit")
    return value


_Limited = Annotated[float, BeforeValidator(_within_limit)]
_LimitedInt = Annotated[int, BeforeValidator(_within_limit)]


class _Client(BaseModel):
    """Settings of local steps; those left out have the defaults of this device."""

    learning_rate: _Limited
    batch_size: _LimitedInt = 0
    epochs: _LimitedInt = 0


class _Named(BaseModel):
    """A part by its name, with its parameters beside it."""

    model_config = ConfigDict(extra="allow")
    name: StrictStr


class _Learning(BaseModel):
    """Settings of training, in values that can be compared and built from."""

    client: _Client
    objective: StrictStr
    objective_parameters: dict[str, Any]
    dtype: Literal["float32", "float64"]
    algorithm: _Named = _Named(name="fedavg")
    freeze: list[StrictStr] = []
    model: _Named | None = None  # what is trained, where it is not the model that acts


class _Bounds(BaseModel):
    events: _LimitedInt
    reward: _Limited


class Instructions(BaseModel):
    """Facts of any request: of a private server the round, and the terms it promises to keep."""

    round: Count | None = None
    privacy: Terms | None = None
    zeros: StrictBool = False  # devices with nothing to train on send zeros, so none can be told

    @model_validator(mode="after")
    def _check_round(self) -> "Instructions":
        if self.privacy is not None and self.round is None:
            raise ValueError("round: not a count")
        return self

    @property
    def tolerance(self) -> DeviceNoise | None:
        """Drop-outs and colluders that the noise of devices allows for, where they add it
        themselves.
        """
        return None if self.privacy is None else self.privacy.tolerance


class ReadyQuestion(Instructions):
    """Before a secure round: can this device take part?"""

    token: Name
    space: StrictStr
    round: Count


class Work(Instructions):
    """A request to train or to judge."""

    token: Name
    space: StrictStr  # what the server's actions and features mean
    learning: _Learning
    bounds: _Bounds

    @property
    def training(self) -> dict[str, Any]:
        """The settings of training that this device understands."""
        return self.learning.model_dump(exclude_unset=True)

    @property
    def report_bounds(self) -> ReportBounds:
        """The most that the server takes as one device's report."""
        return ReportBounds(self.bounds.events, self.bounds.reward)


class Task(Work):
    """A request to train."""

    clip_norm: _Limited


class PlainTask(Task):
    """A request to train and to answer in clear; `counted`: the mark that the server knows,
    if any.
    """

    counted: Count | None


class SecureTask(Task):
    """A request to train for a secure sum; `settled` names earlier sums that were counted."""

    round: Count
    settled: list[Name] = []
    model: Any = None


class Judgement(Work):
    """A request to judge a candidate in place of `version` by this device's log."""

    version: Count
    rule: _Named
    estimator: Literal["ips", "dr"]
    limit: Annotated[float, checked(lambda v: is_number(v) and v > 0, "gains without a limit")]


def _keys(model: type[BaseModel], prefix: str = "") -> set[str]:
    """The names of a model's fields, those of models within it by their paths."""
    found: set[str] = set()
    for name, info in model.model_fields.items():
        found.add(prefix + name)
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            found |= _keys(info.annotation, f"{prefix}{name}.")
    return found


_UNDERSTOOD = {"protocol", "required", *(f"privacy.{name}" for name in Terms.__dataclass_fields__)}
_UNDERSTOOD |= {name for model in (PlainTask, SecureTask, Judgement) for name in _keys(model)}


def check_understood(facts: Mapping[str, Any]) -> None:
    """Refuse a request of unknown protocol, or that requires what this device does not know."""
    if problem := protocol_problem(facts):
        raise DataError(f"the server's request: {problem}")
    required = facts.get("required", [])
    if not (isinstance(required, list) and all(isinstance(name, str) for name in required)):
        raise DataError("the server's request: required: not a list of names")
    for name in required:
        if name not in _UNDERSTOOD:
            what = f"{name[:50]!r}, which this device does not know; update its fedbandit"
            raise DataError(f"the server's request: required: {what}")


def read_instructions(kind: type[T], facts: Mapping[str, Any], limits: Limits) -> T:
    """A request's facts, checked against the limits of this device; `DataError` names the first
    wrong one.
    """
    try:
        return kind.model_validate(dict(facts), context=limits)
    except ValidationError as error:
        raise DataError(f"the server's request: {first_problem(error)}") from None
