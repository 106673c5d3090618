"""A device's side of the rounds: answers the server's requests from its own log. Knows nothing of transports."""

import json
import logging
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from fedbandit import models, objectives
from fedbandit.core.errors import DataError, FedbanditError
from fedbandit.core.files import write_json
from fedbandit.core.parts import construct, resolve
from fedbandit.data.dataset import Contexts
from fedbandit.deploy.device.agent import Agent
from fedbandit.deploy.device.log_arrays import Logged
from fedbandit.deploy.device.model_files import DeviceModel
from fedbandit.deploy.secure_sums import Figures, ReportBounds, encode
from fedbandit.evaluation.gate import GainEstimator
from fedbandit.federated.learners.base import ClientSettings, Learner, make_learner
from fedbandit.federated.pipeline import why_not
from fedbandit.models import DataSpec, Layout, build_model
from fedbandit.policies import Policy


@dataclass(frozen=True)
class Card:
    """A device's name, its mark, and what its last secure round will have counted if it came about."""

    device: str = field(default_factory=lambda: uuid.uuid4().hex)
    counted: int = 0
    pending: dict[str, int] = field(default_factory=dict)  # token of a round -> the mark if its sum was taken


def read_card(path: Path) -> Card:
    """The card in the file; the first time, a new one, which must be written before it is used."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        card = Card()
        write_card(path, card)
        return card
    pending = {str(token): int(mark) for token, mark in kept.get("pending", {}).items()}
    return Card(str(kept["device"]), int(kept["counted"]), pending)


def write_card(path: Path, card: Card) -> None:
    """Keep the card, or raise `OSError` and keep the old one."""
    write_json(path, asdict(card))


Scores = Callable[[np.ndarray, Contexts], np.ndarray]
"""Flat weights and contexts to the score of every action: [n, K]."""


@dataclass(frozen=True)
class GainSums:
    """All that a device reveals about its log: sums, which describe a single event only if there is just one."""

    events: int
    gain: float  # how much more the candidate would have earned, by the estimate
    importance: float  # of the candidate's probabilities over the log's, cut at the limit, ...
    importance_squares: float  # ... and of their squares: how many events this is worth


def estimator_of(terms: Mapping[str, Any]) -> GainEstimator:
    """How the server asks for events to be weighed; never without limits, which keep one event from saying too much."""
    kind, limit, most = terms["estimator"], float(terms["limit"]), float(terms["bounds"]["reward"])
    if kind not in ("ips", "dr"):
        raise DataError(f"the server asks for an estimator {str(kind)[:20]!r}, which this device does not know")
    if not (0 < limit < np.inf and 0 < most < np.inf):
        raise DataError("the server asks for gains without a limit")
    return GainEstimator(kind, limit, most)


def gain_sums(
    logged: Logged,
    policy: Policy,
    scores: Scores,
    deployed: np.ndarray,
    candidate: np.ndarray,
    estimator: GainEstimator,
    bounds: ReportBounds,
) -> GainSums:
    """The sums over the newest events, at most `bounds.events` of them."""
    old, new = (scores(weights, logged.events.contexts) for weights in (deployed, candidate))
    if not (np.isfinite(old).all() and np.isfinite(new).all()):
        raise DataError("scores on this device's events are not finite")
    gains, importance = estimator.terms(logged.events, policy, old, new, logged.available)
    newest = slice(max(0, len(logged) - bounds.events), None)
    gains, importance = gains[newest], np.minimum(importance[newest], estimator.limit or np.inf)
    return GainSums(len(gains), float(gains.sum()), float(importance.sum()), float(importance @ importance))


_logger = logging.getLogger("fedbandit.deploy")
Answer = tuple[dict[str, Any], dict[str, np.ndarray]]


class Participant:
    """Answers the server's requests for one agent. Nothing is consumed, so a request may come twice."""

    def __init__(
        self, agent: Agent, *, trusted: Collection[str] = (), after_install: Callable[[Agent], None] | None = None
    ) -> None:
        """`trusted` names models and objectives of your own that a server may ask for, as in `Agent`.

        `after_install` is called whenever another model has come into use.
        """
        self.agent, self._trusted, self._after_install = agent, frozenset(trusted), after_install
        self._card = agent.folder / "device.json"

    def answer(self, kind: str, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Answer:
        """Facts and arrays to send back. What cannot be done is said in `problem`, never raised."""
        try:
            if kind == "install":
                return self._install(arrays)
            if kind == "judge":
                return self._judge(facts, arrays)
            return self._ready(facts) if kind == "ready" else self._train(facts, arrays)
        except (FedbanditError, OSError, ValueError, KeyError, TypeError) as problem:
            _logger.warning("%s: %s", kind, problem)
            return {"token": facts.get("token"), "problem": str(problem)}, {}

    def _install(self, arrays: Mapping[str, np.ndarray]) -> Answer:
        changed = self.agent.install(np.asarray(arrays["model"], np.uint8).tobytes())
        if changed and self._after_install is not None:
            self._after_install(self.agent)
        return {"version": self.agent.model_version}, {}

    def _train(self, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Answer:
        device, since = self._identity(facts["counted"])
        trained = self._fit(facts, arrays, since)
        found = {"token": facts["token"], "device": device, "version": self.agent.model.version, "since": since}
        if trained is None:
            return {**found, "trained": False}, {}
        logged, fresh = trained.logged, trained.logged.events.fresh
        sums = {
            "upto": max(since, int(logged.settled.max())),
            "events": int(fresh.sum()),
            "reward_sum": float(logged.events.rewards[fresh].astype(np.float64).sum()),
            "propensity_sum": float(logged.events.propensities[fresh].sum()),
        }
        return {**found, **sums, "trained": True, "unclipped": trained.unclipped}, {"update": trained.update}

    def _judge(self, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Answer:
        """What the log says of the server's candidate in place of the model in use: sums, and nothing of training."""
        model = self._model(facts["space"])
        found = {"token": facts["token"], "device": read_card(self._card).device, "version": model.version}
        logged = self.agent.events()
        if model.version != facts["version"] or not len(logged):
            return {**found, "events": 0}, {}
        candidate = arrays["weights"]
        learner, layout = self._learner_for(model, facts["learning"], candidate)
        deployed = layout.flatten(dict(model.weights), candidate.dtype)
        bounds = ReportBounds(int(facts["bounds"]["events"]), float(facts["bounds"]["reward"]))
        estimator = estimator_of(facts)
        sums = gain_sums(logged, self.agent.policy, learner.scores, deployed, candidate, estimator, bounds)
        return {**found, **asdict(sums)}, {}

    def _ready(self, facts: Mapping[str, Any]) -> Answer:
        """Before a secure round: who this is, and whether there is anything to train on."""
        model = self._model(facts["space"])
        found = {"token": facts["token"], "device": read_card(self._card).device, "version": model.version}
        return {**found, "ready": len(self.agent.events()) > 0}, {}

    def contribute(self, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """A secure round's vector, to be masked before it leaves the device; raises what `answer` would say.

        Rewards beyond the bounds wait for the next round (their number) or are cut off (their size).
        """
        card = read_card(self._card)
        since = card.pending.get(facts["settled"], card.counted)
        trained = self._fit(facts, arrays, since)
        if trained is None:
            raise DataError("nothing to train on any more")
        bounds = ReportBounds(int(facts["bounds"]["events"]), float(facts["bounds"]["reward"]))
        logged = trained.logged
        fresh = np.flatnonzero(logged.events.fresh)
        fresh = fresh[np.argsort(logged.settled[fresh], kind="stable")][: bounds.events]
        own = Figures(
            update=trained.update,
            unclipped=int(trained.unclipped),
            events=len(fresh),
            reward_sum=float(np.clip(logged.events.rewards[fresh], -bounds.reward, bounds.reward, dtype=float).sum()),
            propensity_sum=float(logged.events.propensities[fresh].sum()),
        )
        vector = encode(own, facts["clip_norm"], bounds)
        upto = int(logged.settled[fresh].max(initial=since))
        write_card(self._card, replace(card, counted=since, pending={str(facts["token"]): upto}))
        return vector

    def _fit(self, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray], since: int) -> "_Trained | None":
        """One clipped update from the log, in which rewards settled after `since` are fresh; None from an empty one."""
        model = self._model(facts["space"])
        weights = arrays["weights"]
        learner, _ = self._learner_for(model, facts["learning"], weights)
        logged = self.agent.events(counted=since)
        if not len(logged):
            return None
        total = np.zeros_like(weights)
        update, norms = learner.train(weights, logged.events, facts["clip_norm"])
        update.add_to(total)
        if not np.isfinite(norms[0]):
            raise DataError("the update is not finite")
        return _Trained(total, bool(norms[0] <= facts["clip_norm"]), logged)

    def _learner_for(
        self, model: DeviceModel, learning: Mapping[str, Any], weights: np.ndarray
    ) -> tuple[Learner, Layout]:
        """What trains and scores as the server asks for, once the server's weights have been found to fit."""
        what = json.dumps([model.kind, model.shape, model.num_actions, model.model, learning])
        learner, layout, expected = _learner(what, self._trusted)
        if reason := why_not(weights, expected):
            raise DataError(f"the server's weights: {reason}")
        return learner, layout

    def _model(self, space: str) -> DeviceModel:
        model = self.agent.model
        if model.space != space:
            raise DataError(f"model {model.version} on this device has other actions or features than the server's")
        return model

    def _identity(self, counted: int | None) -> tuple[str, int]:
        """Who this device is, and up to where its rewards have been counted: as the server says, else as last heard."""
        card = read_card(self._card)  # a device that could not be known again must not take part
        if counted is not None and counted != card.counted:
            with suppress(OSError):  # no space: the server will send it again
                write_card(self._card, replace(card, counted=counted))
        return card.device, card.counted if counted is None else counted


@dataclass(frozen=True)
class _Trained:
    """What a device has learned, and from what."""

    update: np.ndarray
    unclipped: bool
    logged: Logged


@lru_cache(maxsize=4)
def _learner(what: str, trusted: frozenset[str]) -> tuple[Learner, Layout, np.ndarray]:
    """How to train and how weights lie, with an example that fits; for what the model file and the server ask for."""
    kind, shape, num_actions, described, learning = json.loads(what)
    for name, built_in in ((described["name"], models.BUILT_IN), (learning["objective"], objectives.BUILT_IN)):
        if name not in built_in and name not in trusted:
            raise DataError(f"the server asks for {name!r}, which is not built in and which this app does not trust")
    parameters = {key: value for key, value in described.items() if key != "name"}
    model = build_model(described["name"], DataSpec(kind, tuple(shape), num_actions), parameters)
    initial = model.init(0)
    layout = Layout.of(initial)
    make = resolve("objective.name", learning["objective"], objectives.BUILT_IN)
    objective = construct("objective", make, learning["objective_parameters"])
    learner = make_learner(model, layout, objective, ClientSettings(**learning["client"]))
    return learner, layout, layout.flatten(initial, np.dtype(learning["dtype"]))
