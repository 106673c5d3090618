"""Gathering a round's reports into one sum; here the server sees and screens each of them.

Whatever a device sends may be wrong in any way: an answer is either a sound report or refused under
a name, one for each device. `secure_gathering` sees sums alone. Knows nothing of the step that
follows.
"""

import logging
import random
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from math import trunc
from operator import add
from tempfile import SpooledTemporaryFile
from typing import Annotated, Any, Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict, StrictBool, ValidationError, model_validator

from fedbandit.core.errors import DataError, first_problem
from fedbandit.deploy.messages import (
    Answers,
    Count,
    Number,
    Reply,
    Request,
    RequestPoller,
    checked,
    is_count,
    is_name,
    is_number,
    protocol_problem,
)
from fedbandit.deploy.secure_sums import TOLERANCE, ReportBounds, figure_steps
from fedbandit.deploy.server.database import Mark, MarksOf, own_key
from fedbandit.deploy.server.deployment import Deployment
from fedbandit.deploy.server.operator import registered_nodes
from fedbandit.federated.pipeline import IndividualUpdates, add_steps, clip_factor, norm_or_reason
from fedbandit.federated.server import PlainMean
from fedbandit.federated.state import State

_WITNESSES = 2  # devices that have to say the same before it is believed
_OUTVOTE = 5  # devices that have to report before any of them can be told from the others
_USUAL = 2.0  # times the median number of events, more of which do not count in the reward
_IN_MEMORY = 1 << 23  # bytes of a round's updates that wait for their turn outside of a file
_chance = random.SystemRandom()
_logger = logging.getLogger("fedbandit.deploy.server")
Refusal = tuple[str, str]
"""The reason to leave an answer out: its kind, and what exactly."""


@dataclass(kw_only=True)
class RewardFigures:
    """Sums over a round's rewards, each reward counted in one round only."""

    events: int  # rewards that no round has counted before, ...
    reward_sum: float  # ... their sum, and that of their propensities; if private, of whole steps
    propensity_sum: float
    marks: dict[str, Mark]  # what is remembered of the devices in the sum from now on, by key
    by_version: dict[str, list[float]] | None = None  # version that chose: events, rewards
    events_by_version: dict[str, int] | None = None  # as reported
    reported: float | None = None  # the sum of rewards as reported; None where none is cut
    median: float | None = None  # of devices' mean rewards; None where single ones are not seen
    largest_share: float | None = None  # of the events, that one device has reported


@dataclass(kw_only=True)
class RoundContribution(RewardFigures):
    """A round's gathered reports: one sum of updates, its figures, its devices."""

    total: np.ndarray  # the sum of their clipped updates; of a private round in whole steps
    accepted: int  # devices in the sum
    below: int  # those of them whose update was not clipped
    idle: int  # devices that had nothing to train on
    refused: dict[str, int]  # answers left out, by kind
    versions: dict[str, int]  # how many devices hold which model
    nodes: dict[int, str]  # whose report this was: node -> device
    known_modulo: tuple[float, float, float] | None = None  # of a private secure sum's figures


class OlderThanSeen(DataError):
    """Devices have seen a later round than this server is at: its state is an old copy."""

    def __init__(self, number: int, seen: int, devices: int) -> None:
        super().__init__(
            f"deployment.state: older than what devices have seen: {devices} devices have seen"
            f" round {seen}, and this state would run round {number}; restore the newer state"
        )
        self.seen = seen


class Gathering(Protocol):
    """One way to a round's sum: `PlainReports` here, or `SecureSums` of masked vectors."""

    devices: dict[int, str]  # node -> device, as far as it has said
    users: dict[int, str] | None  # node -> whose turns it has; None: devices have their own

    def gather(
        self, state: State, number: int, asked: Sequence[int], marks: MarksOf
    ) -> RoundContribution | None:
        """Ask the nodes; None if the round did not come about. `marks` looks devices up."""
        ...


