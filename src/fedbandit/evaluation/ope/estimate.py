"""An estimate as a person reads it: a value, its interval, how much of the log bears on it, and what to beware of."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from math import sqrt
from operator import add

from fedbandit.errors import ConfigError
from fedbandit.evaluation.ope.estimators import Estimator
from fedbandit.evaluation.ope.intervals import (
    Interval,
    bernstein_interval,
    bootstrap_interval,
    standard_error,
    value_of,
)
from fedbandit.evaluation.ope.records import Records
from fedbandit.evaluation.ope.sums import Bootstrap, Sums, sums_of
from fedbandit.evaluation.ope.weighting import Plain, Weighting

_FEW_EVENTS = 100  # fewer effective events than this say little about rewards, whatever the interval claims
_SMALL_SHARE = 0.01  # of the log's events
_FEW_CLIENTS = 20  # the bootstrap needs clients to draw from


@dataclass(frozen=True)
class Estimate:
    """What a log says about a policy it did not follow."""

    value: float
    standard_error: float
    interval: Interval
    effective_sample_size: float  # of events as good as the policy's own
    mean_weight: float  # 1 in expectation, if the propensities are right and the log explores enough
    events: int
    clients: int
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bernstein:
    """Asks for empirical Bernstein intervals: rewards, and what a reward model says of them, lie in [low, high].

    No logged propensity lies below `floor`.
    """

    low: float
    high: float
    floor: float


def combine(
    sums: Sums,
    estimator: Estimator,
    *,
    confidence: float = 0.95,
    weighting: Weighting = Plain(),  # noqa: B008 - a frozen value
    bernstein: Bernstein | None = None,
) -> Estimate:
    """The server's part: from the clients' added sums to an estimate."""
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence: must be between 0 and 1, not {confidence}")
    if bernstein is None:
        interval = bootstrap_interval(sums, confidence)
    else:
        span = estimator.span(weighting.largest(1 / bernstein.floor), bernstein.low, bernstein.high)
        if span is None:
            raise ConfigError("interval: a self-normalised estimate is no mean; use the bootstrap for it")
        interval = bernstein_interval(sums, confidence, span)
    effective = sums.importance**2 / sums.importance_squares if sums.importance_squares else 0.0
    return Estimate(
        value=value_of(sums),
        standard_error=standard_error(sums),
        interval=interval,
        effective_sample_size=effective,
        mean_weight=sums.importance / sums.events if sums.events else 0.0,
        events=int(sums.events),
        clients=int(sums.clients),
        warnings=tuple(_warnings(sums, effective)),
    )


def estimate(
    records: Records,
    estimators: Mapping[str, Estimator],
    *,
    confidence: float = 0.95,
    weighting: Weighting = Plain(),  # noqa: B008
    bootstrap: Bootstrap = Bootstrap(),  # noqa: B008
    bernstein: Bernstein | None = None,
) -> dict[str, Estimate]:
    """Several estimators on one log: `estimate(records, {"ips": IPS()})["ips"].value`."""
    if bernstein is not None:
        _check_range(records, bernstein)
    found = {}
    for name, estimator in estimators.items():
        sums = sums_of(records, estimator, weighting, bootstrap)
        bounds = bernstein if estimator.span(1.0, 0.0, 1.0) is not None else None
        found[name] = combine(sums, estimator, confidence=confidence, weighting=weighting, bernstein=bounds)
    return found


def added(parts: list[Sums]) -> Sums:
    """The sums of several clients or groups of clients as one."""
    return reduce(add, parts)


def _check_range(records: Records, bernstein: Bernstein) -> None:
    low, high = bernstein.low, bernstein.high
    room = 1e-9 * (high - low)  # a weighted mean of predictions in the range may leave it by rounding
    columns = {
        "rewards": records.rewards,
        "predicted rewards": records.predicted,
        "expected rewards": records.expected,
    }
    for name, column in columns.items():
        if column is not None and len(column) and not (column.min() >= low - room and column.max() <= high + room):
            raise ConfigError(f"interval: {name} leave the range [{low:g}, {high:g}] that the Bernstein bound is for")


def _warnings(sums: Sums, effective: float) -> list[str]:
    said = []
    if not sums.events or not sums.reached:
        return ["the log holds nothing that the policy would do: it says nothing about it"]
    if effective < _FEW_EVENTS or effective < _SMALL_SHARE * sums.events:
        said.append(f"poor overlap: {sums.events:.0f} events are worth {effective:.0f} of the policy's own")
    mean = sums.importance / sums.events
    error = sqrt(max(0.0, sums.importance_squares / sums.events - mean**2) / sums.events)
    if abs(mean - 1) > max(4 * error, 0.02):
        said.append(
            f"the weights average {mean:.3f} and should average 1: the propensities are wrong,"
            " or the log never takes actions that the policy takes"
        )
    if sums.altered > _SMALL_SHARE * sums.events:
        share = 100 * sums.altered / sums.events
        said.append(f"clipping or shrinkage touched {share:.0f}% of the weights: less variance, more bias")
    if sums.clients < _FEW_CLIENTS:
        said.append(f"only {sums.clients:.0f} clients: intervals over clients are not to be trusted")
    return said
