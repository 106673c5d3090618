"""How a round's devices come to one sum: each report seen and screened by the server, or sums alone.

The step that follows is the same for both and lives elsewhere.
"""

import logging
import random
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from fedbandit.core.errors import DataError
from fedbandit.deploy.messages import Answers, Courier, Request
from fedbandit.deploy.secure_sums import figure_steps
from fedbandit.deploy.server.database import Mark, MarksOf
from fedbandit.deploy.server.deployment import Deployment
from fedbandit.deploy.server.reports import (
    Screening,
    Sorted,
    count_rewards,
    in_figure_steps,
    is_count,
    is_name,
    summed,
    versions_held,
)
from fedbandit.federated.state import State

_WITNESSES = 2  # devices that have to say the same before it is believed
_chance = random.SystemRandom()
_logger = logging.getLogger("fedbandit.deploy.server")


@dataclass(frozen=True)
class RoundContribution:
    """What a round's devices come to, however it was gathered."""

    total: np.ndarray  # the sum of their clipped updates; of a private round in whole steps
    accepted: int  # devices in the sum
    below: int  # those of them whose update was not clipped
    events: int  # rewards that no round has counted before, ...
    reward_sum: float  # ... their sum, and that of their propensities; if private, of whole steps
    propensity_sum: float
    idle: int  # devices that had nothing to train on
    refused: dict[str, int]  # answers left out, by kind
    versions: dict[str, int]  # how many devices hold which model
    marks: dict[str, Mark]  # what is remembered of the devices in the sum from now on
    by_version: dict[str, list[float]] | None = (
        None  # events and rewards by the version that chose; None: hidden
    )
    known_modulo: tuple[float, float, float] | None = (
        None  # events, rewards, propensities of a private secure sum
    )


class OlderThanSeen(DataError):
    """Devices have seen a later round than this server is at: its state is an old copy."""

    def __init__(self, number: int, seen: int, devices: int) -> None:
        problem = (
            f"{devices} devices have seen round {seen}, and this state would run round {number}"
        )
        super().__init__(
            f"deployment.state: older than what devices have seen: {problem}; restore the newer state"
        )
        self.seen = seen


class Gathering(Protocol):
    """One way of coming to a round's sum."""

    devices: dict[int, str]  # node -> device, as far as it has said
    users: dict[int, str] | None  # node -> whose turns it has; None: devices have their own

    def gather(
        self, state: State, number: int, asked: Sequence[int], marks: MarksOf
    ) -> RoundContribution | None:
        """Ask the nodes; None if the round did not come about. `marks` looks up what is remembered of devices."""
        ...


