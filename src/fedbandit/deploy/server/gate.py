"""The server's side of the gate: asks devices about a candidate, screens what they say, and comes
to a verdict.

No device decides alone: a candidate passes only if it does whichever one of them is left out.
Touches no state.
"""

import logging
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import accumulate
from math import isnan
from operator import add
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ValidationError

from fedbandit.core.errors import first_problem
from fedbandit.deploy.messages import (
    Count,
    Number,
    Reply,
    Request,
    RequestPoller,
    checked,
    is_name,
)
from fedbandit.deploy.secure_sums import TOLERANCE
from fedbandit.deploy.server.deployment import LEAST_JUDGES, Deployment
from fedbandit.deploy.server.gathering import Refusal, note_refused, refusal, select_judges
from fedbandit.deploy.server.private_metrics import RoundNoise, private_verdict
from fedbandit.evaluation.estimators import Sums
from fedbandit.evaluation.gate import GainEstimator, Verdict, verdict_of
from fedbandit.federated.state import Version

_logger = logging.getLogger("fedbandit.deploy.server")


UNJUDGED: dict[str, Any] = {
    "passes": False,
    "gain": None,
    "standard_error": None,
    "lower": None,
    "asked": 0,
    "devices": 0,
    "refused": {},
}
"""The verdict in a private round's metrics on a candidate that was not judged, or not yet."""


class Gatekeeper:
    """Judges candidates by the logs of devices that hold the deployed model.

    Each device estimates off-policy, on its own log, what the candidate would have gained over the
    version in use, and sends sums. Without privacy the judges are other devices than those that
    trained, as far as there are any; under privacy they are the round's own, and the verdict is
    made of sums with noise.
    """

    def __init__(self, deployment: Deployment, poller: RequestPoller) -> None:
        self._deployment, self._poller = deployment, poller
        gate, rules = deployment.config.gate, deployment.rules
        assert gate.confidence is not None
        self._confidence, self._margin = gate.confidence, gate.margin
        self._estimator = GainEstimator(gate.estimator, gate.limit, rules.max_reward)

    def judge(
        self,
        number: int,
        version: int,
        candidate: Version,
        trained: Sequence[int],
        noise: RoundNoise | None = None,
    ) -> dict[str, Any]:
        """The verdict on a candidate for the place of that version, as the round's metrics show it.

        `trained` are the nodes that were asked to train in this round. Under privacy (`noise`) they
        are those who judge: it is their turn, and what they say is part of what they release in it.
        """
        rules, token = self._deployment.rules, secrets.token_hex(8)
        if noise is None:
            nodes = select_judges(
                self._poller.nodes(), trained, self._deployment.config.gate.clients
            )
        else:
            nodes = sorted(set(self._poller.nodes()) & set(trained))
        question, seconds = self._question(number, version, candidate, token), rules.round_seconds
        requests = [
            Request("judge", node, question, {"weights": candidate.weights}, seconds)
            for node in nodes
        ]
        answers = self._poller.ask(requests, seconds, f"round {number}, judging")
        found = screen(answers, token, version, self._estimator, rules.max_events)
        refused = note_refused(number, found.refused)
        if noise is not None:
            gains = np.array([sums.value for sums in found.sums])
            verdict, devices = private_verdict(
                gains, noise, rules.bounds, self._confidence, self._margin
            )
            self._log(number, verdict, f"about {devices} devices")
            shown = {name: v for name, v in verdict.to_json().items() if name in UNJUDGED}
            told = {"asked": len(nodes), "devices": devices, "refused": refused}
            return {**UNJUDGED, **shown, **told}
        verdict = without_any_one(found.sums, self._confidence, self._margin)
        if len(found.sums) < rules.min_reports:
            _logger.warning(
                "round %d: %d devices judge, %d needed", number, len(found.sums), rules.min_reports
            )
            verdict = replace(verdict, passes=False)
        self._log(number, verdict, f"{verdict.events} events of {len(found.sums)} devices")
        return {
            **verdict.to_json(),
            "asked": len(nodes),
            "trained": len(set(nodes) & set(trained)),  # of those asked, asked to train as well
            "devices": len(found.sums),
            "idle": found.idle,
            "behind": found.behind,
            "refused": refused,
        }

    def _log(self, number: int, verdict: Verdict, by: str) -> None:
        _logger.log(
            logging.INFO if verdict.passes else logging.WARNING,
            "round %d: model %s: gain %.4g, at least %.4g where %.4g is needed, by %s",
            number,
            "passed the gate" if verdict.passes else "held back",
            verdict.gain,
            verdict.lower,
            0.0 - self._margin,
            by,
        )

    def _question(
        self, number: int, version: int, candidate: Version, token: str
    ) -> dict[str, Any]:
        rules = self._deployment.rules
        return {
            "token": token,
            "round": number,
            "space": self._deployment.space,
            "version": version,
            "rule": self._deployment.device_model(candidate, version + 1).policy,
            "learning": self._deployment.learning,  # names the model whose scores are asked for
            "estimator": self._estimator.kind,
            "limit": self._estimator.limit,
            "bounds": rules.bounds.to_json(),
            **self._deployment.terms,
        }


