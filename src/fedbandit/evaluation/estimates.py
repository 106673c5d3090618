"""From clients' sums to an estimate with an interval, and the choice among estimators.

Intervals come from a calibrated bootstrap over clients, or from bounds that hold where it cannot be
trusted. Clients are the independent units throughout; `benchmarks.coverage` measures how well they
cover.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf, isfinite, log, sqrt
from typing import Literal

import numpy as np

from fedbandit.core.errors import ConfigError, refuse
from fedbandit.evaluation.estimators import (
    Bootstrap,
    Estimator,
    Plain,
    Records,
    Sums,
    Weighting,
    by_client,
    residual_squares,
    sums_of,
)

IntervalKind = Literal["bootstrap", "bernstein"]
_FEWEST = 3  # clients; a standard error of two says nothing of itself
_WIDENING = 2.0  # the variance grows by this over the effective clients: few clients show little
_STEPS = 60  # halvings, when the end of an interval is searched for
_SURE, _SHORT = (
    4.0,
    0.02,
)  # standard errors, and the least distance, at which weights do not average 1
_FEW_EVENTS = 100  # fewer effective events than this say little, whatever the interval claims
_SMALL_SHARE = 0.01  # of the log's events
_FEW_CLIENTS = 20  # the bootstrap needs clients to draw from
_FOLDS = 10
_PREFERRED = ("dr", "snips", "ips", "switch", "dm")  # those that no wrong model can mislead first


@dataclass(frozen=True)
class Interval:
    """Where the value lies with the given confidence, and by which argument.

    Where nothing can be said, `refusal` has the reason and the ends are those of the known range.
    """

    low: float
    high: float
    confidence: float
    method: str
    refusal: str = ""

    def contains(self, value: float) -> bool:
        """Whether the value lies inside or on an end."""
        return self.low <= value <= self.high

    def __str__(self) -> str:
        if self.refusal:
            return f"none: {self.refusal}"
        return f"{self.low:.4f} to {self.high:.4f}  ({self.method})"


@dataclass(frozen=True)
class Range:
    """Known beforehand: rewards, and what a reward model says of them, lie in [low, high].

    No logged propensity lies below `floor`; None takes the log's largest weight for the largest.
    """

    low: float
    high: float
    floor: float | None = None

    def __post_init__(self) -> None:
        floor = 1.0 if self.floor is None else self.floor
        refuse(
            (
                not -inf < self.low < self.high < inf,
                f"reward_range: must be low,high with low below high, not {self.low:g},{self.high:g}",
            ),
            (not 0 < floor <= 1, f"floor: a propensity is above 0 and at most 1, not {floor:g}"),
        )

    def check(self, records: Records) -> None:
        """Refuse records that leave the range; rounding is allowed for."""
        room = 1e-9 * (self.high - self.low)
        columns = {
            "rewards": records.rewards,
            "predicted rewards": records.predicted,
            "expected rewards": records.expected,
        }
        ends, floor = f"[{self.low:g}, {self.high:g}]", self.floor or 0.0
        refuse(
            *(
                (
                    bool(((column < self.low - room) | (column > self.high + room)).any()),
                    f"interval: {name} leave the range {ends} that the interval is for",
                )
                for name, column in columns.items()
                if column is not None
            ),
            (
                bool((records.propensities < floor * (1 - 1e-6)).any()),
                f"floor: the log has propensities below {floor:g}",
            ),
        )


@dataclass(frozen=True)
class Estimate:
    """Estimate of a policy's reward from a log that followed another one."""

    value: float
    standard_error: float
    interval: Interval
    effective_sample_size: float  # of events as good as the policy's own
    mean_weight: float  # 1 in expectation, if propensities are right and the log explores enough
    events: int
    clients: int
    warnings: tuple[str, ...] = ()


def combine(
    sums: Sums,
    estimator: Estimator,
    *,
    confidence: float = 0.95,
    weighting: Weighting = Plain(),  # noqa: B008 - a frozen value
    interval: IntervalKind = "bootstrap",
    within: Range | None = None,
) -> Estimate:
    """The server's part: from the clients' added sums to an estimate.

    `within` says what is known of rewards and propensities; without it their extremes in the log
    are taken for it.
    """
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence: must be between 0 and 1, not {confidence}")
    return Estimate(
        value=sums.value,
        standard_error=sums.standard_error,
        interval=_interval(sums, estimator, confidence, interval, within, weighting.largest),
        effective_sample_size=sums.effective_sample_size,
        mean_weight=sums.mean_weight,
        events=int(sums.events),
        clients=int(sums.clients),
        warnings=tuple(_warnings(sums)),
    )


def estimate(
    records: Records,
    estimators: Mapping[str, Estimator],
    *,
    confidence: float = 0.95,
    weighting: Weighting = Plain(),  # noqa: B008
    bootstrap: Bootstrap = Bootstrap(),  # noqa: B008
    interval: IntervalKind = "bootstrap",
    within: Range | None = None,
) -> dict[str, Estimate]:
    """Several estimators on one log: `estimate(records, {"ips": IPS()})["ips"].value`."""
    if within is not None:
        within.check(records)

    def one(estimator: Estimator) -> Estimate:
        sums = sums_of(records, estimator, weighting, bootstrap)
        asked = {"confidence": confidence, "interval": interval, "within": within}
        return combine(sums, estimator, weighting=weighting, **asked)  # type: ignore[arg-type]

    return {name: one(estimator) for name, estimator in estimators.items()}