def _version_rows(value: Any) -> bool:
    if not isinstance(value, list) or not all(isinstance(r, list) and len(r) == 3 for r in value):
        return False
    return all(is_count(r[0]) and is_count(r[1]) and is_number(r[2]) for r in value)


class Report(BaseModel):
    """One device's contribution, checked. Its update waits in a file until it is added up."""

    model_config = ConfigDict(frozen=True)

    device: Annotated[str, checked(is_name, "no device named")]
    unclipped: StrictBool
    since: Count  # the rewards reported are those settled after this mark of the device's log ...
    upto: Count  # ... up to this one
    events: Count
    version: Count  # the model that it holds
    reward_sum: Number
    propensity_sum: Number
    by_version: Annotated[
        list[list[float]],
        checked(_version_rows, "not a list of versions with their events and rewards"),
    ]  # version that made the choices, events, sum of their rewards
    norm: float = 0.0  # of the update
    load: Callable[[], np.ndarray] | None = None

    @model_validator(mode="after")
    def _check_figures(self) -> "Report":
        most = self.events * (1 + TOLERANCE)
        if self.upto < self.since or not 0 <= self.propensity_sum <= most:
            raise ValueError("its figures contradict each other")
        return self

    @property
    def update(self) -> np.ndarray:
        """The clipped update, as it was sent."""
        assert self.load is not None
        return self.load()


class _Idle(BaseModel):
    """The answer of a device that had nothing to train on."""

    device: Annotated[str, checked(is_name, "no device named")]
    version: Count  # the model that it holds


def _put_away(update: np.ndarray, file: "SpooledTemporaryFile[bytes]") -> Callable[[], np.ndarray]:
    """Let go of an update, into a round's file; call what is returned to have it again."""
    start = file.seek(0, 2)
    file.write(np.ascontiguousarray(update).data.cast("B"))
    dtype, shape, size = update.dtype, update.shape, update.nbytes

    def load() -> np.ndarray:
        file.seek(start)
        return np.frombuffer(file.read(size), dtype).reshape(shape)

    return load


@dataclass(frozen=True)
class Sound:
    """A sound answer, the node that it came from, and whose mark it moves.

    `key` is the device's name. While another node that goes by the name is in reach, it is a name
    of this node's own: a node that takes a neighbour's name silences nobody.
    """

    node: int
    answer: "Report | _Idle"
    key: str
    mark: Mark | None


@dataclass
class Sorted:
    """A round's answers: sound ones in the order in which devices were asked, the rest by name."""

    sound: list[Sound] = field(default_factory=list)
    refused: list[tuple[int, str, str]] = field(default_factory=list)  # node, kind, what exactly

    @property
    def reports(self) -> list[Sound]:
        """Those that hold an update."""
        return [one for one in self.sound if isinstance(one.answer, Report)]

    @property
    def idle(self) -> list[Sound]:
        """Those of devices that had nothing to train on."""
        return [one for one in self.sound if isinstance(one.answer, _Idle)]


