"""A device's side of the rounds: answers the server's requests from its own log.

Knows no transport: `Participant.reply` takes any `Request` and makes the `Reply`.
"""

import hashlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fedbandit.acting import Actor, NotFinite
from fedbandit.core.errors import DataError, FedbanditError
from fedbandit.core.process import alone_in
from fedbandit.core.randomness import Purpose, poisson, uniforms
from fedbandit.deploy.device.agent import Agent
from fedbandit.deploy.device.device_identity import (
    Card,
    Instructions,
    Judgement,
    LaterRoundSeen,
    Limits,
    PlainTask,
    ReadyQuestion,
    SecureTask,
    Task,
    Turns,
    Work,
    check_understood,
    read_card,
    read_instructions,
    write_card,
)
from fedbandit.deploy.device.log_arrays import Logged
from fedbandit.deploy.device.model_files import DeviceModel
from fedbandit.deploy.device.training import DeviceMemory, Training, build_training, described
from fedbandit.deploy.messages import Reply, Request, is_name, with_protocol
from fedbandit.deploy.secure_sums import RANGE, STEP, Figures, ReportBounds, encode, length, nothing
from fedbandit.evaluation.gate import GainEstimator
from fedbandit.events import Events
from fedbandit.federated.algorithm import Clients, remembers
from fedbandit.federated.pipeline import Pipeline, Vectors, rejection_reason, zeros_to_send
from fedbandit.federated.server import join_sent

if TYPE_CHECKING:
    from fedbandit.deploy.device.secure_round import Identity

_logger = logging.getLogger("fedbandit.deploy")
_IN_CLEAR = ("train", "judge")  # requests whose answers tell of this device's log alone
Answer = tuple[dict[str, Any], dict[str, np.ndarray]]


