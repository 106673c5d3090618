"""Off-policy evaluation: what a policy would have earned, from the log of another. Computable from clients' sums alone.

A client makes `Records` of its log and returns `sums_of(...)`; the server adds them and calls `combine(...)`.
"""

from fedbandit.evaluation.ope.estimate import Bernstein, Estimate, added, combine, estimate
from fedbandit.evaluation.ope.estimators import BUILT_IN, IPS, DirectMethod, DoublyRobust, Estimator, SelfNormalisedIPS
from fedbandit.evaluation.ope.intervals import Interval
from fedbandit.evaluation.ope.records import Records
from fedbandit.evaluation.ope.sums import Bootstrap, Sums, sums_of
from fedbandit.evaluation.ope.weighting import Clipped, Plain, Shrunk, Weighting

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
