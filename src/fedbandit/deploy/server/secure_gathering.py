"""A round of which the server sees only the sum: the exchanges with devices, each with its
deadline.

Devices that drop out are left behind as long as the protocol allows it; otherwise the attempt is
given up and nothing counts. Knows no transport.
"""

import logging
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from fedbandit.core.errors import DataError
from fedbandit.deploy.masking import primitives as wire
from fedbandit.deploy.masking.announcements import (
    STATEMENT,
    Announcement,
    CommonTask,
    cohort_of,
    in_order,
    reused,
    task_digest,
)
from fedbandit.deploy.masking.masked_sum import MaskedSum, Sharing
from fedbandit.deploy.masking.primitives import SHARE, TAG
from fedbandit.deploy.messages import Answers, Reply, Request, RequestPoller, is_name, with_protocol
from fedbandit.deploy.secure_sums import (
    Figures,
    decode,
    decode_private,
    figures_modulo,
    length,
    nothing,
    why_impossible,
)
from fedbandit.deploy.server.database import Mark, MarksOf
from fedbandit.deploy.server.deployment import Deployment
from fedbandit.deploy.server.gathering import (
    RoundContribution,
    check_not_older,
    count_each,
    not_now,
    note_refused,
    refusal,
    seen_by,
    takes_users,
)
from fedbandit.deploy.server.operator import read_roster
from fedbandit.federated.state import State

_logger = logging.getLogger("fedbandit.deploy.server")
T = TypeVar("T")


class _GivenUp(Exception):
    """The attempt failed; `left` are still there, and could try among themselves."""

    def __init__(self, reason: str, left: Collection[int] = ()) -> None:
        super().__init__(reason)
        self.left = sorted(left)


class _Spent(Exception):
    """The round's sum was unmasked before, and lost with the server that ran it."""


@dataclass
class _Attempt:
    """One attempt at a round, and what has come of it so far: who can train, who was refused."""

    state: State
    number: int
    token: str
    marks_of: MarksOf
    marks: dict[str, Mark] = field(
        default_factory=dict
    )  # of those that can train; new ones have none
    refused: list[tuple[int, str, str]] = field(default_factory=list)
    idle: int = 0
    devices: dict[int, str] = field(default_factory=dict)  # node -> device, of those that can train
    versions: dict[int, int] = field(default_factory=dict)
    announced: dict[int, Announcement] = field(default_factory=dict)