@dataclass
class ScreenedGains:
    """Devices' answers about a candidate: sums of each sound one, everything else by name."""

    sums: list[Sums] = field(default_factory=list)  # one device each
    idle: int = 0  # have no events
    behind: int = 0  # hold another version than the one that is to be replaced
    refused: list[tuple[int, str, str]] = field(default_factory=list)  # node, kind, what exactly


def screen(
    answers: Iterable[tuple[int, Reply]],
    token: str,
    version: int,
    estimator: GainEstimator,
    max_events: int,
) -> ScreenedGains:
    """Check (node, reply) pairs, one for each device; whatever a device sends may be wrong in any
    way.
    """
    found = ScreenedGains()
    seen: set[str] = set()
    for node, reply in answers:
        said = _read(reply, token)
        if isinstance(said, tuple):
            found.refused.append((node, *said))
        elif said.version != version:
            found.behind += 1
        elif said.events == 0:
            found.idle += 1
        elif refuse := _unsound(said, estimator, max_events):
            found.refused.append((node, *refuse))
        elif said.device in seen:
            what = f"device {said.device} has already judged in this round"
            found.refused.append((node, "twice", what))
        else:
            seen.add(said.device)
            found.sums.append(_sums(said))
    return found


def without_any_one(devices: Sequence[Sums], confidence: float, margin: float) -> Verdict:
    """The verdict on all devices' sums, with the lowest bound that there is when any one of them is
    left out.

    A device with many events could otherwise outweigh all others, and its own sums would make the
    estimate look sure.
    """
    if len(devices) < LEAST_JUDGES:
        found = verdict_of(reduce(add, devices) if devices else None, confidence, margin)
        return replace(found, passes=False, lower=-np.inf)
    before, after = list(accumulate(devices, add)), list(accumulate(reversed(devices), add))[::-1]
    rests = [after[1], *map(add, before[:-2], after[2:]), before[-2]]
    whole, *others = (verdict_of(sums, confidence, margin) for sums in (before[-1], *rests))
    lower = float(np.min([whole.lower, *(verdict.lower for verdict in others)]))
    return replace(
        whole, passes=whole.passes and all(verdict.passes for verdict in others), lower=lower
    )


class _Gains(BaseModel):
    """A device's sums, as it says them; of one without events the rest is missing."""

    device: Annotated[str, checked(is_name, "no device named")]
    version: Count
    events: Count
    gain: Number = np.nan
    importance: Number = np.nan
    importance_squares: Number = np.nan


def _read(reply: Reply, token: str) -> _Gains | Refusal:
    if refuse := refusal(reply, token, unable="could not judge"):
        return refuse
    try:
        said = _Gains.model_validate(reply.facts)
    except ValidationError as error:
        return "garbage", first_problem(error)
    if reply.arrays:
        return "garbage", f"arrays {sorted(reply.arrays)[:5]} where sums were expected"
    return said


def _unsound(said: _Gains, estimator: GainEstimator, max_events: int) -> Refusal | None:
    """The reason why no honest device came to these sums; None if one could have."""
    assert estimator.limit is not None
    events, gain, slack, limit = said.events, said.gain, 1 + TOLERANCE, estimator.limit
    importance, squares = said.importance, said.importance_squares
    for name in ("gain", "importance", "importance_squares"):
        if isnan(getattr(said, name)):
            return "garbage", f"{name}: not a finite number"
    if events > max_events:
        return "too many events", f"more than the {max_events} that devices look at"
    if abs(gain) > events * estimator.largest * slack:
        each = f"{events} events of at most {estimator.largest:.4g} each"
        return "gain too large", f"{gain:.4g} over {each}"
    if not 0 <= importance <= events * limit * slack:
        return "garbage", f"importance of {importance:.4g} over {events} events"
    if importance**2 > events * squares * slack or squares > limit * importance * slack:
        return "garbage", "its figures contradict each other"
    return None


def _sums(own: _Gains) -> Sums:
    """One device's part in an estimate of the gain per event; what no verdict looks at is NaN."""
    events, gain = float(own.events), float(own.gain)
    return Sums(
        clients=1.0,
        events=events,
        importance=float(own.importance),
        importance_squares=float(own.importance_squares),
        reached=np.nan,
        altered=np.nan,
        left_out=np.nan,
        numerator=gain,
        denominator=events,
        client_squares=np.array([gain * gain, gain * events, events * events]),
        client_fourths=np.full(5, np.nan),
        replicates=np.zeros((5, 0)),
    )