class PlainReports:
    """Each device sends one clipped update, which the server screens before it adds it up."""

    def __init__(self, deployment: Deployment, courier: Courier) -> None:
        self._deployment, self._courier = deployment, courier
        self.devices: dict[int, str] = {}
        self.users: dict[int, str] | None = (
            {} if takes_users(deployment) else None
        )  # node -> whose turns it has

    def gather(
        self, state: State, number: int, asked: Sequence[int], marks: MarksOf
    ) -> RoundContribution | None:
        token = secrets.token_hex(8)
        bounds, weights = self._deployment.rules.bounds, state.kept["weights"]
        screening = Screening(token, weights, state.clip_norm, bounds, marks, self.users)

        def sort(replies: Answers) -> Sorted:
            return screening.sort(replies, lambda mark: rests(self._deployment, mark, number))

        names = {node: self.devices[node] for node in asked if node in self.devices}
        known = marks(names.values())
        sound = {device: mark.counted for device, mark in known.items() if not mark.damaged}
        counted = {node: sound.get(device) for node, device in names.items()}
        tasks = [self._task(state, node, number, token, counted.get(node)) for node in asked]
        answers = self._answers(tasks, number, sort)
        if self._deployment.ledger is not None:
            check_not_older(answers, number)
        found = sort(answers)
        names_of = {node: self.devices.get(node) for node, _ in answers}
        name_refused(number, found.refused)
        reports, least = found.reports, self._least()
        private = self._deployment.ledger is not None
        if private:
            reports = [in_figure_steps(report, bounds) for report in reports]
        if len(reports) < least:
            _logger.warning(
                "round %d: %d reports, %d needed; it is run again", number, len(reports), least
            )
            return None
        following, figures, elsewhere = count_rewards(screening.marks, reports, number)
        if self._deployment.ledger is not None:
            # Having nothing to train on must not change who is drawn later: it was their turn all the same.
            idle = [answer.device for answer in found.idle]
            following |= {
                device: replace(screening.marks.get(device, Mark()), turn=number) for device in idle
            }
        if self.users is not None:
            following |= {
                self.users[node]: Mark(turn=number)
                for node in asked
                if names_of.get(node) in following
            }
        steps = figure_steps(bounds).tolist() if private else (1.0, 1.0, 1.0)
        for device in elsewhere:
            _logger.warning(
                "round %d: device %s reports rewards that were counted before; it will be informed",
                number,
                device,
            )
        return RoundContribution(
            total=summed(
                reports,
                weights,
                state.clip_norm,
                self._deployment.aggregation,
                self._deployment.grid.step if private else None,
            ),
            accepted=len(reports),
            below=sum(report.unclipped for report in reports),
            events=figures.events,
            reward_sum=figures.reward_sum * steps[1],
            propensity_sum=figures.propensity_sum * steps[2],
            idle=len(found.idle),
            refused=found.kinds(),
            versions=versions_held(
                [*(report.version for report in reports), *self._versions_of_idle(found)]
            ),
            marks=following,
            by_version=figures.by_version,
        )

    def _versions_of_idle(self, found: Sorted) -> list[int]:
        """Under privacy those who had nothing to train on are counted with the others, and cannot be told from them."""
        return [] if self._deployment.ledger is None else [answer.version for answer in found.idle]

    def _least(self) -> int:
        """A private round continues whoever answers: aborting for lack of reports would leak who took part."""
        return 0 if self._deployment.ledger is not None else self._deployment.rules.min_reports

    def _task(
        self, state: State, node: int, number: int, token: str, counted: int | None
    ) -> Request:
        facts = {
            "token": token,
            "round": number,
            "clip_norm": state.clip_norm,
            "space": self._deployment.space,
            "counted": counted,
            "learning": self._deployment.learning,
            "bounds": self._deployment.rules.bounds.to_json(),
            **self._deployment.terms,
        }
        seconds = self._deployment.rules.round_seconds
        return Request("train", node, facts, {"weights": state.kept["weights"]}, seconds)

    def _answers(self, requests: list[Request], number: int, sort: Any) -> Answers:
        """The answers that came in time, in the order in which the nodes were asked."""
        goal = self._deployment.rules.report_goal

        def enough(answers: Answers) -> bool:
            return goal is not None and len(answers) >= goal and len(sort(answers).reports) >= goal

        answers = self._courier.ask(
            requests, self._deployment.rules.round_seconds, f"round {number}", enough
        )
        for node, reply in answers:
            device = reply.facts.get("device")
            if isinstance(device, str):
                self.devices[node] = device
        return answers


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


def name_refused(number: int, refused: Iterable[tuple[int, str, str]]) -> None:
    """Put every answer that was left out into the log: its node, kind and what exactly."""
    for node, kind, what in refused:
        _logger.warning("round %d: node %d refused: %s: %s", number, node, kind, what)


def select(deployment: Deployment, nodes: Sequence[int], number: int) -> list[int]:
    """The nodes to ask in a round."""
    plan = deployment.ledger and deployment.ledger.plan
    if plan and plan.sampling == "poisson":
        return [node for node in nodes if _chance.random() < plan.probability]
    return _chance.sample(list(nodes), min(len(nodes), deployment.config.clients_per_round))


def select_judges(nodes: Sequence[int], trained: Collection[int], most: int) -> list[int]:
    """The nodes to ask about a candidate: others than those asked to train on their logs, as far as there are any."""
    others = [node for node in nodes if node not in trained]
    rest = [node for node in nodes if node in trained]
    chosen = _chance.sample(others, min(len(others), most))
    return chosen + _chance.sample(rest, min(len(rest), most - len(chosen)))


def rests(deployment: Deployment, mark: Mark, number: int) -> bool:
    """Whether the privacy plan does not let it be the turn of a device.

    The accounting counts on blocks whose turns come round: not any rest of `separation` rounds or more, but turns in
    every `separation`-th round from the first. Others can meet in more of the noise's rows and cost more.
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
