"""The simplest reward model: each action's mean reward, whatever the context. Made of sums, and cross-fitted.

A client's events are predicted from the other half of the clients, so that the model owes nothing to the noise in them.
"""

import numpy as np

from fedbandit.data.dataset import Split
from fedbandit.evaluation.ope.logs import RowScores, log_of

PRIOR_EVENTS = 10.0  # an action is held to be average until it has been seen about this often


def action_means(split: Split, num_actions: int) -> RowScores:
    """Predicted rewards [n, K] of rows of this split, from the log of the clients in the other half."""
    log = log_of(split)
    half = np.repeat(np.arange(split.num_clients) % 2, split.sizes())
    actions, rewards = np.asarray(log.actions), np.asarray(log.rewards, np.float64)
    means = np.stack([_means(actions[half != h], rewards[half != h], num_actions) for h in (0, 1)])

    def predict(rows: np.ndarray) -> np.ndarray:
        return means[half[rows]]

    return predict


def _means(actions: np.ndarray, rewards: np.ndarray, num_actions: int) -> np.ndarray:
    if not len(rewards):
        return np.zeros(num_actions)
    totals = np.bincount(actions, rewards, minlength=num_actions)
    counts = np.bincount(actions, minlength=num_actions)
    return (totals + PRIOR_EVENTS * rewards.mean()) / (counts + PRIOR_EVENTS)
