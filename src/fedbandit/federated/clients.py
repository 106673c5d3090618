"""The work of a chunk of clients in a round: act with the deployed model, then train on the very
events it logged.

This is the unit of work of every engine. Its result depends on the chunk alone, never on who
computes it or when.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace

import numpy as np

from fedbandit.acting import Actor, Chosen, NotFinite, Personal, Predictor, WrongProbabilities
from fedbandit.core.contexts import Candidates, Contexts
from fedbandit.core.errors import ConfigError, Diverged, FedbanditError, PartFailed
from fedbandit.core.identity import place_of
from fedbandit.core.parts import resolve
from fedbandit.core.prediction import Prediction
from fedbandit.core.process import Stopwatch
from fedbandit.core.ragged import Ragged
from fedbandit.core.randomness import Purpose, poisson, uniforms
from fedbandit.data.dataset import Split
from fedbandit.environments import Met, Scenario
from fedbandit.events import Events
from fedbandit.federated.algorithm import Algorithm, Clients
from fedbandit.federated.learners.base import Learner
from fedbandit.federated.pipeline import CompressionStage, Contribution, Memories, Pipeline, Vectors
from fedbandit.federated.state import State, Version
from fedbandit.federated.visit_plans import VisitPlan, Visits
from fedbandit.models.base import Freezing
from fedbandit.objectives import TargetObjective
from fedbandit.policies import Policy, importance_scale, rule_at


@dataclass(frozen=True)
class Broadcast:
    """The server's message to every client of a round: weights to train from and to act with."""

    round: int
    received: Vectors  # by the algorithm: the weights to train from, and whatever else it needs
    deployed: Mapping[int, Version]  # what to act with, by version
    clip_norm: float
    base: np.ndarray | None = None  # the whole model, where only a part of it is trained
    keep_individual_updates: bool = False  # chunks do not add up what their clients send

    def arrays(self) -> Vectors:
        """All weights in it by name: what is large, and what an engine sends once for all."""
        named = {f"received/{name}": array for name, array in self.received.items()}
        named |= {f"deployed/{number}": held.weights for number, held in self.deployed.items()}
        return named if self.base is None else {**named, "base": self.base}

    def with_arrays(self, arrays: Mapping[str, np.ndarray]) -> "Broadcast":
        """The same with other weights, under the names of `arrays()`."""
        return replace(
            self,
            received={name: arrays[f"received/{name}"] for name in self.received},
            deployed={
                number: replace(held, weights=arrays[f"deployed/{number}"])
                for number, held in self.deployed.items()
            },
            base=None if self.base is None else arrays["base"],
        )


@dataclass(frozen=True)
class ChunkResult:
    """The answer of a chunk of clients: sums by name, and figures per client for the metrics."""

    sent: Contribution
    events: np.ndarray  # int64 [clients]: fresh events
    reward_sums: np.ndarray  # float64 [clients], over fresh events
    propensity_sums: np.ndarray  # float64 [clients], over fresh events
    missing: np.ndarray | None = None  # int64 [clients]: rewards that never arrive; None: all do
    regret_sums: np.ndarray | None = None  # float64 [clients], over fresh events, where it is known
    seconds: Mapping[str, float] = field(
        default_factory=dict
    )  # where the time went; no part of any result

    @property
    def norms(self) -> np.ndarray:
        """float64 [clients], before clipping."""
        return self.sent.norms

    def figures(self) -> "ChunkResult":
        """The same without sums and memory, which are as large as the model and needed only until
        they are added.
        """
        return replace(self, sent=Contribution({}, self.norms, bytes=self.sent.bytes))


@dataclass(frozen=True)
class Recipe:
    """Instructions to make the same work elsewhere: a function's import path and its arguments."""

    maker: str  # "package.module:function"
    arguments: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(f"{self.maker} {self.arguments}".encode()).hexdigest()

    def make(self) -> "ClientWork":
        """The work, made here."""
        work: ClientWork = resolve("recipe", self.maker, {})(**json.loads(self.arguments))
        return work


