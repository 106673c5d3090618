"""The rounds of a deployment: select devices, gather, step, keep, publish. Can be killed at any time and resumed."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedbandit.core.errors import DataError, Diverged
from fedbandit.deploy.messages import Answers, Courier, Request, Transport
from fedbandit.deploy.server.database import Mark, user_key
from fedbandit.deploy.server.deployment import Deployment
from fedbandit.deploy.server.gate import UNJUDGED, Gatekeeper
from fedbandit.deploy.server.gathering import (
    Gathering,
    OlderThanSeen,
    PlainReports,
    RoundContribution,
    awake,
    one_of_each,
    select,
    takes_turns,
)
from fedbandit.deploy.server.operator import Admission, Wishes, read_wishes, why_not_now
from fedbandit.deploy.server.private_metrics import (
    RoundNoise,
    published,
    reported,
    reported_with_noise,
)
from fedbandit.deploy.server.reports import is_name
from fedbandit.deploy.server.server_status import Watch, Watched
from fedbandit.deploy.server.store import Store
from fedbandit.federated.algorithm import RoundFacts
from fedbandit.federated.state import State, Version

_logger = logging.getLogger("fedbandit.deploy.server")
Select = Callable[[Deployment, Sequence[int], int], list[int]]


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
        watch: Watch | None = None,
    ) -> None:
        """`watch` is told what goes on, and changes nothing."""
        kept = store.load()
        if kept is not None:
            deployment = deployment.resumed(kept.state)
        self.deployment, self._store = deployment, store
        self._sleep, self._select = sleep, select
        self._clock, self._watch, self._wished = clock, watch or Watch(), Wishes()
        self._admission = Admission(transport)
        watched = Watched(self._admission, self._watch)
        self._courier = Courier(watched, clock, sleep, deployment.rules.poll_seconds)
        self._gathering = _gathering_of(deployment, self._courier)
        self._users = self._gathering.users
        gated = deployment.config.gate.confidence is not None
        self._gatekeeper = Gatekeeper(deployment, self._courier) if gated else None
        self._memory: dict[int, np.ndarray] = {}  # of the noise
        if kept is None:
            self.state = deployment.start()
            store.checkpoint(self.state, self._memory)
        else:
            self.state, self._memory = kept.state, kept.memory
            if kept.lost_step:
                self._keep(self._without_lost_step(), self._memory)
            _logger.info("resuming after round %d with model %d", self.state.round, self.version)
        store.publish(self.state, deployment)
        self._held: dict[int, int] = {}  # node -> the version that it has said it holds
        self._offered: dict[int, int] = {}  # node -> the version that it was last sent
        self._recalled: dict[int, str | None] = {}  # node -> the device that the store knows it as

    @property
    def version(self) -> int:
        """The version in use."""
        return max(self.state.deployed)

    def run(self, attempts: int | None = None) -> State:
        """Run the remaining rounds, with a limited number of attempts at each."""
        while self.state.round < self.deployment.rounds and (attempts is None or attempts > 0):
            if self.attempt() is None:
                self._sleep(self.deployment.rules.poll_seconds)
            attempts = None if attempts is None else attempts - 1
        if self.state.round >= self.deployment.rounds:
            self._watch.ended()
        return self.state

    def attempt(self) -> dict[str, Any] | None:
        """Try to run the next round: its metrics, or None if it failed and nothing has changed.

        The metrics are the operator's; what others may see is kept in the state.
        """
        self._roll_back_if_asked()
        began, wishes = self._clock(), self._wishes()
        self._admission.revoked = frozenset(wishes.revoked)
        nodes = self._courier.nodes()
        if (why := why_not_now(self.deployment, wishes, len(nodes))) is not None:
            _logger.info("%s", why)
            self._watch.waiting(why)
            return None
        self._install(nodes)
        number = self.state.round + 1
        if takes_turns(self.deployment):
            self._recall(nodes)
        owners, candidates = self._gathering.devices, nodes
        if self._users is not None:
            owners, candidates = self._users, one_of_each(nodes, self._users)
        ready = awake(self.deployment, candidates, owners, self._store.marks, number)
        asked = self._select(self.deployment, ready, number)
        self._recall(asked)
        try:
            found = self._gathering.gather(self.state, number, asked, self._store.marks)
        except OlderThanSeen as problem:
            self._store.witnessed(problem.seen - 1)
            raise
        if found is None:
            return None
        metrics = self._conclude(number, asked, found, {"in_reach": len(nodes), "began": began})
        self._watch.finished(self.state.extra["last_metrics"])
        return metrics

    def _wishes(self) -> Wishes:
        """What the operator wants; where that cannot be read, what was wanted before, and no new round."""
        try:
            self._wished = read_wishes(self._store.folder)
        except DataError as problem:
            _logger.error("%s; paused until then", problem)
            self._wished = replace(self._wished, paused=True)
        return self._wished

    def _recall(self, nodes: Sequence[int]) -> None:
        """Find out which devices nodes were in earlier rounds, once for each: a device is told what was counted."""
        new = [node for node in nodes if node not in self._recalled]
        found = self._store.devices(new)
        self._recalled |= {node: found.get(node) for node in new}
        self._gathering.devices.update(found)

    def _install(self, nodes: Sequence[int]) -> None:
        """Bring the model in use to the nodes that do not hold it; who does not answer is asked again next round."""
        behind = [node for node in nodes if self._held.get(node) != self.version]
        if not behind:
            return
        payload = np.frombuffer(self._store.model_path(self.version).read_bytes(), np.uint8)
        rules = self.deployment.rules
        facts = {"version": self.version}
        if self.deployment.terms:
            facts |= {"round": self.state.round, **self.deployment.terms}
        requests = [
            Request("install", node, facts, {"model": payload}, rules.install_seconds)
            for node in behind
        ]
        # Who was asked for this version before and did not answer must not hold up every round from then on.
        awaited = {node for node in behind if self._offered.get(node) != self.version}
        self._offered |= dict.fromkeys(behind, self.version)

        def enough(answers: Answers) -> bool:
            return awaited <= {node for node, _ in answers}

        for node, reply in self._courier.ask(
            requests, rules.install_seconds, f"model {self.version}", enough
        ):
            version = reply.facts.get("version")
            if reply.error is None and type(version) is int:
                self._held[node] = version
            if self._users is not None and reply.error is None and is_name(reply.facts.get("user")):
                self._users[node] = user_key(str(reply.facts["user"]))
            if self._held.get(node) != self.version:
                why = reply.error or reply.facts.get("problem") or f"it holds {str(version)[:20]}"
                _logger.warning(
                    "model %d: node %d has not installed it: %s", self.version, node, str(why)[:300]
                )

    def _conclude(
        self,
        number: int,
        asked: Sequence[int],
        found: RoundContribution,
        circumstances: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Step, judge where a model would go out, checkpoint, and only then let anybody see what came of it."""
        state, ledger = self.state, self.deployment.ledger
        noise = None
        if ledger is not None:
            noise = RoundNoise(ledger.plan, number, self._memory, self.deployment.noise)
        server = self.deployment.server(None if noise is None else noise.weights)
        freezing = self.deployment.freezing
        counted = server.aggregation.counted(found.accepted)
        facts = RoundFacts(
            number, counted, self.deployment.rules.population or len(self._courier.nodes())
        )
        try:
            step = server.step(
                facts,
                state.kept,
                state.clip_norm,
                {"weights": found.total},
                found.accepted,
                found.below,
            )
        except Diverged as problem:
            _logger.error("round %d: %s; stopped before anything was kept", number, problem)
            raise
        weights = step.weights if freezing is None else freezing.join(step.weights, state.weights)
        progress = self.deployment.progress(
            _next_version(state.extra), number, state.events + found.events
        )
        candidate = Version(weights, progress)
        extra, deployed = dict(state.extra), dict(state.deployed)
        pinned = (
            self._wishes().pinned
        )  # read anew: the operator may have decided while the round was running
        due = number % self.deployment.config.deploy_every == 0 and pinned is None
        said = reported(found, noise is not None)
        if noise is not None:
            totals = extra.get("figures", {})
            figures, totals = reported_with_noise(
                found, noise, self.deployment.rules.bounds, totals
            )
            said |= figures
            extra |= {"figures": totals} if totals else {}

        def after(deploys: bool, verdict: dict[str, Any] | None) -> tuple[State, dict[str, Any]]:
            kept, more = deployed, extra
            if deploys:
                kept, more = self._with_version(deployed, extra, candidate, number, "trained")
            exact = 0 if noise is not None else found.events
            more = {
                **more,
                **self.deployment.spent(number, deploys or number == self.deployment.rounds),
            }
            following = state.after(
                step, weights, kept, said["reward"] if exact else None, exact, more
            )
            metrics: dict[str, Any] = {
                "round": number,
                "running_reward": following.running_reward,
                "asked": len(asked),
                "refused": found.refused,
                "clip_norm": state.clip_norm,
                "update_norm": float(np.linalg.norm(step.update)),
                "model_version": max(state.deployed),
                "model_versions": found.versions,
                "in_reach": circumstances["in_reach"],
                "seconds": round(self._clock() - circumstances["began"], 3),
                **said,
            }
            if self._watch.watches:  # rounds themselves read no wall clock
                metrics["time"] = self._watch.now()
            if pinned is not None:
                metrics["pinned"] = pinned
            metrics |= server.aggregation.metrics(number, deploys)
            if verdict is not None:
                metrics["gate"] = verdict
            following.extra["last_metrics"] = published(metrics, noise is not None)
            return following, metrics

        devices = {node: self._gathering.devices.get(node) for node in asked}
        nodes = {
            n: name
            for n, name in devices.items()
            if name in found.marks and name != self._recalled.get(n)
        }
        memory = {} if noise is None else noise.memory
        marks: Mapping[str, Mark] | None = found.marks
        deploys, verdict, in_use = due, None, self.version
        if due and self._gatekeeper is not None:
            if noise is not None:
                # Those who judge see the candidate: the round has to be charged and to have happened before that. A
                # server that is killed meanwhile holds the model back.
                self.state, self._memory = after(False, UNJUDGED)[0], memory
                self._store.checkpoint(self.state, memory, found.marks, nodes)
                marks = None
            verdict = self._gatekeeper.judge(number, in_use, candidate, asked, noise)
            deploys = verdict["passes"]
        if noise is not None and not found.accepted + found.idle:
            _logger.warning("round %d: spent epsilon and heard from no device", number)
        following, metrics = after(deploys, verdict)
        self._keep(following, memory, marks, nodes)
        self._recalled |= nodes
        _logger.info(
            "round %d: %d of %d asked, reward %s, after %.1f s",
            number,
            metrics["clients"],
            len(asked),
            metrics["reward"],
            metrics["seconds"],
            extra={"facts": {"round": number, "seconds": metrics["seconds"]}},
        )
        return metrics

    def _keep(
        self,
        state: State,
        memory: dict[int, np.ndarray],
        marks: Mapping[str, Mark] | None = None,
        nodes: Mapping[int, str] | None = None,
    ) -> None:
        self._store.checkpoint(state, memory, marks, nodes)
        before, self.state, self._memory = self.version, state, memory
        self._store.publish(state, self.deployment)
        if self.version != before:
            _logger.info("deployed model %d", self.version)

    def _with_version(
        self,
        deployed: dict[int, Version],
        extra: dict[str, Any],
        candidate: Version,
        number: int,
        why: str,
    ) -> tuple[dict[int, Version], dict[str, Any]]:
        """One version more, and the oldest gone where there are too many."""
        version = _next_version(extra)
        deployed = {**deployed, version: candidate}
        for outdated in sorted(deployed)[: -self.deployment.rules.keep_versions]:
            del deployed[outdated]
        entry = {"version": version, "round": number, "why": why}
        return deployed, {**extra, "versions": [*extra.get("versions", []), entry]}

    def _without_lost_step(self) -> State:
        """Devices may hold a model that was lost with the step: the one before comes back under a number of its own."""
        state = self.state
        if _next_version(state.extra) == self.version + 1:
            return state
        why = f"went back to model {self.version}: a damaged state"
        deployed, extra = self._with_version(
            state.deployed, state.extra, state.deployed[self.version], state.round, why
        )
        return replace(state, deployed=deployed, extra=extra)

    def _roll_back_if_asked(self) -> None:
        """An old model comes back as a new version, so that no device takes it for an outdated one.

        Training starts from it again: otherwise the next deployment would bring back what was to be got rid of.
        """
        wanted = self._store.rollback_asked()
        if wanted is None:
            return
        state = self.state
        if wanted not in state.deployed:
            _logger.error(
                "cannot roll back to model %d; available: %s", wanted, sorted(state.deployed)
            )
        elif state.extra.get("rolled_back_at") != [
            wanted,
            state.round,
        ]:  # a crash came before the request was removed
            restored = state.deployed[wanted]
            why = f"went back to model {wanted}"
            deployed, extra = self._with_version(
                state.deployed, state.extra, restored, state.round, why
            )
            extra["rolled_back_at"] = [wanted, state.round]
            kept = self.deployment.kept(restored.weights)
            self._keep(
                replace(state, weights=restored.weights, deployed=deployed, kept=kept, extra=extra),
                self._memory,
            )
            _logger.warning("rolled back to model %d, deployed as model %d", wanted, self.version)
        self._store.rollback_done()


def _gathering_of(deployment: Deployment, courier: Courier) -> Gathering:
    if not deployment.rules.secure_aggregation:
        return PlainReports(deployment, courier)
    from fedbandit.deploy.server.secure_gathering import SecureSums  # needs `cryptography`

    return SecureSums(deployment, courier)


def _next_version(extra: Mapping[str, Any]) -> int:
    """No number is given out twice: devices take a model for outdated by its number."""
    return 1 + max(int(entry["version"]) for entry in extra["versions"])
