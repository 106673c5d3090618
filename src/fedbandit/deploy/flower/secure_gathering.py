"""A round of which the server sees only the sum: Flower's SecAgg+, step by step, under our own deadlines.

Who drops out is left behind as long as the protocol allows it; otherwise the attempt is given up and nothing counts.
"""

import logging
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from fedbandit.core.errors import DataError
from fedbandit.deploy.flower import masking
from fedbandit.deploy.messages import GRACE, Answers, Courier, Request
from fedbandit.deploy.secure_sums import LEVELS, MODULUS, Figures, decode, decode_private, length, why_impossible
from fedbandit.deploy.server.database import Mark, MarksOf
from fedbandit.deploy.server.deployment import Deployment
from fedbandit.deploy.server.gathering import Contribution, name_refused, rests
from fedbandit.deploy.server.reports import by_kind, is_name, refusal, versions_held
from fedbandit.federated.state import State

_logger = logging.getLogger("fedbandit.deploy.server")
T = TypeVar("T")


class _GivenUp(Exception):
    """This attempt comes to nothing, for the reason given; `left` are still there, and could try among themselves."""

    def __init__(self, reason: str, left: Collection[int] = ()) -> None:
        super().__init__(reason)
        self.left = list(left)


@dataclass
class _Attempt:
    """One attempt at a round, and what has come of it so far."""

    state: State
    number: int
    token: str
    marks_of: MarksOf
    marks: dict[str, Mark] = field(default_factory=dict)  # of those that can train; new ones have none
    refused: list[tuple[int, str, str]] = field(default_factory=list)
    idle: int = 0
    devices: dict[int, str] = field(default_factory=dict)  # node -> device, of those that can train
    versions: dict[int, int] = field(default_factory=dict)


