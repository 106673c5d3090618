"""What a chunk of clients does in a round: act with the deployed model, then train on the very events it logged.

This is the unit of work of every engine. Its result depends on the chunk alone, never on who computes it or when.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import numpy as np

from fedbandit.core.errors import ConfigError, Diverged
from fedbandit.core.loops import loops
from fedbandit.core.parts import resolve
from fedbandit.core.prediction import Prediction
from fedbandit.core.process import Stopwatch
from fedbandit.core.ragged import Ragged
from fedbandit.core.randomness import Purpose, poisson, uniforms
from fedbandit.data.dataset import Contexts, Split, contexts_at
from fedbandit.events import Events
from fedbandit.federated.algorithm import Algorithm, Clients
from fedbandit.federated.client_logs import VisitPlan, Visits
from fedbandit.federated.learners.base import Learner
from fedbandit.federated.pipeline import Contribution, Pipeline, Vectors
from fedbandit.federated.pipeline import Stage as PipelineStage
from fedbandit.federated.state import State, Version
from fedbandit.models.base import Freezing
from fedbandit.objectives import DoublyRobust
from fedbandit.policies import Policy, check_probabilities, importance_scale, is_built_in, rule_at
from fedbandit.rewards import Rewards
from fedbandit.rewards.scenarios import Stage as RewardStage


@dataclass(frozen=True)
class Broadcast:
    """What the server sends to every client of a round."""

    round: int
    received: Vectors  # by the algorithm: the weights to train from, and whatever else it needs
    deployed: Mapping[int, Version]  # what to act with, by version
    clip_norm: float
    rewards: Rewards
    available: np.ndarray | None = None  # bool [K]: the actions that exist in this round; None: all
    base: np.ndarray | None = None  # the whole model, where only a part of it is trained


@dataclass(frozen=True)
class ChunkResult:
    """What a chunk of clients sends back: sums by name, and figures per client for the metrics."""

    sent: Contribution
    events: np.ndarray  # int64 [clients]: fresh events
    reward_sums: np.ndarray  # float64 [clients], over fresh events
    propensity_sums: np.ndarray  # float64 [clients], over fresh events
    seconds: Mapping[str, float] = field(
        default_factory=dict
    )  # where the time went; no part of any result

    @property
    def norms(self) -> np.ndarray:
        """float64 [clients], before clipping."""
        return self.sent.norms

    def figures(self) -> "ChunkResult":
        """The same without sums and memory, which are as large as the model and needed only until they are added."""
        sent = Contribution({}, self.norms, bytes=self.sent.bytes)
        return ChunkResult(sent, self.events, self.reward_sums, self.propensity_sums, self.seconds)


@dataclass(frozen=True)
class Recipe:
    """How a worker elsewhere makes the same work: the import path of a function, and its arguments as JSON."""

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
    learner: Learner
    algorithm: Algorithm
    seed: int
    num_actions: int
    stages: tuple[PipelineStage, ...] = ()  # what compresses an update
    freezing: Freezing | None = None  # which parameters are not trained
    heads: int = 0  # of an ensemble; each event then counts Poisson(1) times for each of them
    scaled: bool = (
        False  # events weigh as the rule of their version says, in importance-weighted objectives
    )
    supervised: bool = False  # log every action's reward, for full-information training
    single: bool = False  # updates reach the server one by one, where a rule needs them so
    step: float | None = None  # updates are summed in whole steps, of that many clip norms
    doubly_robust: DoublyRobust | None = (
        None  # log an estimate of every action's reward, for this objective
    )
    recipe: Recipe | None = field(
        default=None, repr=False
    )  # None: it can only be done in this process

    def __call__(
        self, clients: np.ndarray, broadcast: Broadcast, memory: Mapping[int, Vectors] | None = None
    ) -> ChunkResult:
        watch = Stopwatch()
        events = self.act(clients, broadcast, watch)
        pipeline = Pipeline(
            broadcast.clip_norm, self.stages, self.seed, broadcast.round, self.single, self.step
        )
        learner = self.learner
        if broadcast.base is not None:
            learner = learner.over(broadcast.base)  # type: ignore[attr-defined] # only such learners freeze
        with watch("train"):
            taking_part = Clients(clients, events, broadcast.round, self.seed, memory or {})
            sent = self.algorithm.train(learner, broadcast.received, taking_part, pipeline)
            if not isinstance(sent, Contribution) or set(sent.sums) != set(self.algorithm.sends):
                kind = type(self.algorithm).__name__
                raise ConfigError(
                    f"algorithm.name: {kind}.train must return a Contribution with sums for all it sends"
                )
        counts, reward_sums, propensity_sums = loops.fresh_sums(
            events.bounds, events.fresh, events.rewards, events.propensities
        )
        return ChunkResult(sent, counts, reward_sums, propensity_sums, watch.take())

    def broadcast(self, state: State, stage: RewardStage) -> Broadcast:
        """What goes out in the round after this state."""
        return Broadcast(
            round=state.round + 1,
            received=self.algorithm.broadcast(state.kept),
            deployed=state.deployed,
            clip_norm=state.clip_norm,
            rewards=stage.rewards,
            available=stage.available,
            base=None if self.freezing is None else state.weights,
        )

    @property
    def description(self) -> str:
        """What is computed, in words: equal for equal work, wherever it was made. The data is the recipe's to check."""
        parts = {
            f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("split", "recipe")
        }
        return re.sub(r" at 0x[0-9a-f]+", "", repr(parts))

    def chunks(self, cohort: np.ndarray) -> list[np.ndarray]:
        """The cohort in order, cut where enough events have come together to be worth a task of their own.

        The cut depends on the cohort alone, so that sums are always added in one order.
        """
        counts = self.event_counts(cohort)
        number = (np.cumsum(counts) - counts) // self.learner.chunk_events
        return np.split(cohort, np.flatnonzero(np.diff(number)) + 1) if len(cohort) else []

    def event_counts(self, clients: np.ndarray) -> np.ndarray:
        """How many events each client will have at most: what its work is measured by."""
        return self.plan.event_counts(self.split, clients)

    def act(
        self, clients: np.ndarray, broadcast: Broadcast, watch: Stopwatch | None = None
    ) -> Events:
        """Algorithm 2 for a chunk of clients: score, explore, draw, and log the reward of what was drawn."""
        watch = watch or Stopwatch()
        with watch("data"):
            visits = self.plan.visits(self.split, clients, broadcast.round)
            contexts, labels = self.split.examples(clients, visits.bounds, visits.rows)
        with watch("act"):
            return self._chosen(visits, contexts, labels, broadcast)

    def rule(self, version: Version) -> Policy:
        """The rule that ships with a deployed version."""
        return rule_at(self.policy, version.progress)

    def _chosen(
        self, visits: Visits, contexts: Contexts, labels: Ragged, broadcast: Broadcast
    ) -> Events:
        """What the clients log when they meet these contexts."""
        predicted, actions, propensities = self._drawn(visits, contexts, broadcast)
        rewards = broadcast.rewards.of(labels, actions, visits.clients)
        targets = broadcast.rewards.matrix(labels, visits.clients) if self.supervised else None
        if self.doubly_robust is not None:
            targets = self.doubly_robust.targets(predicted.mean, actions, rewards, propensities)
        return Events(
            bounds=visits.bounds,
            contexts=contexts,
            actions=actions,
            rewards=rewards,
            propensities=propensities,
            versions=visits.versions,
            fresh=visits.fresh,
            targets=targets,
            weights=self._counts(visits, broadcast),
        )

    def _drawn(
        self, visits: Visits, contexts: Contexts, broadcast: Broadcast
    ) -> tuple[Prediction, np.ndarray, np.ndarray]:
        """Prediction [n, K], actions and propensities [n], each row by the version that its client held at the time."""
        draws = loops.uniforms(
            self.seed, Purpose.ACTIONS, visits.times, visits.clients, visits.positions
        )
        versions = visits.versions
        if len(versions) and versions.min() == versions.max():
            return self._by_version(
                broadcast.deployed[int(versions[0])], contexts, draws, visits.clients, broadcast
            )
        dtype = next(iter(broadcast.received.values())).dtype
        whole, actions = (
            Prediction(np.zeros((0, self.num_actions), dtype)),
            np.zeros(len(versions), np.int64),
        )
        propensities: np.ndarray | None = None
        for version in np.unique(versions):
            rows = np.flatnonzero(versions == version)
            some, deployed = contexts_at(contexts, rows), broadcast.deployed[int(version)]
            found, chosen, chances = self._by_version(
                deployed, some, draws[rows], visits.clients[rows], broadcast
            )
            if propensities is None:
                whole, propensities = (
                    found.like(len(versions)),
                    np.zeros(len(versions), chances.dtype),
                )
            whole.put(rows, found)
            actions[rows], propensities[rows] = chosen, chances
        return whole, actions, np.zeros(0, dtype) if propensities is None else propensities

    def _by_version(
        self,
        version: Version,
        contexts: Contexts,
        draws: np.ndarray,
        clients: np.ndarray,
        broadcast: Broadcast,
    ) -> tuple[Prediction, np.ndarray, np.ndarray]:
        prediction, rule = self.learner.predict(version.weights, contexts), self.rule(version)
        try:
            drawn = _drawn_at_once(rule, prediction, draws) if broadcast.available is None else None
            if drawn is not None:
                return prediction, *drawn
            probabilities = rule.probabilities(prediction, broadcast.available)
        except ValueError:
            self._check_finite(prediction, clients, broadcast.round)
            raise
        if not is_built_in(rule):  # what comes from outside is looked at, every time
            self._check_probabilities(probabilities, prediction, rule, broadcast)
        return prediction, *loops.draw_actions(probabilities, draws)

    def _counts(self, visits: Visits, broadcast: Broadcast) -> np.ndarray | None:
        """How much each event counts in training: [n], or [n, heads]; None: 1."""
        scales = None
        if self.scaled:
            scales = np.ones(len(visits.rows))
            for version in np.unique(visits.versions):
                rule = self.rule(broadcast.deployed[int(version)])
                scales[visits.versions == version] = importance_scale(rule, self.num_actions)
        if not self.heads:
            return scales
        address = (visits.times[:, None], visits.clients[:, None], visits.positions[:, None])
        counts = poisson(uniforms(self.seed, Purpose.HEADS, *address, np.arange(self.heads)))
        return counts if scales is None else counts * scales[:, None]

    def _check_probabilities(
        self, probabilities: np.ndarray, prediction: Prediction, rule: Policy, broadcast: Broadcast
    ) -> None:
        try:
            check_probabilities(probabilities, prediction, broadcast.available)
        except ValueError as error:
            raise ConfigError(
                f"policy.name: {type(rule).__name__} gave {error}, in round {broadcast.round}"
            ) from None

    def _check_finite(self, prediction: Prediction, clients: np.ndarray, round_number: int) -> None:
        """Weights can be finite and still give scores that are not: that is divergence, too."""
        bad = np.flatnonzero(~prediction.finite())
        if len(bad):
            name = self.split.client_id(int(clients[bad[0]]))
            raise Diverged(
                f"diverged at round {round_number}: the scores of client {name} are not finite"
            )


def _drawn_at_once(
    rule: Policy, prediction: Prediction, draws: np.ndarray
) -> tuple[np.ndarray, np.ndarray] | None:
    """Actions and their probabilities by compiled loops; None where there is only the plain way."""
    if not loops.compiling:
        return None
    from fedbandit.federated.exploring import drawn_at_once

    return drawn_at_once(rule, prediction, draws)
