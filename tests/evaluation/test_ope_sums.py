"""Sums, intervals and warnings: what clients return is enough, and what is said of it holds."""

from dataclasses import replace
from functools import reduce
from math import sqrt
from operator import add

import numpy as np
import pytest
from benchmarks.coverage import KINDS, Kind, _sums, covered
from known_worlds import world

from fedbandit.core.errors import DataError
from fedbandit.evaluation.estimators import draws_of
from fedbandit.ope import (
    BUILT_IN,
    IPS,
    Bootstrap,
    Clipped,
    DoublyRobustEstimator,
    Range,
    Records,
    SelfNormalisedIPS,
    Switch,
    choose_estimator,
    combine,
    estimate,
    sums_of,
)

WORLD = world()
MODEL = WORLD.means + 0.1


def least_expected(draws: int, coverage: float = 0.95) -> float:
    """What an interval that covers as promised stays above, three standard errors below the promise."""
    return coverage - 3 * sqrt(coverage * (1 - coverage) / max(1, draws))


@pytest.mark.parametrize("name", BUILT_IN)
def test_clients_sums_added_up_are_the_sums_of_the_log(name):
    records = WORLD.log(3, clients=17, model=MODEL)
    whole = sums_of(records, BUILT_IN[name], Clipped(4), Bootstrap(40, seed=5))
    apart = reduce(
        add,
        [
            sums_of(records.client(c), BUILT_IN[name], Clipped(4), Bootstrap(40, seed=5))
            for c in range(17)
        ],
    )
    assert apart.extremes == whole.extremes
    for field in set(vars(whole)) - {"extremes"}:
        np.testing.assert_allclose(
            getattr(apart, field), getattr(whole, field), rtol=1e-9, atol=1e-9
        )
    assert combine(apart, BUILT_IN[name]).value == pytest.approx(
        combine(whole, BUILT_IN[name]).value
    )


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


def test_bootstrap_interval_is_hardly_wider_than_the_standard_error_says():
    records = WORLD.log(0, clients=400, events=10)
    found = estimate(records, {"e": IPS()}, bootstrap=Bootstrap(4000))["e"]
    width = found.interval.high - found.interval.low
    assert 0.98 < width / (2 * 1.96 * found.standard_error) < 1.12


def test_empirical_bernstein_covers_the_truth_and_is_the_wider_one():
    floor = float(WORLD.logging.min())
    hits = 0
    for seed in range(60):
        records = WORLD.log(seed, clients=1000, events=1, model=MODEL)
        every = {"ips": IPS(), "snips": SelfNormalisedIPS(), "dr": BUILT_IN["dr"]}
        bounds = estimate(
            records, every, interval="bernstein", within=Range(0, 1, floor), bootstrap=Bootstrap(0)
        )
        hits += all(found.interval.contains(WORLD.truth) for found in bounds.values())
        plain = estimate(records, {"ips": IPS()}, bootstrap=Bootstrap(200))["ips"].interval
        assert bounds["ips"].interval.high - bounds["ips"].interval.low > plain.high - plain.low
    assert hits == 60  # a bound, not an approximation: it covers more than it promises


def test_bernstein_holds_for_clients_whose_events_are_all_alike():
    """Over events it covered 0.64 of the time: a client's fifty events are one."""
    kind = Kind("copies", clients=400, events=50, copies=True, estimators={"ips": IPS()})
    found = covered(kind, 100, interval="bernstein", replicates=0)["ips"]
    assert found.coverage == 1
    assert found.refused == 0


def test_the_range_of_rewards_counts():
    records = WORLD.log(0, clients=400, events=5)
    widths = []
    for low, high in ((0, 1), (-10, 10)):
        ends = estimate(records, {"e": IPS()}, interval="bernstein", within=Range(low, high))[
            "e"
        ].interval
        assert low <= ends.low < ends.high <= high
        widths.append(ends.high - ends.low)
    assert widths[1] > 5 * widths[0]


def _nothing_matched(rewards):
    """Three hundred clients with an event each; the policy's action was taken by half of them."""
    half = np.arange(300) % 2
    return Records(
        clients=np.arange(300),
        bounds=np.arange(301),
        rewards=np.asarray(rewards, float) * np.ones(300) * (half == 0),
        propensities=np.full(300, 0.5),
        target=(half == 1).astype(float),
    )


@pytest.mark.parametrize("estimator", [IPS(), SelfNormalisedIPS()])
def test_where_no_reward_was_matched_the_value_is_not_said_to_be_nil(estimator):
    found = estimate(_nothing_matched(1.0), {"e": estimator})["e"]
    assert found.value == 0
    assert found.interval.low == 0
    assert (
        0.01 < found.interval.high < 0.1
    )  # 150 matched events without a reward: the rule of three, for two sides
    assert not found.interval.refusal


