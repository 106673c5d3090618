"""Federated regret (eq. 4): how much more the best policy of the class earns, averaged over clients; best minus ours.

The best of the class is found by full-information training, or known where the environment is realisable.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedbandit.core.prediction import Prediction
from fedbandit.data.dataset import Split
from fedbandit.data.embedded.realizable import RealizableEnvironment
from fedbandit.evaluation.ope.logs import RowPredictions, RowScores
from fedbandit.policies import Greedy, Policy
from fedbandit.rewards import Rewards

_ROWS = 4096


@dataclass(frozen=True)
class Regret:
    """Expected rewards per event, averaged over clients, each client counting the same."""

    best: float
    ours: float
    reference_beaten: bool = False  # ours earned more than full-information training found: then `best` is ours

    @property
    def value(self) -> float:
        return self.best - self.ours


def policy_value(
    split: Split,
    clients: Sequence[int],
    policy: Policy,
    predictions: RowPredictions,
    rewards: RowScores,
    available: np.ndarray | None = None,
) -> float:
    """The expected reward of a policy, exact over its choices: mean over clients of the mean over their examples.

    `available` [K] says which actions exist; None: all.
    """
    chosen = np.asarray(clients)
    sizes = split.sizes()[chosen]
    chosen, sizes = chosen[sizes > 0], sizes[sizes > 0]
    starts = np.repeat(split.offsets[chosen] - (np.cumsum(sizes) - sizes), sizes)
    rows, share = starts + np.arange(len(starts)), np.repeat(1 / sizes, sizes)
    total = 0.0
    for start in range(0, len(rows), _ROWS):
        block = slice(start, start + _ROWS)
        probabilities = policy.probabilities(predictions(rows[block]).astype(np.float64), available)
        total += float(share[block] @ (probabilities * rewards(rows[block])).sum(axis=1))
    return total / len(chosen)


def exact_regret(
    environment: RealizableEnvironment, clients: Sequence[int], policy: Policy, predictions: RowPredictions
) -> Regret:
    """Against the truth of a realisable environment, in expectation over rewards too."""
    split, truth = environment.dataset.train, environment.mean_rewards
    return Regret(best_value(environment, clients), policy_value(split, clients, policy, predictions, truth))


def best_value(environment: RealizableEnvironment, clients: Sequence[int]) -> float:
    """What the best policy of a realisable environment earns."""
    split, truth = environment.dataset.train, environment.mean_rewards
    return policy_value(split, clients, Greedy(), lambda rows: Prediction(truth(rows)), truth)


def table_rewards(split: Split, rewards: Rewards) -> RowScores:
    """The reward of every action in rows of a labelled split."""
    return lambda rows: rewards.matrix(split.labels.take(rows), np.searchsorted(split.offsets, rows, side="right") - 1)
