"""What is measured: a round's rewards and updates, and how well a model's greedy choice does on held-out data."""

from typing import Any

import numpy as np

from fedbandit.data.dataset import Split
from fedbandit.federated.client import ChunkResult
from fedbandit.federated.learners import Learner
from fedbandit.simulation.state import State

_EVALUATION_ROWS = 4096
_PERCENTS = (10, 25, 50, 75, 90)


def round_metrics(
    number: int,
    split: Split,
    cohort: np.ndarray,
    results: list[ChunkResult],
    state: State,
    unclipped: float | None,
    update: np.ndarray,
) -> dict[str, Any]:
    """One line of `metrics.jsonl`. Everything in it is a function of the run's configuration, never of the machine."""

    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(result, name) for result in results]) if results else np.zeros(0)

    events, norms = joined("events"), joined("norms")
    count = int(events.sum())
    had_events = events > 0
    client_rewards = joined("reward_sums")[had_events] / events[had_events]
    rejected = np.flatnonzero(~np.isfinite(norms))
    return {
        "round": number,
        "reward": float(joined("reward_sums").sum() / count) if count else None,
        "running_reward": None,
        "propensity": float(joined("propensity_sums").sum() / count) if count else None,
        "events": count,
        "clients": len(cohort),
        "clip_norm": state.clip_norm if np.isfinite(state.clip_norm) else None,
        "unclipped": unclipped,
        "update_norm": float(np.linalg.norm(update)),
        "client_norm_median": float(np.median(norms[np.isfinite(norms)])) if np.isfinite(norms).any() else None,
        "client_reward": _spread(client_rewards),
        "model_version": max(state.deployed),
        "rejected": [split.client_id(int(cohort[i])) for i in rejected],
    }


def _spread(rewards: np.ndarray) -> dict[str, float] | None:
    """How a round's reward spreads over its clients: an average can hide who loses."""
    if not len(rewards):
        return None
    values = np.quantile(rewards, np.array(_PERCENTS) / 100).tolist()
    quantiles = {f"p{percent}": value for percent, value in zip(_PERCENTS, values, strict=True)}
    worst = np.sort(rewards)[: max(1, len(rewards) // 10)]
    return {**quantiles, "worst_decile": float(worst.mean())}


def held_out_metrics(learner: Learner, weights: np.ndarray, split: Split, multilabel: bool) -> dict[str, float]:
    """Accuracy of the best-scored action, or for several labels per example micro-averaged recall of the best five."""
    hits = labels_seen = 0
    top = 5 if multilabel else 1
    for start in range(0, split.num_examples, _EVALUATION_ROWS):
        rows = np.arange(start, min(start + _EVALUATION_ROWS, split.num_examples))
        scores = learner.scores(weights, split.contexts(rows))
        labels = split.labels.take(rows)
        best = np.argsort(-scores, axis=1, kind="stable")[:, :top]
        hits += int((best[labels.row_of_entry()] == labels.ids[:, None]).any(axis=1).sum())
        labels_seen += len(labels.ids) if multilabel else len(rows)
    name = "test_recall_at_5" if multilabel else "test_accuracy"
    return {name: hits / labels_seen} if labels_seen else {}
