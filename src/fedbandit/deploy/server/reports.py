"""The server's door for devices' answers: each is either a sound report or refused under a name, one per device.

Whatever a device sends may be wrong in any way. Knows nothing of transports, of state or of the step that follows.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedbandit.deploy.messages import Reply, protocol_problem
from fedbandit.deploy.secure_sums import TOLERANCE, ReportBounds
from fedbandit.federated.pipeline import Screened, clip_factor, clipped_sum, why_not
from fedbandit.federated.robust import Robust

_LONGEST_NAME = 64
_MOST = 2**63  # no honest count reaches it, and JSON allows integers too large for arithmetic
_LARGEST = 1e150  # what still has a square


@dataclass(frozen=True)
class Report:
    """One device's contribution, checked."""

    device: str
    update: np.ndarray
    unclipped: bool
    since: int  # the rewards reported are those settled after this mark of the device's log ...
    upto: int  # ... up to this one
    events: int
    reward_sum: float
    propensity_sum: float
    version: int


@dataclass
class Sorted:
    """A round's answers: reports in the order in which devices were asked, and everything else by name."""

    reports: list[Report] = field(default_factory=list)
    idle: int = 0  # had nothing to train on
    refused: list[tuple[int, str, str]] = field(default_factory=list)  # node, kind, what exactly

    def kinds(self) -> dict[str, int]:
        """How many answers were refused, by kind."""
        return by_kind(self.refused)


def sort_replies(
    replies: Iterable[tuple[int, Reply]],
    token: str,
    like: np.ndarray,
    clip_norm: float,
    waiting: Mapping[str, int],
    bounds: ReportBounds,
) -> Sorted:
    """Check (node, reply) pairs; `waiting` names devices whose turn it is not, with the round of their last one."""
    found = Sorted()
    seen: set[str] = set()
    for node, reply in replies:
        refuse = refusal(reply, token)
        if refuse is None and reply.facts.get("trained") is False and is_name(reply.facts.get("device")):
            found.idle += 1
            continue
        if refuse is None:
            report = _read(reply)
            if isinstance(report, str):
                refuse = ("garbage", report)
            else:
                refuse = _beyond(report, bounds) or _unsound(report, like, clip_norm, waiting, seen)
        if refuse is None:
            assert isinstance(report, Report)
            seen.add(report.device)
            found.reports.append(report)
        else:
            found.refused.append((node, *refuse))
    return found


def by_kind(refused: Iterable[tuple[int, str, str]]) -> dict[str, int]:
    """How many of (node, kind, what exactly) there are of each kind."""
    return dict(sorted(Counter(kind for _, kind, _ in refused).items()))


def summed(reports: Iterable[Report], like: np.ndarray, clip_norm: float, rule: Robust | None = None) -> Screened:
    """The sum of sound reports' updates, in their order, clipped once more; or what a rule makes of them."""
    if rule is not None:
        updates = [report.update for report in reports]
        norms = np.array([np.linalg.norm(update.astype(np.float64, copy=False)) for update in updates])
        clipped = [u.dtype.type(clip_factor(norm, clip_norm)) * u for u, norm in zip(updates, norms, strict=True)]
        return Screened(rule.combined(clipped, like), norms, {})
    return clipped_sum(((report.device, report.update) for report in reports), like, clip_norm)


def count_rewards(
    counted: Mapping[str, int], reports: Iterable[Report]
) -> tuple[dict[str, int], dict[str, Any], list[str]]:
    """Each reward in one round only: the new marks by device, the round's figures, and who reported old rewards again.

    A device that did not know its mark reports more than is new; its figures wait until it knows.
    """
    marks = dict(counted)
    overlapping = []
    events, rewards, propensities = 0, 0.0, 0.0
    for report in reports:
        if report.since < marks.get(report.device, 0):
            overlapping.append(report.device)
            continue
        marks[report.device] = report.upto
        events += report.events
        rewards += report.reward_sum
        propensities += report.propensity_sum
    figures = {"events": events, "reward_sum": rewards, "propensity_sum": propensities}
    return marks, figures, overlapping


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
        return "other round", "the answer belongs to another round, or to another attempt at this one"
    if "problem" in reply.facts:
        return unable, str(reply.facts["problem"])[:300]
    return None


def _read(reply: Reply) -> Report | str:
    """A report, or what is wrong with the facts."""
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
    if facts["upto"] < facts["since"] or not 0 <= facts["propensity_sum"] <= facts["events"] * (1 + TOLERANCE):
        return "its figures contradict each other"
    if set(reply.arrays) != {"update"}:
        return f"arrays {sorted(reply.arrays)[:5]} where one update was expected"
    return Report(
        device=facts["device"],
        update=reply.arrays["update"],
        unclipped=facts["unclipped"],
        since=facts["since"],
        upto=facts["upto"],
        events=facts["events"],
        reward_sum=float(facts["reward_sum"]),
        propensity_sum=float(facts["propensity_sum"]),
        version=facts["version"],
    )


def _beyond(report: Report, bounds: ReportBounds) -> tuple[str, str] | None:
    """Why the figures are more than one device can have to report, as kind and words."""
    if report.events > bounds.events:
        return "too many events", f"{report.events}, where one device reports at most {bounds.events} in one round"
    if abs(report.reward_sum) > report.events * bounds.reward * (1 + TOLERANCE):
        what = f"{report.reward_sum:.4g} over {report.events} events of at most {bounds.reward:g} each"
        return "rewards too large", what
    return None


def _unsound(
    report: Report, like: np.ndarray, clip_norm: float, waiting: Mapping[str, int], seen: set[str]
) -> tuple[str, str] | None:
    if report.device in seen:
        return "twice", f"device {report.device} has already reported in this round"
    if reason := why_not(report.update, like):
        return ("not finite" if _fits(report.update, like) else "wrong shape or type"), reason
    norm = float(np.linalg.norm(report.update.astype(np.float64, copy=False)))
    if norm > clip_norm * (1 + TOLERANCE):
        return "too large", f"norm {norm:.4g}, where devices clip to {clip_norm:.4g}"
    if report.device in waiting:
        return "not its turn", f"device {report.device} took part in round {waiting[report.device]}"
    return None


def _fits(update: object, like: np.ndarray) -> bool:
    return isinstance(update, np.ndarray) and (update.dtype, update.shape) == (like.dtype, like.shape)


def is_name(value: object) -> bool:
    """Whether a device may be called that."""
    return isinstance(value, str) and 0 < len(value) <= _LONGEST_NAME


def is_count(value: object) -> bool:
    """Whether it is an integer from 0, small enough to compute with."""
    return type(value) is int and 0 <= value < _MOST


def is_number(value: object) -> bool:
    """Whether it is a finite number, small enough to compute with."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST
