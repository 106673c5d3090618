"""A device's own account of private rounds: the plan that it agreed to, and the turns that it has had.

It is kept in the device's card before anything leaves the device, so that a crash can only cost a turn, never give one
more. Whatever a server says later, a device does no more than it agreed to first. Knows nothing of logs or of training.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from fedbandit.core.errors import DataError

_MOST = 2**31
_COMPUTED = 1e-3  # epsilon is computed anew on each machine, and may come out a little different


class LaterRoundSeen(DataError):
    """The server speaks of a round that this device knows to be over: its state may be an old copy."""

    def __init__(self, what: str, seen: int) -> None:
        super().__init__(what)
        self.seen, self.device = seen, ""


@dataclass(frozen=True)
class Terms:
    """What a private server says that it will do at most with one device."""

    rounds: int  # of the whole plan
    separation: int  # a device's turns come in every such round from its first one
    turns: int  # that a device has at most
    epsilon: float | None  # after all rounds, by RDP; None: there is no finite one
    delta: float

    def __post_init__(self) -> None:
        for name in ("rounds", "separation", "turns"):
            value = getattr(self, name)
            if not (type(value) is int and 1 <= value < _MOST):
                raise DataError(f"privacy.{name}: not a whole number above 0")
        if not (type(self.delta) is float and 0 < self.delta < 1):
            raise DataError("privacy.delta: not a number between 0 and 1")
        if self.epsilon is not None and not (_is_number(self.epsilon) and self.epsilon >= 0):
            raise DataError("privacy.epsilon: not a number from 0")

    def beyond(self, agreed: "Terms") -> str | None:
        """What these terms ask for beyond those that were agreed to; None if nothing."""
        for name in ("rounds", "turns", "delta"):
            if getattr(self, name) > getattr(agreed, name):
                return f"{name} {getattr(self, name):g}, agreed were {getattr(agreed, name):g}"
        if self.separation < agreed.separation:
            return f"turns every {self.separation} rounds, agreed was every {agreed.separation}"
        if agreed.epsilon is not None and (
            self.epsilon is None or self.epsilon > agreed.epsilon * (1 + _COMPUTED)
        ):
            said = "infinite" if self.epsilon is None else f"{self.epsilon:.4g}"
            return f"epsilon {said}, agreed was {agreed.epsilon:.4g}"
        return None


@dataclass(frozen=True)
class Turns:
    """What a device has agreed to, and what has come of it so far."""

    agreed: Terms
    least: int = 1  # no honest server asks for an earlier round than this
    taken: int = 0  # turns
    last: int | None = None  # the round of the last turn
    judged: int | None = None  # the last round in which it was asked about a candidate

    def __post_init__(self) -> None:
        counts = (
            self.least,
            self.taken,
            *(value for value in (self.last, self.judged) if value is not None),
        )
        if not all(type(value) is int and 0 <= value < _MOST for value in counts):
            raise DataError("private: not counts")

    def told(self, completed: int) -> "Turns":
        """After hearing from the server that so many rounds are over."""
        return self if completed < self.least else replace(self, least=completed + 1)

    def after(self, number: int, terms: Terms, *, attempts: bool = False) -> "Turns":
        """With a turn in that round, unless it would be more than was agreed to.

        A round in which there was a turn is over for this device: that the server asks again may mean that it was
        killed, or that it was restored from an old copy and would use a second answer. Where an attempt that failed
        reveals nothing (`attempts`), another one is the same turn.
        """
        if problem := terms.beyond(self.agreed):
            raise DataError(f"the server asks for more than this device agreed to: {problem}")
        if number < self.least:
            raise LaterRoundSeen(
                f"the server asks for round {number}, and this device has seen round {self.least}: is its state an old"
                " copy?",
                self.least,
            )
        if number > self.agreed.rounds:
            raise DataError(
                f"round {number} is beyond the {self.agreed.rounds} that this device agreed to"
            )
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
            raise DataError(
                f"this device has had all of the {self.agreed.turns} turns that it agreed to"
            )
        return replace(self, least=number, taken=self.taken + 1, last=number)

    def after_judging(self, number: int) -> "Turns":
        """Having been asked about a candidate, which is part of the turn in that round and happens once."""
        if number != self.last:
            raise DataError(f"round {number} is not one in which this device has had its turn")
        if number == self.judged:
            raise DataError(
                f"this device has been asked about the candidate of round {number} before"
            )
        return replace(self, judged=number)


@dataclass(frozen=True)
class MostAgreed:
    """The largest plan that an app agrees to, where it sets bounds of its own; None: whatever is said first."""

    rounds: int | None = None
    turns: int | None = None
    epsilon: float | None = None

    def check(self, terms: Terms) -> None:
        """Refuse terms beyond these bounds."""
        for name, most in vars(self).items():
            said = getattr(terms, name)
            if most is not None and (said is None or said > most):
                shown = "infinite" if said is None else f"{said:.4g}"
                raise DataError(
                    f"the server's privacy.{name}: {shown}, and this app agrees to at most {most:g}"
                )


def agreed(turns: Turns | None, terms: Terms, most: MostAgreed) -> Turns:
    """What was agreed to before; on first contact, these terms, if they are within the app's own bounds."""
    if turns is not None:
        return turns
    most.check(terms)
    return Turns(terms)


def read_terms(facts: Mapping[str, Any]) -> tuple[int, Terms] | None:
    """The round that a request is about, and the terms of a private server; None of one that is not."""
    said = facts.get("privacy")
    if said is None:
        return None
    if not isinstance(said, Mapping):
        raise DataError("the server's request: privacy: not a section")
    number = facts.get("round")
    if not (type(number) is int and 0 <= number < _MOST):
        raise DataError("the server's request: round: not a count")
    try:
        return number, _terms(said)
    except DataError as problem:
        raise DataError(f"the server's request: {problem}") from None


def read_turns(kept: Any) -> Turns | None:
    """The account as a card holds it; `DataError` where it is damaged."""
    if kept is None:
        return None
    if not isinstance(kept, dict) or not isinstance(kept.get("agreed"), dict):
        raise DataError("private: not an account of turns")
    counts = {name: kept.get(name) for name in ("least", "taken", "last", "judged")}
    if counts["least"] is None or counts["taken"] is None:
        raise DataError("private: not an account of turns")
    return Turns(_terms(kept["agreed"]), **counts)  # type: ignore[arg-type]


def _terms(said: Mapping[str, Any]) -> Terms:
    """What this device understands of terms; a server may say more."""
    known: dict[str, Any] = {
        name: said.get(name) for name in ("rounds", "separation", "turns", "epsilon", "delta")
    }
    return Terms(**known)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