def choose_estimator(
    records: Records,
    estimators: Mapping[str, Estimator],
    weighting: Weighting = Plain(),  # noqa: B008
    among: Mapping[str, Estimate] | None = None,
) -> str | None:
    """The estimator that predicts held-out clients best, by cross-validation; None if none can.

    Each tenth of the clients is predicted from the others, and judged by the unbiased estimate of
    the tenth itself (Cief et al., 2024). One that is no more than two standard errors behind the
    best is as good as it. Of those, the one with the narrowest interval in `among` is chosen;
    without intervals, one that a wrong reward model cannot mislead.
    """
    judge = next((name for name in ("dr", "ips") if name in estimators), None)
    if judge is None or records.num_clients < 2 * _FOLDS:
        return None
    fold = np.arange(records.num_clients) % _FOLDS
    importance = records.importance

    def folded(estimator: Estimator, given: np.ndarray) -> np.ndarray:
        """Both sums of each fold's clients: [2, folds]."""
        terms = estimator.terms(records, estimator.used(given))
        sums = (by_client(part, records.bounds) for part in terms)
        return np.stack([np.bincount(fold, part, minlength=_FOLDS) for part in sums])

    top, bottom = folded(estimators[judge], importance)  # without clipping: it has to be unbiased
    if not bottom.all():
        return None
    truth, losses = top / bottom, {}
    named = estimators if among is None else among
    for name in sorted(named, key=lambda name: [*_PREFERRED, name].index(name)):
        own = folded(estimators[name], weighting(importance))
        rest = own.sum(axis=1, keepdims=True) - own
        if rest[1].all():
            losses[name] = (rest[0] / rest[1] - truth) ** 2
    if not losses:
        return None
    best = min(losses.values(), key=lambda loss: float(loss.mean()))
    behind = {name: loss - best for name, loss in losses.items()}
    alike = [n for n, b in behind.items() if b.mean() <= 2 * b.std(ddof=1) / sqrt(_FOLDS)]
    if among is None:
        return alike[0]
    return min(alike, key=lambda name: among[name].interval.high - among[name].interval.low)


def _distrusted(sums: Sums) -> bool:
    """Whether the weights do not average 1 within their own error."""
    return abs(sums.mean_weight - 1) > max(_SURE * sums.weight_error, _SHORT)


def _warnings(sums: Sums) -> list[str]:
    """Warnings to read beside the numbers, one line each."""
    said = []
    if not sums.events or not sums.reached:
        return ["the log holds nothing that the policy would do: it says nothing about it"]
    effective = sums.effective_sample_size
    if effective < _FEW_EVENTS or effective < _SMALL_SHARE * sums.events:
        worth = f"{sums.events:.0f} events are worth {effective:.0f} of the policy's own"
        said.append(f"poor overlap: {worth}")
    if _distrusted(sums):
        said.append(
            f"the weights average {sums.mean_weight:.3f} and should average 1: the propensities are"
            " wrong, or the log never takes actions that the policy takes"
        )
    if sums.altered > _SMALL_SHARE * sums.events:
        touched = f"touched {100 * sums.altered / sums.events:.0f}% of the weights"
        said.append(f"clipping, shrinkage or switching {touched}: less variance, more bias")
    if sums.clients < _FEW_CLIENTS:
        said.append(f"only {sums.clients:.0f} clients: others may be unlike them")
    elif (alike := sums.denominator**2 / (sums.client_squares[2] or 1)) < _FEW_CLIENTS:
        worth = f"{sums.clients:.0f} clients count as {alike:.0f}"
        said.append(f"{worth}: a few have most of the weight, and others may be unlike them")
    return said


@dataclass(frozen=True)
class _Known:
    """The range to reason with: as given, or as the log has it."""

    low: float
    high: float
    weight: float  # the largest that the estimator can use
    events: float  # the most of one client
    given: bool


def _interval(
    sums: Sums,
    estimator: Estimator,
    confidence: float,
    kind: IntervalKind,
    within: Range | None,
    largest: Callable[[float], float],
) -> Interval:
    """The interval of an estimate.

    `largest` turns the largest importance weight into the largest that is used.
    """
    heaviest = sums.extremes.weight if within is None or within.floor is None else 1 / within.floor
    low, high = sums.extremes.ends if within is None else (within.low, within.high)
    known = _Known(low, high, largest(heaviest), sums.extremes.events, within is not None)

    def refused(why: str) -> Interval:
        ends = (low, high) if known.given else (-inf, inf)
        return Interval(*ends, confidence, "none", why)

    if not sums.events or not sums.reached:
        return refused("the log holds nothing that the policy would do")
    if estimator.limits(0.0, 1.0, 0.0, 1.0) is None:
        return refused("nothing shows how wrong the reward model is")
    if _distrusted(sums) and sums.mean_weight > 1:  # below 1 actions may be missing: it is widened
        return refused(f"the weights average {sums.mean_weight:.3g}, so the propensities are wrong")
    if not low < high:
        return refused(
            "all rewards of the log are the same; a reward range says how they may differ"
        )
    too_small = "the log is too small to tell the value from any other"
    if sums.clients < 2 or not sums.denominator:
        return refused(too_small)
    if kind == "bernstein":
        found = _bernstein(sums, estimator, confidence, known)
    else:
        found = _bootstrap(sums, estimator, confidence, known) or _chernoff(
            sums, estimator, confidence, known
        )
    found = _with_what_is_unseen(found, sums, estimator, known)
    if found.low <= low and found.high >= high:
        return refused(too_small)
    return replace(found, low=max(found.low, low), high=min(found.high, high))


