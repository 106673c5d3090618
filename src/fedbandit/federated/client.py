"""What a chunk of clients does in a round: act with the deployed model, then train on the very events it logged.

This is the unit of work of every engine. Its result depends on the chunk alone, never on who computes it or when.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedbandit.data.dataset import Contexts, Split, contexts_at
from fedbandit.events import Events, draw_actions
from fedbandit.federated.learners import Learner
from fedbandit.federated.updates import UpdateSum
from fedbandit.federated.visits import VisitPlan, Visits
from fedbandit.policies import Policy
from fedbandit.randomness import Purpose, uniforms
from fedbandit.rewards import RewardTable


@dataclass(frozen=True)
class Broadcast:
    """What the server sends to every client of a round."""

    round: int
    training: np.ndarray  # flat weights to train from
    deployed: Mapping[int, np.ndarray]  # flat weights to act with, by version
    clip_norm: float
    rewards: RewardTable
    available: np.ndarray | None = None  # bool [K]: the actions that exist in this round; None: all


@dataclass(frozen=True)
class ChunkResult:
    """What a chunk of clients sends back: one clipped sum, and figures per client for the metrics."""

    update: UpdateSum
    norms: np.ndarray  # float64 [clients], before clipping
    events: np.ndarray  # int64 [clients]: fresh events
    reward_sums: np.ndarray  # float64 [clients], over fresh events
    propensity_sums: np.ndarray  # float64 [clients], over fresh events


@dataclass(frozen=True)
class ClientWork:
    """Everything a chunk needs that stays the same from round to round."""

    split: Split
    plan: VisitPlan
    policy: Policy
    learner: Learner
    seed: int
    supervised: bool = False  # log every action's reward, for full-information training

    def __call__(self, clients: np.ndarray, broadcast: Broadcast) -> ChunkResult:
        events = self.act(clients, broadcast)
        update, norms = self.learner.train(broadcast.training, events, broadcast.clip_norm)
        owner = np.repeat(np.arange(len(clients)), np.diff(events.bounds))[events.fresh]

        def per_client(values: np.ndarray) -> np.ndarray:
            return np.bincount(owner, values[events.fresh].astype(np.float64), minlength=len(clients))

        return ChunkResult(
            update=update,
            norms=norms,
            events=np.bincount(owner, minlength=len(clients)),
            reward_sums=per_client(events.rewards),
            propensity_sums=per_client(events.propensities),
        )

    def act(self, clients: np.ndarray, broadcast: Broadcast) -> Events:
        """Algorithm 2 for a chunk of clients: score, explore, draw, and log the reward of what was drawn."""
        visits = self.plan.visits(self.split, clients, broadcast.round)
        contexts = self.split.contexts(visits.rows)
        labels = self.split.labels.take(visits.rows)
        scores = self._scores(visits, contexts, broadcast)
        probabilities = self.policy.probabilities(scores, broadcast.available)
        draws = uniforms(self.seed, Purpose.ACTIONS, visits.times, visits.clients, visits.positions)
        actions, propensities = draw_actions(probabilities, draws)
        return Events(
            bounds=visits.bounds,
            contexts=contexts,
            actions=actions,
            rewards=broadcast.rewards.of(labels, actions),
            propensities=propensities,
            versions=visits.versions,
            fresh=visits.fresh,
            targets=broadcast.rewards.matrix(labels) if self.supervised else None,
        )

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
