"""The rounds of a deployment: select devices, gather, step, keep, publish.

Can be killed at any time and resumed. Knows no transport.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedbandit.core.errors import DataError, Diverged
from fedbandit.deploy.messages import (
    Answers,
    Reply,
    Request,
    RequestPoller,
    Transport,
    is_count,
    is_name,
)
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
from fedbandit.deploy.server.operator import (
    OPEN,
    OperatorRequests,
    is_open,
    read_requests,
    why_not_now,
)
from fedbandit.deploy.server.private_metrics import (
    RoundNoise,
    published,
    reported,
    reported_with_noise,
)
from fedbandit.deploy.server.server_status import Watch
from fedbandit.deploy.server.store import Store
from fedbandit.federated.algorithm import RoundFacts
from fedbandit.federated.server import split_sent
from fedbandit.federated.state import State, Version

_logger = logging.getLogger("fedbandit.deploy.server")
_LONGEST_PATIENCE = 8.0  # times as long as the settings say that a deadline may become
Select = Callable[[Deployment, Sequence[int], int], list[int]]


class Coordinator:
    """Runs the rounds of a deployment. All that must survive a crash is in `state` and the store.

    One round: wait until enough nodes are in reach, choose some, bring them the model in use,
    gather their updates into one sum, step, let the gate judge a candidate, and commit. Whatever
    fails before the commit leaves no trace, and the round is tried again. For example, with an
    in-process transport::

        store = Store(deployment.folder)
        Coordinator(deployment, store, transport).run(attempts=10)
        store.close()
    """

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
        self._clock, self._watch, self._requests = clock, watch or Watch(), OperatorRequests()
        self._held: dict[int, int | None] = {}  # node -> the version that it has said it holds
        self._unsaved: dict[int, int] = {}  # those that the store does not know yet
        self._offered: dict[int, int] = {}  # node -> the version that it was last sent
        self._recalled: dict[int, str | None] = {}  # node -> the device that the store knows it as
        poll = deployment.rules.poll_seconds
        self._poller = RequestPoller(transport, clock, sleep, poll, self._watch, self._note)
        self._gathering = _gathering_of(deployment, self._poller)
        self._users = self._gathering.users
        gated = deployment.config.gate.confidence is not None
        self._gatekeeper = Gatekeeper(deployment, self._poller) if gated else None
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
        if is_open(deployment):
            _logger.warning("%s", OPEN)

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
        began, requests = self._clock(), self._read_requests()
        self._poller.revoked = frozenset(requests.revoked)
        nodes = self._poller.nodes()
        if (why := why_not_now(self.deployment, requests, len(nodes))) is not None:
            _logger.info("%s", why)
            self._watch.waiting(why)
            return None
        number = self.state.round + 1
        if takes_turns(self.deployment):
            self._recall(nodes)
        owners, candidates = self._gathering.devices, nodes
        if self._users is not None:  # devices say whose they are when they are sent a model
            self._install(nodes, nodes)
            owners, candidates = self._users, one_of_each(nodes, self._users)
        ready = awake(self.deployment, candidates, owners, self._store.marks, number)
        asked = self._select(self.deployment, ready, number)
        self._install(asked, nodes)
        self._recall(asked)
        late = self._poller.late
        try:
            found = self._gathering.gather(self.state, number, asked, self._store.marks)
        except OlderThanSeen as problem:
            self._store.witnessed(problem.seen - 1)
            raise
        self._adapt(found is None and self._poller.late > late)
        if found is None:
            return None
        metrics = self._conclude(number, asked, found, {"in_reach": len(nodes), "began": began})
        self._watch.finished(self.state.extra["last_metrics"])
        return metrics

    def _adapt(self, slow: bool) -> None:
        """Give rounds more time after one that failed by late answers, less after others."""
        before = self._poller.patience
        patience = min(2 * before, _LONGEST_PATIENCE) if slow else max(before / 2, 1.0)
        if patience > before:
            _logger.warning("answers were late: deadlines are %g times as long now", patience)
        self._poller.patience = patience

    def _read_requests(self) -> OperatorRequests:
        """The operator's instructions; where they cannot be read, the earlier ones, paused."""
        try:
            self._requests = read_requests(self._store.folder)
        except DataError as problem:
            _logger.error("%s; paused until then", problem)
            self._requests = replace(self._requests, paused=True)
        return self._requests

    def _recall(self, nodes: Sequence[int]) -> None:
        """Find out, once for each, which devices nodes were in earlier rounds."""
        new = [node for node in nodes if node not in self._recalled]
        found = self._store.database.devices(new)
        self._recalled |= {node: found.get(node) for node in new}
        self._gathering.devices.update(found)

    def _note(self, node: int, reply: Reply) -> None:
        """Learn from any reply which model a node holds, and whose device it is."""
        version = reply.facts.get("version")
        if reply.error is None and is_count(version):
            if self._held.get(node) != version:
                self._unsaved[node] = int(str(version))
            self._held[node] = int(str(version))
        elif "problem" in reply.facts:  # it may have lost its model: it is offered one again
            self._held[node] = None
        user = reply.facts.get("user")
        if self._users is not None and reply.error is None and is_name(user):
            self._users[node] = user_key(str(user))

    def _install(self, asked: Sequence[int], nodes: Sequence[int]) -> None:
        """Bring the model in use to the nodes that are asked and do not hold it.

        Some of the others get it meanwhile, at most as many as a round asks, so that each node gets
        it once and no deployment floods the network. Who does not answer is tried again when asked.
        """
        version, rules = self.version, self.deployment.rules
        new = [node for node in nodes if node not in self._held]
        self._held |= {**dict.fromkeys(new), **self._store.database.held(new)}
        behind = [node for node in asked if self._held[node] != version]
        if self._users is not None:  # after a restart, whose devices they are is asked once more
            unknown = set(asked) - self._users.keys() - set(behind)
            behind += [node for node in unknown if self._offered.get(node) != version]
        chosen, most = set(asked), self.deployment.config.clients_per_round
        others = [
            node
            for node in nodes
            if node not in chosen and version not in (self._held[node], self._offered.get(node))
        ][:most]
        if not behind and not others:
            return
        payload = np.frombuffer(self._store.model_path(version).read_bytes(), np.uint8)
        facts: dict[str, Any] = {"version": version}
        if self.deployment.terms:
            facts |= {"round": self.state.round, **self.deployment.terms}

        def requests(some: Sequence[int]) -> Iterator[Request]:
            for node in some:
                yield Request("install", node, facts, {"model": payload}, rules.install_seconds)

        def check(node: int, reply: Reply) -> Reply:
            said = reply.facts.get("version")
            if said != version:
                why = reply.error or reply.facts.get("problem") or f"it holds {str(said)[:20]}"
                said = str(why)[:300]
                _logger.warning("model %d: node %d has not installed it: %s", version, node, said)
            return reply

        # Who was sent this version before and did not answer must not hold up every round.
        awaited = {node for node in behind if self._offered.get(node) != version}
        self._offered |= dict.fromkeys((*behind, *others), version)

        def enough(answers: Answers) -> bool:
            return awaited <= {node for node, _ in answers}

        what = f"model {version}"
        self._poller.post(requests(others), what, check)
        if behind:
            self._poller.ask(requests(behind), rules.install_seconds, what, enough, check)

    def _conclude(
        self,
        number: int,
        asked: Sequence[int],
        found: RoundContribution,
        circumstances: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Step, judge where a model would go out, checkpoint, and only then let anybody see what
        came of it.
        """
        state, ledger = self.state, self.deployment.ledger
        noise = None
        if ledger is not None:
            noise = RoundNoise(ledger.plan, number, self._memory, self.deployment.noise)
        server = self.deployment.server(None if noise is None else noise.weights)
        freezing = self.deployment.freezing
        counted = server.aggregation.denominator(found.accepted)
        facts = RoundFacts(
            number, counted, self.deployment.rules.population or len(self._poller.nodes())
        )
        try:
            step = server.step(
                facts,
                state.server_state,
                state.clip_norm,
                split_sent(found.total, server.algorithm.sends, self.deployment.received(state)),
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
        pinned = self._read_requests().pinned  # it may have changed during the round
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

        nodes = {n: name for n, name in found.nodes.items() if name != self._recalled.get(n)}
        memory = {} if noise is None else noise.memory
        marks: Mapping[str, Mark] | None = found.marks
        deploys, verdict, in_use = due, None, self.version
        if due and self._gatekeeper is not None:
            if noise is not None:
                # Those who judge see the candidate: the round has to be charged and to have
                # happened before that. A server that is killed meanwhile holds the model back.
                self.state, self._memory = after(False, UNJUDGED)[0], memory
                self._store.checkpoint(self.state, memory, found.marks, nodes)
                marks = None
            verdict = self._gatekeeper.judge(number, in_use, candidate, asked, noise)
            deploys = verdict["passes"]
        if noise is not None and not found.accepted + found.idle:
            _logger.warning("round %d: spent epsilon and heard from no device", number)
        following, metrics = after(deploys, verdict)
        self._keep(following, memory, marks, nodes)
        taken = set(nodes.values())  # a name that a node has taken over is no longer another's
        left = {node: None for node, name in self._recalled.items() if name in taken}
        self._recalled |= {**left, **nodes}
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
        self._store.checkpoint(state, memory, marks, nodes, self._unsaved)
        self._unsaved = {}
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
        """Devices may hold a model that was lost with the step: the one before comes back under a
        number of its own.
        """
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

        Training starts from it again: otherwise the next deployment would bring back what was to be
        got rid of.
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
            kept = self.deployment.kept_from(restored)
            self._keep(
                replace(
                    state,
                    weights=restored.weights,
                    deployed=deployed,
                    server_state=kept,
                    extra=extra,
                ),
                self._memory,
            )
            _logger.warning("rolled back to model %d, deployed as model %d", wanted, self.version)
        self._store.rollback_done()


def _gathering_of(deployment: Deployment, poller: RequestPoller) -> Gathering:
    if not deployment.rules.secure_aggregation:
        return PlainReports(deployment, poller)
    from fedbandit.deploy.server.secure_gathering import SecureSums  # needs `cryptography`

    return SecureSums(deployment, poller)


def _next_version(extra: Mapping[str, Any]) -> int:
    """No number is given out twice: devices take a model for outdated by its number."""
    return 1 + max(int(entry["version"]) for entry in extra["versions"])