class SecureSums:
    """Devices mask what they send; only the sum over all of them can be read.

    Five exchanges, each with its deadline: who is ready, with which keys; shares of the secrets
    behind the masks; training and masked vectors; who is in the sum, signed by all; shares that
    take the masks off. `masking/primitives.py` has the messages.
    """

    def __init__(self, deployment: Deployment, poller: RequestPoller) -> None:
        self._deployment, self._poller = deployment, poller
        self.devices: dict[int, str] = {}
        self.users: dict[int, str] | None = {} if takes_users(deployment) else None
        self._private = deployment.ledger is not None
        # Who is in a private sum must not tell: devices with nothing to train on send zeros.
        self._said = {"zeros": True, "required": ["zeros"]} if self._private else {}
        self._tolerance = None if deployment.ledger is None else deployment.ledger.tolerance
        if self._tolerance is not None:
            self._said = {"zeros": True, "required": ["zeros", "privacy.noise"]}

    def gather(
        self, state: State, number: int, asked: Sequence[int], marks: MarksOf
    ) -> RoundContribution | None:
        attempt = _Attempt(state, number, secrets.token_hex(8), marks)
        try:
            try:
                found, summed = self._sum(attempt, asked)
            finally:
                refused = note_refused(number, attempt.refused)
        except _Spent:
            _logger.warning(
                "round %d: its sum was unmasked before, and is lost; devices take part in one sum"
                " of a round, so it ends without any",
                number,
            )
            found, summed = nothing(self._deployment.sent_by_one(state).size), []
        except _GivenUp as reason:
            if self._private and 0 < len(reason.left) < len(asked):
                # A private round is drawn again only where too few are left: that is charged for.
                _logger.warning(
                    "round %d: no secure sum: %s; those who are left try again", number, reason
                )
                return self.gather(state, number, reason.left, marks)
            _logger.warning("round %d: no secure sum: %s; it is run again", number, reason)
            return None
        nodes = {node: attempt.devices[node] for node in summed}
        if self._private:
            attempt.idle = len(nodes) - found.devices
        marks_now = {
            device: replace(attempt.marks.get(device, Mark()), settled=attempt.token, turn=number)
            for device in nodes.values()
        }
        if self.users is not None:
            marks_now |= {self.users[node]: Mark(turn=number) for node in summed}
        return RoundContribution(
            total=found.update
            if self._private
            else found.update.astype(self._deployment.sent_by_one(state).dtype),
            accepted=found.devices,
            below=found.unclipped,
            events=found.events,
            reward_sum=found.reward_sum,
            propensity_sum=found.propensity_sum,
            idle=attempt.idle,
            refused=refused,
            versions=count_each(attempt.versions[node] for node in summed),
            nodes=nodes,
            known_modulo=figures_modulo(self._deployment.rules.bounds) if self._private else None,
            marks=marks_now,
        )

    def _sum(self, attempt: _Attempt, asked: Sequence[int]) -> tuple[Figures, list[int]]:
        """The devices' summed figures, and the nodes that are in the sum."""
        rules = self._deployment.rules
        ready = self._ready(attempt, asked)
        terms = Sharing.of(len(ready), rules.secure_shares, rules.secure_threshold)
        neighbours = terms.neighbours(ready)
        announced = {node: attempt.announced[node] for node in ready}
        task, arrays = self._task(attempt), {"weights": self._deployment.received(attempt.state)}
        digest = task_digest(with_protocol(task), arrays)
        common = CommonTask(attempt.token, digest, terms.threshold, cohort_of(announced))
        said = {
            wire.STEP: wire.SHARES,
            wire.THRESHOLD: common.threshold,
            wire.TASK: common.task,
            wire.COHORT: common.cohort,
        }

        def introduced(node: int) -> wire.Said:
            others = sorted(neighbours[node] - {node})
            return {
                **said,
                **wire.parcels({other: announced[other].to_bytes() for other in others}),
            }

        def packets(node: int, answer: wire.Said) -> dict[int, bytes]:
            """Each packet, with the sender's statement behind it."""
            signed = wire.read_bytes(answer, wire.STATEMENT, STATEMENT)
            found = wire.read_parcels(answer, 2 * SHARE + TAG)
            _for_exactly(neighbours[node] - {node}, found)
            return {other: packet + signed for other, packet in found.items()}

        sealed = self._step(attempt, "shares", {node: introduced(node) for node in ready}, packets)
        self._enough(sealed, "have sent shares")
        self._recoverable(sealed, neighbours, sealed, terms)

        total = MaskedSum(common, length(self._deployment.sent_by_one(attempt.state).size))
        self._vectors(attempt, task, arrays, sealed, neighbours, total)
        self._enough(total.nodes, "have sent what is to be summed")
        if self._tolerance is not None:
            needed = self._tolerance.survivors(len(ready))
            if len(total.nodes) < needed:
                raise _GivenUp(
                    f"{len(total.nodes)} of {len(ready)} devices are left, and it takes the noise"
                    f" of {needed} (privacy.dropout)",
                    total.nodes,
                )
        self._recoverable(sealed, neighbours, total.nodes, terms)

        survivors = {wire.STEP: wire.SURVIVORS, wire.SURVIVORS: in_order(total.nodes)}
        signed = self._step(
            attempt,
            "survivors",
            dict.fromkeys(sorted(total.nodes), survivors),
            lambda _, answer: wire.read_bytes(answer, wire.STATEMENT, STATEMENT),
        )
        self._recoverable(sealed, neighbours, signed, terms)

        def statements(node: int) -> wire.Said:
            others = sorted((neighbours[node] - {node}) & signed.keys())
            return {wire.STEP: wire.UNMASK, **wire.parcels({o: signed[o] for o in others})}

        answers = self._step(
            attempt,
            "unmasking",
            {node: statements(node) for node in signed},
            lambda node, answer: _for_exactly(
                neighbours[node] & sealed.keys(), wire.read_parcels(answer, SHARE)
            ),
        )
        self._recoverable(sealed, neighbours, answers, terms)
        shares = {
            node: {keeper: answers[keeper][node] for keeper in neighbours[node] & answers.keys()}
            for node in sealed
        }
        try:
            levels = total.unmasked(shares, announced, neighbours, sealed)
        except DataError as problem:
            raise _GivenUp(str(problem)) from None
        return self._read(attempt, levels, len(total.nodes)), [
            node for node in ready if node in total.nodes
        ]

    def _ready(self, attempt: _Attempt, asked: Sequence[int]) -> list[int]:
        """The nodes that have something to train on and announced keys, each device in its turn.

        The others sit out before masks are made: among idle devices, the sum would show the only
        one that is not. In a private round they take part all the same, and have their turn.
        """
        facts = {
            "token": attempt.token,
            "round": attempt.number,
            "space": self._deployment.space,
            **self._said,
            **self._deployment.terms,
        }
        seconds = self._deployment.rules.secure_seconds
        requests = [Request("ready", node, facts, {}, seconds) for node in asked]
        answers = self._poller.ask(requests, seconds, f"round {attempt.number}")
        spent = seen_by(answers, attempt.number)
        seen: set[str] = set()
        keys: set[bytes] = set()
        roster = read_roster(self._deployment.folder)
        for node, reply in answers:
            refuse = refusal(reply, attempt.token)
            device, version, ready = (
                reply.facts.get(name) for name in ("device", "version", "ready")
            )
            if refuse is None and not (
                is_name(device) and type(version) is int and isinstance(ready, bool)
            ):
                refuse = ("garbage", "no device, version or readiness named")
            elif refuse is None and (owner := self._owner(node, str(device))) is None:
                refuse = ("no user", f"device {device} has not said whose it is")
            elif refuse is None and not seen.isdisjoint({device, owner}):
                whose = "it" if device in seen else "another device of its user"
                refuse = ("twice", f"device {device}: {whose} takes part under another node")
            if refuse is not None:
                attempt.refused.append((node, *refuse))
                continue
            seen |= {str(device), str(owner)}
            self.devices[node] = str(device)
            if not ready:
                attempt.idle += 1
                continue
            try:
                said = Announcement.of(wire.read_bytes(reply.sealed, wire.ANNOUNCEMENT))
                said.check(attempt.token, node, roster)
                if reused([said]) or not keys.isdisjoint(said.keys):
                    raise DataError("one key stands for two things or two nodes")
            except DataError as problem:
                attempt.refused.append((node, "keys", str(problem)))
                continue
            keys.update(said.keys)
            attempt.announced[node] = said
            attempt.devices[node], attempt.versions[node] = str(device), int(str(version))
        owners = {node: self._owner(node, name) or name for node, name in attempt.devices.items()}
        attempt.marks = attempt.marks_of([*attempt.devices.values(), *owners.values()])
        for node, device in list(attempt.devices.items()):
            both = attempt.marks.get(device), attempt.marks.get(owners[node])
            if refuse := not_now(self._deployment, attempt.number, device, *both):
                del attempt.devices[node]
                attempt.refused.append((node, *refuse))
        if spent and len(attempt.devices) < self._deployment.rules.min_reports:
            raise _Spent
        self._enough(
            attempt.devices,
            "are there whose turn it is" if self._private else "have something to train on",
        )
        return list(attempt.devices)

    def _owner(self, node: int, device: str) -> str | None:
        """Whose turns a node has: its device's own, or its user's, where one has said so."""
        return device if self.users is None else self.users.get(node)

    def _task(self, attempt: _Attempt) -> dict[str, Any]:
        """The request to train, the same for all devices: none can be singled out by it."""
        own = self._deployment
        settled = {attempt.marks.get(device, Mark()).settled for device in attempt.devices.values()}
        return {
            "token": attempt.token,
            "round": attempt.number,
            "clip_norm": attempt.state.clip_norm,
            "space": own.space,
            "model": own.untrained,
            "learning": own.learning,
            "bounds": own.rules.bounds.to_json(),
            "settled": sorted(token for token in settled if token is not None),
            **self._said,
            **own.terms,
        }

    def _vectors(
        self,
        attempt: _Attempt,
        task: Mapping[str, Any],
        arrays: Mapping[str, np.ndarray],
        sealed: Mapping[int, Mapping[int, bytes]],
        neighbours: Mapping[int, set[int]],
        total: MaskedSum,
    ) -> None:
        """Send the task, and add up masked vectors as they come, at most to the goal."""
        rules = self._deployment.rules

        def packets_for(node: int) -> wire.Said:
            found = {
                other: sealed[other][node]
                for other in sorted(neighbours[node] - {node})
                if other in sealed
            }
            return {wire.STEP: wire.VECTOR, **wire.parcels(found)}

        self._step(
            attempt,
            "training",
            {node: packets_for(node) for node in sealed},
            lambda node, answer: total.add(node, wire.read_bytes(answer, wire.MASKED)),
            facts=task,
            arrays=arrays,
            seconds=rules.round_seconds,
            enough=lambda _: (
                rules.report_goal is not None and len(total.nodes) >= rules.report_goal
            ),
        )

    def _step(
        self,
        attempt: _Attempt,
        what: str,
        said: Mapping[int, wire.Said],
        read: Callable[[int, wire.Said], T],
        *,
        facts: Mapping[str, Any] | None = None,
        arrays: Mapping[str, np.ndarray] | None = None,
        seconds: float | None = None,
        enough: Callable[[Answers], bool] = lambda _: False,
    ) -> dict[int, T]:
        """Send each node its message; by node, what could be read from the answers that came in
        time.

        Answers are read as they come, and what has been read is let go of.
        """
        seconds = self._deployment.rules.secure_seconds if seconds is None else seconds
        found: dict[int, T] = {}

        def request(node: int) -> Request:
            known = facts or {"token": attempt.token}
            return Request("secure", node, known, arrays or {}, seconds, sealed=said[node])

        def take(node: int, reply: Reply) -> Reply:
            refuse = refusal(reply, attempt.token)
            try:
                if refuse is None:
                    found[node] = read(node, reply.sealed)
            except DataError as problem:
                refuse = ("garbage", str(problem))
            if refuse is not None:
                attempt.refused.append((node, refuse[0], f"{what}: {refuse[1]}"))
            return replace(reply, arrays={}, sealed={})

        requests = [request(node) for node in said]
        answers = self._poller.ask(
            requests, seconds, f"round {attempt.number}, {what}", enough, take
        )
        check_not_older(answers, attempt.number)
        return {node: found[node] for node in said if node in found}

    def _enough(self, nodes: Collection[int], what: str) -> None:
        least = self._deployment.rules.min_reports
        if len(nodes) < least:
            raise _GivenUp(f"{len(nodes)} devices {what}, {least} needed")

    def _recoverable(
        self,
        owners: Collection[int],
        neighbours: Mapping[int, set[int]],
        keepers: Collection[int],
        terms: Sharing,
    ) -> None:
        """Each secret needs enough neighbours that still answer, or the masks cannot come off."""
        left_of_all = set(keepers)
        for owner in owners:
            left = len(neighbours[owner] & left_of_all)
            if left < terms.threshold:
                raise _GivenUp(
                    f"{left} of {terms.shares} shares of node {owner}'s masks are left,"
                    f" {terms.threshold} needed",
                    keepers,
                )

    def _read(self, attempt: _Attempt, levels: np.ndarray, devices: int) -> Figures:
        """The figures in a sum; all that can be refused is the whole of it, and of a private one
        not even that.
        """
        clip_norm, bounds = attempt.state.clip_norm, self._deployment.rules.bounds
        if self._private:
            return decode_private(levels, devices, bounds)
        found = decode(levels, devices, clip_norm, bounds)
        if reason := why_impossible(found, devices, clip_norm, bounds):
            raise _GivenUp(f"the sum is refused: {reason}")
        return found


def _for_exactly(nodes: Collection[int], found: dict[int, bytes]) -> dict[int, bytes]:
    if found.keys() != set(nodes):
        raise DataError("parcels for others than its neighbours")
    return found
