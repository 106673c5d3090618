"""From sums to a value with an interval: bootstrap over clients, or empirical Bernstein over events."""

from dataclasses import dataclass
from math import inf, log, nan, sqrt

import numpy as np

from fedbandit.evaluation.ope.sums import Sums


@dataclass(frozen=True)
class Interval:
    """Where the value lies with the given confidence, and by which argument."""

    low: float
    high: float
    confidence: float
    method: str

    def contains(self, value: float) -> bool:
        return self.low <= value <= self.high


def value_of(sums: Sums) -> float:
    """The estimate itself; NaN where nothing in the log says anything about the policy."""
    return sums.numerator / sums.denominator if sums.denominator else nan


def standard_error(sums: Sums) -> float:
    """Of the estimate, with clients as the independent units; infinite for a single client."""
    if sums.clients < 2 or not sums.denominator:
        return inf
    value = value_of(sums)
    squares, products, sizes = sums.client_squares
    residual = max(0.0, squares - 2 * value * products + value**2 * sizes)
    return sqrt(residual * sums.clients / (sums.clients - 1)) / abs(sums.denominator)


def bootstrap_interval(sums: Sums, confidence: float) -> Interval:
    """Percentiles of the replicates that the clients' own draws made."""
    numerators, denominators = sums.replicates
    kept = denominators != 0
    if not kept.any():
        return Interval(nan, nan, confidence, "bootstrap over clients")
    tail = 100 * (1 - confidence) / 2
    low, high = np.percentile(numerators[kept] / denominators[kept], [tail, 100 - tail])
    return Interval(float(low), float(high), confidence, "bootstrap over clients")


def bernstein_interval(sums: Sums, confidence: float, span: float) -> Interval:
    """Maurer and Pontil's empirical Bernstein bound, for independent events whose terms lie within `span`."""
    if sums.events < 2:
        return Interval(-inf, inf, confidence, "empirical Bernstein")
    n, value = sums.events, value_of(sums)
    variance = max(0.0, sums.numerator_squares - n * value**2) / (n - 1)
    spread = log(4 / (1 - confidence))  # half of the error on each side
    margin = sqrt(2 * variance * spread / n) + 7 * span * spread / (3 * (n - 1))
    return Interval(value - margin, value + margin, confidence, "empirical Bernstein")
