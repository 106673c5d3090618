"""Epsilon against published numbers, against the library itself, and against plain formulas."""

import math
from dataclasses import replace

import dp_accounting
import pytest
from dp_accounting import rdp

from fedbandit.assembly.privacy import build_ledger
from fedbandit.config import Config
from fedbandit.core.errors import ConfigError
from fedbandit.privacy.accounting import Ledger, epsilon_of, least_noise, plan_epsilon
from fedbandit.privacy.plan import PrivacyPlan
from fedbandit.privacy.reporting import (
    composed_epsilon,
    extrapolated,
    in_one_line,
    known_cohorts,
    show,
    summary,
    sweep_cost,
    verdict,
)
from fedbandit.privacy.strategies import Tree, best_banded, best_blt

STACKOVERFLOW = 342_477


def plan(**changes):
    values = {
        "population": STACKOVERFLOW,
        "clients_per_round": 64,
        "rounds": 1600,
        "noise_multiplier": 0.7,
    }
    return PrivacyPlan(**{**values, **changes})


@pytest.mark.parametrize(
    ("clients", "noise", "rounds", "by_rdp", "by_pld"),
    [(64, 0.3, 1600, 15.82, 12.86), (64, 0.7, 1600, 1.49, 0.19), (6400, 1.0, 800, 4.10, 3.71)],
)
def test_the_papers_three_cases(clients, noise, rounds, by_rdp, by_pld):
    case = plan(clients_per_round=clients, noise_multiplier=noise, rounds=rounds)
    assert plan_epsilon(case, "rdp") == pytest.approx(by_rdp, abs=0.005)
    assert plan_epsilon(case, "pld") == pytest.approx(by_pld, abs=0.005)


def test_the_papers_extrapolation():
    small = plan(noise_multiplier=0.01, rounds=800, population=340_000)
    large = extrapolated(small, 100, 340_000)
    assert (large.clients_per_round, large.noise_multiplier) == (6400, 1.0)
    assert plan_epsilon(large) == pytest.approx(4.13, abs=0.005)
    ratio = [p.noise_multiplier / p.clients_per_round for p in (small, large)]
    assert ratio[0] == pytest.approx(ratio[1])


@pytest.mark.parametrize("sampling", ["poisson", "fixed", "min-separation"])
def test_the_cheap_epsilon_of_every_round_is_the_librarys(sampling):
    case = plan(
        population=2000,
        rounds=100,
        sampling=sampling,
        separation=7 if sampling == "min-separation" else 1,
    )
    ledger = Ledger(case)
    assert ledger.epsilon(0) == 0
    for rounds in (1, 2, 17, 100):
        accountant = rdp.RdpAccountant().compose(case.event(rounds))
        assert ledger.epsilon(rounds) == pytest.approx(accountant.get_epsilon(case.delta), rel=1e-9)


def test_epsilon_grows_with_rounds_and_falls_with_noise():
    for case in (
        plan(rounds=40),
        plan(rounds=40, sampling="min-separation", separation=9, strategy=Tree()),
    ):
        ledger = Ledger(case)
        spent = [ledger.epsilon(t) for t in range(41)]
        assert spent == sorted(spent)
        assert Ledger(replace(case, noise_multiplier=1.4)).epsilon(40) < spent[40]


def test_fixed_cohorts_get_no_amplification():
    amplified, plain = plan(rounds=100), plan(rounds=100, sampling="fixed")
    assert plan_epsilon(plain) > 10 * plan_epsilon(amplified)
    gaussian = dp_accounting.get_epsilon_gaussian(0.7 / 10, 1e-6)
    assert plan_epsilon(replace(plain, noise_multiplier=7.0), "pld") < gaussian
    exact = dp_accounting.get_epsilon_gaussian(7.0 / 10, 1e-6)
    assert plan_epsilon(replace(plain, noise_multiplier=7.0), "pld") == pytest.approx(exact)


def test_no_noise_is_no_guarantee():
    ledger = Ledger(plan(noise_multiplier=0.0))
    assert ledger.epsilon(0) == 0
    assert ledger.epsilon(1) == ledger.tight_epsilon(1) == math.inf
    assert ledger.metrics(1, deploys=True) == {"epsilon": None, "epsilon_pld": None}
    found = summary(ledger, 3)
    assert found["epsilon_rdp"] is None
    assert found["guarantee"].startswith("no guarantee")


