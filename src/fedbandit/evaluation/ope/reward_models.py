"""Reward models for doubly robust estimates, fitted from sums that add up over clients."""

from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Self

import numpy as np

from fedbandit.core.contexts import Features
from fedbandit.core.ragged import Ragged
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
        predicted: np.ndarray = means[half[rows]]
        return predicted

    return predict


def _means(actions: np.ndarray, rewards: np.ndarray, num_actions: int) -> np.ndarray:
    if not len(rewards):
        return np.zeros(num_actions)
    totals = np.bincount(actions, rewards, minlength=num_actions)
    counts = np.bincount(actions, minlength=num_actions)
    shrunk: np.ndarray = (totals + PRIOR_EVENTS * rewards.mean()) / (counts + PRIOR_EVENTS)
    return shrunk


_MOST_NUMBERS = (
    2**21
)  # in the sums that a client returns; wide contexts are cut to their most telling columns
_MOST_COLUMNS = 256
_ROWS = 4096


@dataclass(frozen=True)
class Columns:
    """The columns of a context that the model looks at, and how they are standardised."""

    chosen: np.ndarray  # int64 [m]
    mean: np.ndarray  # [m]
    deviation: np.ndarray  # [m]

    def features(self, contexts: Features) -> np.ndarray:
        """[n, 1 + m]: a one, and the standardised columns."""
        x = np.zeros((len(contexts), len(self.chosen)))
        if isinstance(contexts, Ragged):
            place = np.full(
                int(max(contexts.ids.max(initial=-1), self.chosen.max(initial=-1))) + 1, -1
            )
            place[self.chosen] = np.arange(len(self.chosen))
            columns, rows = place[contexts.ids], contexts.row_of_entry()
            kept = columns >= 0
            assert contexts.values is not None
            np.add.at(x, (rows[kept], columns[kept]), contexts.values[kept])
        else:
            x[:] = contexts.reshape(len(contexts), -1)[:, self.chosen]
        return np.concatenate([np.ones((len(x), 1)), (x - self.mean) / self.deviation], axis=1)


@dataclass(frozen=True)
class LinearSums:
    """What clients return and a server adds up."""

    gram: np.ndarray  # [actions, 1 + m, 1 + m]: X'X over the events of each action
    moments: np.ndarray  # [actions, 1 + m]: X'r

    def __add__(self, other: Self) -> "LinearSums":
        return LinearSums(self.gram + other.gram, self.moments + other.moments)

    def fitted(self) -> np.ndarray:
        """[actions, 1 + m]: coefficients; an effect is held to be nil until about `PRIOR_EVENTS` events show it."""
        events = self.gram[:, 0, 0].sum()
        average = self.moments[:, 0].sum() / events if events else 0.0
        ridge = PRIOR_EVENTS * np.eye(self.gram.shape[1])
        found: np.ndarray = np.linalg.solve(
            self.gram + ridge, (self.moments - average * self.gram[:, 0])[..., None]
        )
        found = found[..., 0]
        found[:, 0] += average
        return found


def linear_sums(
    columns: Columns, contexts: Features, actions: np.ndarray, rewards: np.ndarray, num_actions: int
) -> LinearSums:
    """A client's part: the sums of its own log."""
    x = columns.features(contexts)
    gram = np.zeros((num_actions, x.shape[1], x.shape[1]))
    moments = np.zeros((num_actions, x.shape[1]))
    for action in np.unique(actions):
        taken = actions == action
        gram[action] = x[taken].T @ x[taken]
        moments[action] = x[taken].T @ rewards[taken]
    return LinearSums(gram, moments)


def choose_columns(split: Split, num_actions: int) -> Columns | None:
    """The columns that vary most, as many as the sums have room for; None if contexts tell nothing apart."""
    count, total, squares = 0, np.zeros(0), np.zeros(0)
    for rows in _blocks(np.arange(split.num_examples)):
        first, second = _moments(split.shared(rows))
        width = max(len(total), len(first))
        total, squares = (np.pad(s, (0, width - len(s))) for s in (total, squares))
        total[: len(first)] += first
        squares[: len(second)] += second
        count += len(rows)
    if not count or not len(total):
        return None
    mean = total / count
    variance = np.maximum(squares / count - mean**2, 0)
    room = min(_MOST_COLUMNS, int(np.sqrt(_MOST_NUMBERS / num_actions)) - 1)
    chosen = np.sort(np.argsort(-variance, kind="stable")[: max(room, 0)])
    chosen = chosen[variance[chosen] > 1e-12 * max(1.0, float(variance.max()))]
    return Columns(chosen, mean[chosen], np.sqrt(variance[chosen])) if len(chosen) else None


def linear_rewards(split: Split, num_actions: int) -> RowScores | None:
    """Predicted rewards [n, K] of rows of this split, from the log of the clients in the other half.

    None where there are no contexts to look at.
    """
    columns = choose_columns(split, num_actions)
    if columns is None:
        return None
    log = log_of(split)
    actions, rewards = np.asarray(log.actions), np.asarray(log.rewards, np.float64)
    half = np.repeat(np.arange(split.num_clients) % 2, split.sizes())

    def sums(rows: np.ndarray) -> LinearSums:
        return linear_sums(columns, split.shared(rows), actions[rows], rewards[rows], num_actions)

    halves = [np.flatnonzero(half != number) for number in (0, 1)]
    fitted = [reduce(add, map(sums, _blocks(rows) or [rows])).fitted() for rows in halves]

    def predict(rows: np.ndarray) -> np.ndarray:
        x = columns.features(split.shared(rows))
        predicted: np.ndarray = np.where(
            (half[rows] == 0)[:, None], x @ fitted[0].T, x @ fitted[1].T
        )
        return predicted

    return predict


def _moments(contexts: Features) -> tuple[np.ndarray, np.ndarray]:
    """Sums and sums of squares of every column; a word stands once in a row."""
    if isinstance(contexts, Ragged):
        assert contexts.values is not None
        values = contexts.values.astype(np.float64)
        return np.bincount(contexts.ids, values), np.bincount(contexts.ids, values**2)
    x = contexts.reshape(len(contexts), -1).astype(np.float64)
    return x.sum(axis=0), (x**2).sum(axis=0)


def _blocks(rows: np.ndarray) -> list[np.ndarray]:
    return [rows[start : start + _ROWS] for start in range(0, len(rows), _ROWS)]