class Participant:
    """Answers the server's requests for one agent. Nothing is consumed: a request may come twice.

    `Participant(agent).reply(request)` is all that a transport calls on a device. What leaves the
    device are sums over its log and one clipped update; never an event.
    """

    def __init__(
        self,
        agent: Agent,
        *,
        trusted: Collection[str] = (),
        after_install: Callable[[Agent], None] | None = None,
        limits: Limits | None = None,
        secure_only: bool = False,
        identity: "Identity | None" = None,
    ) -> None:
        """`trusted` names models and objectives of your own that a server may ask for, as in
        `Agent`.

        `after_install` is called whenever another model has come into use. `limits` are the most
        that the device does for a server, and the least that it hides among. With `secure_only`
        nothing of its log leaves the device except inside secure sums, whatever a server asks for.
        `identity` says whom it believes in them.
        """
        self.agent, self._trusted, self._after_install = agent, frozenset(trusted), after_install
        self._limits, self._secure_only = limits or Limits(), secure_only
        self._identity = identity
        self._card, self._memory = agent.folder / "device.json", DeviceMemory(agent.memory)
        self._answers: dict[
            str, Callable[[Mapping[str, Any], Mapping[str, np.ndarray]], Answer]
        ] = {
            "install": self._install,
            "ready": self._ready,
            "train": self._train,
            "judge": self._judge,
        }

    def answer(
        self, kind: str, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
    ) -> Answer:
        """Facts and arrays to send back. What cannot be done is said in `problem`, never raised."""
        try:
            if kind not in self._answers:
                what = f"requests of the kind {kind[:50]!r}"
                raise DataError(f"this device does not know {what}; update its fedbandit")
            check_understood(facts)
            if self._secure_only and kind in _IN_CLEAR:
                raise DataError("this device takes part in secure sums only")
            said, sent = self._answers[kind](facts, arrays)
        except Exception as problem:  # a server's word, or a user's part, may fail in any way
            said, sent = _cannot(kind, facts, problem), {}
        return with_protocol(said), sent

    def reply(self, request: Request, ticket: str = "") -> Reply:
        """The reply to any request, whichever transport brought it; `ticket` goes back with it."""
        facts: dict[str, Any] = {}
        if request.kind != "secure":
            facts, arrays = self.answer(request.kind, request.facts, request.arrays)
            if request.kind != "ready" or facts.get("ready") is not True:
                return Reply(ticket, facts, arrays)
        try:
            from fedbandit.deploy.device.secure_round import Identity, SecureRounds

            check_understood(request.facts)
            token = request.facts.get("token")
            if not is_name(token):
                raise DataError("the server's request: token: not a name of 1 to 64 characters")
            identity = self._identity or Identity()
            rounds = SecureRounds(self.agent.folder, request.node, identity, self._limits.secure)
            if request.kind == "ready":
                return Reply(ticket, facts, sealed=rounds.announce(str(token)))
            sealed = rounds.step(str(token), request.facts, request.arrays, request.sealed, self)
        except Exception as problem:  # a server's word, or a user's part, may fail in any way
            return Reply(ticket, with_protocol(_cannot("secure sum", request.facts, problem)))
        return Reply(ticket, with_protocol({"token": token}), sealed=sealed)

    def _install(self, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Answer:
        """Take a model into use; a private server's terms are agreed to on first contact."""
        payload = arrays.get("model")
        if not isinstance(payload, np.ndarray) or payload.dtype != np.uint8:
            raise DataError("the server's request: model: not the bytes of a file")
        asked = read_instructions(Instructions, facts, self._limits)
        if asked.privacy is not None and asked.round is not None:
            with alone_in(self.agent.folder):
                card = read_card(self._card)
                told = self._limits.private.agreed(card.private, asked.privacy).told(asked.round)
                if told != card.private:
                    write_card(self._card, replace(card, private=told))
        changed = self.agent.install(payload.tobytes())
        if changed and self._after_install is not None:
            self._after_install(self.agent)
        user = read_card(self._card).user
        return {
            "version": self.agent.model_version,
            **({} if user is None else {"user": user}),
        }, {}

    def _train(self, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Answer:
        """One clipped update, and sums over the rewards that no round has counted."""
        task = read_instructions(PlainTask, facts, self._limits)
        with self._alone_if_private(task):
            card = read_card(self._card)  # a device that is not known again must not take part
            since = card.counted if task.counted is None else task.counted
            turns = self._turn(card, task)
            work = self._work(task, arrays)
            if turns is not None:
                # From here on it has had its turn, whatever it trains on and however that ends.
                write_card(self._card, replace(card, counted=since, private=turns))
        fit = self._fit if turns is None else self._fit_or_nothing
        report = fit(work, task, since)
        if turns is None and since != card.counted:
            with suppress(OSError):  # no space: the server will send it again
                write_card(self._card, replace(card, counted=since))
        found = {"token": task.token, "device": card.device, "version": work.model.version}
        if report is None:
            return {**found, "since": since, "trained": False}, {}
        inside = ("update", "devices")
        said = {name: value for name, value in vars(report).items() if name not in inside}
        return {**found, "since": since, **said, "trained": True}, {"update": report.update}

    def _judge(self, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Answer:
        """Sums that say what the log thinks of the server's candidate; nothing of training."""
        self._check_private(
            read_card(self._card), read_instructions(Instructions, facts, self._limits)
        )
        asked = read_instructions(Judgement, facts, self._limits)
        model = self._model(asked.space)
        with self._alone_if_private(asked):
            card = read_card(self._card)
            found = {"token": asked.token, "device": card.device, "version": model.version}
            if card.private is not None and asked.round is not None:
                judged = card.private.after_judging(asked.round)
                write_card(self._card, replace(card, private=judged))
        logged = self.agent.events()
        if model.version != asked.version or not len(logged):
            return {**found, "events": 0}, {}
        built = self._training(model, asked)
        weights = _fitting(arrays, built.whole)
        before = built.acting.layout.flatten(dict(model.weights), weights.dtype)
        rule = self.agent.rule_of(asked.rule.model_dump())
        deployed = Actor(built.predictor, before, self.agent.policy)
        candidate = Actor(built.predictor, weights, rule)
        return {**found, **_gain_sums(logged, deployed, candidate, asked)}, {}

    def _ready(self, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Answer:
        """Before a secure round: who this is, and whether it has anything to train on."""
        asked = read_instructions(ReadyQuestion, facts, self._limits)
        model, card = self._model(asked.space), read_card(self._card)
        _check_unsummed(card, asked.round)
        self._check_private(card, asked)
        found = {"token": asked.token, "device": card.device, "version": model.version}
        return {**found, "ready": asked.zeros or len(self.agent.events()) > 0}, {}

    def contribute(
        self, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray], cohort: int = 0
    ) -> np.ndarray:
        """A secure round's vector of grid points, to be masked before it leaves the device.

        Rewards beyond the bounds wait for the next round (their number) or are cut off (their
        size). The attempt is on record before the vector leaves: only the last one on record can be
        unmasked with this device's help.
        """
        task = read_instructions(SecureTask, facts, self._limits)
        with alone_in(self.agent.folder):
            vector = self._contribution(task, arrays)
        if task.privacy is not None and task.tolerance is not None:
            size, noise = vector.size - length(0), task.privacy.noise or 0.0  # all of the update
            vector[:size] += task.tolerance.drawn(size, cohort, noise, STEP / RANGE)
        return vector

    def release(self, token: str) -> None:
        """Record that the vector of this attempt is in a sum: there is no other in its round."""
        with alone_in(self.agent.folder):
            card = read_card(self._card)
            if card.masked is None or token not in card.pending:
                raise DataError("this device has begun another attempt at a sum since")
            _check_unsummed(card, card.masked)
            write_card(self._card, replace(card, summed=card.masked))

    def _contribution(self, task: SecureTask, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        card = read_card(self._card)
        _check_unsummed(card, task.round)
        work = self._work(task, arrays)
        freezing = work.training.freezing
        if task.model != work.model.untrained(() if freezing is None else freezing.frozen):
            raise DataError("the model on this device is not the one that the task is for")
        marks = (mark for token, mark in card.pending.items() if token in task.settled)
        since = next(marks, card.counted)
        turns = self._turn(card, task, attempts=True)  # nobody sees anything of a failed attempt
        report = (self._fit_or_nothing if task.zeros else self._fit)(work, task, since)
        if report is None and not task.zeros:
            raise DataError("nothing to train on any more")
        own: Figures = report or nothing(work.joined(work.zeros()).size)
        if task.tolerance is not None:  # nothing but what the noise covers
            own = replace(nothing(own.update.size), update=own.update)
        vector = encode(own, task.clip_norm, task.report_bounds)
        pending = {task.token: since if report is None else report.upto}
        write_card(
            self._card,
            replace(card, counted=since, pending=pending, private=turns, masked=task.round),
        )
        return vector

    def _work(self, task: Task, arrays: Mapping[str, np.ndarray]) -> "_Work":
        """Build what a request to train names, if it and the server's weights fit this device."""
        model = self._model(task.space)
        training = self._training(model, task)
        return _Work(model, training, _fitting(arrays, training.received))

    def _fit_or_nothing(self, work: "_Work", task: Task, since: int) -> "_Report | None":
        """As `_fit`; what fails on the log counts as an empty one, which must not be told apart."""
        try:
            return self._fit(work, task, since)
        except Exception as problem:  # a damaged row, an update that is not finite, a user's part
            _logger.warning("this device answers as with an empty log: %s", problem)
            return None

    def _turn(self, card: Card, asked: Instructions, *, attempts: bool = False) -> Turns | None:
        """The account with the turn that a private server asks for; None of one that is not."""
        self._check_private(card, asked)
        if asked.privacy is None or asked.round is None:
            return None
        before = self._limits.private.agreed(card.private, asked.privacy)
        try:
            return before.after(asked.round, asked.privacy, attempts=attempts)
        except LaterRoundSeen as problem:
            problem.device = card.device
            raise

    def _check_private(self, card: Card, asked: Instructions) -> None:
        """Once it has agreed to a privacy plan, a device does nothing without one.

        Zeros go with a plan alone: otherwise a server that knows who has none could hide nobody.
        """
        if asked.privacy is None and asked.zeros:
            raise DataError("the server asks for zeros in a round without privacy")
        if asked.privacy is None and card.private is not None:
            what = "a round without privacy, and this device agreed to a private plan"
            raise DataError(f"the server asks for {what}")

    def _alone_if_private(self, asked: Instructions) -> AbstractContextManager[None]:
        """Two requests at once must not have the same turn."""
        return nullcontext() if asked.privacy is None else alone_in(self.agent.folder)

    def _fit(self, work: "_Work", task: Task, since: int) -> "_Report | None":
        """One clipped update; rewards settled after `since` are fresh. None from an empty log."""
        logged = self.agent.events(counted=since)
        if not len(logged):
            return None
        training, received = work.training, {"weights": work.weights}
        learner: Any = training.learner
        if training.freezing is not None:
            whole = training.trainable.layout.flatten(dict(work.model.weights), work.weights.dtype)
            learner = learner.over(whole)
        counted = replace(self._counted(training, logged), available=logged.available)
        report = _Report.of(logged, since, task.report_bounds)
        remembering, memory = bool(remembers(training.algorithm)), {}
        if remembering:  # each event once: those that this report is about
            counted = counted.where(counted.fresh & (logged.settled <= report.upto))
            memory = {0: self._memory.at(since)}
        this_one, trained = np.zeros(1, np.int64), training.events(counted)
        own = Clients(this_one, trained, 0, 0, memory, counted, training.predictor)
        sent = training.algorithm.train(learner, received, own, Pipeline(task.clip_norm))
        if not np.isfinite(sent.norms[0]):
            raise DataError("the update is not finite")
        totals = work.zeros()
        for name, total in totals.items():
            sent.sums[name].add_to(total)
        if remembering and 0 in sent.memory and report.upto > since:
            told = {"space": work.model.space, "learning": task.training}
            self._memory.keep(since, report.upto, sent.memory[0], told)
        unclipped = bool(sent.norms[0] <= task.clip_norm)
        return replace(report, update=work.joined(totals), unclipped=unclipped)

    def _counted(self, training: Training, logged: Logged) -> Events:
        """The events, each Poisson(1) times for each head of an ensemble, the same every time."""
        heads = training.trainable.model.heads
        if not heads:
            return logged.events
        device = int(hashlib.sha256(read_card(self._card).device.encode()).hexdigest()[:15], 16)
        counts = poisson(
            uniforms(device, Purpose.HEADS, logged.sequence[:, None], np.arange(heads))
        )
        return replace(logged.events, weights=counts)

    def _training(self, model: DeviceModel, asked: Work) -> Training:
        """Build what trains and predicts as the server asks for."""
        return build_training(described(model, asked.training), self._trusted)

    def _model(self, space: str) -> DeviceModel:
        model = self.agent.model
        if model.space != space:
            what = f"model {model.version} on this device has other actions or features"
            raise DataError(f"{what} than the server's")
        return model


def _cannot(kind: str, facts: Mapping[str, Any], problem: Exception) -> dict[str, Any]:
    """The answer to a request that has failed."""
    expected = isinstance(problem, FedbanditError | OSError | ValueError)
    _logger.warning("%s: %s", kind, problem, exc_info=not expected)
    why = str(problem) if expected else f"{type(problem).__name__}: {problem}"
    token = facts.get("token")  # whatever it is, it goes back only if it can be one
    said = {"token": token if is_name(token) else None, "problem": why}
    if isinstance(problem, LaterRoundSeen):  # the server must know, and from whom
        said |= {"device": problem.device, "seen": problem.seen}
    return said


def _gain_sums(
    logged: Logged, deployed: Actor, candidate: Actor, asked: Judgement
) -> dict[str, float]:
    """All that a device reveals when it judges: sums over its newest events, up to a limit.

    `gain` estimates how much more the candidate would have earned. `importance` sums the
    candidate's probabilities over the log's, cut at the server's limit, and their squares.
    """
    bounds, limit = asked.report_bounds, float(asked.limit)
    estimator = GainEstimator(asked.estimator, limit, bounds.reward)
    try:
        gains, importance = estimator.terms(logged.events, deployed, candidate, logged.available)
    except NotFinite:
        raise DataError("scores on this device's events are not finite") from None
    newest = slice(max(0, len(logged) - bounds.events), None)
    gains, importance = gains[newest], np.minimum(importance[newest], limit)
    return {
        "events": len(gains),
        "gain": float(gains.sum()),
        "importance": float(importance.sum()),
        "importance_squares": float(importance @ importance),
    }


@dataclass(frozen=True)
class _Work:
    """A request to train, ready to run: the model in use, what trains it, and from which
    weights.
    """

    model: DeviceModel
    training: Training
    weights: np.ndarray

    def zeros(self) -> Vectors:
        """Zeros like what the algorithm sends."""
        return zeros_to_send(self.training.algorithm.sends, self.weights)

    def joined(self, sent: Vectors) -> np.ndarray:
        """The named parts as one vector, as it is sent."""
        return join_sent(sent, self.training.algorithm.sends)


@dataclass(frozen=True)
class _Report(Figures):
    """An update, and sums over rewards that no round has counted: those settled up to `upto`."""

    upto: int = 0
    by_version: Sequence[Sequence[float]] = ()  # version that chose, events, sum of their rewards

    @classmethod
    def of(cls, logged: Logged, since: int, bounds: ReportBounds) -> "_Report":
        """Beyond the bounds, rewards wait for the next round or are cut off at their size."""
        fresh = np.flatnonzero(logged.events.fresh)
        rewards = logged.events.rewards.astype(np.float64)
        fresh = fresh[np.argsort(logged.settled[fresh], kind="stable")][: bounds.events]
        rewards = np.clip(rewards, -bounds.reward, bounds.reward)[fresh]
        versions = logged.events.versions[fresh]
        return cls(
            update=np.empty(0),
            unclipped=False,
            upto=int(logged.settled[fresh].max(initial=since)),
            events=len(fresh),
            reward_sum=float(rewards.sum()),
            propensity_sum=float(logged.events.propensities[fresh].sum()),
            by_version=[
                [int(version), int(own.sum()), float(rewards[own].sum())]
                for version in np.unique(versions)
                for own in [versions == version]
            ],
        )


def _check_unsummed(card: Card, number: int) -> None:
    """Refuse a round in which this device has let a sum be unmasked, and any before it.

    Two sums over almost the same devices differ by the update of one.
    """
    if card.summed is not None and number <= card.summed:
        raise LaterRoundSeen(
            f"a second sum in round {number}: this device has been in the sum of round"
            f" {card.summed}, and takes part in one sum of each round",
            card.summed,
            card.device,
        )


def _fitting(arrays: Mapping[str, np.ndarray], like: np.ndarray) -> np.ndarray:
    """The weights that the server sent, which must be such as `like`."""
    weights = arrays.get("weights")
    if reason := rejection_reason(weights, like):
        raise DataError(f"the server's weights: {reason}")
    assert weights is not None
    return weights
