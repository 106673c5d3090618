"""The loops of `kernels` in plain numpy, with the same bits: what devices use, and short runs."""

import numpy as np

from fedbandit.core.randomness import Purpose, bits
from fedbandit.core.randomness import uniforms as uniforms  # the same name, for `Loops`


def random_examples(
    seed: int, times: np.ndarray, clients: np.ndarray, offsets: np.ndarray, limit: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each (client, time) a random subset of its examples in random order: (which pair, position, row) per example.

    Client c's examples are rows offsets[c]:offsets[c + 1]. An order is that of the random bits of the examples' places.
    """
    sizes = offsets[clients + 1] - offsets[clients]
    owner = np.repeat(np.arange(len(clients)), sizes)
    places = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    keys = bits(seed, Purpose.EXAMPLES, times[owner], clients[owner], places)
    rows = offsets[clients[owner]] + places[np.lexsort((keys, owner))]
    kept = slice(None) if limit is None else places < limit
    return owner[kept], places[kept], rows[kept]


def draw_actions(probabilities: np.ndarray, uniforms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Actions [n] and their probabilities [n] for probabilities [n, K] and uniforms [n] in [0, 1).

    An action of probability 0 is never drawn, whatever rounding does.
    """
    cumulative = np.cumsum(probabilities, axis=1)
    threshold = uniforms.astype(cumulative.dtype) * cumulative[:, -1]
    actions = (cumulative <= threshold[:, None]).sum(axis=1)
    overshot = np.flatnonzero(
        actions == probabilities.shape[1]
    )  # the threshold was rounded up to the total
    for row in overshot:
        actions[row] = np.flatnonzero(probabilities[row])[-1]
    return actions, np.take_along_axis(probabilities, actions[:, None], axis=1)[:, 0]


def best_rewards(
    offsets: np.ndarray,
    labels: np.ndarray,
    actions: np.ndarray,
    exact: np.ndarray,
    near: np.ndarray,
    near_value: np.ndarray,
) -> np.ndarray:
    """The best of what an example's labels give for its action, at least 0."""
    rewards = np.zeros(len(actions), np.float32)
    row, own = (
        np.repeat(np.arange(len(actions)), np.diff(offsets)),
        labels[offsets[0] : offsets[-1]],
    )
    for answers, values in ((own, exact), (near[own], near_value)):
        right = actions[row] == answers
        np.maximum.at(rewards, row[right], values[own[right]])
    return rewards


def fresh_sums(
    bounds: np.ndarray, fresh: np.ndarray, rewards: np.ndarray, propensities: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each client of some events: how many are fresh, and the sums of their rewards and propensities."""
    clients = len(bounds) - 1
    owner = np.repeat(np.arange(clients), np.diff(bounds))[fresh]

    def summed(numbers: np.ndarray | None) -> np.ndarray:
        return np.bincount(owner, numbers, minlength=clients)

    return summed(None), summed(rewards[fresh]), summed(propensities[fresh])


def labels_among_best(scores: np.ndarray, offsets: np.ndarray, labels: np.ndarray, top: int) -> int:
    """How many labels are among the best-scored `top` actions of their example; the lower index among equals."""
    row, own = (
        np.repeat(np.arange(len(offsets) - 1), np.diff(offsets)),
        labels[offsets[0] : offsets[-1]],
    )
    mine = scores[row, own][:, None]
    lower = np.arange(scores.shape[1]) < own[:, None]
    before = np.where(lower, scores[row] >= mine, scores[row] > mine).sum(axis=1)
    return int(
        ((before < top) & (mine[:, 0] == mine[:, 0])).sum()
    )  # what is not a number is never among the best


def all_finite(numbers: np.ndarray) -> bool:
    """Whether all of a vector are."""
    return bool(np.isfinite(numbers).all())


def adam_moments(
    m0: np.ndarray,
    v0: np.ndarray,
    w0: np.ndarray,
    update: np.ndarray,
    constants: np.ndarray,
    m: np.ndarray,
    v: np.ndarray,
    w: np.ndarray,
) -> None:
    """One step of Adam with rate, beta 1, beta 2 and epsilon: both moments and the weights."""
    rate, beta_1, beta_2, epsilon = constants
    one = constants.dtype.type(1)
    m[:] = beta_1 * m0 + (one - beta_1) * update
    v[:] = beta_2 * v0 + (one - beta_2) * update * update
    w[:] = w0 + rate * m / (np.sqrt(v) + epsilon)


def gathered_offsets(offsets: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Where each of the given rows begins when they stand one after the other, and where the last one ends."""
    lengths = offsets[rows + 1] - offsets[rows]
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def gather(
    offsets: np.ndarray,
    source: np.ndarray,
    rows: np.ndarray,
    target_offsets: np.ndarray,
    target: np.ndarray,
) -> None:
    """Copy the entries of the given rows, one row after the other."""
    moved = np.repeat(offsets[rows] - target_offsets[:-1], np.diff(target_offsets))
    target[:] = source[moved + np.arange(len(target))]


def count_rows(
    offsets: np.ndarray,
    ids: np.ndarray,
    unknown: int,
    row_offsets: np.ndarray,
    words: np.ndarray,
    values: np.ndarray,
) -> int:
    """Count each row's ids below `unknown`, ascending, and divide the counts by their L2 norm; how many there are."""
    row = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    known = ids < unknown
    found, counts = np.unique(row[known] * max(unknown, 1) + ids[known], return_counts=True)
    row = found // max(unknown, 1)
    squares = np.bincount(row, counts.astype(np.float64) ** 2, minlength=len(offsets) - 1)
    words[: len(found)] = found % max(unknown, 1)
    values[: len(found)] = counts / np.sqrt(squares[row])
    row_offsets[1:] = np.cumsum(np.bincount(row, minlength=len(offsets) - 1))
    return len(found)


def add_entries(entries: np.ndarray, values: np.ndarray, total: np.ndarray) -> None:
    """Add each value to its entry of the total."""
    np.add.at(total, entries, values)
