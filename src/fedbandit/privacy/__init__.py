"""Privacy: one frozen plan from which clipping, sampling, noise and accounting come, so that they cannot disagree.

Knows sums of clipped updates and who may take part when; knows nothing of policies, rewards, models or data.

Examples:
    >>> plan = PrivacyPlan(population=100_000, clients_per_round=500, rounds=400, noise_multiplier=1.0, delta=1e-6)
    >>> epsilon = plan_epsilon(plan)
    >>> print(f"epsilon {epsilon:.2f}: {verdict(epsilon)}")
    epsilon 1.29: a reasonable guarantee
"""

from fedbandit.federated.pipeline import AdaptiveClipping, FixedClipping
from fedbandit.privacy.accounting import Ledger, epsilon_of, least_noise, plan_epsilon
from fedbandit.privacy.plan import PrivacyPlan
from fedbandit.privacy.reporting import (
    assumptions,
    composed_epsilon,
    extrapolated,
    known_cohorts,
    verdict,
)
from fedbandit.privacy.strategies import Banded, Blt, Independent, Restarted, Strategy, Tree

__all__ = [
    "AdaptiveClipping",
    "Banded",
    "Blt",
    "FixedClipping",
    "Independent",
    "Ledger",
    "PrivacyPlan",
    "Restarted",
    "Strategy",
    "Tree",
    "assumptions",
    "composed_epsilon",
    "epsilon_of",
    "extrapolated",
    "known_cohorts",
    "least_noise",
    "plan_epsilon",
    "verdict",
]