@dataclass(frozen=True)
class ClientWork:
    """Everything a chunk needs that stays the same from round to round."""

    split: Split
    plan: VisitPlan
    policy: Policy
    predictor: Predictor
    learner: Learner
    algorithm: Algorithm
    seed: int
    num_actions: int
    world: Scenario  # pays for actions, and says which of them exist
    stages: tuple[CompressionStage, ...] = ()  # what compresses an update
    freezing: Freezing | None = None  # which parameters are not trained
    heads: int = 0  # of an ensemble; each event then counts Poisson(1) times for each of them
    per_version_importance: bool = False  # events weigh as the rule of their version says
    with_regret: bool = False  # log what each choice loses, where expected rewards are known
    supervised: bool = False  # log every action's reward, for full-information training
    estimator: TargetObjective | None = None  # estimates every action's reward from what is logged
    reduction: Callable[[Events], Events] | None = None  # of what is logged to what is trained on
    training: bool = True  # False: nobody trains, the baseline of an initial model
    step: float | None = None  # updates are summed in whole steps, of that many clip norms
    recipe: Recipe | None = field(
        default=None, repr=False
    )  # None: it can only be done in this process

    def __call__(
        self,
        clients: np.ndarray,
        broadcast: Broadcast,
        memory: Mapping[int, Memories] | None = None,
    ) -> ChunkResult:
        watch = Stopwatch()
        events = self.act(clients, broadcast, watch, memory or {})
        pipeline = Pipeline(
            broadcast.clip_norm,
            self.stages,
            self.seed,
            broadcast.round,
            broadcast.keep_individual_updates,
            self.step,
        )
        learner = self.learner
        if broadcast.base is not None:
            learner = learner.over(broadcast.base)  # type: ignore[attr-defined] # only such learners freeze
        with watch("train"):
            used = events if self.reduction is None else self.reduction(events)
            taking_part = Clients(
                clients, used, broadcast.round, self.seed, memory or {}, events, self.predictor
            )
            if self.training:
                sent = self.algorithm.train(learner, broadcast.received, taking_part, pipeline)
            else:
                sent = pipeline.collect([None] * len(clients), clients, self.algorithm.sends)
            if not isinstance(sent, Contribution) or set(sent.sums) != set(self.algorithm.sends):
                kind = type(self.algorithm).__name__
                raise ConfigError(
                    f"algorithm.name: {kind}.train must return a Contribution with sums for all it sends"
                )
        return ChunkResult(
            sent,
            events.sum_fresh(),
            events.sum_fresh(events.rewards),
            events.sum_fresh(events.propensities),
            events.missing,
            None if events.regret is None else events.sum_fresh(events.regret),
            watch.take(),
        )

    def broadcast(self, state: State, *, keep_individual_updates: bool = False) -> Broadcast:
        """The message of the round after this state."""
        return Broadcast(
            round=state.round + 1,
            received=self.algorithm.broadcast(state.server_state),
            deployed=state.deployed,
            clip_norm=state.clip_norm,
            base=None if self.freezing is None else state.weights,
            keep_individual_updates=keep_individual_updates,
        )

    @property
    def description(self) -> str:
        """The work in words: equal for equal work, wherever it was made. The data is the
        recipe's to check.
        """
        parts = {
            f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("split", "recipe")
        }
        return re.sub(r" at 0x[0-9a-f]+", "", repr(parts))

    def chunks(self, cohort: np.ndarray) -> list[np.ndarray]:
        """The cohort in order, cut where enough events have come together to be worth a task of
        their own.

        The cut depends on the cohort alone, so that sums are always added in one order.
        """
        counts = self.event_counts(cohort)
        number = (np.cumsum(counts) - counts) // self.learner.chunk_events
        return np.split(cohort, np.flatnonzero(np.diff(number)) + 1) if len(cohort) else []

    def event_counts(self, clients: np.ndarray) -> np.ndarray:
        """The most events that each client will have, which measure its work: int64 [clients]."""
        return self.plan.event_counts(self.split, clients)

    def act(
        self,
        clients: np.ndarray,
        broadcast: Broadcast,
        watch: Stopwatch | None = None,
        memory: Mapping[int, Memories] | None = None,
    ) -> Events:
        """Algorithm 2 for a chunk of clients: score, explore, draw, and log the reward of the
        drawn.

        `memory` is what the clients remember; an algorithm with `personal` cannot do without it.
        """
        watch = watch or Stopwatch()
        if memory is None and hasattr(self.algorithm, "personal"):
            raise ConfigError(
                f"algorithm.name: clients of {type(self.algorithm).__name__} act with what they"
                " remember, so that their events cannot be computed again, as gates and callbacks do"
            )
        with watch("data"):
            visits = self.plan.visits(self.split, clients, broadcast.round)
            contexts = self.split.contexts(visits.rows)
            labels = self.split.labels.take(visits.rows)
        with watch("act"):
            return self._chosen(visits, contexts, labels, broadcast, memory or {})

    def rule(self, version: Version) -> Policy:
        """The rule that ships with a deployed version."""
        return rule_at(self.policy, version.progress)

    def predictions(self, weights: np.ndarray) -> Callable[[np.ndarray], Prediction]:
        """From rows of the split to what the model of these weights says about them."""
        return lambda rows: self.predictor.predict(weights, self.split.contexts(rows))

    def actor(self, version: Version) -> Actor:
        """A deployed version, ready to act."""
        return Actor(self.predictor, version.weights, self.rule(version))

    def _chosen(
        self,
        visits: Visits,
        contexts: Contexts,
        labels: Ragged,
        broadcast: Broadcast,
        memory: Mapping[int, Memories],
    ) -> Events:
        """The log of clients that meet these contexts."""
        available = self.world.available(visits.rounds)
        chosen = self._drawn(visits, contexts, available, broadcast, memory)
        actions, propensities = chosen.actions, chosen.propensities
        met = Met(
            self.seed,
            contexts,
            labels,
            visits.clients,
            visits.rounds,
            visits.positions,
            self.num_actions,
        )
        rewards = self.world.rewards(met, actions)
        targets = self.world.expected(met) if self.supervised else None
        if self.estimator is not None:
            targets = self._targets(self.estimator, chosen, rewards)
        arrives = visits.times + self.world.delay
        fresh, known = arrives == visits.now, arrives <= visits.now
        missing, observed = None, self.world.observed(met, actions)
        if observed is not None:
            lost = np.concatenate([[0], np.cumsum(fresh & ~observed)])
            missing, known = np.diff(lost[visits.bounds]), known & observed
        events = Events(
            bounds=visits.bounds,
            contexts=contexts,
            actions=actions,
            rewards=rewards,
            propensities=propensities,
            versions=visits.versions,
            fresh=fresh,
            times=visits.times,
            available=available,
            missing=missing,
            regret=self.world.regret(met, actions) if self.with_regret else None,
            targets=targets,
            weights=self._counts(visits, contexts.candidates, broadcast),
        )
        return events if known.all() else events.where(known)

    def _targets(
        self, objective: TargetObjective, chosen: Chosen, rewards: np.ndarray
    ) -> np.ndarray:
        """A reward for every action, as the objective estimates it: [n, K], over candidates [m]."""
        actions, propensities, prediction = chosen.actions, chosen.propensities, chosen.prediction
        if prediction.bounds is None:
            return objective.targets(prediction, actions, rewards, propensities)
        targets = np.empty_like(prediction.mean)
        for rows, at, block in prediction.blocks():
            own = (actions[rows], rewards[rows], propensities[rows])
            targets[at] = objective.targets(block, *own)
        return targets

    def _drawn(
        self,
        visits: Visits,
        contexts: Contexts,
        available: np.ndarray | None,
        broadcast: Broadcast,
        memory: Mapping[int, Memories],
    ) -> Chosen:
        """Each row by the version that its client held at the time."""
        draws = uniforms(self.seed, Purpose.ACTIONS, visits.times, visits.clients, visits.positions)
        versions = visits.versions
        if len(versions) and versions.min() == versions.max():
            version = int(versions[0])
            return self._by_version(
                version, contexts, draws, visits.clients, available, broadcast, memory
            )
        dtype = next(iter(broadcast.received.values())).dtype
        none = Prediction(np.zeros((0, self.num_actions), dtype))
        whole = Chosen(none, np.zeros(0, np.int64), np.zeros(0, dtype))
        for version in np.unique(versions):
            rows = np.flatnonzero(versions == version)
            some, clients = contexts.take(rows), visits.clients[rows]
            exist = available if available is None or available.ndim == 1 else available[rows]
            found = self._by_version(
                int(version), some, draws[rows], clients, exist, broadcast, memory
            )
            if not len(whole.actions):
                whole = found.like(contexts)
            whole.put(rows, found)
        return whole

    def _by_version(
        self,
        version: int,
        contexts: Contexts,
        draws: np.ndarray,
        clients: np.ndarray,
        available: np.ndarray | None,
        broadcast: Broadcast,
        memory: Mapping[int, Memories],
    ) -> Chosen:
        actor = self.actor(broadcast.deployed[version])
        personal = personal_weights(self.algorithm, actor.weights, clients, memory)
        try:
            return actor.choose(contexts, draws, available, personal)
        except WrongProbabilities as error:
            raise ConfigError(f"policy.name: {error}, in round {broadcast.round}") from None
        except NotFinite as error:
            client = self.split.client_id(int(clients[error.row]))
            raise Diverged(
                f"diverged at round {broadcast.round}: the scores of client {client} are not finite"
            ) from None
        except (Exception, SystemExit) as error:
            if isinstance(error, FedbanditError) or (place := place_of(error)) is None:
                raise
            client = self._first_failing(actor, contexts, draws, clients, available)
            kind = type(actor.rule)
            raise PartFailed(
                f"round {broadcast.round}, client {client}: policy {kind.__module__}:"
                f"{kind.__qualname__}: {place}: {type(error).__name__}: {error}"
            ) from error

    def _first_failing(
        self,
        actor: Actor,
        contexts: Contexts,
        draws: np.ndarray,
        clients: np.ndarray,
        available: np.ndarray | None,
    ) -> str:
        """The id of the first client alone with whose decisions a rule fails; else of the first."""
        whole = available is None or available.ndim == 1
        for client in dict.fromkeys(clients.tolist()):
            rows = np.flatnonzero(clients == client)
            exist = available if whole or available is None else available[rows]
            try:
                actor.choose(contexts.take(rows), draws[rows], exist)
            except (Exception, SystemExit):
                return self.split.client_id(int(client))
        return self.split.client_id(int(clients[0]))

    def _counts(
        self, visits: Visits, shown: Candidates | None, broadcast: Broadcast
    ) -> np.ndarray | None:
        """The weight of each event in training: [n], or [n, heads]; None: 1."""
        scales = None
        if self.per_version_importance:
            scales = np.ones(len(visits.rows))
            counts = np.full(len(scales), self.num_actions) if shown is None else shown.counts
            for version, count in np.unique(np.stack([visits.versions, counts]), axis=1).T:
                rule = self.rule(broadcast.deployed[int(version)])
                own = (visits.versions == version) & (counts == count)
                scales[own] = importance_scale(rule, int(count))
        if not self.heads:
            return scales
        address = (visits.times[:, None], visits.clients[:, None], visits.positions[:, None])
        counts = poisson(uniforms(self.seed, Purpose.HEADS, *address, np.arange(self.heads)))
        return counts if scales is None else counts * scales[:, None]


def personal_weights(
    algorithm: Algorithm,
    weights: np.ndarray,
    clients: np.ndarray,
    memory: Mapping[int, Memories],
) -> Personal | None:
    """The weights that clients [n] of decisions act with in place of the deployed ones.

    They are what the algorithm's `personal(received, memory)` makes of the deployed weights and of
    what a client remembers; None where it has no such method, or nobody remembers anything.
    """
    make = getattr(algorithm, "personal", None)
    if make is None or not memory:
        return None
    vectors: list[np.ndarray] = []
    owner = np.full(len(clients), -1)
    for client in np.unique(clients).tolist():
        found = make({"weights": weights}, memory[client]) if client in memory else None
        if found is None:
            continue
        own = np.asarray(found["weights"])
        if (own.shape, own.dtype) != (weights.shape, weights.dtype):
            made = f"{own.dtype} {own.shape} for {weights.dtype} {weights.shape}"
            raise ConfigError(f"algorithm.name: {type(algorithm).__name__}.personal makes {made}")
        owner[clients == client] = len(vectors)
        vectors.append(own)
    return Personal(vectors, owner)
