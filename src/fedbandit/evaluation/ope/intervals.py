"""Intervals from clients' sums: a calibrated bootstrap, and bounds that hold where it cannot be trusted.

Clients are the independent units throughout. How well the intervals cover is measured by `benchmarks.coverage`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf, isfinite, log, sqrt
from typing import Literal

import numpy as np

from fedbandit.core.errors import ConfigError
from fedbandit.evaluation.ope.estimators import Estimator
from fedbandit.evaluation.ope.sums import (
    Sums,
    effective_clients,
    residual_squares,
    standard_error,
    value_of,
)

IntervalKind = Literal["bootstrap", "bernstein"]
_FEWEST = 3  # clients; a standard error of two says nothing of itself
_WIDENING = 2.0  # the variance grows by this over the effective number of clients: what few clients show is uncertain
_STEPS = 60  # halvings, when the end of an interval is searched for
_SURE = (
    4.0  # standard errors by which weights fall short of 1, before the log is said to lack actions
)
_SHORT = 0.02


@dataclass(frozen=True)
class Interval:
    """Where the value lies with the given confidence, and by which argument; `refusal` says why nothing can be said."""

    low: float
    high: float
    confidence: float
    method: str
    refusal: str = ""

    def contains(self, value: float) -> bool:
        return self.low <= value <= self.high

    def __str__(self) -> str:
        return (
            f"none: {self.refusal}"
            if self.refusal
            else f"{self.low:.4f} to {self.high:.4f}  ({self.method})"
        )


@dataclass(frozen=True)
class Range:
    """What is known beforehand: rewards, and what a reward model says of them, lie in [low, high].

    No logged propensity lies below `floor`; None takes the largest weight of the log for the largest there is.
    """

    low: float
    high: float
    floor: float | None = None

    def __post_init__(self) -> None:
        if not (self.low < self.high and isfinite(self.low) and isfinite(self.high)):
            raise ConfigError(
                f"reward_range: must be low,high with low below high, not {self.low:g},{self.high:g}"
            )
        if self.floor is not None and not 0 < self.floor <= 1:
            raise ConfigError(f"floor: a propensity is above 0 and at most 1, not {self.floor:g}")


@dataclass(frozen=True)
class _Known:
    """The range to reason with: as given, or as the log has it."""

    low: float
    high: float
    weight: float  # the largest that the estimator can use
    events: float  # the most of one client
    given: bool

    @property
    def constant(self) -> bool:
        return not self.low < self.high


def interval_of(
    sums: Sums,
    estimator: Estimator,
    confidence: float,
    kind: IntervalKind,
    within: Range | None,
    largest: Callable[[float], float],
) -> Interval:
    """The interval of an estimate; `largest` turns the largest importance weight into the largest that is used."""
    heaviest = sums.extremes.weight if within is None or within.floor is None else 1 / within.floor
    low, high = sums.extremes.ends if within is None else (within.low, within.high)
    known = _Known(low, high, largest(heaviest), sums.extremes.events, within is not None)
    if not sums.events or not sums.reached:
        return _refused(known, confidence, "the log holds nothing that the policy would do")
    if estimator.limits(0.0, 1.0, 0.0, 1.0) is None:
        return _refused(known, confidence, "nothing shows how wrong the reward model is")
    if known.constant:
        return _refused(
            known,
            confidence,
            "all rewards of the log are the same; a reward range says how they may differ",
        )
    found = _bernstein(sums, estimator, confidence, known) if kind == "bernstein" else None
    if kind == "bootstrap":
        found = _bootstrap(sums, estimator, confidence, known) or _chernoff(
            sums, estimator, confidence, known
        )
    assert found is not None
    found = _with_what_is_unseen(found, sums, estimator, known)
    if found.low <= known.low and found.high >= known.high:
        return _refused(known, confidence, "the log is too small to tell the value from any other")
    return replace(found, low=max(found.low, known.low), high=min(found.high, known.high))


def _refused(known: _Known, confidence: float, why: str) -> Interval:
    ends = (known.low, known.high) if known.given else (-inf, inf)
    return Interval(*ends, confidence, "none", why)


_BOOTSTRAP = "bootstrap over clients"


def _bootstrap(
    sums: Sums, estimator: Estimator, confidence: float, known: _Known
) -> Interval | None:
    """Studentised by client sums, never narrower than Student's t; None where the sample may have missed what matters.

    It may have, where one more event at the edge of the range would move the estimate by more than a standard error:
    then the log holds only a few of the events that decide, and how few is not in it.
    """
    value, error = value_of(sums), standard_error(sums)
    lowest, highest = _limits(estimator, value, known)
    if sums.clients < _FEWEST or not 0 < error < inf:
        return None
    if max(-lowest, highest) / abs(sums.denominator) > error:
        return None
    tail = (1 - confidence) / 2
    below, above = _studentised(sums, value, tail)
    student = _student(sums.clients - 1, 1 - tail)
    wider = error * sqrt(1 + _WIDENING / effective_clients(sums))
    low, high = value - max(above, student) * wider, value + max(-below, student) * wider
    return Interval(low, high, confidence, _BOOTSTRAP) if isfinite(low) and isfinite(high) else None


def _studentised(sums: Sums, value: float, tail: float) -> tuple[float, float]:
    """Lower and upper quantile of the replicates' distances from the value, each in its own standard errors."""
    tops, bottoms, *squares = sums.replicates
    count = len(tops)
    if not count:
        return 0.0, 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        values = tops / bottoms
        residual = residual_squares(values, np.stack(squares))
        errors = np.sqrt(residual * sums.clients / (sums.clients - 1)) / np.abs(bottoms)
        away = np.where(np.abs(values - value) > 1e-9 * abs(value), values - value, 0.0)
        distances = np.where((away == 0) & (errors == 0), 0.0, away / errors)
    lost = ~np.isfinite(values)  # a replicate without a weight could have been anything
    lower, upper = np.sort(np.where(lost, -inf, distances)), np.sort(np.where(lost, inf, distances))
    first = min(int(tail * count), count - 1)
    return float(lower[first]), float(upper[count - 1 - first])


