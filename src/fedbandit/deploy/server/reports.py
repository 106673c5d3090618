"""The server's door for devices' answers: each is either a sound report or refused under a name, one per device.

Whatever a device sends may be wrong in any way. Knows nothing of transports, of state or of the step that follows.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import trunc
from typing import Any

import numpy as np

from fedbandit.deploy.messages import Reply, protocol_problem
from fedbandit.deploy.secure_sums import TOLERANCE, ReportBounds, figure_steps
from fedbandit.deploy.server.database import Mark, MarksOf
from fedbandit.federated.pipeline import IndividualUpdates, add_steps, clip_factor, norm_or_reason
from fedbandit.federated.server import Aggregation

_LONGEST_NAME = 64
_MOST = 2**63  # no honest count reaches it, and JSON allows integers too large for arithmetic
_LARGEST = 1e150  # what still has a square


Refusal = tuple[str, str]
"""Why an answer is left out: its kind, and what exactly."""


@dataclass(frozen=True)
class Report:
    """One device's contribution, checked."""

    device: str
    update: np.ndarray
    norm: float  # of the update
    unclipped: bool
    since: int  # the rewards reported are those settled after this mark of the device's log ...
    upto: int  # ... up to this one
    events: int
    reward_sum: float
    propensity_sum: float
    version: int  # the model that it holds
    by_version: tuple[
        tuple[int, int, float], ...
    ]  # version that made the choices, events, sum of their rewards


@dataclass(frozen=True)
class Idle:
    """The answer of a device that had nothing to train on."""

    device: str
    version: int  # the model that it holds


@dataclass
class Sorted:
    """A round's answers: reports in the order in which devices were asked, and everything else by name."""

    reports: list[Report] = field(default_factory=list)
    idle: list[Idle] = field(default_factory=list)
    refused: list[tuple[int, str, str]] = field(default_factory=list)  # node, kind, what exactly

    def kinds(self) -> dict[str, int]:
        """How many answers were refused, by kind."""
        return by_kind(self.refused)


class Screening:
    """The door for the answers to one attempt at a round. Each is looked at once, however often they are sorted."""

    def __init__(
        self,
        token: str,
        like: np.ndarray,
        clip_norm: float,
        bounds: ReportBounds,
        marks: MarksOf,
        users: Mapping[int, str] | None = None,
    ) -> None:
        """`users` says whose devices nodes are, by the names under which turns are kept; None: devices have turns."""
        self._users = users
        self._token, self._like, self._clip_norm, self._bounds, self._marks_of = (
            token,
            like,
            clip_norm,
            bounds,
            marks,
        )
        self._seen: dict[str, Report | Idle | Refusal] = {}  # by ticket
        self._looked_up: set[str] = set()
        self.marks: dict[str, Mark] = {}  # of the devices that have reported; new ones have none

    def sort(self, replies: Iterable[tuple[int, Reply]], rests: Callable[[Mark], bool]) -> Sorted:
        """The answers of nodes, one for each device; `rests` says whose turn it is not."""
        answers = [(node, self._look(reply)) for node, reply in replies]
        named = {answer.device for _, answer in answers if isinstance(answer, Report | Idle)}
        named |= (
            set()
            if self._users is None
            else {self._users[node] for node, _ in answers if node in self._users}
        )
        self.marks |= self._marks_of(sorted(named - self._looked_up))
        self._looked_up |= named
        found = Sorted()
        devices: set[str] = set()
        for node, answer in answers:
            if not isinstance(answer, Report | Idle):
                found.refused.append((node, *answer))
            elif refuse := self._out_of_turn(node, answer.device, devices, rests):
                found.refused.append((node, *refuse))
            else:
                devices |= (
                    {answer.device} if self._users is None else {answer.device, self._users[node]}
                )
                if isinstance(answer, Report):
                    found.reports.append(answer)
                else:
                    found.idle.append(answer)
        return found

    def _out_of_turn(
        self, node: int, device: str, seen: set[str], rests: Callable[[Mark], bool]
    ) -> Refusal | None:
        owner = device if self._users is None else self._users.get(node)
        if owner is None:
            return "no user", f"device {device} has not said whose it is"
        if device in seen:
            return "twice", f"device {device} has already reported in this round"
        if owner in seen:
            return (
                "twice",
                f"another device of the same user as {device} has already reported in this round",
            )
        mark, turns = self.marks.get(device, Mark()), self.marks.get(owner, Mark())
        if mark.damaged or turns.damaged:
            return (
                "damaged mark",
                f"what the server remembers of device {device} is not what it wrote",
            )
        if rests(turns):
            return "not its turn", f"device {device} took part in round {turns.turn}"
        return None

    def _look(self, reply: Reply) -> Report | Idle | Refusal:
        if reply.ticket not in self._seen:
            self._seen[reply.ticket] = self._judged(reply)
        return self._seen[reply.ticket]

    def _judged(self, reply: Reply) -> Report | Idle | Refusal:
        if refuse := refusal(reply, self._token):
            return refuse
        if reply.facts.get("trained") is False and is_name(reply.facts.get("device")):
            if not is_count(reply.facts.get("version")):
                return "garbage", "version: not a count"
            return Idle(reply.facts["device"], reply.facts["version"])
        if problem := _unreadable(reply):
            return "garbage", problem
        if refuse := _beyond(reply.facts, self._bounds):
            return refuse
        if problem := _wrong_by_version(reply.facts, self._bounds):
            return "garbage", f"by_version: {problem}"
        update = reply.arrays["update"]
        norm = norm_or_reason(update, self._like)
        if isinstance(norm, str):
            return ("not finite" if _fits(update, self._like) else "wrong shape or type"), norm
        if norm > self._clip_norm * (1 + TOLERANCE):
            return "too large", f"norm {norm:.4g}, where devices clip to {self._clip_norm:.4g}"
        return _report(reply, norm)


