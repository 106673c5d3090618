"""Off-policy evaluation: what a policy would have earned, from the log of another. Computable from
clients' sums alone.

A client makes `Records` of its log and returns `sums_of(...)`; the server adds them up and calls
`combine(...)`.

Examples:
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> rewards = rng.random(2000)
    >>> records = Records(
    ...     clients=np.arange(100),
    ...     bounds=np.arange(101) * 20,  # client i owns rows 20 i to 20 (i + 1)
    ...     rewards=rewards,
    ...     propensities=np.full(2000, 0.5),
    ...     target=np.where(rewards > 0.5, 0.9, 0.1),  # the policy to evaluate knows what pays
    ... )
    >>> estimate(records, {"ips": IPS()})["ips"].interval.contains(0.7)
    True
"""

from fedbandit.evaluation.estimates import (
    Estimate,
    Interval,
    Range,
    choose_estimator,
    combine,
    estimate,
)
from fedbandit.evaluation.estimators import (
    BUILT_IN,
    IPS,
    Bootstrap,
    Clipped,
    DirectMethod,
    DoublyRobustEstimator,
    Estimator,
    Extremes,
    Plain,
    Records,
    SelfNormalisedIPS,
    Shrunk,
    Sums,
    Switch,
    Weighting,
    sums_of,
)
from fedbandit.evaluation.logs import records_of
from fedbandit.policies import Constant, Uniform

__all__ = [
    "BUILT_IN",
    "IPS",
    "Bootstrap",
    "Clipped",
    "Constant",
    "DirectMethod",
    "DoublyRobustEstimator",
    "Estimate",
    "Estimator",
    "Extremes",
    "Interval",
    "Plain",
    "Range",
    "Records",
    "SelfNormalisedIPS",
    "Shrunk",
    "Sums",
    "Switch",
    "Uniform",
    "Weighting",
    "choose_estimator",
    "combine",
    "estimate",
    "records_of",
    "sums_of",
]
