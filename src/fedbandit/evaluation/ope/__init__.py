"""Off-policy evaluation: what a policy would have earned, from the log of another. Computable from clients' sums alone.

A client makes `Records` of its log and returns `sums_of(...)`; the server adds them and calls `combine(...)`.
"""

from fedbandit.evaluation.ope.estimate import (
    Bernstein,
    Bootstrap,
    Estimate,
    Interval,
    Sums,
    added,
    combine,
    estimate,
    sums_of,
)
from fedbandit.evaluation.ope.estimators import (
    BUILT_IN,
    IPS,
    Clipped,
    DirectMethod,
    DoublyRobust,
    Estimator,
    Plain,
    Records,
    SelfNormalisedIPS,
    Shrunk,
    Weighting,
)

__all__ = [
    "BUILT_IN",
    "IPS",
    "Bernstein",
    "Bootstrap",
    "Clipped",
    "DirectMethod",
    "DoublyRobust",
    "Estimate",
    "Estimator",
    "Interval",
    "Plain",
    "Records",
    "SelfNormalisedIPS",
    "Shrunk",
    "Sums",
    "Weighting",
    "added",
    "combine",
    "estimate",
    "sums_of",
]