def by_kind(refused: Iterable[tuple[int, str, str]]) -> dict[str, int]:
    """How many of (node, kind, what exactly) there are of each kind."""
    return dict(sorted(Counter(kind for _, kind, _ in refused).items()))


def summed(
    reports: Iterable[Report],
    like: np.ndarray,
    clip_norm: float,
    aggregation: Aggregation,
    step: float | None = None,
) -> np.ndarray:
    """What the aggregation makes of sound reports' updates, in their order, clipped once more.

    With a step it is their sum in whole steps of that many clip norms: int64.
    """
    if step is not None:
        total = np.zeros_like(like, dtype=np.int64)
        for report in reports:
            factor = clip_factor(report.norm, clip_norm)
            add_steps(total, report.update, factor, step * clip_norm)
        return total
    accumulator = aggregation.accumulator({"weights": np.zeros_like(like)})
    for report in reports:
        clipped = report.update.dtype.type(clip_factor(report.norm, clip_norm)) * report.update
        accumulator.add({"weights": IndividualUpdates((clipped,))}, 1)
    return accumulator.totals()["weights"]


def in_figure_steps(report: Report, bounds: ReportBounds) -> Report:
    """The report with its sums as numbers of whole `figure_steps`, cut towards 0."""
    _, rewards, propensities = figure_steps(bounds)
    return replace(
        report,
        reward_sum=trunc(report.reward_sum / rewards),
        propensity_sum=trunc(report.propensity_sum / propensities),
    )


@dataclass(frozen=True)
class RewardFigures:
    """What a round's rewards come to, each of them counted in one round only."""

    events: int
    reward_sum: float
    propensity_sum: float
    by_version: dict[
        str, list[float]
    ]  # version that made the choices -> events, sum of their rewards


def count_rewards(
    marks: Mapping[str, Mark], reports: Iterable[Report], number: int
) -> tuple[dict[str, Mark], RewardFigures, list[str]]:
    """The new marks of the devices, the round's figures, and who reported other rewards than those that are new.

    A device that did not know its mark reports more than is new; its figures wait until it knows.
    """
    following: dict[str, Mark] = {}
    elsewhere = []
    events, rewards, propensities = 0, 0.0, 0.0
    by_version: dict[int, tuple[int, float]] = {}
    for report in reports:
        mark = marks.get(report.device)
        if mark is not None and report.since != mark.counted:
            elsewhere.append(report.device)
            following[report.device] = replace(mark, turn=number)
            continue
        following[report.device] = replace(mark or Mark(), counted=report.upto, turn=number)
        events += report.events
        rewards += report.reward_sum
        propensities += report.propensity_sum
        for version, some, reward in report.by_version:
            before = by_version.get(version, (0, 0.0))
            by_version[version] = before[0] + some, before[1] + reward
    versions = {str(version): list(sums) for version, sums in sorted(by_version.items())}
    return following, RewardFigures(events, rewards, propensities, versions), elsewhere


