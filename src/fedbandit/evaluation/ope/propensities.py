"""Propensities of logs that recorded none, estimated from what the log did; and how far another estimate would lie."""

import numpy as np

from fedbandit.data.dataset import Split
from fedbandit.evaluation.ope.logs import available_at, log_of
from fedbandit.evaluation.ope.reward_models import PRIOR_EVENTS, choose_columns

_LEAST = 0.1  # of an action's share: no context makes an action rarer than this


def estimated_propensities(split: Split, num_actions: int) -> list[np.ndarray]:
    """How likely each logged action was, [n] each: the best estimate first, then others that are as defensible.

    The best one is made for each half of the clients from the other half: linear in the context, if contexts tell
    anything apart, otherwise each action's share. The others are the halves' own fits, and the shares. An estimate that
    the log decides well hardly differs between them; an interval has to hold under each.
    """
    half = np.repeat(np.arange(split.num_clients) % 2, split.sizes())
    fits = [_shares(split, num_actions, half)]
    if (linear := _linear(split, num_actions, half)) is not None:
        fits.insert(0, linear)
    return [_taken(split, fit, half ^ swapped) for swapped in (1, 0) for fit in fits]


def _shares(split: Split, num_actions: int, half: np.ndarray) -> np.ndarray:
    """[2, n, K]: each action's share in the log of either half of the clients."""
    actions = np.asarray(log_of(split).actions)
    counts = np.stack(
        [np.bincount(actions[half == h], minlength=num_actions) + 1.0 for h in (0, 1)]
    )
    shares = counts / counts.sum(axis=1, keepdims=True)
    return np.broadcast_to(shares[:, None], (2, len(actions), num_actions))


def _linear(split: Split, num_actions: int, half: np.ndarray) -> np.ndarray | None:
    """[2, n, K]: linear probabilities in the context, fitted to either half by sums that add up over clients."""
    columns = choose_columns(split, num_actions)
    if columns is None:
        return None
    n = split.num_examples
    x = columns.features(split.shared(np.arange(n)))
    taken = np.zeros((n, num_actions))
    taken[np.arange(n), np.asarray(log_of(split).actions)] = 1
    shares = _shares(split, num_actions, half)
    fitted = []
    for h in (0, 1):
        own, share = x[half == h], shares[h, 0]
        gram = own.T @ own + PRIOR_EVENTS * np.eye(x.shape[1])
        found = share + x @ np.linalg.solve(gram, own.T @ (taken[half == h] - share))
        found = np.maximum(found, _LEAST * share)
        fitted.append(found / found.sum(axis=1, keepdims=True))
    return np.stack(fitted)


def _taken(split: Split, fits: np.ndarray, which: np.ndarray) -> np.ndarray:
    """The probability of each logged action by the fit of the given half, among the actions that were available."""
    log, rows = log_of(split), np.arange(split.num_examples)
    found = fits[which, rows]
    mask = available_at(log, rows, fits.shape[2])
    if mask is not None:
        found = np.where(mask, found, 0.0)
        found = found / found.sum(axis=1, keepdims=True)
    chosen: np.ndarray = found[rows, np.asarray(log.actions)]
    return chosen