def test_where_nothing_can_be_said_nothing_is():
    same = estimate(_nothing_matched(0.0), {"e": IPS()})["e"].interval
    assert "all rewards of the log are the same" in same.refusal
    assert (same.low, same.high) == (-np.inf, np.inf)
    told = estimate(_nothing_matched(0.0), {"e": IPS()}, within=Range(0, 1))["e"].interval
    assert not told.refusal
    assert 0 < told.high < 0.1
    few = estimate(WORLD.log(0, clients=2, events=2), {"e": IPS()}, within=Range(0, 1, 0.05))[
        "e"
    ].interval
    assert "too small" in few.refusal
    assert (few.low, few.high) == (0, 1)
    model = estimate(WORLD.log(0, model=MODEL), {"e": BUILT_IN["dm"]})["e"].interval
    assert "how wrong the reward model is" in model.refusal


QUICK = 80  # draws; the table in docs/off-policy.md has 400


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_intervals_cover_on_every_kind_of_log(kind):
    for name, found in covered(
        replace(kind, estimators=_some(kind)), QUICK // (1 + 3 * kind.estimated), replicates=200
    ).items():
        given = QUICK * (1 - found.refused)
        assert found.refused > 0.9 or found.coverage >= least_expected(round(given)), name


def _some(kind):
    """Two estimators a kind, so that the test stays quick: every other kind has the doubly robust one."""
    names = ("ips", "dr") if KINDS.index(kind) % 2 else ("snips", "switch")
    return {name: BUILT_IN[name] for name in names}


def test_the_sums_of_the_study_are_those_of_the_estimators():
    kind = Kind("one", clients=30, sizes="geometric")
    records, counts = (
        kind.records(np.random.default_rng(0), 2),
        draws_of(np.arange(30), Bootstrap(50)),
    )
    bounds = records.bounds[:31]
    first = {name: getattr(records, name)[: bounds[-1]] for name in COLUMNS}
    alone = sums_of(
        Records(np.arange(30), bounds, **first), DoublyRobustEstimator(), bootstrap=Bootstrap(50)
    )
    study = _sums(kind, records, DoublyRobustEstimator(), counts, 2)[0]
    assert study.extremes == alone.extremes
    for field in set(vars(alone)) - {"extremes"}:
        np.testing.assert_allclose(
            getattr(study, field), getattr(alone, field), rtol=1e-9, atol=1e-9
        )


COLUMNS = ("rewards", "propensities", "target", "predicted", "expected")


def test_what_clipping_and_switching_leave_out_widens_the_interval():
    records = WORLD.log(0, clients=400, model=WORLD.means)
    every = {"ips": IPS(), "switch": Switch(1.5)}
    plain = estimate(records, {"ips": IPS(), "switch": DoublyRobustEstimator()})
    cut = estimate(records, every, weighting=Clipped(1.5))
    for name in every:
        assert "left out" in cut[name].interval.method
        assert cut[name].interval.contains(WORLD.truth)
    assert (
        cut["switch"].interval.high - cut["switch"].interval.low
        > plain["switch"].interval.high - WORLD.truth
    )
    assert cut["ips"].value < plain["ips"].value


def test_switch_is_doubly_robust_below_its_limit_and_the_model_above():
    records = WORLD.log(0, model=MODEL)
    every = {
        "dr": DoublyRobustEstimator(),
        "all": Switch(1e6),
        "none": Switch(1e-9),
        "dm": BUILT_IN["dm"],
    }
    found = estimate(records, every, bootstrap=Bootstrap(2))
    assert found["all"].value == pytest.approx(found["dr"].value)
    assert found["none"].value == pytest.approx(found["dm"].value)


def test_cross_validation_over_clients_shuns_a_wrong_model_and_uses_a_right_one():
    every = {name: BUILT_IN[name] for name in ("ips", "snips", "dm", "dr")}
    wrong = [
        choose_estimator(WORLD.log(s, clients=200, model=1 - WORLD.means), every) for s in range(20)
    ]
    assert "dm" not in wrong
    beside = {"ips": IPS(), "dm": BUILT_IN["dm"]}
    right = [
        choose_estimator(WORLD.log(s, clients=60, events=5, model=WORLD.means), beside)
        for s in range(20)
    ]
    assert set(right) <= {"ips", "dm"}
    assert (
        choose_estimator(WORLD.log(0, clients=10), {"ips": IPS()}) is None
    )  # too few clients to hold any out