def versions_held(versions: Iterable[int]) -> dict[str, int]:
    """How many devices hold which version, by its number as JSON has keys."""
    return {str(version): count for version, count in sorted(Counter(versions).items())}


def refusal(reply: Reply, token: str, unable: str = "could not train") -> tuple[str, str] | None:
    """Why an answer does not belong to the attempt with that token, as kind and words; None if it does.

    `unable` is the kind of an answer by a device that says itself that it cannot.
    """
    if reply.error is not None:
        return "failed", reply.error
    if problem := protocol_problem(reply.facts):
        return "garbage", problem
    if reply.facts.get("token") != token:
        return (
            "other round",
            "the answer belongs to another round, or to another attempt at this one",
        )
    if "problem" in reply.facts:
        return unable, str(reply.facts["problem"])[:300]
    return None


def _unreadable(reply: Reply) -> str | None:
    """What is wrong with the facts of a report; None if it can be read."""
    facts: Mapping[str, Any] = reply.facts
    if not is_name(facts.get("device")):
        return "no device named"
    if not isinstance(facts.get("unclipped"), bool):
        return "unclipped: not true or false"
    for name in ("since", "upto", "events", "version"):
        if not is_count(facts.get(name)):
            return f"{name}: not a count"
    for name in ("reward_sum", "propensity_sum"):
        if not is_number(facts.get(name)):
            return f"{name}: not a finite number"
    if facts["upto"] < facts["since"] or not 0 <= facts["propensity_sum"] <= facts["events"] * (
        1 + TOLERANCE
    ):
        return "its figures contradict each other"
    if set(reply.arrays) != {"update"}:
        return f"arrays {sorted(reply.arrays)[:5]} where one update was expected"
    return None


def _wrong_by_version(facts: Mapping[str, Any], bounds: ReportBounds) -> str | None:
    rows = facts.get("by_version")
    if not isinstance(rows, list) or not all(
        isinstance(row, list) and len(row) == 3 for row in rows
    ):
        return "not a list of versions with their events and rewards"
    if not all(is_count(row[0]) and is_count(row[1]) and is_number(row[2]) for row in rows):
        return "not counts and finite numbers"
    if len({row[0] for row in rows}) < len(rows) or not all(row[1] for row in rows):
        return "a version twice, or without events"
    if any(abs(rewards) > events * bounds.reward * (1 + TOLERANCE) for _, events, rewards in rows):
        return "rewards too large"
    near = abs(sum(row[2] for row in rows) - facts["reward_sum"]) <= TOLERANCE * (
        1 + abs(facts["reward_sum"])
    )
    return None if near and sum(row[1] for row in rows) == facts["events"] else "does not add up"


def _beyond(facts: Mapping[str, Any], bounds: ReportBounds) -> Refusal | None:
    """Why the figures are more than one device can have to report."""
    events, rewards = facts["events"], facts["reward_sum"]
    if events > bounds.events:
        return (
            "too many events",
            f"{events}, where one device reports at most {bounds.events} in one round",
        )
    if abs(rewards) > events * bounds.reward * (1 + TOLERANCE):
        return (
            "rewards too large",
            f"{rewards:.4g} over {events} events of at most {bounds.reward:g} each",
        )
    return None


def _report(reply: Reply, norm: float) -> Report:
    facts: Mapping[str, Any] = reply.facts
    return Report(
        device=facts["device"],
        update=reply.arrays["update"],
        norm=norm,
        unclipped=facts["unclipped"],
        since=facts["since"],
        upto=facts["upto"],
        events=facts["events"],
        reward_sum=float(facts["reward_sum"]),
        propensity_sum=float(facts["propensity_sum"]),
        version=facts["version"],
        by_version=tuple((row[0], row[1], float(row[2])) for row in facts["by_version"]),
    )


def _fits(update: object, like: np.ndarray) -> bool:
    return isinstance(update, np.ndarray) and (update.dtype, update.shape) == (
        like.dtype,
        like.shape,
    )


def is_name(value: object) -> bool:
    """Whether a device may be called that."""
    if not isinstance(value, str) or not 0 < len(value) <= _LONGEST_NAME:
        return False
    return not any(
        "\ud800" <= character <= "\udfff" for character in value
    )  # half of a character has no bytes


def is_count(value: object) -> bool:
    """Whether it is an integer from 0, small enough to compute with."""
    return type(value) is int and 0 <= value < _MOST


def is_number(value: object) -> bool:
    """Whether it is a finite number, small enough to compute with."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST
