"""Measures of a model: greedy choices on held-out data, recovery after a change, and federated
regret (eq. 4).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedbandit.acting import Predictor, explore
from fedbandit.core import loops
from fedbandit.core.errors import ConfigError
from fedbandit.core.prediction import Prediction, at_actions, best_action
from fedbandit.data.dataset import Split
from fedbandit.environments import Environment, Met
from fedbandit.policies import Greedy, Policy, takes_contexts

if TYPE_CHECKING:  # they come with the readers of tables, which a run does not need
    from fedbandit.evaluation.logs import RowPredictions, RowScores

_EVALUATION_ROWS = 4096


def held_out_metrics(
    predictor: Predictor,
    weights: np.ndarray,
    split: Split,
    multilabel: bool,
    environment: Environment | None = None,
) -> dict[str, float]:
    """Accuracy of the best-scored action, or micro-averaged recall of the best five of several
    labels.

    Over candidates: the share of decisions whose best-scored candidate is a right one, and the mean
    of one over the rank of the first right one; where the environment knows mean rewards, also
    that of the best-scored candidate as a share of the best one's.
    """
    if split.candidates is not None:
        return _ranking_metrics(predictor, weights, split, environment)
    hits = labels_seen = 0
    top = 5 if multilabel else 1
    for start in range(0, split.num_examples, _EVALUATION_ROWS):
        stop = min(start + _EVALUATION_ROWS, split.num_examples)
        contexts, labels = split.between(start, stop)
        scores = predictor.predict(weights, contexts).mean
        hits += loops.labels_among_best(
            np.ascontiguousarray(scores), labels.offsets, labels.ids, top
        )
        labels_seen += len(labels.ids) if multilabel else stop - start
    name = "test_recall_at_5" if multilabel else "test_accuracy"
    return {name: hits / labels_seen} if labels_seen else {}


def _ranking_metrics(
    predictor: Predictor, weights: np.ndarray, split: Split, environment: Environment | None
) -> dict[str, float]:
    """Hit rate and mean reciprocal rank over the decisions that have a right candidate, and the
    share of the best reward over all.
    """
    ranks, earned, best = [], 0.0, 0.0
    for start in range(0, split.num_examples, _EVALUATION_ROWS):
        stop = min(start + _EVALUATION_ROWS, split.num_examples)
        contexts, labels = split.between(start, stop)
        prediction = predictor.predict(weights, contexts)
        assert prediction.bounds is not None
        right = np.zeros(len(prediction.mean), bool)
        right[prediction.bounds[labels.row_of_entry()] + labels.ids] = True
        met = Met.at_rows(split, np.arange(start, stop), 0)
        means = None if environment is None else environment.expected(met)
        for _, at, block in prediction.blocks():
            order = np.argsort(-block.mean, axis=1, kind="stable")  # the lower place among equals
            ranked = np.take_along_axis(right[at], order, axis=1)
            ranks.append(1 + ranked[ranked.any(axis=1)].argmax(axis=1))
            if means is not None:
                earned += float(at_actions(means[at], order[:, 0]).sum(dtype=np.float64))
                best += float(best_action(means[at]).sum(dtype=np.float64))
    found, metrics = np.concatenate(ranks) if ranks else np.zeros(0), {}
    if len(found):
        metrics["test_hit_rate"] = float((found == 1).mean())
        metrics["test_reciprocal_rank"] = float((1 / found).mean())
    if best > 0:
        metrics["test_reward_share"] = earned / best
    return metrics


@dataclass(frozen=True)
class Recovery:
    """Effect of one change on one run."""

    change: int  # the first round of the changed world
    before: float  # mean reward in the last rounds before
    lowest: float  # the worst mean over as many rounds after it
    # from the change until the mean is back at the asked share of `before`; 0: it never left that,
    # None: it never came back
    rounds: int | None
    last: float  # mean reward in the last rounds before the next change, or the end
    lost: (
        float  # reward below `before`, summed over rounds until then: the whole price of the change
    )

    @property
    def fall(self) -> float:
        return self.before - self.lowest


def recoveries(
    rewards: Sequence[float] | np.ndarray,
    changes: Sequence[int],
    *,
    window: int = 10,
    share: float = 0.9,
) -> list[Recovery]:
    """For each change: the fall and the recovery of mean rewards over `window` rounds, to `share`
    of what was before.

    A recovery ends the first fall below that share: who never falls so far needs 0 rounds for it,
    and who stays there never has one (None).

    Rounds without events (NaN) count as nothing; the changes are the scenario's `at`, counted from
    1.
    """
    values = np.asarray(rewards, np.float64)
    ends = [*changes[1:], len(values) + 1]
    return [
        _one(values, change, end, window, share) for change, end in zip(changes, ends, strict=True)
    ]


def _one(values: np.ndarray, change: int, end: int, window: int, share: float) -> Recovery:
    first, stop = change - 1, min(end - 1, len(values))
    if first < 1 or stop - first < window or first < window:
        asked = f"the change before round {change} needs {window} rounds on either side"
        raise ConfigError(
            f"rounds: {asked}; there are {max(0, first)} before it and {max(0, stop - first)} after"
        )
    before = float(np.nanmean(values[first - window : first]))
    after = values[first:stop]
    means = np.array([np.nanmean(after[i : i + window]) for i in range(len(after) - window + 1)])
    lost = float(np.nansum(np.maximum(before - after, 0)))
    return Recovery(
        change,
        before,
        float(means.min()),
        _rounds(means, share * before, window),
        float(means[-1]),
        lost,
    )


def _rounds(means: np.ndarray, threshold: float, window: int) -> int | None:
    below = np.flatnonzero(means < threshold)
    if not len(below):
        return 0
    back = np.flatnonzero(means[below[0] :] >= threshold)
    return int(below[0] + back[0] + window) if len(back) else None


@dataclass(frozen=True)
class Regret:
    """Expected rewards per event, averaged over clients, each client counting the same."""

    best: float
    ours: float
    reference_beaten: bool = (
        False  # ours earned more than full-information training found: then `best` is ours
    )

    @property
    def value(self) -> float:
        return self.best - self.ours


def policy_value(
    split: Split,
    clients: Sequence[int],
    policy: Policy,
    predictions: "RowPredictions",
    rewards: "RowScores",
    available: np.ndarray | None = None,
) -> float:
    """The expected reward of a policy, exact over its choices: mean over clients of the mean over
    their examples.

    `available` [K] says which actions exist; None: all.
    """
    chosen = np.asarray(clients)
    sizes = split.sizes()[chosen]
    chosen, sizes = chosen[sizes > 0], sizes[sizes > 0]
    starts = np.repeat(split.offsets[chosen] - (np.cumsum(sizes) - sizes), sizes)
    rows, share = starts + np.arange(len(starts)), np.repeat(1 / sizes, sizes)
    total = 0.0
    for start in range(0, len(rows), _EVALUATION_ROWS):
        block = slice(start, start + _EVALUATION_ROWS)
        found = predictions(rows[block]).astype(np.float64)
        contexts = split.contexts(rows[block]) if takes_contexts(type(policy)) else None
        probabilities = explore(policy, found, available, contexts)
        total += float(share[block] @ (probabilities * rewards(rows[block])).sum(axis=1))
    return total / len(chosen)


def best_value(split: Split, truth: "RowScores", clients: Sequence[int]) -> float:
    """The expected reward of the best policy, which knows all mean rewards."""
    return policy_value(split, clients, Greedy(), lambda rows: Prediction(truth(rows)), truth)


def expected_rewards(
    split: Split, environment: Environment, num_actions: int, time: int = 1
) -> "RowScores":
    """The mean reward of every action in rows of a split, at a time."""

    def means(rows: np.ndarray) -> np.ndarray:
        found = environment.expected(Met.at_rows(split, rows, num_actions, time))
        if found is None:
            kind = type(environment).__name__
            raise ConfigError(f"environment.name: {kind} does not know expected rewards")
        return found

    return means