def test_overlap_is_warned_of():
    good = estimate(WORLD.log(0), {"e": IPS()})["e"]
    assert not good.warnings
    few = estimate(WORLD.log(0, clients=4, events=10), {"e": IPS()})["e"]
    assert any("poor overlap" in text for text in few.warnings)
    assert any("only 4 clients" in text for text in few.warnings)
    clipped = estimate(WORLD.log(0), {"e": IPS()}, weighting=Clipped(0.5))["e"]
    assert any("clipping" in text for text in clipped.warnings)
    records = WORLD.log(0)
    nothing = Records(
        records.clients, records.bounds, records.rewards, records.propensities, 0 * records.target
    )
    assert "says nothing" in estimate(nothing, {"e": IPS()})["e"].warnings[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"propensities": 0.0}, "propensities"),
        ({"rewards": np.nan}, "rewards"),
        ({"target": 1.5}, "target"),
    ],
)
def test_impossible_logs_are_refused(change, message):
    records = WORLD.log(0)
    ((name, value),) = change.items()
    columns = {key: getattr(records, key).copy() for key in ("rewards", "propensities", "target")}
    columns[name][5] = value
    with pytest.raises(DataError, match=message):
        Records(records.clients, records.bounds, **columns)


def _logged(rng, clients, events, propensity, said, rewards):
    """A log that took an action with `propensity` and says `said`, for a policy that always does."""
    n = clients * events
    taken = rng.random(n) < propensity
    return Records(
        clients=np.arange(clients),
        bounds=np.arange(clients + 1) * events,
        rewards=rewards,
        propensities=np.where(taken, said, 1 - said),
        target=taken.astype(float),
    )


def test_wrong_propensities_get_no_interval():
    """Weights that average 1.8 gave an ips interval of width 0.168, 0.4 beside the truth."""
    rng = np.random.default_rng(0)
    rewards = (rng.random(3000) < 0.5).astype(float)
    wrong = _logged(rng, 300, 10, 0.9, 0.5, rewards)
    for name, found in estimate(wrong, {"ips": IPS(), "snips": SelfNormalisedIPS()}).items():
        assert found.mean_weight == pytest.approx(1.8, abs=0.02)
        assert "propensities are wrong" in found.interval.refusal, name
        assert any("should average 1" in text for text in found.warnings)
    right = _logged(rng, 300, 10, 0.9, 0.9, rewards)
    assert not estimate(right, {"ips": IPS()})["ips"].interval.refusal


def test_weights_are_judged_by_their_own_error_over_clients():
    """Where each client has one action, weights vary between clients alone: 20 clients say little."""
    rng = np.random.default_rng(3)
    taken = np.repeat(rng.random(20) < 0.7, 50)
    records = Records(
        clients=np.arange(20),
        bounds=np.arange(21) * 50,
        rewards=rng.random(1000),
        propensities=np.full(1000, 0.5),
        target=taken.astype(float),
    )
    found = estimate(records, {"ips": IPS()})["ips"]
    assert abs(found.mean_weight - 1) > 0.1
    assert "propensities are wrong" not in found.interval.refusal


def test_of_equally_good_estimators_the_narrower_interval_is_marked():
    rng = np.random.default_rng(1)
    propensities = np.where(rng.random(4000) < 0.5, 0.02, 0.9)
    records = Records(
        clients=np.arange(200),
        bounds=np.arange(201) * 20,
        rewards=(rng.random(4000) < 0.005).astype(float),
        propensities=propensities,
        target=np.where(rng.random(4000) < 0.5, propensities, 0.1 * propensities),
    )
    both = {"ips": IPS(), "snips": SelfNormalisedIPS()}
    found = estimate(records, both, bootstrap=Bootstrap(200))
    widths = {name: one.interval.high - one.interval.low for name, one in found.items()}
    assert widths["ips"] < widths["snips"]
    assert choose_estimator(records, both) == "snips"  # without intervals, the steadier one
    assert choose_estimator(records, both, among=found) == "ips"


def test_a_few_clients_with_most_of_the_events_are_warned_of():
    rng = np.random.default_rng(0)
    sizes = np.where(np.arange(200) % 50 == 0, 490, 10)
    n = int(sizes.sum())
    records = Records(
        clients=np.arange(200),
        bounds=np.concatenate([[0], np.cumsum(sizes)]),
        rewards=rng.random(n),
        propensities=np.full(n, 0.5),
        target=np.full(n, 0.5),
    )
    found = estimate(records, {"ips": IPS()}, bootstrap=Bootstrap(50))["ips"]
    assert any("200 clients count as 16" in text for text in found.warnings)
    even = replace(records, bounds=np.arange(201) * n // 200)
    assert not estimate(even, {"ips": IPS()}, bootstrap=Bootstrap(50))["ips"].warnings


def test_a_few_clients_with_half_of_the_events_may_differ_as_all_others_do():
    """Where the four agreed, nothing of them showed that they need not: 0.87 held the truth."""
    [kind] = [kind for kind in KINDS if kind.name == "the same of 200, who differ"]
    for name, found in covered(replace(kind, estimators=_some(kind)), 300, replicates=200).items():
        assert found.refused == 0
        assert found.coverage >= 0.93, name