def _bootstrap(
    sums: Sums, estimator: Estimator, confidence: float, known: _Known
) -> Interval | None:
    """Studentised by client sums, never narrower than Student's t, nor than large clients who
    differ as the small ones do would make it; None where the sample may have missed what matters.

    It may have, where one more event at the edge of the range would move the estimate by more than
    a standard error: then the log holds only a few of the events that decide, and how few is not in
    it.
    """
    from scipy.special import stdtrit

    value, error = sums.value, sums.standard_error
    lowest, highest = _limits(estimator, value, known)
    if sums.clients < _FEWEST or not 0 < error < inf:
        return None
    if max(-lowest, highest) / abs(sums.denominator) > error:
        return None
    tail = (1 - confidence) / 2
    below, above = _studentised(sums, value, tail)
    student = float(stdtrit(sums.clients - 1, 1 - tail))
    wider = max(error, sums.unequal_error) * sqrt(1 + _WIDENING / sums.effective_clients)
    low, high = value - max(above, student) * wider, value + max(-below, student) * wider
    known_ends = isfinite(low) and isfinite(high)
    return Interval(low, high, confidence, "bootstrap over clients") if known_ends else None


def _studentised(sums: Sums, value: float, tail: float) -> tuple[float, float]:
    """Lower and upper quantile of the replicates' distances from the value, each in its own
    standard errors.
    """
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


def _limits(estimator: Estimator, value: float, known: _Known) -> tuple[float, float]:
    """Within which one event's residual lies, if the value is the given one: nil is always
    possible.
    """
    found = estimator.limits(value, known.weight, known.low, known.high)
    assert found is not None
    return min(found[0], 0.0), max(found[1], 0.0)


def _bernstein(sums: Sums, estimator: Estimator, confidence: float, known: _Known) -> Interval:
    """Maurer and Pontil's empirical Bernstein bound on the residuals of clients, inverted in the
    value.

    The residuals of independent clients average nil at the true value, and none leaves `events`
    times the range.
    """
    n, value, mean_size = sums.clients, sums.value, sums.denominator / sums.clients
    low, high = _limits(estimator, min(max(value, known.low), known.high), known)
    spread = log(4 / (1 - confidence))  # half of the error on each side
    room = 7 * known.events * (high - low) * spread / (3 * (n - 1))
    _, products, sizes = sums.client_squares.tolist()
    residual = float(residual_squares(value, sums.client_squares))
    cross, size_variance = products - value * sizes, max(0.0, sizes - n * mean_size**2)
    share = 2 * spread / (n * (n - 1))

    def distance(sign: float) -> float:
        """The way up or down on which residuals stay within the bound: the root of a quadratic."""
        a = mean_size**2 - share * size_variance
        b = -2 * abs(mean_size) * room + 2 * share * sign * cross
        c = room**2 - share * residual
        if a <= 0:
            return inf
        return float((-b + sqrt(max(0.0, b * b - 4 * a * c))) / (2 * a))

    ends = value - distance(-1.0), value + distance(1.0)
    return Interval(*ends, confidence, "empirical Bernstein over clients")


def _chernoff(sums: Sums, estimator: Estimator, confidence: float, known: _Known) -> Interval:
    """The Chernoff-Hoeffding bound on the mean residual of clients, inverted in the value: holds
    without any variance.

    Where nothing was earned by n clients this is the rule of three: rewards are not nil, they are
    rarer than that.
    """
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

    start = min(max(sums.value, known.low), known.high)
    low, high = (_furthest(start, end, possible) for end in (known.low, known.high))
    return Interval(low, high, confidence, "Chernoff bound over clients")


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
    """Widened by what the policy does and the estimate leaves out: weights cut, actions that the
    log never takes.
    """
    missing = max(0.0, 1 - sums.mean_weight) if _distrusted(sums) else 0.0
    share = missing + max(0.0, sums.left_out / sums.events)
    if share <= 1e-9:
        return found
    down, up = estimator.unseen(sums.value, known.low, known.high)
    method = f"{found.method}, widened for the {100 * min(share, 1.0):.2g}% of its choices left out"
    return replace(
        found,
        low=found.low + share * min(down, 0.0),
        high=found.high + share * max(up, 0.0),
        method=method,
    )
