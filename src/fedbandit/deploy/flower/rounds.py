"""Rounds over devices: ask, gather until enough or too late, screen, step, checkpoint, deploy. One round at a time.

Knows nothing of Flower: it is given something that carries messages. Time is a steady clock's; no wall clock is read.
"""

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedbandit.deploy.flower.deployment import Deployment
from fedbandit.deploy.flower.messages import Reply, Request, Transport
from fedbandit.deploy.flower.reports import Sorted, count_rewards, sort_replies, summed, versions_held
from fedbandit.deploy.flower.selection import resting, select
from fedbandit.deploy.flower.store import Store
from fedbandit.errors import Diverged
from fedbandit.privacy.noise import DeploymentNoise
from fedbandit.simulation.state import State

_logger = logging.getLogger("fedbandit.deploy.server")
_GRACE = 600.0  # seconds by which devices' clocks may be wrong: Flower drops messages by wall clock
_REMEMBERED = 10_000  # unanswered requests whose answers are still looked for

Answers = list[tuple[int, Reply]]
"""Nodes and what they replied, in the order in which they were asked."""
Select = Callable[[Deployment, Sequence[int], int], list[int]]


@dataclass
class _Open:
    """An unanswered request."""

    node: int
    what: str


class Coordinator:
    """Plays the rounds of a deployment. All that must survive a crash is in `state`, and in the store."""

    def __init__(
        self,
        deployment: Deployment,
        store: Store,
        transport: Transport,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        select: Select = select,
    ) -> None:
        self.deployment, self._store, self._transport = deployment, store, transport
        self._clock, self._sleep, self._select = clock, sleep, select
        kept = store.load()
        self._memory: dict[int, np.ndarray] = {}  # of the noise
        if kept is None:
            self.state = deployment.start()
            store.checkpoint(self.state, self._memory)
        else:
            self.state, self._memory = kept
            deployment.check_same(self.state)
            _logger.info("going on after round %d with model %d", self.state.round, self.version)
        store.publish(self.state, deployment)
        self._held: dict[int, int] = {}  # node -> the version that it has said it holds
        self._offered: dict[int, int] = {}  # node -> the version that it was last sent
        self._devices: dict[int, str] = {}  # node -> device, as far as it has said
        self._late: dict[str, _Open] = {}

    @property
    def version(self) -> int:
        """The version in use."""
        return max(self.state.deployed)

    def run(self, attempts: int | None = None) -> State:
        """Play what is left of the rounds; at most so many attempts at one."""
        while self.state.round < self.deployment.rounds and (attempts is None or attempts > 0):
            if self.attempt() is None:
                self._sleep(self.deployment.rules.poll_seconds)
            attempts = None if attempts is None else attempts - 1
        return self.state

    def attempt(self) -> dict[str, Any] | None:
        """Try to play the next round: its metrics, or None if it did not come about and nothing has changed."""
        self._roll_back_if_asked()
        nodes = self._transport.nodes()
        if len(nodes) < self.deployment.rules.min_reports:
            _logger.info("waiting: %d nodes in reach, %d needed", len(nodes), self.deployment.rules.min_reports)
            return None
        self._install(nodes)
        number, token = self.state.round + 1, secrets.token_hex(8)
        too_soon = resting(self.deployment, self.state, number)
        asked = self._select(
            self.deployment, [node for node in nodes if self._devices.get(node) not in too_soon], number
        )

        def sort(replies: Answers) -> Sorted:
            return sort_replies(replies, token, self.state.weights, self.state.clip_norm, too_soon)

        found = sort(self._gather([self._task(node, number, token) for node in asked], sort))
        for node, kind, what in found.refused:
            _logger.warning("round %d: node %d refused: %s: %s", number, node, kind, what)
        if len(found.reports) < self._least():
            _logger.warning(
                "round %d: %d reports, %d needed; it is run again", number, len(found.reports), self._least()
            )
            return None
        return self._conclude(number, len(asked), found)

    def _least(self) -> int:
        """A private round goes on whoever answers: to stop for want of reports would tell who took part."""
        return 0 if self.deployment.ledger is not None else self.deployment.rules.min_reports

    def _task(self, node: int, number: int, token: str) -> Request:
        device = self._devices.get(node)
        facts = {
            "token": token,
            "round": number,
            "clip_norm": self.state.clip_norm,
            "space": self.deployment.space,
            "counted": None if device is None else self.state.extra.get("counted", {}).get(device, 0),
            "learning": self.deployment.learning,
        }
        seconds = self.deployment.rules.round_seconds + _GRACE
        return Request("train", node, facts, {"weights": self.state.weights}, seconds)

    def _gather(self, requests: list[Request], sort: Callable[[Answers], Sorted]) -> Answers:
        """The answers that came in time, in the order in which the nodes were asked."""
        goal, seconds = self.deployment.rules.report_goal, self.deployment.rules.round_seconds

        def enough(answers: Answers) -> bool:
            return goal is not None and len(answers) >= goal and len(sort(answers).reports) >= goal

        answers = self._wait(requests, seconds, enough, f"round {self.state.round + 1}")
        for node, reply in answers:
            device = reply.facts.get("device")
            if isinstance(device, str):
                self._devices[node] = device
        return answers

    def _wait(self, requests: list[Request], seconds: float, enough: Callable[[Answers], bool], what: str) -> Answers:
        """Send, and poll until all have answered, it is enough, or time is up; who is missing is late from then on."""
        sent = self._transport.send(requests) if requests else []
        tickets = {ticket: request.node for ticket, request in zip(sent, requests, strict=True)}
        deadline = self._clock() + seconds
        answers: dict[str, Reply] = {}

        def in_order() -> Answers:
            return [(node, answers[ticket]) for ticket, node in tickets.items() if ticket in answers]

        while True:
            for reply in self._transport.receive([*(tickets.keys() - answers.keys()), *self._late]):
                if reply.ticket in tickets and reply.ticket not in answers:
                    answers[reply.ticket] = reply
                else:
                    self._not_awaited(reply)
            if len(answers) == len(tickets) or enough(in_order()) or self._clock() >= deadline:
                break
            self._sleep(self.deployment.rules.poll_seconds)
        for ticket in [ticket for ticket in tickets if ticket not in answers]:
            _logger.warning("%s: node %d has not answered in time", what, tickets[ticket])
            self._late[ticket] = _Open(tickets[ticket], what)
        while len(self._late) > _REMEMBERED:
            self._late.pop(next(iter(self._late)))
        return in_order()

    def _not_awaited(self, reply: Reply) -> None:
        late = self._late.pop(reply.ticket, None)
        if late is not None:
            _logger.warning("%s: node %d answered late; not counted", late.what, late.node)
        else:
            _logger.warning("an answer came twice; not counted")

    def _install(self, nodes: Sequence[int]) -> None:
        """Bring the model in use to the nodes that do not hold it; who does not answer is asked again next round."""
        behind = [node for node in nodes if self._held.get(node) != self.version]
        if not behind:
            return
        payload = np.frombuffer(self._store.model_path(self.version).read_bytes(), np.uint8)
        rules = self.deployment.rules
        requests = [
            Request("install", node, {"version": self.version}, {"model": payload}, rules.install_seconds + _GRACE)
            for node in behind
        ]
        # Who was asked for this version before and did not answer must not hold up every round from then on.
        awaited = {node for node in behind if self._offered.get(node) != self.version}
        self._offered |= dict.fromkeys(behind, self.version)

        def enough(answers: Answers) -> bool:
            return awaited <= {node for node, _ in answers}

        for node, reply in self._wait(requests, rules.install_seconds, enough, f"model {self.version}"):
            version = reply.facts.get("version")
            if reply.error is None and type(version) is int:
                self._held[node] = version
            if self._held.get(node) != self.version:
                why = reply.error or reply.facts.get("problem") or f"it holds {str(version)[:20]}"
                _logger.warning("model %d: node %d has not installed it: %s", self.version, node, str(why)[:300])

    def _conclude(self, number: int, asked: int, found: Sorted) -> dict[str, Any]:
        """Step, checkpoint, and only then let anybody see what came of it."""
        state, reports = self.state, found.reports
        noise = None
        if self.deployment.ledger is not None:
            noise = DeploymentNoise(self.deployment.ledger.plan.strategy, number - 1, self._memory)
        stepping = self.deployment.stepping(noise)
        screened = summed(reports, state.weights, state.clip_norm)
        below = sum(report.unclipped for report in reports)
        try:
            step = stepping.step(
                number, state.weights, state.optimizer, state.clip_norm, screened.total, screened.accepted, below
            )
        except Diverged as problem:
            _logger.error("round %d: %s; stopped before anything was kept", number, problem)
            raise
        counted, figures, overlapping = count_rewards(state.extra.get("counted", {}), reports)
        for device in overlapping:
            _logger.warning("round %d: device %s reports rewards counted before; it will be told", number, device)
        extra = {**state.extra, "counted": counted}
        extra["last_turn"] = {**state.extra.get("last_turn", {}), **{report.device: number for report in reports}}
        deployed = dict(state.deployed)
        deploys = number % self.deployment.config.deploy_every == 0
        if deploys:
            deployed, extra = self._with_version(deployed, extra, step.weights, number, "trained")
        metrics: dict[str, Any] = {
            "round": number,
            **figures,
            "running_reward": None,
            "asked": asked,
            "clients": len(reports),
            "idle": found.idle,
            "refused": found.kinds(),
            "clip_norm": state.clip_norm,
            "unclipped": below / len(reports) if reports else None,
            "update_norm": float(np.linalg.norm(step.update)),
            "model_version": self.version,
            "model_versions": versions_held(reports),
        }
        following = State(
            round=number,
            weights=step.weights,
            deployed=deployed,
            optimizer=step.optimizer,
            clip_norm=step.clip_norm,
            reward_total=state.reward_total + (metrics["reward"] or 0.0),
            rewarded_rounds=state.rewarded_rounds + (metrics["reward"] is not None),
            extra=extra,
        )
        metrics["running_reward"] = following.running_reward
        metrics |= stepping.aggregation.metrics(number, deploys)
        following.extra["last_metrics"] = metrics
        self._keep(following, {} if noise is None else dict(noise.memory))
        _logger.info("round %d: %d of %d asked, reward %s", number, len(reports), asked, metrics["reward"])
        return metrics

    def _keep(self, state: State, memory: dict[int, np.ndarray]) -> None:
        self._store.checkpoint(state, memory)
        before, self.state, self._memory = self.version, state, memory
        self._store.publish(state, self.deployment)
        if self.version != before:
            _logger.info("deployed model %d", self.version)

    def _with_version(
        self, deployed: dict[int, np.ndarray], extra: dict[str, Any], weights: np.ndarray, number: int, why: str
    ) -> tuple[dict[int, np.ndarray], dict[str, Any]]:
        """One version more, and the oldest gone where there are too many."""
        version = max(deployed) + 1
        deployed = {**deployed, version: weights}
        for outdated in sorted(deployed)[: -self.deployment.rules.keep_versions]:
            del deployed[outdated]
        entry = {"version": version, "round": number, "why": why}
        return deployed, {**extra, "versions": [*extra.get("versions", []), entry]}

    def _roll_back_if_asked(self) -> None:
        """An old model comes back as a new version, so that no device takes it for an outdated one.

        Training starts from it again: otherwise the next deployment would bring back what was to be got rid of.
        """
        wanted = self._store.rollback_asked()
        if wanted is None:
            return
        state = self.state
        if wanted not in state.deployed:
            _logger.error("cannot go back to model %d: kept are %s", wanted, sorted(state.deployed))
        elif state.extra.get("rolled_back_at") != [wanted, state.round]:  # a crash came before the request was removed
            weights = state.deployed[wanted]
            why = f"went back to model {wanted}"
            deployed, extra = self._with_version(state.deployed, state.extra, weights, state.round, why)
            extra["rolled_back_at"] = [wanted, state.round]
            optimizer = self.deployment.start().optimizer
            self._keep(
                replace(state, weights=weights, deployed=deployed, optimizer=optimizer, extra=extra), self._memory
            )
            _logger.warning("went back to model %d, as model %d", wanted, self.version)
        self._store.rollback_done()
