"""Sums, intervals and warnings: what clients return is enough, and what is said of it holds."""

import numpy as np
import pytest
from known_worlds import world

from fedbandit.core.errors import ConfigError, DataError
from fedbandit.ope import (
    BUILT_IN,
    IPS,
    Bernstein,
    Bootstrap,
    Clipped,
    Records,
    SelfNormalisedIPS,
    added,
    combine,
    estimate,
    sums_of,
)

WORLD = world()
MODEL = WORLD.means + 0.1


@pytest.mark.parametrize("name", BUILT_IN)
def test_clients_sums_added_up_are_the_sums_of_the_log(name):
    records = WORLD.log(3, clients=17, model=MODEL)
    whole = sums_of(records, BUILT_IN[name], Clipped(4), Bootstrap(40, seed=5))
    apart = added([sums_of(records.client(c), BUILT_IN[name], Clipped(4), Bootstrap(40, seed=5)) for c in range(17)])
    for field in vars(whole):
        np.testing.assert_allclose(getattr(apart, field), getattr(whole, field), rtol=1e-10)
    assert combine(apart, BUILT_IN[name]).value == pytest.approx(combine(whole, BUILT_IN[name]).value)


def test_a_client_without_events_changes_nothing_but_the_count():
    records = WORLD.log(3, clients=6)
    bounds = np.insert(records.bounds, 3, records.bounds[3])
    with_idle = Records(np.arange(7), bounds, records.rewards, records.propensities, records.target)
    found, before = (combine(sums_of(r, IPS()), IPS()) for r in (with_idle, records))
    assert found.value == pytest.approx(before.value)
    assert (found.clients, before.clients) == (7, 6)


def test_estimates_by_hand():
    """Two clients; weights 2, 0.5 and 4; rewards 1, 1 and 0.5."""
    records = Records(
        clients=np.arange(2),
        bounds=np.array([0, 2, 3]),
        rewards=np.array([1.0, 1.0, 0.5]),
        propensities=np.array([0.25, 0.8, 0.2]),
        target=np.array([0.5, 0.4, 0.8]),
    )
    found = estimate(records, {"ips": IPS(), "snips": SelfNormalisedIPS()})
    assert found["ips"].value == pytest.approx(4.5 / 3)
    assert found["snips"].value == pytest.approx(4.5 / 6.5)
    assert found["ips"].effective_sample_size == pytest.approx(6.5**2 / 20.25)
    assert found["ips"].mean_weight == pytest.approx(6.5 / 3)
    # Clients' sums are 2.5 of 2 events and 2 of 1: residuals -0.5 and 0.5 around 1.5.
    assert found["ips"].standard_error == pytest.approx(np.sqrt(0.5 * 2) / 3)


@pytest.mark.parametrize("name", ["ips", "snips", "dr"])
def test_bootstrap_over_clients_covers_the_truth(name):
    """Clients differ in taste, so intervals that took events as independent would be too short."""
    draws = 200
    hits = 0
    for seed in range(draws):
        records = WORLD.log(seed, clients=60, events=30, model=MODEL, client_spread=0.2)
        found = estimate(records, {"e": BUILT_IN[name]}, bootstrap=Bootstrap(300, seed))["e"]
        hits += found.interval.contains(WORLD.truth)
    assert hits >= 0.95 * draws - 3 * np.sqrt(draws * 0.95 * 0.05)


def test_bootstrap_interval_is_as_wide_as_the_standard_error_says():
    records = WORLD.log(0, clients=400, events=10)
    found = estimate(records, {"e": IPS()}, bootstrap=Bootstrap(4000))["e"]
    width = found.interval.high - found.interval.low
    assert width == pytest.approx(2 * 1.96 * found.standard_error, rel=0.08)


def test_empirical_bernstein_covers_the_truth_and_is_the_wider_one():
    floor = float(WORLD.logging.min())
    hits = 0
    for seed in range(100):
        records = WORLD.log(seed, model=MODEL)
        both = estimate(records, {"ips": IPS(), "dr": BUILT_IN["dr"]}, bernstein=Bernstein(0, 1, floor))
        hits += all(found.interval.contains(WORLD.truth) for found in both.values())
        plain = estimate(records, {"ips": IPS()}, bootstrap=Bootstrap(200))["ips"].interval
        assert both["ips"].interval.high - both["ips"].interval.low > plain.high - plain.low
    assert hits >= 95  # a bound, not an approximation: it covers more than it promises


def test_a_self_normalised_estimate_has_no_bernstein_interval():
    sums = sums_of(WORLD.log(0), SelfNormalisedIPS())
    with pytest.raises(ConfigError, match="bootstrap"):
        combine(sums, SelfNormalisedIPS(), bernstein=Bernstein(0, 1, 0.05))


def test_overlap_is_warned_of():
    good = estimate(WORLD.log(0), {"e": IPS()})["e"]
    assert not good.warnings
    few = estimate(WORLD.log(0, clients=4, events=10), {"e": IPS()})["e"]
    assert any("poor overlap" in text for text in few.warnings)
    assert any("only 4 clients" in text for text in few.warnings)
    clipped = estimate(WORLD.log(0), {"e": IPS()}, weighting=Clipped(0.5))["e"]
    assert any("clipping" in text for text in clipped.warnings)
    records = WORLD.log(0)
    nothing = Records(records.clients, records.bounds, records.rewards, records.propensities, 0 * records.target)
    assert "says nothing" in estimate(nothing, {"e": IPS()})["e"].warnings[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [({"propensities": 0.0}, "propensities"), ({"rewards": np.nan}, "rewards"), ({"target": 1.5}, "target")],
)
def test_impossible_logs_are_refused(change, message):
    records = WORLD.log(0)
    ((name, value),) = change.items()
    columns = {key: getattr(records, key).copy() for key in ("rewards", "propensities", "target")}
    columns[name][5] = value
    with pytest.raises(DataError, match=message):
        Records(records.clients, records.bounds, **columns)