def _student(freedom: float, probability: float) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(freedom, probability))


def _limits(estimator: Estimator, value: float, known: _Known) -> tuple[float, float]:
    """Within which one event's residual lies, if the value is the given one: nil is always possible."""
    found = estimator.limits(value, known.weight, known.low, known.high)
    assert found is not None
    return min(found[0], 0.0), max(found[1], 0.0)


def _bernstein(sums: Sums, estimator: Estimator, confidence: float, known: _Known) -> Interval:
    """Maurer and Pontil's empirical Bernstein bound on the residuals of clients, inverted in the value.

    The residuals of independent clients average nil at the true value, and none leaves `events` times the range.
    """
    method = "empirical Bernstein over clients"
    n = sums.clients
    if n < 2 or not sums.denominator:
        return Interval(-inf, inf, confidence, method)
    value, mean_size = value_of(sums), sums.denominator / n
    low, high = _limits(estimator, min(max(value, known.low), known.high), known)
    spread = log(4 / (1 - confidence))  # half of the error on each side
    room = 7 * known.events * (high - low) * spread / (3 * (n - 1))
    _, products, sizes = sums.client_squares.tolist()
    residual = float(residual_squares(value, sums.client_squares))
    cross, size_variance = products - value * sizes, max(0.0, sizes - n * mean_size**2)
    share = 2 * spread / (n * (n - 1))

    def distance(sign: float) -> float:
        """How far up or down a value's residuals stay within the bound: the root of a quadratic."""
        a = mean_size**2 - share * size_variance
        b = -2 * abs(mean_size) * room + 2 * share * sign * cross
        c = room**2 - share * residual
        if a <= 0:
            return inf
        return float((-b + sqrt(max(0.0, b * b - 4 * a * c))) / (2 * a))

    return Interval(value - distance(-1.0), value + distance(1.0), confidence, method)


def _chernoff(sums: Sums, estimator: Estimator, confidence: float, known: _Known) -> Interval:
    """The Chernoff-Hoeffding bound on the mean residual of clients, inverted in the value: holds without any variance.

    Where nothing was earned by n clients this is the rule of three: rewards are not nil, they are rarer than that.
    """
    method = "Chernoff bound over clients"
    if sums.clients < 2 or not sums.denominator:
        return Interval(-inf, inf, confidence, method)
    top, bottom, least = (
        sums.numerator / sums.clients,
        sums.denominator / sums.clients,
        log(2 / (1 - confidence)),
    )

    def possible(value: float) -> bool:
        low, high = _limits(estimator, value, known)
        span = known.events * (high - low)
        seen = (top - value * bottom - known.events * low) / span
        return sums.clients * _divergence(seen, -known.events * low / span) <= least

    start = min(max(value_of(sums), known.low), known.high)
    return Interval(
        _furthest(start, known.low, possible),
        _furthest(start, known.high, possible),
        confidence,
        method,
    )


def _furthest(near: float, far: float, possible: Callable[[float], bool]) -> float:
    """The last possible value on the way from near to far."""
    if possible(far):
        return far
    for _ in range(_STEPS):
        middle = (near + far) / 2
        near, far = (middle, far) if possible(middle) else (near, middle)
    return far


def _divergence(p: float, q: float) -> float:
    """Kullback and Leibler's, between two coins."""
    p = min(max(p, 0.0), 1.0)
    parts = ((p, q), (1 - p, 1 - q))
    return sum(x * log(x / y) if y > 0 else inf for x, y in parts if x > 0)


def _with_what_is_unseen(
    found: Interval, sums: Sums, estimator: Estimator, known: _Known
) -> Interval:
    """Widened by what the policy does and the estimate leaves out: weights cut, actions that the log never takes."""
    mean = sums.importance / sums.events
    error = sqrt(max(0.0, sums.importance_squares / sums.events - mean**2) / sums.events)
    missing = 1 - mean if 1 - mean > max(_SURE * error, _SHORT) else 0.0
    share = missing + max(0.0, sums.left_out / sums.events)
    if share <= 1e-9:
        return found
    down, up = estimator.unseen(value_of(sums), known.low, known.high)
    method = f"{found.method}, widened for the {100 * min(share, 1.0):.2g}% of its choices left out"
    return replace(
        found,
        low=found.low + share * min(down, 0.0),
        high=found.high + share * max(up, 0.0),
        method=method,
    )
