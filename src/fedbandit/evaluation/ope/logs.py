"""From a logged split to the records of estimators: the evaluated policy's probabilities, and a reward model's word.

Scores and predictions are functions of rows, so that nothing larger than a block is ever in memory.
"""

from collections.abc import Callable

import numpy as np

from fedbandit.data.dataset import Log, Split
from fedbandit.errors import DataError
from fedbandit.evaluation.ope.records import Records
from fedbandit.policies import Policy

RowScores = Callable[[np.ndarray], np.ndarray]
"""Rows of a split -> a number for every action, [n, K]: a model's scores, or predicted rewards."""

_ROWS = 4096


def records_of(
    split: Split,
    policy: Policy,
    num_actions: int,
    scores: RowScores | None = None,
    rewards: RowScores | None = None,
    within: tuple[float, float] | None = None,
) -> Records:
    """The records of a logged split for a policy; `scores` for a policy that needs some, `rewards` a reward model.

    What the reward model says is cut to the range `within`, for bounds that need one.
    """
    log = log_of(split)
    n = split.num_examples
    target = np.zeros(n)
    predicted, expected = (np.zeros(n), np.zeros(n)) if rewards is not None else (None, None)
    for start in range(0, n, _ROWS):
        rows = np.arange(start, min(start + _ROWS, n))
        given = np.zeros((len(rows), num_actions)) if scores is None else scores(rows)
        probabilities = policy.probabilities(given.astype(np.float64), available_at(log, rows, num_actions))
        actions = np.asarray(log.actions[rows])[:, None]
        target[rows] = np.take_along_axis(probabilities, actions, axis=1)[:, 0]
        if rewards is not None:
            # Action by action and before any average: only so is the weighted prediction, on average, the expected one.
            modelled = rewards(rows) if within is None else np.clip(rewards(rows), *within)
            predicted[rows] = np.take_along_axis(modelled, actions, axis=1)[:, 0]  # type: ignore[index]
            expected[rows] = (probabilities * modelled).sum(axis=1)  # type: ignore[index]
    return records_for(split, target, predicted, expected)


def records_for(
    split: Split, target: np.ndarray, predicted: np.ndarray | None = None, expected: np.ndarray | None = None
) -> Records:
    """The records of a logged split, where the evaluated policy's probability of each logged action is known."""
    log = log_of(split)
    return Records(
        clients=np.arange(split.num_clients),
        bounds=np.asarray(split.offsets, np.int64),
        rewards=np.asarray(log.rewards, np.float64),
        propensities=np.asarray(log.propensities, np.float64),
        target=np.asarray(target, np.float64),
        predicted=predicted,
        expected=expected,
    )


def available_at(log: Log, rows: np.ndarray, num_actions: int) -> np.ndarray | None:
    """Which actions could be taken, bool [n, K]; None where always all of them."""
    if log.available is None:
        return None
    sets = log.available.take(rows)
    mask = np.zeros((len(rows), num_actions), bool)
    mask[sets.row_of_entry(), sets.ids] = True
    return mask


def log_of(split: Split) -> Log:
    """The split's log; a split of labels has none."""
    if split.log is None:
        raise DataError("the data set holds labels, not logged feedback; `fedbandit data import logged` makes one")
    return split.log