class _Screening:
    """Judges the answers to one attempt at a round, each once, however often they are sorted.

    What an answer says by itself is judged as it comes (`take`). Whether it is its device's turn,
    or its second answer, depends on the others: `sort` decides that among all that have come.
    """

    def __init__(
        self,
        own: "PlainReports",
        state: State,
        number: int,
        marks: MarksOf,
        updates: "SpooledTemporaryFile[bytes]",
    ) -> None:
        self.token = secrets.token_hex(8)
        self._own, self._number, self._marks_of, self._updates = own, number, marks, updates
        self._like, self._clip_norm = own.deployment.sent_by_one(state), state.clip_norm
        self._bounds = own.deployment.rules.bounds
        self._seen: dict[str, Report | _Idle | Refusal] = {}  # by ticket
        self._marks: dict[str, Mark | None] = {}
        self._registered = registered_nodes(own.deployment.folder)

    @cached_property
    def _reachable(self) -> set[int]:
        """The nodes in reach, looked up only where two claim one device."""
        return set(self._own.poller.nodes())

    def marks(self, keys: Iterable[str]) -> dict[str, Mark]:
        """The marks under these keys, each looked up once."""
        keys = list(keys)
        if new := sorted({key for key in keys if key not in self._marks}):
            found = self._marks_of(new)
            self._marks |= {key: found.get(key) for key in new}
        return {key: mark for key in keys if (mark := self._marks[key]) is not None}

    def take(self, node: int, reply: Reply) -> Reply:
        """Judge a reply as it comes, and let go of what it holds."""
        self._seen[reply.ticket] = self._judged(reply)
        return replace(reply, arrays={}, sealed={})

    def sort(self, answers: Answers) -> Sorted:
        """The answers that were taken, one for each device, in the order of asking."""
        taken = [(node, self._seen[reply.ticket]) for node, reply in answers]
        users = self._own.users or {}
        self.marks(answer.device for _, answer in taken if not isinstance(answer, tuple))
        self.marks(users[node] for node, _ in taken if node in users)
        found, seen = Sorted(), set[str]()
        for node, answer in taken:
            refuse = answer if isinstance(answer, tuple) else None
            if not isinstance(answer, tuple):
                one = self._of(node, answer)
                refuse = self._out_of_turn(one, seen)
                if refuse is None:
                    found.sound.append(one)
                    seen |= {one.key, users.get(node, one.key)}
            if refuse is not None:
                found.refused.append((node, *refuse))
        return found

    def _of(self, node: int, answer: "Report | _Idle") -> Sound:
        """Whose mark an answer moves, and the mark that it continues.

        Without keys, a device that starts again comes from a new node: it takes over its name from
        a node that is out of reach, and from there on continues its mark. A mark beyond the end of
        its own log is not its own.
        """
        device = answer.device
        mark = self.marks([device]).get(device)
        if mark is None or mark.damaged or mark.owner in (None, node):
            return Sound(node, answer, device, mark)
        own = own_key(node, device)
        mine = self.marks([own]).get(own)
        gone = mark.owner not in self._registered and mark.owner not in self._reachable
        if mine is None and isinstance(answer, Report):
            counted = max(mark.counted, answer.since)
            counted = counted if counted <= answer.upto else answer.since
            mine = replace(mark, counted=counted)
        shared = gone or self._own.deployment.ledger is not None
        return Sound(node, answer, device if shared else own, mine or mark)

    def _out_of_turn(self, one: Sound, seen: set[str]) -> Refusal | None:
        users, device = self._own.users, one.answer.device
        owner = one.key if users is None else users.get(one.node)
        if owner is None:
            return "no user", f"device {device} has not said whose it is"
        if one.key in seen:
            return "twice", f"device {device} has already reported in this round"
        if owner in seen:
            return "twice", (
                f"another device of the same user as {device} has already reported in this round"
            )
        turns = one.mark if users is None else self.marks([owner]).get(owner)
        return not_now(self._own.deployment, self._number, device, one.mark, turns)

    def _judged(self, reply: Reply) -> Report | _Idle | Refusal:
        if refuse := refusal(reply, self.token):
            return refuse
        try:
            if reply.facts.get("trained") is False:
                return _Idle.model_validate(reply.facts)
            report = Report.model_validate({"by_version": None, **reply.facts, "load": None})
        except ValidationError as error:
            return "garbage", first_problem(error)
        if set(reply.arrays) != {"update"}:
            return "garbage", f"arrays {sorted(reply.arrays)[:5]} where one update was expected"
        if refuse := _beyond(report, self._bounds):
            return refuse
        update = reply.arrays["update"]
        norm = norm_or_reason(update, self._like)
        if isinstance(norm, str):
            like = getattr(update, "dtype", None), getattr(update, "shape", None)
            fits = like == (self._like.dtype, self._like.shape)
            return "not finite" if fits else "wrong shape or type", norm
        if norm > self._clip_norm * (1 + TOLERANCE):
            return "too large", f"norm {norm:.4g}, where devices clip to {self._clip_norm:.4g}"
        return report.model_copy(update={"norm": norm, "load": _put_away(update, self._updates)})