def test_the_papers_emnist_case_means_nothing_and_says_so():
    ledger = Ledger(plan(population=3400, noise_multiplier=0.1, rounds=800))
    assert ledger.epsilon(800) > 1000
    assert summary(ledger, 800)["guarantee"].startswith("no meaningful guarantee")
    assert verdict(ledger.epsilon(800)).startswith("no meaningful guarantee")
    assert not verdict(4.1).startswith("no")


def test_summaries_state_their_assumptions():
    found = summary(Ledger(plan(), budget=2.0), 1600)
    assert found["epsilon_rdp"] == pytest.approx(1.49, abs=0.005)
    assert found["epsilon_pld"] == pytest.approx(0.19, abs=0.005)
    assert set(found["assumptions"]) == {"unit", "adjacency", "sampling"}
    assert "added or removed" in found["assumptions"]["adjacency"]
    assert "342477" in found["assumptions"]["sampling"]
    assert "1600 rounds" in found["assumptions"]["sampling"]
    assert "not noised" in found["covers"]
    assert "warning" not in found
    assert "warning" in summary(Ledger(plan(delta=1e-3)), 1)
    assert summary(None, 5)["mechanism"] == "none"


def test_known_cohorts_and_known_sizes_cost_what_the_docs_say():
    """`docs/privacy.md`: the headline plan, and a client with one or two known turns (PLD)."""
    case, large = plan(), plan(clients_per_round=6400, noise_multiplier=1.0, rounds=800)
    for known, epsilon in ((case, 9.91), (large, 26.3)):  # of sizes: the sum moves twice as far
        halved = replace(known, noise_multiplier=known.noise_multiplier / 2)
        assert plan_epsilon(halved) == pytest.approx(epsilon, rel=2e-3)
    turns = [plan_epsilon(known_cohorts(replace(case, rounds=n)), "pld") for n in (1, 2)]
    assert turns == [pytest.approx(7.37, abs=0.005), pytest.approx(11.1, abs=0.05)]
    cyclic = plan(sampling="cyclic-poisson", separation=4, strategy=best_banded(1600, 4))
    assert known_cohorts(cyclic).sampling == "min-separation"
    unamplified = plan(sampling="fixed")
    assert known_cohorts(unamplified) is unamplified


def test_a_report_says_how_sums_are_released_and_what_the_cohorts_secret_is_worth():
    found = summary(Ledger(plan(), source="system"), 1600)
    assert "whole steps of 2^-24 clip norms, with discrete Gaussian noise" in found["noise"]
    assert "misses at most 1e-06 of epsilon" in found["noise"]
    assert found["epsilon_if_cohorts_known"] == pytest.approx(1931, abs=1)
    blt = plan(
        strategy=best_blt(1600, 100, 2), sampling="min-separation", separation=100, rounds=1600
    )
    found = summary(Ledger(blt, source="system"), 1600)
    assert "Gaussian noise of float64 rounded to whole steps" in found["noise"]
    assert "epsilon_if_cohorts_known" not in found
    seeded = summary(Ledger(plan()), 1600)
    assert "as the cohorts do" in seeded["noise"]
    assert seeded["epsilon_if_cohorts_known"] == pytest.approx(1931, abs=1)
    assert "1931 (RDP) to those who know the cohorts" in in_one_line(seeded)
    assert "whole steps" not in seeded["noise"]


def test_known_cohorts_of_an_accounted_pretraining_count_too():
    few = replace(plan(), population=100, clients_per_round=64, rounds=3200)
    found = summary(Ledger(plan(), few), 1600)
    assert found["epsilon_if_cohorts_known"] == pytest.approx(plan_epsilon(known_cohorts(few)))


def test_what_covers_metrics_depends_on_the_noise():
    found = summary(Ledger(plan(), source="system"), 1600)
    assert "private/" in found["covers"]
    assert "private/" not in summary(Ledger(plan()), 1600)["covers"]


def test_epsilon_is_said_in_one_form():
    line = in_one_line(summary(Ledger(plan()), 1600))
    for part in (
        "1.49 (RDP)",
        "0.194 (PLD)",
        "delta 1e-06",
        "after 1600 rounds",
        "added or removed",
        "Poisson",
        "342477",
    ):
        assert part in line
    assert "zCDP" not in line  # amplification has none
    apart = plan(sampling="min-separation", separation=800, noise_multiplier=2.0)
    found = summary(Ledger(apart), 1600)
    assert found["zcdp_rho"] == pytest.approx(2 / (2 * 2.0**2))
    assert "rho 0.250 (zCDP)" in in_one_line(found)
    assert "replaced by nothing" in in_one_line(found)
    # zCDP is what RDP says at every order: rho·α.
    spent = rdp.RdpAccountant(orders=[2.0, 8.0]).compose(apart.event()).rdp
    assert spent == pytest.approx([0.5, 2.0])
    assert in_one_line(summary(None, 3)) == "no differential privacy"
    assert "operating system" in summary(Ledger(apart), 3, deployed=True)["noise"]


