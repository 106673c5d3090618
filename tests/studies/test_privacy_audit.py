"""The audit: its statistics are right, real rounds stay below what they state, and rounds without noise are caught."""

import math

import pytest

from fedbandit.federated.pipeline import AdaptiveClipping
from fedbandit.privacy.accounting import plan_epsilon
from fedbandit.privacy.plan import PrivacyPlan
from fedbandit.privacy.strategies import Tree, best_banded
from fedbandit.studies.privacy import audit, epsilon_lower_bound

APART = {"sampling": "min-separation", "separation": 2}
PLANS = {
    "poisson": {"noise_multiplier": 2.0},
    "adaptive": {
        "noise_multiplier": 2.0,
        "clipping": AdaptiveClipping(0.5, 0.1),
        "population": 48,
        "clients_per_round": 24,
    },
    "tree": {"noise_multiplier": 4.0, "strategy": Tree(), **APART},
    "banded": {"noise_multiplier": 2.5, "strategy": best_banded(6, 2), **APART},
}


def plan(**changes):
    values = {"population": 24, "clients_per_round": 12, "rounds": 6, "noise_multiplier": 1.5, "delta": 1e-5}
    return PrivacyPlan(**{**values, **changes})


def test_lower_bounds_from_counts():
    assert epsilon_lower_bound(50, 50, 100, 1e-5) == 0
    assert epsilon_lower_bound(0, 0, 100, 1e-5) == 0
    perfect = epsilon_lower_bound(1000, 0, 1000, 0.0)
    # Clopper and Pearson at the extremes: 1 - (α/2)^(1/n) misses at most, (α/2)^(1/n) hits at least.
    hits = 0.025 ** (1 / 1000)
    assert perfect == pytest.approx(math.log(hits / (1 - hits)))
    assert epsilon_lower_bound(900, 100, 1000, 0.0) < math.log(9)
    assert epsilon_lower_bound(900, 100, 1000, 0.0) > epsilon_lower_bound(90, 10, 100, 0.0)
    # Rarely missing with the client counts as much as rarely accusing without.
    assert epsilon_lower_bound(900, 500, 1000, 0.0) == pytest.approx(epsilon_lower_bound(500, 100, 1000, 0.0))


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_an_attack_stays_below_the_stated_epsilon_and_rises_without_noise(name):
    audited = plan(**PLANS[name])
    stated = plan_epsilon(audited, "pld")
    assert stated < 4
    kept = audit(audited, stated, trials=400)
    assert kept.lower_bound <= stated
    assert kept.passed
    broken = audit(audited, stated, trials=400, noise=0.0)
    assert broken.lower_bound > kept.lower_bound + 1
    assert broken.lower_bound > stated
    assert not broken.passed
