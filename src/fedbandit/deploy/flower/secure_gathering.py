"""A round of which the server sees only the sum: the exchanges with devices, step by step, each with its deadline.

Who drops out is left behind as long as the protocol allows it; otherwise the attempt is given up and nothing counts.
"""

import logging
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from fedbandit.core.errors import DataError
from fedbandit.deploy.flower.roster import read_roster
from fedbandit.deploy.masking import wire
from fedbandit.deploy.masking.announcements import Announcement, reused
from fedbandit.deploy.masking.primitives import SHARE, TAG
from fedbandit.deploy.masking.server import MaskedSum, Terms
from fedbandit.deploy.messages import GRACE, Answers, Courier, Reply, Request
from fedbandit.deploy.secure_sums import (
    Figures,
    decode,
    decode_private,
    figures_modulo,
    length,
    why_impossible,
)
from fedbandit.deploy.server.database import Mark, MarksOf
from fedbandit.deploy.server.deployment import Deployment
from fedbandit.deploy.server.gathering import Contribution, check_not_older, name_refused, rests
from fedbandit.deploy.server.reports import by_kind, is_name, refusal, versions_held
from fedbandit.federated.state import State

_logger = logging.getLogger("fedbandit.deploy.server")
T = TypeVar("T")


class _GivenUp(Exception):
    """This attempt comes to nothing, for the reason given; `left` are still there, and could try among themselves."""

    def __init__(self, reason: str, left: Collection[int] = ()) -> None:
        super().__init__(reason)
        self.left = sorted(left)