def test_least_noise_is_enough_and_hardly_more():
    def at(z):
        return plan_epsilon(plan(noise_multiplier=z))

    found = least_noise(at, 4.0)
    assert at(found) <= 4.0 < at(found * 0.999)
    with pytest.raises(ValueError, match=r"^epsilon: "):
        least_noise(lambda z: 5.0, 4.0)


def _config(**privacy):
    values = {
        "scenario": "scratch",
        "rounds": 50,
        "clients_per_round": 10,
        "clipping": {"norm": 1.0},
    }
    return Config.build({**values, "privacy": {"mechanism": "dp-fedavg", **privacy}})


@pytest.mark.parametrize("accountant", ["rdp", pytest.param("pld", marks=pytest.mark.slow)])
def test_a_budget_sets_the_noise(accountant):
    ledger = build_ledger(_config(epsilon=2.0, accountant=accountant), 500, pretrained=False)
    spent = ledger.epsilon(50) if accountant == "rdp" else ledger.tight_epsilon(50)
    assert 1.99 < spent <= 2.0
    assert ledger.last_round == 50


def test_a_budget_ends_a_run_whose_noise_is_given():
    ledger = build_ledger(_config(epsilon=2.0, noise_multiplier=0.9), 500, pretrained=False)
    last = ledger.last_round
    assert 0 < last < 50
    assert ledger.epsilon(last) <= 2.0 < ledger.epsilon(last + 1)
    assert "epsilon_pld" in ledger.metrics(last, deploys=False)
    assert "epsilon_pld" not in ledger.metrics(last - 1, deploys=False)


def test_private_pretraining_is_paid_for():
    config = _config(noise_multiplier=2.0, pretraining="accounted").with_values(
        {"scenario": "init"}
    )
    paid = build_ledger(config, 500, pretrained=True)
    declared = build_ledger(
        config.with_values({"privacy.pretraining": "public"}), 500, pretrained=True
    )
    assert paid.pretraining.population == config.pretraining.clients
    assert declared.pretraining is None
    groups = [epsilon_of(plan.event(), 1e-6) for plan in (paid.pretraining, paid.plan)]
    assert paid.epsilon(50) == pytest.approx(max(groups), rel=1e-9)  # nobody is in both
    assert paid.epsilon(50) > declared.epsilon(50)
    assert paid.epsilon(0) == pytest.approx(groups[0], rel=1e-9)
    tight = [epsilon_of(plan.event(), 1e-6, "pld") for plan in (paid.pretraining, paid.plan)]
    assert paid.tight_epsilon(50) == pytest.approx(max(tight), rel=1e-6)
    short = config.with_values(
        {"pretraining.rounds": 1, "pretraining.clients": 400, "clients_per_round": 8}
    )
    assert build_ledger(short, 30, pretrained=True).epsilon(50) == pytest.approx(
        build_ledger(
            short.with_values({"privacy.pretraining": "public"}), 30, pretrained=True
        ).epsilon(50)
    )
    with pytest.raises(ConfigError, match="pretraining"):
        build_ledger(config.with_values({"privacy.pretraining": None}), 500, pretrained=True)


def test_a_sweep_spends_what_all_its_runs_spend():
    ledger = Ledger(plan())
    assert composed_epsilon(ledger, 1) == pytest.approx(ledger.epsilon(1600), rel=1e-9)
    found = sweep_cost(ledger, 9)
    assert found["epsilon_together"] > found["epsilon_each"]
    longer = plan(rounds=9 * 1600)
    assert found["epsilon_together"] == pytest.approx(plan_epsilon(longer), rel=1e-9)
    assert "tuning spends privacy" in found["note"]


def test_shown_numbers():
    assert [show(x) for x in (15.8167, 1.4912, 4.1025, 0.19428, 11374.2, 123.4, math.inf)] == [
        "15.8",
        "1.49",
        "4.10",
        "0.194",
        "11374",
        "123",
        "infinite",
    ]