class SecureSums:
    """Devices mask what they send; only the sum over all of them can be read."""

    def __init__(self, deployment: Deployment, courier: Courier) -> None:
        self._deployment, self._courier = deployment, courier
        self.devices: dict[int, str] = {}
        self._private = deployment.ledger is not None
        # In a private round devices without anything to train on send zeros: who is in the sum must not tell.
        self._said = {"zeros": True, "required": ["zeros"]} if self._private else {}

    def gather(self, state: State, number: int, asked: Sequence[int], marks: MarksOf) -> Contribution | None:
        attempt = _Attempt(state, number, secrets.token_hex(8), marks)
        try:
            found, summed = self._sum(attempt, asked)
        except _GivenUp as reason:
            name_refused(number, attempt.refused)
            if self._private and 0 < len(reason.left) < len(asked):
                # Only too few devices may have a private round drawn anew: that is what is charged for.
                _logger.warning("round %d: no secure sum: %s; those who are left try again", number, reason)
                return self.gather(state, number, reason.left, marks)
            _logger.warning("round %d: no secure sum: %s; it is run again", number, reason)
            return None
        name_refused(number, attempt.refused)
        devices = [attempt.devices[node] for node in summed]
        if self._private:
            attempt.idle = min(max(len(devices) - found.devices, 0), len(devices))
        return Contribution(
            total=found.update if self._private else found.update.astype(state.kept["weights"].dtype),
            accepted=found.devices,
            below=found.unclipped,
            events=found.events,
            reward_sum=found.reward_sum,
            propensity_sum=found.propensity_sum,
            idle=attempt.idle,
            refused=by_kind(attempt.refused),
            versions=versions_held(attempt.versions[node] for node in summed),
            marks={
                device: replace(attempt.marks.get(device, Mark()), settled=attempt.token, turn=number)
                for device in devices
            },
        )

    def _sum(self, attempt: _Attempt, asked: Sequence[int]) -> tuple[Figures, list[int]]:
        """What the devices add up to, and the nodes that are in the sum."""
        rules = self._deployment.rules
        ready = self._ready(attempt, asked)
        terms = masking.Terms.of(len(ready), rules.secure_shares, rules.secure_threshold)
        keys = self._step(attempt, "keys", dict.fromkeys(ready, terms.setup()), lambda _, a: masking.public_keys(a))
        self._enough(keys, "have sent keys")

        neighbours = terms.neighbours(list(keys))
        known = {node: masking.share_keys({n: keys[n] for n in sorted(neighbours[node])}) for node in keys}
        sealed = self._step(
            attempt, "shares", known, lambda node, answer: masking.sealed_shares(answer, neighbours[node] - {node})
        )
        self._enough(sealed, "have sent shares")
        self._recoverable(sealed, neighbours, sealed, terms, sealed)

        vectors = self._vectors(attempt, sealed)
        self._enough(vectors, "have sent what is to be summed")
        self._recoverable(sealed, neighbours, vectors, terms, vectors)

        dropped = sealed.keys() - vectors.keys()
        names = {
            node: masking.unmask(neighbours[node] & vectors.keys(), neighbours[node] & dropped) for node in vectors
        }
        answers = self._step(attempt, "unmasking", names, lambda _, answer: masking.shares_told(answer))
        shares = {node: {n: kept[node] for n, kept in answers.items() if node in kept} for node in sealed}
        for node in sealed:
            self._recoverable([node], neighbours, shares[node], terms, answers)
        try:
            total = masking.unmasked_sum(vectors, shares, keys, neighbours)
        except DataError as problem:
            raise _GivenUp(str(problem)) from None
        return self._read(attempt, total, len(vectors)), list(vectors)

    def _ready(self, attempt: _Attempt, asked: Sequence[int]) -> list[int]:
        """Those of the nodes that have something to train on, each device once, and only where it is its turn.

        The others sit out before masks are made: among idle devices, the sum would show the only one that is not.
        In a private round they take part all the same, and have their turn.
        """
        facts = {"token": attempt.token, "space": self._deployment.space, **self._said}
        seconds = self._deployment.rules.secure_seconds
        requests = [Request("ready", node, facts, {}, seconds + GRACE) for node in asked]
        seen: set[str] = set()
        for node, reply in self._courier.ask(requests, seconds, f"round {attempt.number}"):
            refuse = refusal(reply, attempt.token)
            device, version, ready = (reply.facts.get(name) for name in ("device", "version", "ready"))
            if refuse is None and not (is_name(device) and type(version) is int and isinstance(ready, bool)):
                refuse = ("garbage", "no device, version or readiness named")
            elif refuse is None and device in seen:
                refuse = ("twice", f"device {device} takes part in this round under another node")
            if refuse is not None:
                attempt.refused.append((node, *refuse))
                continue
            seen.add(str(device))
            self.devices[node] = str(device)
            if ready:
                attempt.devices[node], attempt.versions[node] = str(device), int(str(version))
            else:
                attempt.idle += 1
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
        self._enough(attempt.devices, "have something to train on")
        return list(attempt.devices)

    def _vectors(self, attempt: _Attempt, sealed: Mapping[int, Mapping[int, bytes]]) -> dict[int, np.ndarray]:
        """The step in which devices train: the task goes out, masked vectors come back, at most until the goal."""
        state, rules = attempt.state, self._deployment.rules
        task = {
            "round": attempt.number,
            "clip_norm": state.clip_norm,
            "space": self._deployment.space,
            "learning": self._deployment.learning,
            "bounds": rules.bounds.to_json(),
            **self._said,
        }

        def enough(answers: Answers) -> bool:
            goal = rules.report_goal
            return goal is not None and sum(refusal(reply, attempt.token) is None for _, reply in answers) >= goal

        return self._step(
            attempt,
            "training",
            {n: masking.collect({o: sealed[o][n] for o in sealed if n in sealed[o]}) for n in sealed},
            lambda _, answer: masking.masked_vector(answer, length(state.kept["weights"].size)),
            facts={n: {**task, "settled": attempt.marks.get(attempt.devices[n], Mark()).settled} for n in sealed},
            arrays={"weights": state.kept["weights"]},
            seconds=rules.round_seconds,
            enough=enough,
        )

    def _step(
        self,
        attempt: _Attempt,
        what: str,
        sealed: Mapping[int, Mapping[str, Any]],
        read: Callable[[int, Mapping[str, Any]], T],
        *,
        facts: Mapping[int, Mapping[str, Any]] | None = None,
        arrays: Mapping[str, np.ndarray] | None = None,
        seconds: float | None = None,
        enough: Callable[[Answers], bool] = lambda _: False,
    ) -> dict[int, T]:
        """Send each node its message; by node, what could be read from the answers that came in time."""
        seconds = self._deployment.rules.secure_seconds if seconds is None else seconds

        def request(node: int) -> Request:
            said = {"token": attempt.token, **({} if facts is None else facts[node])}
            return Request("secure", node, said, arrays or {}, seconds + GRACE, sealed=sealed[node])

        found: dict[int, T] = {}
        answers = self._courier.ask(
            [request(node) for node in sealed], seconds, f"round {attempt.number}, {what}", enough
        )
        for node, reply in answers:
            refuse = refusal(reply, attempt.token)
            try:
                if refuse is None:
                    found[node] = read(node, reply.sealed)
            except DataError as problem:
                refuse = ("garbage", str(problem))
            if refuse is not None:
                attempt.refused.append((node, refuse[0], f"{what}: {refuse[1]}"))
        return found

    def _enough(self, nodes: Collection[int], what: str) -> None:
        least = self._deployment.rules.min_reports
        if len(nodes) < least:
            raise _GivenUp(f"{len(nodes)} devices {what}, {least} needed")

    def _recoverable(
        self,
        owners: Collection[int],
        neighbours: Mapping[int, set[int]],
        keepers: Mapping[int, Any],
        terms: masking.Terms,
        here: Collection[int],
    ) -> None:
        """Each secret needs enough neighbours that still answer, or the masks cannot come off."""
        for owner in owners:
            left = len(neighbours[owner] & keepers.keys())
            if left < terms.threshold:
                raise _GivenUp(
                    f"{left} of {terms.shares} shares of node {owner}'s masks are left, {terms.threshold} needed", here
                )

    def _read(self, attempt: _Attempt, total: np.ndarray, devices: int) -> Figures:
        """The figures in a sum; all that can be refused is the whole of it, and of a private one not even that."""
        clip_norm, bounds = attempt.state.clip_norm, self._deployment.rules.bounds
        if total[0] != devices * LEVELS % MODULUS:
            raise _GivenUp("the sum is refused: devices did not weigh one each, or a share was wrong")
        if self._private:
            return decode_private(total[1:], devices, bounds)
        found = decode(total[1:], devices, clip_norm, bounds)
        if reason := why_impossible(found, devices, clip_norm, bounds):
            raise _GivenUp(f"the sum is refused: {reason}")
        return found
