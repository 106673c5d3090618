"""The audit: its tests are exact, every broken promise is found, right rounds pass, and it knows its own power."""

from dataclasses import replace

import numpy as np
import pytest
from audit_violations import VIOLATIONS
from scipy.stats import kstest

from fedbandit.core.errors import ConfigError
from fedbandit.studies import privacy_audit
from fedbandit.studies.audited_rounds import AuditedRun, audited_run
from fedbandit.studies.privacy_audit import LEVEL, SHORT, audit, audit_case, default_cases

CASES = default_cases()
EACH = [(name, target) for name, one in VIOLATIONS.items() for target in one.targets]
BLAMED = {
    "half the noise": "noise",
    "nine tenths of the noise": "noise",
    "the same normals every round": "independence of rounds",
    "noise shared by two rounds": "independence of rounds",
    "the same normals every round, correlated": "independence of rounds",
    "noise shared by two rounds, correlated": "independence of rounds",
    "Poisson at twice the rate": "sampling rate",
    "the same cohort every round": "the same clients again",
    "separation ignored": "separation",
    "groups ignored": "separation",
    "restarts stated and not made": "independence of rounds",
    "divisor is the actual cohort": "noise of single rounds",
    "clipping skipped": "clip norm and divisor",
    "count with half the noise": "noise of the count",
}


def caught(name, target, seed=0):
    one = VIOLATIONS[name]
    with one():
        (found,) = audit({one.case: CASES[one.case]}, [target], seed=seed, level=LEVEL / 20)
    return found


@pytest.mark.parametrize(("name", "target"), [each for each in EACH if each[1] == "simulation"])
def test_a_broken_promise_is_found_and_named(name, target):
    found = caught(name, target)
    assert found.verdict == "violated"
    assert BLAMED[name] in [test.name for test in found.failed]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "target"), [each for each in EACH if each[1] != "simulation"])
def test_a_broken_promise_of_releases_on_a_grid_is_found(name, target):
    assert caught(name, target).verdict == "violated"


@pytest.mark.parametrize("name", CASES)
def test_right_rounds_pass(name):
    (found,) = audit({name: CASES[name]}, ["simulation"])
    assert found.verdict == "passed", found
    assert found.noise[0] < 1 < found.noise[1]


@pytest.mark.slow
def test_the_default_audit_passes():
    found = audit()
    assert {one.verdict for one in found} == {"passed"}
    assert len(found) == 3 * len(CASES) - 1  # devices have no groups
    assert sum(len(one.tests) for one in found) * found[0].bound == pytest.approx(LEVEL)


def made_run(seed, plan, sent=0.0):
    """A run of made-up rounds that keep the plan: noise by C⁻¹, clients by chance."""
    rng, clients = np.random.default_rng(seed), 60
    encoder = AuditedRun(plan, *np.zeros((3, 1, 1))).encoder
    shape = (plan.rounds, 300)
    noise = np.linalg.solve(encoder, rng.standard_normal(shape)) * plan.update_multiplier
    taking = rng.random((plan.rounds, clients)) < plan.probability
    signs = np.zeros(shape)
    signs[:, :clients] = taking * rng.choice((-1, 1), taking.shape)
    return AuditedRun(plan, noise + (1 + sent) * signs, signs, taking)


def plan_of(name):
    return audited_run(CASES[name], "simulation", 0, 500).plan


@pytest.mark.parametrize(
    ("name", "audits"),
    [
        ("dp-fedavg", 60),
        *(pytest.param(name, 1000, marks=pytest.mark.slow) for name in ("dp-fedavg", "blt")),
    ],
)
def test_p_values_are_uniform_or_larger(name, audits):
    """Of made-up rounds: exact tests of the noise, conservative ones of the rest."""
    plan = plan_of(name)
    few = {"population": 60, "clients_per_round": 6} if plan.amplified else {"separation": 1}
    plan = replace(plan, **few)
    found: dict[str, list[float]] = {}
    for seed in range(audits):
        runs = [made_run(2 * seed + i, plan) for i in range(2)]
        for test in privacy_audit._tests(runs, LEVEL / 200):
            found.setdefault(test.name, []).append(test.p)
    exact = {"noise", "independence of rounds", "noise of two runs"}
    for test, p_values in found.items():
        larger = kstest(p_values, "uniform", alternative="greater")
        assert larger.pvalue > 1e-4, test
        if test in exact:
            assert kstest(p_values, "uniform").pvalue > 1e-4, test


def test_an_audit_knows_when_it_is_too_small():
    """Noise that hides planted clients, and samples too few to count."""
    hidden = audit_case(8, 2, 2, privacy={"mechanism": "dp-fedavg", "noise_multiplier": 200.0})
    (found,) = audit({"": hidden}, ["simulation"], runs=1, weights=50)
    assert found.verdict == "cannot tell"
    assert {test.name for test in found.weak} == {
        "noise", "clip norm and divisor", "sampling rate", "the same clients again",
    }  # fmt: skip


@pytest.mark.parametrize(("weights", "verdict"), [(10, "cannot tell"), (4000, "violated")])
def test_a_tenth_less_noise_is_found_or_cannot_be_told(weights, verdict, monkeypatch):
    right = privacy_audit.audited_run

    def short(*given):
        run = right(*given)
        return replace(run, released=run.sent + SHORT * (run.released - run.sent))

    monkeypatch.setattr(privacy_audit, "audited_run", short)
    privacy = {"mechanism": "dp-fedavg", "noise_multiplier": 0.3, "sampling": "fixed"}
    few = audit_case(8, 8, 2, privacy=privacy)
    (found,) = audit({"": few}, ["simulation"], weights=weights)
    assert found.verdict == verdict


def test_a_plan_for_more_clients_than_can_be_planted_is_refused():
    many = audit_case(10**6, 64, 4, privacy={"mechanism": "dp-fedavg", "noise_multiplier": 1.0})
    with pytest.raises(ConfigError, match="2000 at most"):
        audit({"": many}, ["simulation"])
