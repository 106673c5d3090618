"""The estimators, statistically: unbiased where they should be, biased in the known direction where not."""

import numpy as np
import pytest
from known_worlds import ACTIONS, CONTEXTS, world

from fedbandit.ope import (
    IPS,
    Bootstrap,
    Clipped,
    DirectMethod,
    DoublyRobustEstimator,
    Plain,
    SelfNormalisedIPS,
    Shrunk,
    estimate,
)

DRAWS = 300
WORLD = world()
WRONG_MODEL = np.random.default_rng(7).uniform(0, 1, (CONTEXTS, ACTIONS))


def _values(estimator, weighting=Plain(), draws=DRAWS, **log):  # noqa: B008
    found = [
        estimate(
            WORLD.log(seed, **log), {"e": estimator}, weighting=weighting, bootstrap=Bootstrap(2)
        )["e"].value
        for seed in range(draws)
    ]
    return np.array(found)


def _bias(values):
    """The mean error, and its standard error."""
    return values.mean() - WORLD.truth, values.std(ddof=1) / np.sqrt(len(values))


@pytest.mark.parametrize(
    ("estimator", "log"),
    [
        (IPS(), {}),
        (DirectMethod(), {"model": WORLD.means}),
        (DoublyRobustEstimator(), {"model": WRONG_MODEL}),
        (
            DoublyRobustEstimator(),
            {"model": WORLD.means, "claimed": np.full((CONTEXTS, ACTIONS), 1 / ACTIONS)},
        ),
    ],
    ids=["ips", "dm with the right model", "dr with a wrong model", "dr with wrong propensities"],
)
def test_unbiased_where_it_should_be(estimator, log):
    bias, error = _bias(_values(estimator, **log))
    assert abs(bias) < 3 * error


def test_self_normalised_bias_vanishes_with_more_events():
    small, _ = _bias(_values(SelfNormalisedIPS(), clients=5, events=4))
    large, error = _bias(_values(SelfNormalisedIPS()))
    assert abs(large) < max(3 * error, abs(small) / 3)


def test_self_normalised_varies_less_than_ips():
    assert _values(SelfNormalisedIPS()).std() < _values(IPS()).std()


def test_doubly_robust_varies_less_than_ips_with_a_good_model():
    assert _values(DoublyRobustEstimator(), model=WORLD.means).std() < 0.8 * _values(IPS()).std()


@pytest.mark.parametrize("weighting", [Clipped(1.5), Shrunk(4.0)], ids=["clipped", "shrunk"])
def test_touched_weights_err_downwards_and_vary_less(weighting):
    values = _values(IPS(), weighting)
    bias, error = _bias(values)
    assert bias < -3 * error
    assert values.std() < _values(IPS()).std()


@pytest.mark.parametrize(("shift", "sign"), [(0.2, 1), (-0.2, -1)])
def test_direct_method_errs_as_its_model_does(shift, sign):
    bias, error = _bias(_values(DirectMethod(), model=WORLD.means + shift))
    assert sign * bias > 3 * error


def test_ips_errs_upwards_where_propensities_are_understated():
    bias, error = _bias(_values(IPS(), claimed=0.7 * WORLD.logging))
    assert bias > 3 * error


def test_ips_errs_downwards_where_the_log_never_takes_an_action():
    logging = WORLD.logging.copy()
    logging[:, 0] = 0
    logging /= logging.sum(axis=1, keepdims=True)
    blind = type(WORLD)(WORLD.means, logging, WORLD.target)
    values = np.array(
        [
            estimate(blind.log(s), {"e": IPS()}, bootstrap=Bootstrap(2))["e"].value
            for s in range(DRAWS)
        ]
    )
    missed = (WORLD.target[:, 0] * WORLD.means[:, 0]).mean()
    bias, error = _bias(values)
    assert bias < -3 * error
    assert abs(bias + missed) < 3 * error  # by exactly what the action would have earned
    warnings = " ".join(estimate(blind.log(0), {"e": IPS()})["e"].warnings)
    assert "never takes actions" in warnings


def test_the_shrunk_weight_has_the_largest_value_it_claims():
    weights = np.linspace(0, 50, 5001)
    for weighting in (Shrunk(9.0), Clipped(3.0), Plain()):
        for ceiling in (1.0, 2.0, 20.0):
            found = weighting(weights[weights <= ceiling]).max()
            assert found == pytest.approx(weighting.largest(ceiling), rel=1e-3)
