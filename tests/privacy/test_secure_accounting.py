"""What secure sums add to the accounting: whole orders for discrete noise, and the price of drawing a round anew."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent, rdp

from fedbandit.privacy.accounting import Ledger, Redraws
from fedbandit.privacy.plan import PrivacyPlan
from fedbandit.privacy.reporting import in_one_line, summary

PAPER = {"population": 342_477, "clients_per_round": 64, "rounds": 1600, "noise_multiplier": 0.7}
REACH = 60  # of the noise below, in whole numbers: what lies beyond is less than 1e-14


@pytest.mark.parametrize(
    ("dropped", "charged"), [(0.0, 8e-12), (0.3, 1.4e-6), (0.5, 6e-4), (0.7, 1.8e-2)]
)
def test_the_price_of_redraws_over_a_whole_run(dropped, charged):
    """64 of 342,477 on average in 1,600 rounds, with 20 needed in each sum."""
    survives = 64 / 342_477 * (1 - dropped)
    found = 1600 * Redraws(20, 342_477).chance(survives)
    assert found == pytest.approx(charged, rel=0.06)


def test_it_is_the_chance_of_being_one_of_exactly_as_many_as_are_needed():
    """eta = (k/M) · P(|S| = k | |S| >= k): all devices are alike, so each is among k of M with k/M."""
    from scipy.stats import binom

    for needed, connected, probability in [(3, 10, 0.3), (5, 5, 0.9), (20, 400, 0.1)]:
        given = binom.pmf(needed, connected, probability) / binom.sf(
            needed - 1, connected, probability
        )
        found = Redraws(needed, connected).chance(probability)
        assert found == pytest.approx(needed / connected * given, rel=1e-9)


def test_fewer_connected_devices_cost_more_and_so_does_needing_more_of_them():
    """What a plan states as the least that are connected is therefore the worst case."""
    over_devices = [Redraws(20, connected).chance(0.05) for connected in (200, 400, 800, 1600)]
    over_needed = [Redraws(needed, 800).chance(0.05) for needed in (3, 10, 20, 30)]
    assert over_devices == sorted(over_devices, reverse=True)
    assert over_needed == sorted(over_needed)
    assert Redraws(20, 19).chance(0.05) == 1.0  # no round can ever be released without the last one


def noise_at(shift, deviation=2.0):
    """The law of a whole number plus discrete noise, over -REACH..REACH."""
    weights = np.exp(-((np.arange(-REACH, REACH + 1) - shift) ** 2) / (2 * deviation**2))
    return weights / weights.sum()


def released(values, probabilities, needed):
    """The law of the sum of those who survive a draw, with noise, given that there are enough of them."""
    law, total = np.zeros(2 * REACH + 1), 0.0
    for survive in itertools.product([False, True], repeat=len(values)):
        chance = math.prod(p if s else 1 - p for p, s in zip(probabilities, survive, strict=True))
        if sum(survive) >= needed:
            law += chance * noise_at(sum(v for v, s in zip(values, survive, strict=True) if s))
            total += chance
    return law / total


def delta_at(epsilon, p, q, rounds):
    """The least delta for which P(E) <= e^epsilon Q(E) + delta, for so many independent rounds."""
    for _ in range(rounds - 1):
        p, q = np.outer(p, p).reshape(-1), np.outer(q, q).reshape(-1)
    return float(np.maximum(p - math.exp(epsilon) * q, 0).sum())


WORLDS = [  # the others' numbers, their chance of surviving, that device's number and chance, devices needed
    ([3, 3, 3, 3], 0.6, -3, 0.6, 4),  # without it a sum of fewer than all four is never seen
    ([3, -3, 0, 2, 3], 0.4, 3, 0.2, 3),
    ([0, 0, 0, 0, 0, 0], 0.5, 3, 0.5, 2),
    ([3, 3, 3, 3, 3], 0.9, 3, 0.9, 1),
    ([3, 2, 1, -3, -3, -3], [0.2, 0.3, 0.4, 0.5, 0.6, 0.7], 3, 0.5, 4),
]


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize(("others", "survive", "own", "chance", "needed"), WORLDS)
def test_redraws_cost_no_more_than_is_charged(others, survive, own, chance, needed, rounds):
    """All draws of a small population counted out, in both orders of the neighbours and at many epsilons."""
    survive = survive if isinstance(survive, list) else [survive] * len(others)
    without = released(others, survive, needed)
    with_it = released([*others, own], [*survive, chance], needed)
    sampled, plain = (
        (1 - chance) * noise_at(0) + chance * noise_at(own),
        noise_at(0),
    )  # no redraws: Poisson sampling
    worst = min(survive)  # the formula is for devices that are alike; fewer survivors cost more
    eta = Redraws(needed, len(others) + 1).chance(worst, chance)
    for epsilon in np.linspace(0, 6, 25):
        stated = delta_at(epsilon, sampled, plain, rounds)
        assert delta_at(epsilon, with_it, without, rounds) <= stated + rounds * eta + 1e-12
        stated = delta_at(epsilon, plain, sampled, rounds)
        assert (
            delta_at(epsilon - rounds * math.log1p(-eta), without, with_it, rounds)
            <= stated + 1e-12
        )


def test_without_the_charge_the_promise_would_be_broken():
    others, survive, own, chance, needed = WORLDS[0]
    without = released(others, [survive] * 4, needed)
    with_it = released([*others, own], [survive] * 4 + [chance], needed)
    sampled = (1 - chance) * noise_at(0) + chance * noise_at(own)
    assert delta_at(3.0, with_it, without, 1) > 2 * delta_at(3.0, sampled, noise_at(0), 1)


def ledger(**changed):
    return Ledger(PrivacyPlan(**PAPER), discrete=True, **changed)


def test_discrete_noise_is_accounted_at_whole_orders_alone():
    orders = [*range(2, 64), 128, 256, 512, 1024]
    one = PoissonSampledDpEvent(64 / 342_477, GaussianDpEvent(0.7))
    expected = rdp.RdpAccountant(orders).compose(SelfComposedDpEvent(one, 1600)).get_epsilon(1e-6)
    assert ledger().epsilon(1600) == pytest.approx(expected, rel=1e-9)
    usual = replace(ledger(), discrete=False)
    assert (usual.epsilon(1600), ledger().epsilon(1600)) == pytest.approx(
        (1.49, 1.55), abs=0.005
    )  # as documented


def test_discrete_noise_has_no_privacy_loss_distribution():
    found = summary(ledger(), 1600, deployed=True)
    assert found["epsilon_pld"] is None
    assert ledger().tight_epsilon(1600) == found["epsilon_rdp"]
    assert ledger().metrics(1600, True)["epsilon_pld"] is None
    assert "discrete Gaussian" in found["noise"]
    assert "PLD" not in in_one_line(found)


def test_redraws_are_charged_to_delta_and_to_epsilon():
    redraws = Redraws(20, 280_000)
    eta = redraws.chance(64 / 342_477)
    assert 1e-11 < eta < 5e-10
    charged, free = ledger(redraws=redraws), ledger()
    less = Ledger(PrivacyPlan(**PAPER, delta=1e-6 - 1600 * eta), discrete=True)
    assert charged.epsilon(1600) == pytest.approx(
        less.epsilon(1600) - 1600 * math.log1p(-eta), rel=1e-9
    )
    assert charged.epsilon(1600) > free.epsilon(1600)
    assert "fewer than 20 devices is never released" in summary(charged, 1600)["redraws"]


def test_redraws_that_cost_all_of_delta_leave_no_guarantee():
    assert ledger(redraws=Redraws(20, 100_000)).epsilon(1600) == math.inf