class PlainReports:
    """Each device sends one clipped update, which the server screens before it adds it up.

    Used unless `deployment.secure_aggregation` is set. Updates wait in a file until the round ends
    and are added up in the order of asking: memory stays flat, and the same reports give the same
    bits whichever came first.
    """

    def __init__(self, deployment: Deployment, poller: RequestPoller) -> None:
        self.deployment, self.poller = deployment, poller
        self.devices: dict[int, str] = {}
        self.users: dict[int, str] | None = {} if takes_users(deployment) else None

    def gather(
        self, state: State, number: int, asked: Sequence[int], marks: MarksOf
    ) -> RoundContribution | None:
        folder = str(self.deployment.folder)
        with SpooledTemporaryFile(max_size=_IN_MEMORY, dir=folder) as updates:
            screening = _Screening(self, state, number, marks, updates)
            return self._gathered(screening, state, number, asked)

    def _gathered(
        self, screening: _Screening, state: State, number: int, asked: Sequence[int]
    ) -> RoundContribution | None:
        rules, private = self.deployment.rules, self.deployment.ledger is not None
        before = {node: self.devices[node] for node in asked if node in self.devices}
        answers = self._answers(screening, state, number, asked, before)
        if private:
            check_not_older(answers, number)
        found = screening.sort(answers)
        refused = note_refused(number, found.refused)
        least = 0 if private else rules.min_reports  # aborting would leak who took part
        if len(found.reports) < least:
            _logger.warning(
                "round %d: %d reports, %d needed; it is run again",
                number,
                len(found.reports),
                least,
            )
            return None
        figures = count_rewards(found.reports, number, before, rules.bounds if private else None)
        following = figures.marks
        if private:  # having nothing to train on must not change who is drawn later
            following |= {one.key: replace(one.mark or Mark(), turn=number) for one in found.idle}
        nodes = {one.node: one.key for one in found.sound if one.key in following}
        if self.users is not None:
            following |= {self.users[node]: Mark(turn=number) for node in nodes}
        reports = [one.answer for one in found.reports if isinstance(one.answer, Report)]
        step, aggregation = self.deployment.grid.step, self.deployment.aggregation
        like = self.deployment.sent_by_one(state)
        held = found.sound if private else found.reports  # who is idle is not told apart
        return RoundContribution(
            **vars(figures),
            total=summed(reports, like, state.clip_norm, aggregation, step if private else None),
            accepted=len(reports),
            below=sum(report.unclipped for report in reports),
            idle=len(found.idle),
            refused=refused,
            versions=count_each(one.answer.version for one in held),
            nodes=nodes,
        )

    def _answers(
        self,
        screening: _Screening,
        state: State,
        number: int,
        asked: Sequence[int],
        before: Mapping[int, str],
    ) -> Answers:
        """The answers that came in time, in the order in which the nodes were asked."""
        rules, goal = self.deployment.rules, self.deployment.rules.report_goal
        marks = screening.marks(before.values())

        def requests() -> Iterator[Request]:
            for node in asked:
                name = before.get(node, "")
                mark = marks.get(name)
                if mark is not None and mark.owner not in (None, node):
                    own = own_key(node, name)
                    mark = screening.marks([own]).get(own)
                counted = None if mark is None or mark.damaged else mark.counted
                yield self._task(state, node, number, screening.token, counted)

        def enough(answers: Answers) -> bool:
            return (
                goal is not None
                and len(answers) >= goal
                and len(screening.sort(answers).reports) >= goal
            )

        answers = self.poller.ask(
            requests(), rules.round_seconds, f"round {number}", enough, screening.take
        )
        for node, reply in answers:
            if is_name(reply.facts.get("device")):
                self.devices[node] = reply.facts["device"]
        return answers

    def _task(
        self, state: State, node: int, number: int, token: str, counted: int | None
    ) -> Request:
        facts = {
            "token": token,
            "round": number,
            "clip_norm": state.clip_norm,
            "space": self.deployment.space,
            "counted": counted,
            "learning": self.deployment.learning,
            "bounds": self.deployment.rules.bounds.to_json(),
            **self.deployment.terms,
        }
        seconds = self.deployment.rules.round_seconds
        return Request("train", node, facts, {"weights": self.deployment.received(state)}, seconds)


