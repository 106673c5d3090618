"""A device's side of the rounds: answers the server's requests from its own log. Knows no transport."""

import hashlib
import json
import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from fedbandit import algorithms, models, objectives
from fedbandit.acting import Actor, NotFinite, Predictor
from fedbandit.core.errors import DataError, FedbanditError
from fedbandit.core.parts import construct, resolve
from fedbandit.core.process import alone_in
from fedbandit.core.randomness import Purpose, poisson, uniforms
from fedbandit.deploy.device.agent import Agent
from fedbandit.deploy.device.device_identity import Card, is_token, read_card, write_card
from fedbandit.deploy.device.instructions import (
    Limits,
    Task,
    check_understood,
    read_bounds,
    read_learning,
    read_mark,
    read_round,
    read_rule,
    read_settled,
    read_space,
    read_task,
    read_token,
    read_version,
    sends_zeros,
)
from fedbandit.deploy.device.log_arrays import Logged
from fedbandit.deploy.device.model_files import DeviceModel
from fedbandit.deploy.device.participation import LaterRoundSeen, Turns, agreed, read_terms
from fedbandit.deploy.device.training import device_learner
from fedbandit.deploy.messages import Reply, Request, with_protocol
from fedbandit.deploy.secure_sums import Figures, ReportBounds, encode, nothing
from fedbandit.evaluation.gate import GainEstimator
from fedbandit.events import Events
from fedbandit.federated.algorithm import Algorithm, Clients
from fedbandit.federated.learners.base import ClientSettings, Learner
from fedbandit.federated.learners.make_learner import Trainable
from fedbandit.federated.pipeline import Pipeline, rejection_reason
from fedbandit.models import DataSpec, Freezing

if TYPE_CHECKING:
    from fedbandit.deploy.device.secure_round import Identity, SecureRounds

_LARGEST_LIMIT = 1e150  # what still has a square
_IN_CLEAR = ("train", "judge")  # requests whose answers tell of this device's log alone


@dataclass(frozen=True)
class GainSums:
    """All that a device reveals about its log: sums, which describe a single event only if there is just one."""

    events: int
    gain: float  # how much more the candidate would have earned, by the estimate
    importance: float  # of the candidate's probabilities over the log's, cut at the limit, ...
    importance_squares: float  # ... and of their squares: how many events this is worth


def estimator_of(terms: Mapping[str, Any], bounds: ReportBounds) -> GainEstimator:
    """How the server asks for events to be weighed; never without limits, which keep one event from saying too much."""
    kind, limit = terms.get("estimator"), terms.get("limit")
    if kind not in ("ips", "dr"):
        raise DataError(
            f"the server asks for an estimator {str(kind)[:20]!r}, which this device does not know"
        )
    if not (isinstance(limit, int | float) and 0 < limit <= _LARGEST_LIMIT):
        raise DataError("the server asks for gains without a limit")
    return GainEstimator(kind, float(limit), bounds.reward)


def gain_sums(
    logged: Logged,
    deployed: Actor,
    candidate: Actor,
    estimator: GainEstimator,
    bounds: ReportBounds,
) -> GainSums:
    """The sums over the newest events, at most `bounds.events` of them."""
    try:
        gains, importance = estimator.terms(logged.events, deployed, candidate, logged.available)
    except NotFinite:
        raise DataError("scores on this device's events are not finite") from None
    newest = slice(max(0, len(logged) - bounds.events), None)
    gains, importance = gains[newest], np.minimum(importance[newest], estimator.limit or np.inf)
    return GainSums(
        len(gains), float(gains.sum()), float(importance.sum()), float(importance @ importance)
    )


_logger = logging.getLogger("fedbandit.deploy")
Answer = tuple[dict[str, Any], dict[str, np.ndarray]]


def cannot(kind: str, facts: Mapping[str, Any], problem: Exception) -> dict[str, Any]:
    """What to answer to a request that has failed."""
    expected = isinstance(problem, FedbanditError | OSError | ValueError)
    _logger.warning("%s: %s", kind, problem, exc_info=not expected)
    why = str(problem) if expected else f"{type(problem).__name__}: {problem}"
    token = facts.get("token")  # whatever it is, it goes back only if it can be one
    said = {"token": token if is_token(token) else None, "problem": why}
    if isinstance(problem, LaterRoundSeen):  # the server must know, and from whom
        said |= {"device": problem.device, "seen": problem.seen}
    return said


