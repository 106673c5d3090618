"""The bounds: by hand in small cases, and the shapes that the paper's section 6 claims."""

from itertools import pairwise
from math import log, sqrt

import numpy as np
import pytest

from fedbandit.theory import (
    Setting,
    centralised_regret,
    epsilon_greedy_per_event,
    falcon_per_event,
    federated_regret,
    inverse_roots,
    is_vacuous,
    longest_useful_period,
)

SETTING = Setting(actions=4, epsilon=0.1, log_class=20.0, delta=0.05, optimization_error=0.0)


def test_federated_bound_by_hand():
    term = 20 + log(3 / 0.05)
    expected = 0.1 * 300 + 100 + sum(sqrt(80 * 100 * term / (i - 1)) for i in (2, 3))
    assert federated_regret(SETTING, 100, 3) == pytest.approx(expected)


def test_centralised_bound_by_hand():
    term = 20 + log(6 / 0.05)
    expected = 0.1 * 6 + 1 + sum(sqrt(80 * term / (j - 1)) for j in range(2, 7))
    assert centralised_regret(SETTING, 2, 3) == pytest.approx(expected)


def test_per_event_bounds_by_hand():
    error = (20 + log(5 / 0.05)) / 500 + 0.01
    setting = Setting(actions=4, epsilon=0.1, log_class=20.0, delta=0.05, optimization_error=0.01)
    assert epsilon_greedy_per_event(setting, 100, 5) == pytest.approx(0.1 + sqrt(80 * error))
    assert falcon_per_event(setting, 100, 5) == pytest.approx(sqrt(4 * error))


@pytest.mark.parametrize(
    "bound", [epsilon_greedy_per_event, falcon_per_event, federated_regret, centralised_regret]
)
def test_a_bound_needs_samples_and_periods(bound):
    for samples, periods in ((0, 5), (100, 0), (-1, 5)):
        with pytest.raises(ValueError, match="at least 1"):
            bound(SETTING, samples, periods)


def test_optimization_error_costs_the_same_in_both():
    worse = Setting(actions=4, epsilon=0.1, log_class=20.0, delta=0.05, optimization_error=0.02)
    price = sqrt(80 * 0.02) * 100 * 30
    assert federated_regret(worse, 100, 30) - federated_regret(SETTING, 100, 30) == pytest.approx(
        price
    )
    assert centralised_regret(worse, 100, 30) - centralised_regret(
        SETTING, 100, 30
    ) == pytest.approx(price)


def test_one_period_is_vacuous_while_the_centralised_bound_still_falls():
    for samples in (10**4, 10**6, 10**8):
        assert is_vacuous(federated_regret(SETTING, samples, 1), samples, 1)
    per_event = [centralised_regret(SETTING, n, 1) / n for n in (10**5, 10**7, 10**9)]
    assert per_event[0] > per_event[1] > per_event[2]
    beyond_exploration = np.array(per_event) - 0.1
    slope = np.diff(np.log(beyond_exploration)) / np.diff(np.log([10**5, 10**7, 10**9]))
    np.testing.assert_allclose(slope, -0.5, atol=0.03)  # 1/sqrt(n), but for the logarithm


def test_delay_costs_a_factor_that_shrinks_with_more_periods_where_the_bounds_say_something():
    n = 10**6
    ratios = [
        federated_regret(SETTING, n, i) / centralised_regret(SETTING, n, i) for i in (2, 8, 64, 512)
    ]
    assert all(earlier > later for earlier, later in pairwise(ratios))
    assert 1 <= ratios[-1] < 1.05


def test_where_both_say_nothing_the_printed_bounds_may_cross():
    """Eq. 9 charges the first period at most n, eq. 10 its first events more than 1 each."""
    assert federated_regret(SETTING, 1000, 2) < centralised_regret(SETTING, 1000, 2)
    assert is_vacuous(federated_regret(SETTING, 1000, 2), 1000, 2)


def test_longer_periods_never_help():
    events = 7_200_000
    regrets = [
        federated_regret(SETTING, n, events // n)
        for n in (60_000, 120_000, 720_000, 3_600_000, 7_200_000)
    ]
    assert regrets == sorted(regrets)
    longest = longest_useful_period(SETTING, 10**6)
    assert longest is not None
    assert not is_vacuous(
        federated_regret(SETTING, longest, 10**6 // longest), longest, 10**6 // longest
    )
    assert is_vacuous(federated_regret(SETTING, 10**6, 1), 10**6, 1)


def test_long_sums_agree_with_short_ones():
    for count in (999_999, 1_000_000, 1_000_001, 1_000_002):
        assert inverse_roots(count + 1) - inverse_roots(count) == pytest.approx(
            1 / sqrt(count + 1), rel=1e-5
        )
    assert inverse_roots(0) == 0


@pytest.mark.parametrize(
    "wrong",
    [{"actions": 1}, {"epsilon": 0}, {"log_class": -1}, {"delta": 1}, {"optimization_error": -0.1}],
)
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Setting(**{"actions": 4, **wrong})
