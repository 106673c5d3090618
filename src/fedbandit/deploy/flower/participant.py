"""The device's side of a round: install the model that the server deploys, train on the agent's log, answer once.

Only sums leave the device: one clipped update and, for the metrics, the number of new events and their total reward.
"""

import json
import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from fedbandit import models, objectives
from fedbandit.components import construct, resolve
from fedbandit.deploy.agent import Agent
from fedbandit.deploy.flower.card import read_card, write_card
from fedbandit.deploy.flower.judging import estimator_of, gain_sums
from fedbandit.deploy.flower.secure_sums import Bounds, Figures, encode
from fedbandit.deploy.model_files import DeviceModel
from fedbandit.deploy.reading import Logged
from fedbandit.errors import DataError, FedbanditError
from fedbandit.federated.learners import ClientSettings, Learner, make_learner
from fedbandit.federated.screening import why_not
from fedbandit.models import DataSpec, Layout, build_model

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
        bounds = Bounds(int(facts["bounds"]["events"]), float(facts["bounds"]["reward"]))
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
        bounds = Bounds(int(facts["bounds"]["events"]), float(facts["bounds"]["reward"]))
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
            with suppress(OSError):  # no room: the server will say it again
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