@dataclass
class _Attempt:
    """One attempt at a round, and what has come of it so far."""

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
    """Devices mask what they send; only the sum over all of them can be read."""

    def __init__(self, deployment: Deployment, courier: Courier) -> None:
        self._deployment, self._courier = deployment, courier
        self.devices: dict[int, str] = {}
        self._private = deployment.ledger is not None
        # In a private round devices without anything to train on send zeros: who is in the sum must not tell.
        self._said = {"zeros": True, "required": ["zeros"]} if self._private else {}

    def gather(
        self, state: State, number: int, asked: Sequence[int], marks: MarksOf
    ) -> Contribution | None:
        attempt = _Attempt(state, number, secrets.token_hex(8), marks)
        try:
            found, summed = self._sum(attempt, asked)
        except _GivenUp as reason:
            name_refused(number, attempt.refused)
            if self._private and 0 < len(reason.left) < len(asked):
                # Only too few devices may have a private round drawn anew: that is what is charged for.
                _logger.warning(
                    "round %d: no secure sum: %s; those who are left try again", number, reason
                )
                return self.gather(state, number, reason.left, marks)
            _logger.warning("round %d: no secure sum: %s; it is run again", number, reason)
            return None
        name_refused(number, attempt.refused)
        devices = [attempt.devices[node] for node in summed]
        if self._private:
            attempt.idle = len(devices) - found.devices
        return Contribution(
            total=found.update
            if self._private
            else found.update.astype(state.kept["weights"].dtype),
            accepted=found.devices,
            below=found.unclipped,
            events=found.events,
            reward_sum=found.reward_sum,
            propensity_sum=found.propensity_sum,
            idle=attempt.idle,
            refused=by_kind(attempt.refused),
            versions=versions_held(attempt.versions[node] for node in summed),
            known_modulo=figures_modulo(self._deployment.rules.bounds) if self._private else None,
            marks={
                device: replace(
                    attempt.marks.get(device, Mark()), settled=attempt.token, turn=number
                )
                for device in devices
            },
        )

    def _sum(self, attempt: _Attempt, asked: Sequence[int]) -> tuple[Figures, list[int]]:
        """What the devices add up to, and the nodes that are in the sum."""
        rules = self._deployment.rules
        ready = self._ready(attempt, asked)
        terms = Terms.of(len(ready), rules.secure_shares, rules.secure_threshold)
        neighbours, announced = terms.neighbours(ready), attempt.announced

        def introduced(node: int) -> wire.Said:
            keys = {
                other: announced[other].to_bytes() for other in sorted(neighbours[node] - {node})
            }
            return {wire.STEP: wire.SHARES, wire.THRESHOLD: terms.threshold, **wire.parcels(keys)}

        def packets(node: int, answer: wire.Said) -> dict[int, bytes]:
            return _for_exactly(
                neighbours[node] - {node}, wire.read_parcels(answer, 2 * SHARE + TAG)
            )

        sealed = self._step(attempt, "shares", {node: introduced(node) for node in ready}, packets)
        self._enough(sealed, "have sent shares")
        self._recoverable(sealed, neighbours, sealed, terms)

        total = MaskedSum(attempt.token, length(attempt.state.kept["weights"].size))
        self._vectors(attempt, sealed, neighbours, total)
        self._enough(total.nodes, "have sent what is to be summed")
        self._recoverable(sealed, neighbours, total.nodes, terms)

        dropped = sealed.keys() - total.nodes
        names = {
            node: (neighbours[node] & total.nodes, neighbours[node] & dropped)
            for node in total.nodes
        }
        answers = self._step(
            attempt,
            "unmasking",
            {node: wire.unmask(*pair) for node, pair in names.items()},
            lambda node, answer: _for_exactly(
                set().union(*names[node]), wire.read_parcels(answer, SHARE)
            ),
        )
        self._recoverable(sealed, neighbours, answers, terms)
        shares = {
            node: {keeper: answers[keeper][node] for keeper in neighbours[node] & answers.keys()}
            for node in sealed
        }
        try:
            levels = total.unmasked(shares, terms.threshold, announced, neighbours, sealed)
        except DataError as problem:
            raise _GivenUp(str(problem)) from None
        return self._read(attempt, levels, len(total.nodes)), [
            node for node in ready if node in total.nodes
        ]

    def _ready(self, attempt: _Attempt, asked: Sequence[int]) -> list[int]:
        """Those of the nodes that have something to train on and have announced keys, each device once in its turn.

        The others sit out before masks are made: among idle devices, the sum would show the only one that is not.
        In a private round they take part all the same, and have their turn.
        """
        facts = {"token": attempt.token, "space": self._deployment.space, **self._said}
        seconds = self._deployment.rules.secure_seconds
        requests = [Request("ready", node, facts, {}, seconds + GRACE) for node in asked]
        seen: set[str] = set()
        keys: set[bytes] = set()
        roster = read_roster(self._deployment.folder)
        for node, reply in self._courier.ask(requests, seconds, f"round {attempt.number}"):
            refuse = refusal(reply, attempt.token)
            device, version, ready = (
                reply.facts.get(name) for name in ("device", "version", "ready")
            )
            if refuse is None and not (
                is_name(device) and type(version) is int and isinstance(ready, bool)
            ):
                refuse = ("garbage", "no device, version or readiness named")
            elif refuse is None and device in seen:
                refuse = ("twice", f"device {device} takes part in this round under another node")
            if refuse is not None:
                attempt.refused.append((node, *refuse))
                continue
            seen.add(str(device))
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
        attempt.marks = attempt.marks_of(attempt.devices.values())
        for node, device in list(attempt.devices.items()):
            mark = attempt.marks.get(device, Mark())
            if mark.damaged:
                refuse = ("damaged mark", f"what is remembered of device {device} is damaged")
            elif rests(self._deployment, mark, attempt.number):
                refuse = ("not its turn", f"device {device} took part in round {mark.turn}")
            else:
                continue
            del attempt.devices[node]
            attempt.refused.append((node, *refuse))
        self._enough(
            attempt.devices,
            "are there whose turn it is" if self._private else "have something to train on",
        )
        return list(attempt.devices)

    def _vectors(
        self,
        attempt: _Attempt,
        sealed: Mapping[int, Mapping[int, bytes]],
        neighbours: Mapping[int, set[int]],
        total: MaskedSum,
    ) -> None:
        """The step in which devices train: the task goes out, and masked vectors are added up, at most to the goal."""
        state, rules = attempt.state, self._deployment.rules
        task = {
            "round": attempt.number,
            "clip_norm": state.clip_norm,
            "space": self._deployment.space,
            "learning": self._deployment.learning,
            "bounds": rules.bounds.to_json(),
            **self._said,
            **self._deployment.terms,
        }

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
            facts={
                n: {**task, "settled": attempt.marks.get(attempt.devices[n], Mark()).settled}
                for n in sealed
            },
            arrays={"weights": state.kept["weights"]},
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
        facts: Mapping[int, Mapping[str, Any]] | None = None,
        arrays: Mapping[str, np.ndarray] | None = None,
        seconds: float | None = None,
        enough: Callable[[Answers], bool] = lambda _: False,
    ) -> dict[int, T]:
        """Send each node its message; by node, what could be read from the answers that came in time.

        Answers are read as they come, and what has been read is let go of.
        """
        seconds = self._deployment.rules.secure_seconds if seconds is None else seconds
        found: dict[int, T] = {}

        def request(node: int) -> Request:
            known = {"token": attempt.token, **({} if facts is None else facts[node])}
            return Request("secure", node, known, arrays or {}, seconds + GRACE, sealed=said[node])

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
        answers = self._courier.ask(
            requests, seconds, f"round {attempt.number}, {what}", enough, take
        )
        if self._private:
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
        terms: Terms,
    ) -> None:
        """Each secret needs enough neighbours that still answer, or the masks cannot come off."""
        left_of_all = set(keepers)
        for owner in owners:
            left = len(neighbours[owner] & left_of_all)
            if left < terms.threshold:
                raise _GivenUp(
                    f"{left} of {terms.shares} shares of node {owner}'s masks are left, {terms.threshold} needed",
                    keepers,
                )

    def _read(self, attempt: _Attempt, levels: np.ndarray, devices: int) -> Figures:
        """The figures in a sum; all that can be refused is the whole of it, and of a private one not even that."""
        clip_norm, bounds = attempt.state.clip_norm, self._deployment.rules.bounds
        if self._private:
            return decode_private(levels, devices, bounds)
        found = decode(levels, devices, clip_norm, bounds)
        if reason := why_impossible(found, devices, clip_norm, bounds):
            raise _GivenUp(f"the sum is refused: {reason}")
        return found


def _for_exactly(nodes: set[int], found: dict[int, bytes]) -> dict[int, bytes]:
    if found.keys() != nodes:
        raise DataError("parcels for others than its neighbours")
    return found