class Participant:
    """Answers the server's requests for one agent. Nothing is consumed, so a request may come twice."""

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
        """`trusted` names models and objectives of your own that a server may ask for, as in `Agent`.

        `after_install` is called whenever another model has come into use. `limits` are the most
        that the device does for a server, and the least that it hides among. With `secure_only`
        nothing of its log leaves the device except inside secure sums, whatever a server asks for.
        `identity` says whom it believes in them.
        """
        self.agent, self._trusted, self._after_install = agent, frozenset(trusted), after_install
        self._limits, self._secure_only = limits or Limits(), secure_only
        self._identity = identity
        self._card = agent.folder / "device.json"
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
                raise DataError(
                    f"this device does not know requests of the kind {kind[:50]!r}; update its fedbandit"
                )
            check_understood(facts)
            if self._secure_only and kind in _IN_CLEAR:
                raise DataError("this device takes part in secure sums only")
            said, sent = self._answers[kind](facts, arrays)
        except (
            Exception
        ) as problem:  # a server's word, or a part of the user's, may fail in any way
            said, sent = cannot(kind, facts, problem), {}
        return with_protocol(said), sent

    def reply(self, request: Request, ticket: str = "") -> Reply:
        """The reply to any request, whichever transport has brought it; `ticket` goes back with it."""
        facts: dict[str, Any] = {}
        if request.kind != "secure":
            facts, arrays = self.answer(request.kind, request.facts, request.arrays)
            if request.kind != "ready" or facts.get("ready") is not True:
                return Reply(ticket, facts, arrays)
        try:
            check_understood(request.facts)
            token, rounds = read_token(request.facts), self._rounds(request.node)
            if request.kind == "ready":
                return Reply(ticket, facts, sealed=rounds.announce(token))
            sealed = rounds.step(token, request.facts, request.arrays, request.sealed, self)
        except Exception as problem:  # a server's word, or a user's part, may fail in any way
            return Reply(ticket, with_protocol(cannot("secure sum", request.facts, problem)))
        return Reply(ticket, with_protocol({"token": token}), sealed=sealed)

    def _rounds(self, node: int) -> "SecureRounds":
        from fedbandit.deploy.device.secure_round import Identity, SecureRounds

        identity = self._identity or Identity()
        return SecureRounds(self.agent.folder, node, identity, self._limits.secure)

    def _install(self, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Answer:
        payload = arrays.get("model")
        if not isinstance(payload, np.ndarray) or payload.dtype != np.uint8:
            raise DataError("the server's request: model: not the bytes of a file")
        self._hear(facts)
        changed = self.agent.install(payload.tobytes())
        if changed and self._after_install is not None:
            self._after_install(self.agent)
        return {"version": self.agent.model_version, **self._owner()}, {}

    def _train(self, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Answer:
        task, counted = read_task(facts, self._limits), read_mark(facts)
        with self._alone_if_private(facts):
            card = read_card(
                self._card
            )  # a device that could not be known again must not take part
            since = card.counted if counted is None else counted
            turns = self._turn(card, facts)
            if turns is not None:
                _fitting(arrays, self._built(self._model(task.space), task.learning).trained)
                # From here on it has had its turn, whatever it has to train on and however that ends.
                write_card(self._card, replace(card, counted=since, private=turns))
        trained = (
            self._fit(task, arrays, since)
            if turns is None
            else self._fit_or_nothing(task, arrays, since)
        )
        if turns is None and since != card.counted:
            with suppress(OSError):  # no space: the server will send it again
                write_card(self._card, replace(card, counted=since))
        found = {
            "token": task.token,
            "device": card.device,
            "version": self.agent.model.version,
            "since": since,
        }
        if trained is None:
            return {**found, "trained": False}, {}
        fresh = _Fresh.of(trained.logged, since, task.bounds)
        return {**found, **asdict(fresh), "trained": True, "unclipped": trained.unclipped}, {
            "update": trained.update
        }

    def _judge(self, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Answer:
        """What the log says of the server's candidate in place of the model in use: sums, and nothing of training."""
        model = self._model(read_space(facts))
        with self._alone_if_private(facts):
            card = read_card(self._card)
            found = {"token": read_token(facts), "device": card.device, "version": model.version}
            self._check_private(card, facts)
            if card.private is not None:
                write_card(
                    self._card, replace(card, private=card.private.after_judging(facts["round"]))
                )
        logged = self.agent.events()
        if model.version != read_version(facts) or not len(logged):
            return {**found, "events": 0}, {}
        built = self._built(model, read_learning(facts, self._limits))
        weights = _fitting(arrays, built.whole)
        before = built.trainable.layout.flatten(dict(model.weights), weights.dtype)
        rule = self.agent.rule_of(read_rule(facts))
        deployed = Actor(built.predictor, before, self.agent.policy)
        candidate = Actor(built.predictor, weights, rule)
        bounds = read_bounds(facts, self._limits)
        estimator = estimator_of(facts, bounds)
        sums = gain_sums(logged, deployed, candidate, estimator, bounds)
        return {**found, **asdict(sums)}, {}

    def _ready(self, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Answer:
        """Before a secure round: who this is, and whether it has anything to train on."""
        model, card = self._model(read_space(facts)), read_card(self._card)
        _check_unsummed(card, read_round(facts))
        self._check_private(card, facts)
        found = {"token": read_token(facts), "device": card.device, "version": model.version}
        return {**found, "ready": sends_zeros(facts) or len(self.agent.events()) > 0}, {}

    def contribute(self, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """A secure round's vector of grid points, to be masked before it leaves the device.

        Rewards beyond the bounds wait for the next round (their number) or are cut off (their size).
        The attempt is on record before the vector leaves: only the last one on record can be unmasked
        with this device's help.
        """
        with alone_in(self.agent.folder):
            return self._contribution(facts, arrays)

    def release(self, token: str) -> None:
        """Record that the vector of this attempt is in a sum: there is no other in its round."""
        with alone_in(self.agent.folder):
            card = read_card(self._card)
            if card.masked is None or token not in card.pending:
                raise DataError("this device has begun another attempt at a sum since")
            _check_unsummed(card, card.masked)
            write_card(self._card, replace(card, summed=card.masked))

    def _contribution(
        self, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
    ) -> np.ndarray:
        task = read_task(facts, self._limits)
        card, number, settled = read_card(self._card), read_round(facts), read_settled(facts)
        _check_unsummed(card, number)
        model = self._model(task.space)
        freezing = self._built(model, task.learning).freezing
        if facts.get("model") != model.untrained(() if freezing is None else freezing.frozen):
            raise DataError("the model on this device is not the one that the task is for")
        marks = (mark for token, mark in card.pending.items() if token in settled)
        since = next(marks, card.counted)
        turns = self._turn(
            card, facts, attempts=True
        )  # of an attempt that fails nobody sees anything
        trained = (
            self._fit_or_nothing(task, arrays, since)
            if sends_zeros(facts)
            else self._fit(task, arrays, since)
        )
        if trained is not None:
            fresh = _Fresh.of(trained.logged, since, task.bounds)
            upto, own = fresh.upto, trained.figures(fresh)
        elif sends_zeros(facts):
            upto, own = since, nothing(arrays["weights"].size)
        else:
            raise DataError("nothing to train on any more")
        vector = encode(own, task.clip_norm, task.bounds)
        write_card(
            self._card,
            replace(card, counted=since, pending={task.token: upto}, private=turns, masked=number),
        )
        return vector

    def _fit_or_nothing(
        self, task: Task, arrays: Mapping[str, np.ndarray], since: int
    ) -> "_Trained | None":
        """In a private round the log must not decide how a device answers: what fails on it counts as an empty one."""
        _fitting(
            arrays, self._built(self._model(task.space), task.learning).trained
        )  # no fault of the log's
        try:
            return self._fit(task, arrays, since)
        except (
            Exception
        ) as problem:  # a damaged row, an update that is not finite, a part of the user's
            _logger.warning("this device answers as with an empty log: %s", problem)
            return None

    def _turn(
        self, card: Card, facts: Mapping[str, Any], *, attempts: bool = False
    ) -> Turns | None:
        """The card's account with the turn that a private server asks for; None of a server that is not private."""
        self._check_private(card, facts)
        said = read_terms(facts)
        if said is None:
            return None
        number, terms = said
        before = agreed(card.private, terms, self._limits.private)
        try:
            return before.after(number, terms, attempts=attempts)
        except LaterRoundSeen as problem:
            problem.device = card.device
            raise

    def _check_private(self, card: Card, facts: Mapping[str, Any]) -> None:
        """Once it has agreed to a privacy plan, a device does nothing without one.

        Zeros go with a plan alone: otherwise a server that knows who has none could hide nobody.
        """
        if read_terms(facts) is None and sends_zeros(facts):
            raise DataError("the server asks for zeros in a round without privacy")
        if card.private is not None and read_terms(facts) is None:
            raise DataError(
                "the server asks for a round without privacy, and this device agreed to a private plan"
            )

    def _hear(self, facts: Mapping[str, Any]) -> None:
        """Remember how far a private server has come; on first contact, agree to its plan."""
        if (said := read_terms(facts)) is not None:
            with alone_in(self.agent.folder):
                card = read_card(self._card)
                told = agreed(card.private, said[1], self._limits.private).told(said[0])
                if told != card.private:
                    write_card(self._card, replace(card, private=told))

    def _alone_if_private(self, facts: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Two requests at once must not have the same turn."""
        return nullcontext() if facts.get("privacy") is None else alone_in(self.agent.folder)

    def _owner(self) -> dict[str, str]:
        """Whose device this is, where somebody has said so."""
        user = read_card(self._card).user
        return {} if user is None else {"user": user}

    def _fit(self, task: Task, arrays: Mapping[str, np.ndarray], since: int) -> "_Trained | None":
        """One clipped update from the log, in which rewards settled after `since` are fresh; None from an empty one."""
        model = self._model(task.space)
        received = dict(arrays)
        built = self._built(model, task.learning)
        _fitting(received, built.trained)
        logged = self.agent.events(counted=since)
        if not len(logged):
            return None
        learner: Any = built.learner
        if built.freezing is not None:
            learner = learner.over(
                built.trainable.layout.flatten(dict(model.weights), received["weights"].dtype)
            )
        own = Clients(np.zeros(1, np.int64), self._counted(built, logged), round=0, seed=0)
        sent = built.algorithm.train(learner, received, own, Pipeline(task.clip_norm))
        total = np.zeros_like(received["weights"])
        sent.sums["weights"].add_to(total)
        if not np.isfinite(sent.norms[0]):
            raise DataError("the update is not finite")
        return _Trained(total, bool(sent.norms[0] <= task.clip_norm), logged)

    def _counted(self, built: "_Built", logged: Logged) -> Events:
        """The events, each counting Poisson(1) times for each head of an ensemble, the same number every time."""
        heads = built.trainable.model.heads
        if not heads:
            return logged.events
        device = int(hashlib.sha256(read_card(self._card).device.encode()).hexdigest()[:15], 16)
        counts = poisson(
            uniforms(device, Purpose.HEADS, logged.sequence[:, None], np.arange(heads))
        )
        return replace(logged.events, weights=counts)

    def _built(self, model: DeviceModel, learning: Mapping[str, Any]) -> "_Built":
        """What trains and predicts as the server asks for."""
        return _build(
            json.dumps([model.kind, model.shape, model.num_actions, model.model, learning]),
            self._trusted,
        )

    def _model(self, space: str) -> DeviceModel:
        model = self.agent.model
        if model.space != space:
            raise DataError(
                f"model {model.version} on this device has other actions or features than the server's"
            )
        return model


@dataclass(frozen=True)
class _Trained:
    """What a device has learned, and from what."""

    update: np.ndarray
    unclipped: bool
    logged: Logged

    def figures(self, fresh: "_Fresh") -> Figures:
        """What goes into a secure sum."""
        return Figures(
            update=self.update,
            unclipped=int(self.unclipped),
            events=fresh.events,
            reward_sum=fresh.reward_sum,
            propensity_sum=fresh.propensity_sum,
        )


@dataclass(frozen=True)
class _Fresh:
    """What is reported of rewards that no round has counted: those settled up to a mark, and sums over them."""

    upto: int
    events: int
    reward_sum: float
    propensity_sum: float
    by_version: list[list[float]]  # version that made the choices, events, sum of their rewards

    @classmethod
    def of(cls, logged: Logged, since: int, bounds: ReportBounds) -> "_Fresh":
        """Beyond the bounds, rewards wait for the next round (their number) or are cut off (their size)."""
        fresh = np.flatnonzero(logged.events.fresh)
        rewards = logged.events.rewards.astype(np.float64)
        fresh = fresh[np.argsort(logged.settled[fresh], kind="stable")][: bounds.events]
        rewards = np.clip(rewards, -bounds.reward, bounds.reward)
        versions = logged.events.versions[fresh]
        return cls(
            upto=int(logged.settled[fresh].max(initial=since)),
            events=len(fresh),
            reward_sum=float(rewards[fresh].sum()),
            propensity_sum=float(logged.events.propensities[fresh].sum()),
            by_version=[
                [
                    int(version),
                    int((versions == version).sum()),
                    float(rewards[fresh][versions == version].sum()),
                ]
                for version in np.unique(versions)
            ],
        )


def _check_unsummed(card: Card, number: int) -> None:
    """Refuse a round in which this device has let a sum be unmasked, and any before it.

    Two sums over almost the same devices differ by the update of one.
    """
    if card.summed is not None and number <= card.summed:
        problem = LaterRoundSeen(
            f"a second sum in round {number}: this device has been in the sum of round"
            f" {card.summed}, and takes part in one sum of each round",
            card.summed,
        )
        problem.device = card.device
        raise problem


def _fitting(arrays: Mapping[str, np.ndarray], like: np.ndarray) -> np.ndarray:
    """The weights that the server sent, which must be such as `like`."""
    weights = arrays.get("weights")
    if reason := rejection_reason(weights, like):
        raise DataError(f"the server's weights: {reason}")
    assert weights is not None
    return weights


@dataclass(frozen=True)
class _Built:
    """What a device makes of what the model file and the server name, with examples of vectors that fit."""

    trainable: Trainable
    predictor: Predictor
    learner: Learner
    algorithm: Algorithm
    freezing: Freezing | None
    whole: np.ndarray  # like the weights of the whole model
    trained: np.ndarray  # like the part of them that is trained


@lru_cache(maxsize=4)
def _build(what: str, trusted: frozenset[str]) -> _Built:
    kind, shape, num_actions, described, learning = json.loads(what)
    named = learning.get("algorithm", {"name": "fedavg"})
    for name, built_in in (
        (described["name"], models.BUILT_IN),
        (learning["objective"], objectives.BUILT_IN),
        (named["name"], algorithms.BUILT_IN),
    ):
        if name not in built_in and name not in trusted:
            raise DataError(
                f"the server asks for {name!r}, which is not built in and which this app does not trust"
            )
    data = DataSpec(kind, tuple(shape), num_actions)
    trainable = Trainable.of(described, data)
    make = resolve("objective.name", learning["objective"], objectives.BUILT_IN)
    objective = construct("objective", make, learning["objective_parameters"])
    parameters = {key: value for key, value in named.items() if key != "name"}
    make = resolve("algorithm.name", named["name"], algorithms.BUILT_IN)
    freeze = learning.get("freeze", ())
    freezing = Freezing.of(trainable.layout, freeze) if freeze else None
    layout = trainable.layout if freezing is None else freezing.trainable
    told = {"data": data, "layout": layout, "objective": objective}
    optimizer = None  # is the server's
    algorithm = construct("algorithm", make, parameters, optimizer, told=told)
    settings = construct("client", ClientSettings, learning["client"])
    learner = device_learner(described["name"], trainable, objective, settings, freezing)
    whole = trainable.initial(0, np.dtype(learning["dtype"]))
    return _Built(
        trainable,
        trainable.predictor(light=True),
        learner,
        algorithm,
        freezing,
        whole,
        whole if freezing is None else freezing.pick(whole),
    )