def summed(
    reports: Iterable[Report],
    like: np.ndarray,
    clip_norm: float,
    aggregation: PlainMean,
    step: float | None = None,
) -> np.ndarray:
    """The aggregation of sound reports' updates, in their order, clipped once more.

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
        update = report.update
        clipped = update.dtype.type(clip_factor(report.norm, clip_norm)) * update
        accumulator.add({"weights": IndividualUpdates((clipped,))}, 1)
    return accumulator.totals()["weights"]


def count_rewards(
    reports: Iterable[Sound],
    number: int,
    before: Mapping[int, str],
    private: ReportBounds | None = None,
) -> RewardFigures:
    """The round's figures, and the marks of its devices from now on.

    A device that did not know its mark reports more than is new; its figures wait until it knows.
    So do those of a node whose device had another name `before`, until it keeps the name for a
    round. Sums of a `private` round are exact, in whole `figure_steps` cut towards 0. In any other
    no device owns the reward: see `bounded_mean`.
    """
    marks, counted = dict[str, Mark](), list[Report]()
    for one in reports:
        report, mark = one.answer, one.mark
        assert isinstance(report, Report)
        name = before.get(one.node, report.device)
        if mark is not None and report.since != mark.counted:
            what = f"device {report.device} reports rewards that were counted before"
            _logger.warning("round %d: %s; it will be informed", number, what)
            upto = mark.counted
        elif private is None and name not in (report.device, own_key(one.node, report.device)):
            upto = report.since
        else:
            upto = report.upto
            counted.append(report)
        marks[one.key] = replace(mark or Mark(), counted=upto, turn=number)
    _, per_reward, per_propensity = (
        (1.0, 1.0, 1.0) if private is None else figure_steps(private).tolist()
    )
    whole = float if private is None else trunc
    events = np.array([report.events for report in counted], np.float64)
    rewards = [whole(report.reward_sum / per_reward) for report in counted]
    propensities = [whole(report.propensity_sum / per_propensity) for report in counted]
    # `sum` of floats is compensated from Python 3.12 on; results are the same bits everywhere.
    found = RewardFigures(
        events=sum(report.events for report in counted),
        reward_sum=reduce(add, rewards, 0.0) * per_reward,
        propensity_sum=reduce(add, propensities, 0.0) * per_propensity,
        marks=marks,
    )
    weights = events
    if private is None and found.events:
        some, sums = events > 0, np.array(rewards)
        found.median = float(np.median(sums[some] / events[some]))
        found.largest_share = float(events.max() / found.events)
        weights, found.reported = usual_weights(events), found.reward_sum
        mean = bounded_mean(events, sums, weights)
        found.reward_sum = found.reward_sum if mean is None else mean * found.events
    by_version: dict[int, list[float]] = {}
    chosen: Counter[int] = Counter()
    for report, weight in zip(counted, weights, strict=True):
        share = 1 if weight == report.events else float(weight) / report.events
        for version, own_events, reward in report.by_version:
            row = by_version.setdefault(int(version), [0, 0.0])
            row[0] += own_events * share
            row[1] += reward * share
            chosen[int(version)] += int(own_events)
    found.by_version = {str(version): row for version, row in sorted(by_version.items())}
    found.events_by_version = {str(version): n for version, n in sorted(chosen.items())}
    return found


def usual_weights(events: np.ndarray) -> np.ndarray:
    """The events of each device [n] that count in the reward: at most twice the median device's.

    With fewer than three devices that have any, all events count.

    Examples:
        >>> usual_weights(np.array([4.0, 6.0, 5.0, 1000.0]))
        array([ 4.,  6.,  5., 11.])
    """
    some = events[events > 0]
    return events if len(some) < 3 else np.minimum(events, _USUAL * np.median(some))


def bounded_mean(events: np.ndarray, rewards: np.ndarray, weights: np.ndarray) -> float | None:
    """The mean reward, in which no device counts more than the one after it; None: the plain mean.

    Each device pulls the median of the devices' mean rewards by weight times distance.
    The strongest pull is cut to the second strongest: one liar moves the mean by no more than some
    honest device does. With fewer than five devices only those are cut whose events are unusual.
    `events`, their sums of `rewards` and the `weights` of `usual_weights` are [n].

    Examples:
        >>> events, rewards = np.full(5, 10.0), np.array([5.0, 6.0, 4.0, 5.0, 1000.0])
        >>> float(rewards.sum() / events.sum())
        20.4
        >>> round(bounded_mean(events, rewards, usual_weights(events)), 2)
        0.52
    """
    some = events > 0
    unusual = weights[some] < events[some]
    if some.sum() < _OUTVOTE and not unusual.any():
        return None
    weights, means = weights[some], rewards[some] / events[some]
    centre = float(np.median(means))
    pulls = weights * (means - centre)
    most = float(np.sort(np.abs(pulls))[-2])
    cut = unusual if some.sum() < _OUTVOTE else np.full(len(pulls), True)
    pulls = np.where(cut, np.clip(pulls, -most, most), pulls)
    return centre + float(pulls.sum() / weights.sum())


def count_each(values: Iterable[int | str]) -> dict[str, int]:
    """The number of times each value occurs, by its text, in the order of the values.

    Examples:
        >>> count_each([3, 2, 3])
        {'2': 1, '3': 2}
    """
    return {str(value): count for value, count in sorted(Counter(values).items())}


def refusal(reply: Reply, token: str, unable: str = "could not train") -> Refusal | None:
    """The reason why an answer does not belong to the attempt with that token; None if it does.

    `unable` is the kind of an answer by a device that says itself that it cannot.
    """
    if reply.error is not None:
        return "failed", reply.error
    if problem := protocol_problem(reply.facts):
        return "garbage", problem
    if reply.facts.get("token") != token:
        return "other round", "it belongs to another round, or to another attempt at this one"
    if "problem" in reply.facts:
        return unable, str(reply.facts["problem"])[:300]
    return None


def _beyond(report: Report, bounds: ReportBounds) -> Refusal | None:
    """The reason why no honest device reports these figures; None if one could."""
    events, rewards = report.events, report.reward_sum
    if events > bounds.events:
        most = f"where one device reports at most {bounds.events} in one round"
        return "too many events", f"{events}, {most}"
    slack = bounds.reward * (1 + TOLERANCE)
    if abs(rewards) > events * slack:
        each = f"{events} events of at most {bounds.reward:g} each"
        return "rewards too large", f"{rewards:.4g} over {each}"
    rows = report.by_version
    near = TOLERANCE * (1 + abs(rewards))
    if len({row[0] for row in rows}) < len(rows) or not all(row[1] for row in rows):
        problem = "a version twice, or without events"
    elif any(abs(row[2]) > row[1] * slack for row in rows):
        problem = "rewards too large"
    elif sum(r[1] for r in rows) != events or abs(sum(r[2] for r in rows) - rewards) > near:
        problem = "does not add up"
    else:
        return None
    return "garbage", f"by_version: {problem}"


def check_not_older(answers: Answers, number: int) -> None:
    """Stop where devices have seen a later round: its releases would be repeated, unaccounted.

    One device alone could only want to stop the server; the round continues without it.
    """
    later = [seen for seen in _seen(answers) if seen > number]
    if len(later) >= min(_WITNESSES, max(1, len(answers))):
        raise OlderThanSeen(number, sorted(later)[-_WITNESSES:][0], len(later))


def seen_by(answers: Answers, number: int) -> bool:
    """Whether enough devices say that they were in a sum of this very round."""
    check_not_older(answers, number)
    return sum(seen == number for seen in _seen(answers)) >= _WITNESSES


def _seen(answers: Answers) -> list[int]:
    """The latest rounds that devices have seen, where they refuse an earlier one."""
    said = {
        str(reply.facts["device"]): int(reply.facts["seen"])
        for _, reply in answers
        if reply.error is None
        and is_name(reply.facts.get("device"))
        and is_count(reply.facts.get("seen"))
    }
    return list(said.values())


def note_refused(number: int, refused: Sequence[tuple[int, str, str]]) -> dict[str, int]:
    """Log every answer that was left out: (node, kind, what exactly); how many of each kind."""
    for node, kind, what in refused:
        _logger.warning("round %d: node %d refused: %s: %s", number, node, kind, what)
    return count_each(kind for _, kind, _ in refused)


def select(deployment: Deployment, nodes: Sequence[int], number: int) -> list[int]:
    """The nodes to ask in a round."""
    plan = deployment.ledger and deployment.ledger.plan
    if plan and plan.sampling == "poisson":
        return [node for node in nodes if _chance.random() < plan.probability]
    return _chance.sample(list(nodes), min(len(nodes), deployment.config.clients_per_round))


def select_judges(nodes: Sequence[int], trained: Collection[int], most: int) -> list[int]:
    """The nodes to ask about a candidate: others than those asked to train on their logs, as far as
    there are any.
    """
    others = [node for node in nodes if node not in trained]
    rest = [node for node in nodes if node in trained]
    chosen = _chance.sample(others, min(len(others), most))
    return chosen + _chance.sample(rest, min(len(rest), most - len(chosen)))


def not_now(
    deployment: Deployment, number: int, device: str, mark: Mark | None, turns: Mark | None
) -> Refusal | None:
    """The reason why a device may not take part in this round, by its mark and its `turns`."""
    mark, turns = mark or Mark(), turns or Mark()
    if mark.damaged or turns.damaged:
        what = f"what the server remembers of device {device} is not what it wrote"
        return "damaged mark", what
    if rests(deployment, turns, number):
        return "not its turn", f"device {device} took part in round {turns.turn}"
    return None


def rests(deployment: Deployment, mark: Mark, number: int) -> bool:
    """Whether the privacy plan does not let it be the turn of a device.

    The accounting counts on blocks whose turns come round: not any rest of `separation` rounds or
    more, but turns in every `separation`-th round from the first. Others can meet in more of the
    noise's rows and cost more.
    """
    plan = deployment.ledger and deployment.ledger.plan
    if not plan or not takes_turns(deployment) or mark.turn is None:
        return False
    return (number - mark.turn) % plan.separation != 0


def takes_turns(deployment: Deployment) -> bool:
    """Whether the privacy plan gives each device its turns."""
    return deployment.ledger is not None and deployment.ledger.plan.sampling == "min-separation"


def takes_users(deployment: Deployment) -> bool:
    """Whether turns belong to users, of whom each may have several devices."""
    return deployment.ledger is not None and deployment.ledger.plan.unit == "user"


def one_of_each(nodes: Sequence[int], users: Mapping[int, str]) -> list[int]:
    """One node of each user, by chance; whose user is not known is left out until it is."""
    owned: dict[str, list[int]] = {}
    for node in nodes:
        if node in users:
            owned.setdefault(users[node], []).append(node)
    return [_chance.choice(own) for own in owned.values()]


def awake(
    deployment: Deployment,
    nodes: Sequence[int],
    devices: Mapping[int, str],
    marks: MarksOf,
    number: int,
) -> list[int]:
    """The nodes whose turn it may be, as far as it is known which devices they are."""
    if not takes_turns(deployment):
        return list(nodes)
    known = marks(devices[node] for node in nodes if node in devices)
    return [
        node
        for node in nodes
        if not rests(deployment, known.get(devices.get(node, ""), Mark()), number)
    ]
