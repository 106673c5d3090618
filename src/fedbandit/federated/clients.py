"""What a chunk of clients does in a round: act with the deployed model, then train on the very events it logged.

This is the unit of work of every engine. Its result depends on the chunk alone, never on who computes it or when.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numba
import numpy as np

from fedbandit.core.errors import ConfigError, Diverged
from fedbandit.core.parts import resolve
from fedbandit.core.ragged import Ragged
from fedbandit.core.random_kernels import draw_actions, uniforms
from fedbandit.core.randomness import Purpose
from fedbandit.core.timing import Stopwatch
from fedbandit.data.dataset import Contexts, Split, contexts_at
from fedbandit.events import Events
from fedbandit.federated.client_logs import VisitPlan, Visits
from fedbandit.federated.learners.base import Learner
from fedbandit.federated.pipeline import Nothing, UpdateSum
from fedbandit.objectives import DoublyRobust
from fedbandit.policies import BUILT_IN, Policy, check_probabilities
from fedbandit.rewards import Rewards


@dataclass(frozen=True)
class Broadcast:
    """What the server sends to every client of a round."""

    round: int
    training: np.ndarray  # flat weights to train from
    deployed: Mapping[int, np.ndarray]  # flat weights to act with, by version
    clip_norm: float
    rewards: Rewards
    available: np.ndarray | None = None  # bool [K]: the actions that exist in this round; None: all


@dataclass(frozen=True)
class ChunkResult:
    """What a chunk of clients sends back: one clipped sum, and figures per client for the metrics."""

    update: UpdateSum
    norms: np.ndarray  # float64 [clients], before clipping
    events: np.ndarray  # int64 [clients]: fresh events
    reward_sums: np.ndarray  # float64 [clients], over fresh events
    propensity_sums: np.ndarray  # float64 [clients], over fresh events
    seconds: Mapping[str, float] = field(default_factory=dict)  # where the time went; no part of any result

    def figures(self) -> "ChunkResult":
        """The same without the update, which is as large as the model and needed only until it has been added."""
        return replace(self, update=Nothing())


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
    seed: int
    supervised: bool = False  # log every action's reward, for full-information training
    doubly_robust: DoublyRobust | None = None  # log an estimate of every action's reward, for this objective
    recipe: Recipe | None = field(default=None, repr=False)  # None: it can only be done in this process

    def __call__(self, clients: np.ndarray, broadcast: Broadcast) -> ChunkResult:
        watch = Stopwatch()
        events = self.act(clients, broadcast, watch)
        with watch("train"):
            update, norms = self.learner.train(broadcast.training, events, broadcast.clip_norm)
        counts, reward_sums, propensity_sums = fresh_sums(
            events.bounds, events.fresh, events.rewards, events.propensities
        )
        return ChunkResult(update, norms, counts, reward_sums, propensity_sums, watch.take())

    @property
    def description(self) -> str:
        """What is computed, in words: equal for equal work, wherever it was made. The data is the recipe's to check."""
        parts = (self.plan, self.policy, self.learner, self.seed, self.supervised, self.doubly_robust)
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

    def act(self, clients: np.ndarray, broadcast: Broadcast, watch: Stopwatch | None = None) -> Events:
        """Algorithm 2 for a chunk of clients: score, explore, draw, and log the reward of what was drawn."""
        watch = watch or Stopwatch()
        with watch("data"):
            visits = self.plan.visits(self.split, clients, broadcast.round)
            contexts = self.split.contexts(visits.rows)
            labels = self.split.labels.take(visits.rows)
        with watch("act"):
            return self._chosen(visits, contexts, labels, broadcast)

    def _chosen(self, visits: Visits, contexts: Contexts, labels: Ragged, broadcast: Broadcast) -> Events:
        """What the clients log when they meet these contexts."""
        scores = self._scores(visits, contexts, broadcast)
        try:
            probabilities = self.policy.probabilities(scores, broadcast.available)
        except ValueError:
            self._check_finite(scores, visits, broadcast.round)
            raise
        if type(self.policy) not in BUILT_IN.values():  # what comes from outside is looked at, every time
            self._check_probabilities(probabilities, scores, broadcast.round)
        draws = uniforms(self.seed, Purpose.ACTIONS, visits.times, visits.clients, visits.positions)
        actions, propensities = draw_actions(probabilities, draws)
        rewards = broadcast.rewards.of(labels, actions, visits.clients)
        targets = broadcast.rewards.matrix(labels, visits.clients) if self.supervised else None
        if self.doubly_robust is not None:
            targets = self.doubly_robust.targets(scores, actions, rewards, propensities)
        return Events(
            bounds=visits.bounds,
            contexts=contexts,
            actions=actions,
            rewards=rewards,
            propensities=propensities,
            versions=visits.versions,
            fresh=visits.fresh,
            targets=targets,
        )

    def _check_probabilities(self, probabilities: np.ndarray, scores: np.ndarray, round_number: int) -> None:
        try:
            check_probabilities(probabilities, scores)
        except ValueError as error:
            raise ConfigError(
                f"policy.name: {type(self.policy).__name__} gave {error}, in round {round_number}"
            ) from None

    def _check_finite(self, scores: np.ndarray, visits: Visits, round_number: int) -> None:
        """Weights can be finite and still give scores that are not: that is divergence, too."""
        bad = np.flatnonzero(~np.isfinite(scores).all(axis=1))
        if len(bad):
            name = self.split.client_id(int(visits.clients[bad[0]]))
            raise Diverged(f"diverged at round {round_number}: the scores of client {name} are not finite")

    def _scores(self, visits: Visits, contexts: Contexts, broadcast: Broadcast) -> np.ndarray:
        """[n, K], each row from the model version that its client held at the time."""
        versions = np.unique(visits.versions)
        if len(versions) == 1:
            return self.learner.scores(broadcast.deployed[int(versions[0])], contexts)
        scores = np.zeros((len(visits.rows), broadcast.rewards.num_actions), broadcast.training.dtype)
        for version in versions:
            rows = np.flatnonzero(visits.versions == version)
            scores[rows] = self.learner.scores(broadcast.deployed[int(version)], contexts_at(contexts, rows))
        return scores


@numba.njit(nogil=True, cache=True)
def fresh_sums(bounds, fresh, rewards, propensities):  # type: ignore[no-untyped-def]
    """For each client of some events: how many are fresh, and the sums of their rewards and propensities."""
    clients = len(bounds) - 1
    counts, reward_sums, propensity_sums = np.zeros(clients, np.int64), np.zeros(clients), np.zeros(clients)
    for client in range(clients):
        for i in range(bounds[client], bounds[client + 1]):
            if fresh[i]:
                counts[client] += 1
                reward_sums[client] += rewards[i]
                propensity_sums[client] += propensities[i]
    return counts, reward_sums, propensity_sums
