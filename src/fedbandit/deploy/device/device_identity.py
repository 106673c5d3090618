"""What a device has agreed to and done, on its card, and what it checks of a server's requests.

The card is the file by which a server knows the device again. It is kept before anything leaves the
device, so that a crash can cost a turn in private rounds, never give one more. A damaged card is
refused by name. Requests are checked for types, ranges and the device's own limits before any work;
what a newer server adds is ignored unless it is listed as required. Knows no log and no learner.
"""

import dataclasses
import math
import uuid
from collections.abc import Mapping
from dataclasses import asdict, field, replace
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    StrictBool,
    StrictStr,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.dataclasses import dataclass

from fedbandit.core.errors import DataError, first_problem
from fedbandit.core.files import read_object, write_json
from fedbandit.deploy.messages import (
    Count,
    Name,
    checked,
    is_name,
    is_number,
    protocol_problem,
)
from fedbandit.deploy.private_files import make_private
from fedbandit.deploy.secure_sums import MOST_EVENTS, ReportBounds, SecureMinimum
from fedbandit.privacy.discrete import DeviceNoise, gaussian_epsilon

_COMPUTED = 1e-3  # each machine computes epsilon itself, and may differ a little


def _is_epsilon(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return value is None or (number and isfinite(value) and value >= 0)


_Whole = Annotated[
    int, checked(lambda v: type(v) is int and 1 <= v < 2**31, "not a whole number above 0")
]
_Delta = Annotated[
    float, checked(lambda v: type(v) is float and 0 < v < 1, "not a number between 0 and 1")
]


_NoiseParts = Annotated[float | None, checked(_is_epsilon, "not a number from 0")]


class LaterRoundSeen(DataError):
    """The server speaks of a round that this device knows to be over: its state may be an old copy.

    Carries the `seen` round and, once known, the `device`, which a server needs to be warned.
    """

    def __init__(self, what: str, seen: int, device: str = "") -> None:
        super().__init__(what)
        self.seen, self.device = seen, device


@dataclass(frozen=True)
class Terms:
    """The most that a private server says it will do with one device.

    A device keeps the first terms that it hears and holds the server to them.
    """

    rounds: _Whole  # of the whole plan
    separation: _Whole  # a device's turns come in every such round from its first one
    turns: _Whole  # that a device has at most
    epsilon: Annotated[float | None, checked(_is_epsilon, "not a number from 0")]  # by RDP
    delta: _Delta
    noise: _NoiseParts = None  # clip norms: of all honest devices together, where they add it
    dropout: _NoiseParts = None  # parts of a round's devices that this noise allows for
    colluders: _NoiseParts = None

    def __post_init__(self) -> None:
        if self.noise is None:
            return
        assert self.tolerance is not None  # checks its parts
        spent = math.inf if not self.noise else gaussian_epsilon(self.noise, self.turns, self.delta)
        if self.epsilon is not None and spent > self.epsilon * (1 + _COMPUTED):
            raise ValueError(
                f"noise: {self.turns} turns with noise of {self.noise:.4g} clip norms are worth"
                f" epsilon {spent:.4g}, not {self.epsilon:.4g}"
            )

    @property
    def tolerance(self) -> DeviceNoise | None:
        """Drop-outs and colluders that this device's own noise allows for; None: it adds none."""
        if self.noise is None:
            return None
        return DeviceNoise(self.dropout or 0.0, self.colluders or 0.0)

    def beyond(self, agreed: "Terms") -> str | None:
        """The first thing that these terms ask for beyond those agreed to; None if nothing."""
        for name in ("rounds", "turns", "delta"):
            if getattr(self, name) > getattr(agreed, name):
                return f"{name} {getattr(self, name):g}, agreed were {getattr(agreed, name):g}"
        if self.separation < agreed.separation:
            return f"turns every {self.separation} rounds, agreed was every {agreed.separation}"
        for name in ("noise", "dropout", "colluders"):
            least, own = getattr(agreed, name), getattr(self, name)
            if least is not None and (own is None or own < least * (1 - _COMPUTED)):
                return f"{name} {'none' if own is None else f'{own:.4g}'}, agreed was {least:.4g}"
        if agreed.epsilon is not None and (
            self.epsilon is None or self.epsilon > agreed.epsilon * (1 + _COMPUTED)
        ):
            said = "infinite" if self.epsilon is None else f"{self.epsilon:.4g}"
            return f"epsilon {said}, agreed was {agreed.epsilon:.4g}"
        return None


@dataclass(frozen=True)
class Turns:
    """A device's account of private rounds: the terms that it agreed to, and its turns so far.

    Each method returns the account after something has happened, or raises where that would be more
    than was agreed to. The device writes the result to its card before it answers.

    Examples:
        >>> terms = Terms(rounds=100, separation=10, turns=2, epsilon=2.0, delta=1e-6)
        >>> account = Turns(terms).after(3, terms).after(13, terms)
        >>> account.taken, account.last
        (2, 13)
        >>> account.after(23, terms)
        Traceback (most recent call last):
        fedbandit.core.errors.DataError: this device has had all of the 2 turns that it agreed to
    """

    agreed: Terms
    least: Count = 1  # no honest server asks for an earlier round than this
    taken: Count = 0  # turns
    last: Count | None = None  # the round of the last turn
    judged: Count | None = None  # the last round in which it was asked about a candidate

    def told(self, completed: int) -> "Turns":
        """After hearing from the server that `completed` rounds are over."""
        return self if completed < self.least else replace(self, least=completed + 1)

    def after(self, number: int, terms: Terms, *, attempts: bool = False) -> "Turns":
        """With a turn in that round, unless it would be more than was agreed to.

        A round in which there was a turn is over for this device: that the server asks again may
        mean that it was killed, or that it was restored from an old copy and would use a second
        answer. Where an attempt that failed reveals nothing (`attempts`), another one is the same
        turn.
        """
        if problem := terms.beyond(self.agreed):
            raise DataError(f"the server asks for more than this device agreed to: {problem}")
        if number < self.least:
            what = f"round {number}, and this device has seen round {self.least}"
            raise LaterRoundSeen(
                f"the server asks for {what}: is its state an old copy?", self.least
            )
        if number > self.agreed.rounds:
            most = self.agreed.rounds
            raise DataError(f"round {number} is beyond the {most} that this device agreed to")
        if number == self.last and attempts:
            return self
        if number == self.last:
            raise DataError(f"this device has had its turn in round {number}")
        if self.last is not None and (number - self.last) % self.agreed.separation:
            raise DataError(
                f"not this device's turn: its last was in round {self.last}, and they come every"
                f" {self.agreed.separation} rounds"
            )
        if self.taken >= self.agreed.turns:
            most = self.agreed.turns
            raise DataError(f"this device has had all of the {most} turns that it agreed to")
        return replace(self, least=number, taken=self.taken + 1, last=number)

    def after_judging(self, number: int) -> "Turns":
        """After a question about a candidate: part of the turn in that round, and asked once."""
        if number != self.last:
            raise DataError(f"round {number} is not one in which this device has had its turn")
        if number == self.judged:
            raise DataError(
                f"this device has been asked about the candidate of round {number} before"
            )
        return replace(self, judged=number)


@dataclass(frozen=True)
class MostAgreed:
    """The largest plan that an app agrees to; None: whatever a server says first.

    An app sets it in `Limits(private=MostAgreed(epsilon=4.0, turns=10))`.
    """

    rounds: int | None = None
    turns: int | None = None
    epsilon: float | None = None

    def agreed(self, turns: Turns | None, terms: Terms) -> Turns:
        """The account so far; on first contact a new one over `terms`, if they are within
        bounds.
        """
        if turns is not None:
            return turns
        for name in ("rounds", "turns", "epsilon"):
            most, said = getattr(self, name), getattr(terms, name)
            if most is not None and (said is None or said > most):
                shown = "infinite" if said is None else f"{said:.4g}"
                raise DataError(
                    f"the server's privacy.{name}: {shown}, and this app agrees to at most {most:g}"
                )
        return Turns(terms)


@dataclass(frozen=True)
class Card:
    """A device's name, its mark, its last part in secure sums, and its turns in private rounds.

    One file in the agent's folder; moving it away makes the device a new one.
    """

    device: Name = field(default_factory=lambda: uuid.uuid4().hex)
    counted: Count = 0  # rewards settled up to this mark of the log are in the server's metrics
    pending: dict[Name, Count] = field(default_factory=dict)  # token -> mark, if its sum was taken
    private: Turns | None = None  # None: it never was in a private round
    user: Name | None = None  # whose device it is, by an opaque name; None: nobody said
    masked: Count | None = None  # the round of its last masked vector, whose token is in `pending`
    summed: Count | None = None  # the last round in which it let a sum be unmasked


_CARD: TypeAdapter[Card] = TypeAdapter(Card)
_NEEDED: dict[str, None] = {"device": None, "counted": None}


def read_card(path: Path) -> Card:
    """The card in the file; the first time, a new one, which is written before it is used."""
    try:
        kept = read_object(path)
        if isinstance(account := kept.get("private"), Mapping):
            kept["private"] = {"least": None, "taken": None, **account}
        return _CARD.validate_python({**_NEEDED, **kept})
    except FileNotFoundError:
        card = Card()
        write_card(path, card)
        return card
    except ValidationError as error:
        what = first_problem(error)
    except (OSError, ValueError) as error:
        what = (getattr(error, "strerror", None) or str(error))[:100]
    raise DataError(f"{path}: damaged ({what}); move it away, and the device joins as a new one")


def name_user(folder: Path, user: str) -> None:
    """Say, once, whose device the agent's folder belongs to; a person's devices share one name."""
    path = folder / "device.json"
    if not is_name(user):
        raise DataError("user: not a name of 1 to 64 characters")
    card = read_card(path)
    if card.user not in (None, user):
        whose = f"a device of user {card.user}"
        raise DataError(f"{path}: {whose}; move the file away, and the device joins as a new one")
    if card.user is None:
        write_card(path, replace(card, user=user))


def write_card(path: Path, card: Card) -> None:
    """Keep the card, or raise `OSError` and keep the old one."""
    write_json(path, {name: value for name, value in asdict(card).items() if value is not None})
    make_private(path)


T = TypeVar("T", bound="Instructions")


@dataclasses.dataclass(frozen=True)
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
