"""The device's side of the gate: what its log says of a candidate in place of the model in use, as four sums.

Pure functions of a log and two models; knows nothing of messages or of verdicts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedbandit.data.dataset import Contexts
from fedbandit.deploy.flower.secure_sums import Bounds
from fedbandit.deploy.reading import Logged
from fedbandit.errors import DataError
from fedbandit.evaluation.gains import GainEstimator
from fedbandit.policies import Policy

Scores = Callable[[np.ndarray, Contexts], np.ndarray]
"""Flat weights and contexts to the score of every action: [n, K]."""


@dataclass(frozen=True)
class GainSums:
    """All that a device tells the server of its log; none of it about a single event, unless there is only one."""

    events: int
    gain: float  # how much more the candidate would have earned, by the estimate
    importance: float  # of the candidate's probabilities over the log's, cut at the limit, ...
    importance_squares: float  # ... and of their squares: how many events this is worth


def estimator_of(terms: Mapping[str, Any]) -> GainEstimator:
    """How the server asks for events to be weighed; never without limits, which keep one event from saying too much."""
    kind, limit, most = terms["estimator"], float(terms["limit"]), float(terms["bounds"]["reward"])
    if kind not in ("ips", "dr"):
        raise DataError(f"the server asks for an estimator {str(kind)[:20]!r}, which this device does not know")
    if not (0 < limit < np.inf and 0 < most < np.inf):
        raise DataError("the server asks for gains without a limit")
    return GainEstimator(kind, limit, most)


def gain_sums(
    logged: Logged,
    policy: Policy,
    scores: Scores,
    deployed: np.ndarray,
    candidate: np.ndarray,
    estimator: GainEstimator,
    bounds: Bounds,
) -> GainSums:
    """The sums over the newest events, at most `bounds.events` of them."""
    old, new = (scores(weights, logged.events.contexts) for weights in (deployed, candidate))
    if not (np.isfinite(old).all() and np.isfinite(new).all()):
        raise DataError("scores on this device's events are not finite")
    gains, importance = estimator.terms(logged.events, policy, old, new, logged.available)
    newest = slice(max(0, len(logged) - bounds.events), None)
    gains, importance = gains[newest], np.minimum(importance[newest], estimator.limit or np.inf)
    return GainSums(len(gains), float(gains.sum()), float(importance.sum()), float(importance @ importance))
