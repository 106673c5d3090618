"""The audit: its statistics are right, it knows its own power, and short noise is caught where right noise is not."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from benchmarks.audit_power import audit_table, table_plans

from fedbandit.federated.pipeline import AdaptiveClipping
from fedbandit.privacy import noise
from fedbandit.privacy.accounting import plan_epsilon
from fedbandit.privacy.plan import PrivacyPlan
from fedbandit.privacy.strategies import Banded, Tree
from fedbandit.studies.privacy_audit import (
    Stated,
    _statement,
    audit,
    epsilon_lower_bound,
    one_run_bound,
    one_run_epsilon,
    trials_needed,
)

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden" / "jax_privacy.json").read_text(encoding="utf-8")
)
PLANS = {
    **table_plans(),
    "dp-fedavg (poisson), adaptive clipping": PrivacyPlan(
        population=24,
        clients_per_round=20,
        rounds=4,
        noise_multiplier=1.0,
        delta=1e-5,
        clipping=AdaptiveClipping(0.5, 0.1),
    ),
}
UNAMPLIFIED = [name for name, plan in PLANS.items() if not plan.amplified]
AMPLIFIED = [name for name, plan in PLANS.items() if plan.amplified]


def verdicts(plan, source="simulation", **options):
    return [one.verdict for one in audit(plan, source, **options)]


@pytest.fixture
def known_system_noise(monkeypatch):
    """The operating system's bytes from a seed, so that a test cannot fail by chance."""
    rng = np.random.default_rng(7)
    monkeypatch.setattr(noise.os, "urandom", rng.bytes)


def test_lower_bounds_from_counts():
    assert epsilon_lower_bound(50, 100, 50, 100, 1e-5) == 0
    assert epsilon_lower_bound(0, 100, 0, 100, 1e-5) == 0
    perfect = epsilon_lower_bound(1000, 1000, 0, 1000, 0.0)
    hits = 0.0005 ** (1 / 1000)  # Clopper and Pearson at the extremes
    assert perfect == pytest.approx(math.log(hits / (1 - hits)))
    assert epsilon_lower_bound(900, 1000, 100, 1000, 0.0) < math.log(9)
    assert epsilon_lower_bound(900, 1000, 100, 1000, 0.0) > epsilon_lower_bound(
        90, 100, 10, 100, 0.0
    )
    # Rarely missing with the client counts as much as rarely accusing without.
    swapped = epsilon_lower_bound(500, 1000, 100, 1000, 0.0)
    assert epsilon_lower_bound(900, 1000, 500, 1000, 0.0) == pytest.approx(swapped)


def test_one_run_bounds_are_those_of_jax_privacy():
    for canaries, guesses, right, epsilon in GOLDEN["one run"]:
        assert one_run_epsilon(canaries, guesses, right, 1e-3, 1e-6) == pytest.approx(
            epsilon, abs=1e-4
        )


def test_one_run_of_guesses_proves_what_it_can():
    rng = np.random.default_rng(0)
    present = rng.random(2000) < 0.5
    assert one_run_bound(rng.standard_normal(2000), present, 1e-6) == 0
    assert one_run_bound(present + 0.1 * rng.standard_normal(2000), present, 1e-6) > 3


@pytest.mark.parametrize("name", PLANS)
def test_what_is_audited_is_what_the_plan_states(name):
    plan = PLANS[name]
    if plan.adaptive:  # the two releases together cost what the plan states
        updates, count = (_statement(plan, what)[0] for what in ("updates", "count"))
        together = plan.noise_multiplier**-2 * (1 if plan.amplified else plan.turns())
        assert updates.multiplier**-2 + count.multiplier**-2 == pytest.approx(together)
        assert (
            updates.probability == count.probability == (plan.probability if plan.amplified else 1)
        )
    else:
        stated, _ = _statement(plan, "updates")
        if plan.amplified:
            assert (stated.multiplier, stated.probability) == (
                plan.turn_multiplier,
                plan.probability,
            )
            assert len(stated.shifts) == plan.turns()
        else:
            assert stated.epsilon == pytest.approx(plan_epsilon(plan, "pld"))


@pytest.mark.parametrize("name", UNAMPLIFIED)
@pytest.mark.parametrize("source", ["simulation", "deployment"])
def test_short_noise_is_found_and_right_noise_is_not(name, source, known_system_noise):
    plan = PLANS[name]
    found = audit(plan, source)
    assert [one.what for one in found] == (["updates", "count"] if plan.adaptive else ["updates"])
    assert {one.verdict for one in found} == {"passed"}
    assert all(one.lower_bound < one.stated for one in found)
    assert set(verdicts(plan, source, actual=0.5)) == {"violated"}
    assert set(verdicts(plan, source, actual=0.0)) == {"violated"}


def test_a_tree_without_noise_fails_at_any_size():
    """It used to pass: too few trials to exceed the stated epsilon counted as a pass."""
    tree = PrivacyPlan(
        population=60, clients_per_round=12, rounds=10, noise_multiplier=2.0, delta=1e-5, strategy=Tree(),
        sampling="min-separation", separation=5,
    )  # fmt: skip
    assert verdicts(tree, actual=0.0, trials=50) == ["violated"]


def test_too_few_trials_are_no_pass():
    weak = replace(PLANS["dp-ftrl (min-separation)"], noise_multiplier=60.0)
    (found,) = audit(weak, trials=200)
    assert found.verdict == "inconclusive"
    assert found.needed > 1000
    assert verdicts(weak, trials=found.needed) == ["passed"]
    assert verdicts(weak, trials=found.needed, actual=0.5) == ["violated"]


def test_the_canary_takes_the_turns_that_hurt_most():
    """In a tree the first round is in most nodes; in two bands any but the last."""
    tree = PLANS["dp-ftrl (min-separation)"]
    stated, _ = _statement(tree, "updates")
    assert stated.shifts[0] == pytest.approx(
        math.sqrt(tree.squared_sensitivities[-1]) / tree.noise_multiplier
    )
    banded = replace(tree, strategy=Banded((1.0, 0.5)), separation=16, population=16 * 24)
    assert _statement(banded, "updates")[0].shifts[0] == pytest.approx(
        math.sqrt(1.25) / banded.noise_multiplier
    )


def test_the_needed_trials_of_a_gaussian_grow_with_its_noise():
    needed = [trials_needed(Stated((1 / z,), 1.0, z, 1e-5)) for z in (1.0, 10.0, 20.0)]
    assert needed[0] == 200
    assert needed[2] == pytest.approx(4 * needed[1], rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", AMPLIFIED)
def test_amplified_plans_are_judged_by_their_whole_profile(name, known_system_noise):
    plan = PLANS[name]
    for source in ("simulation", "deployment"):
        found = audit(plan, source)
        assert {one.verdict for one in found} == {"passed"}
        short = audit(plan, source, actual=0.5)
        assert {one.verdict for one in short} == {"violated"}
        assert {one.what for one in short} == (
            {"updates", "count"} if plan.adaptive else {"updates"}
        )
        # At the stated delta alone half the noise would pass: it is another part of the profile that gives it away.
        assert min(one.lower_bound for one in short) < max(one.stated for one in short)


@pytest.mark.slow
def test_the_table_of_audits():
    for row in audit_table(20, ("simulation",)):
        assert row.caught >= 0.95, row
        assert row.blamed == 0, row
