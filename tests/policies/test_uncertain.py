"""Rules with growing confidence or with uncertainty, each against a short form in float64."""

from math import erf, exp, pi, sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbandit.core.prediction import Prediction, Progress
from fedbandit.policies import (
    Bagging,
    DecayingEpsilon,
    EpsilonGreedy,
    Falcon,
    Floored,
    Greedy,
    Optimistic,
    Softmax,
    SquareCB,
    Thompson,
    Ucb,
    describe,
    importance_scale,
    make_policy,
    rule_at,
)


@st.composite
def decisions(draw):
    """Means, widths of many sizes, heads, and what is available: [n, K]."""
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    n, k, heads = draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.integers(1, 5))
    mean, width = rng.normal(size=(n, k)), 10.0 ** rng.uniform(-3, 1, (n, k))
    available = rng.random((n, k)) < 0.7
    available[:, rng.integers(k)] = True
    told = Prediction(mean, heads=mean[:, None] + rng.normal(size=(n, heads, k)), width=width)
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    return told.astype(dtype), available if draw(st.booleans()) else None


RULES = [
    Ucb(0.7), Thompson(0.5), Bagging(), Optimistic(Softmax(0.3), 0.5), Optimistic(Falcon(None, 9), 1),
    Floored(Ucb(), 0.2), rule_at(SquareCB(), Progress(2, 20, 300, 5)),
    rule_at(DecayingEpsilon(), Progress(2, 20, 300, 5)),
]  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("by", ["heads", "width"])
@given(case=decisions())
@settings(max_examples=25, deadline=None)
def test_probabilities_are_a_distribution_over_what_is_available(rule, by, case):
    told, available = case
    if by == "width" and not isinstance(rule, Bagging):
        told = Prediction(told.mean, width=told.width)
    p = rule.probabilities(told, available)
    assert p.shape == told.mean.shape
    assert p.dtype == told.mean.dtype
    np.testing.assert_allclose(p.sum(axis=-1), 1, rtol=1e-5)
    assert (p >= 0).all()
    if available is not None:
        assert (p[~available] == 0).all()
    alone = rule.probabilities(
        Prediction(*(None if a is None else a[:1] for a in (told.mean, told.heads, told.width))),
        None if available is None else available[:1],
    )
    np.testing.assert_array_equal(alone, p[:1])  # no decision depends on its neighbours


def by_a_fine_grid(means, widths, available=None):
    """The probability that each Gaussian is the largest, by sums over 60,000 points."""
    chosen = [a for a in range(len(means)) if available is None or available[a]]
    low = max(means[a] - 7 * widths[a] for a in chosen)
    high = max(means[a] + 7 * widths[a] for a in chosen)
    found = np.zeros(len(means))
    for x in np.linspace(low, high, 60_001):
        below = {a: (1 + erf((x - means[a]) / widths[a] / sqrt(2))) / 2 for a in chosen}
        for a in chosen:
            density = exp(-(((x - means[a]) / widths[a]) ** 2) / 2) / (widths[a] * sqrt(2 * pi))
            found[a] += density * np.prod([below[b] for b in chosen if b != a])
    return found / found.sum()


@pytest.mark.parametrize(
    ("means", "widths", "available"),
    [
        ([0.0, 0.1], [1.0, 1.0], None),
        ([0.0, 0.002, -0.5], [0.001, 0.001, 1.0], None),
        ([0.3, 0.1, 0.2, 0.25, -1.0], [0.1, 0.4, 0.02, 0.2, 0.5], None),
        ([0.3, 9.0, 0.2, 0.25], [0.1, 0.4, 0.02, 0.2], [True, False, True, True]),
        (np.linspace(0, 0.2, 20), np.linspace(0.05, 0.4, 20), None),
    ],
)
def test_thompson_on_widths_is_right_to_1e_4(means, widths, available):
    told = Prediction(np.array([means], float), width=np.array([widths], float))
    allowed = None if available is None else np.array([available])
    found = Thompson().probabilities(told, allowed)[0]
    np.testing.assert_allclose(found, by_a_fine_grid(means, widths, available), rtol=0, atol=1e-4)


def test_thompson_is_what_drawing_gives():
    rng = np.random.default_rng(0)
    mean, width = rng.normal(size=6), rng.uniform(0.1, 1, 6)
    drawn = (mean + 2 * width * rng.normal(size=(200_000, 6))).argmax(axis=1)
    shares = np.bincount(drawn, minlength=6) / len(drawn)
    found = Thompson(scale=2.0).probabilities(Prediction(mean[None], width=width[None]))[0]
    np.testing.assert_allclose(found, shares, atol=4 * np.sqrt(0.25 / len(drawn)))


def test_without_any_width_thompson_is_greedy():
    told = Prediction(np.array([[0.1, 0.3, 0.2]]), width=np.zeros((1, 3)))
    np.testing.assert_allclose(Thompson().probabilities(told), [[0, 1, 0]], atol=1e-12)


def test_ucb_is_greedy_on_the_upper_bound_and_heads_give_a_width():
    rng = np.random.default_rng(1)
    mean, heads = rng.normal(size=(5, 4)), rng.normal(size=(5, 7, 4))
    for told, width in (
        (Prediction(mean, width=np.abs(mean)), np.abs(mean)),
        (Prediction(mean, heads=heads), heads.std(axis=1)),
    ):
        best = (mean + 0.5 * width).argmax(axis=1)
        np.testing.assert_array_equal(Ucb(0.5).probabilities(told), np.eye(4)[best])
        expected = Softmax(0.2).probabilities(Prediction(mean + 0.5 * width))
        np.testing.assert_allclose(Optimistic(Softmax(0.2), 0.5).probabilities(told), expected)


def test_bagging_counts_votes_and_ties_go_to_the_lowest():
    heads = np.array([[[1.0, 1.0, 0.0], [0.0, 2.0, 1.0], [0.0, 0.0, 5.0], [3.0, 0.0, 1.0]]])
    told = Prediction(heads.mean(axis=1), heads=heads)
    np.testing.assert_array_equal(Bagging().probabilities(told), [[0.5, 0.25, 0.25]])
    np.testing.assert_array_equal(Thompson().probabilities(told), [[0.5, 0.25, 0.25]])
    without = Bagging().probabilities(told, np.array([True, True, False]))
    np.testing.assert_array_equal(without, [[0.75, 0.25, 0]])


def test_squarecb_grows_and_takes_k_from_the_decision():
    policy, scores = SquareCB(scale=3.0, power=0.25), np.array([[0.2, 0.5, 0.1, 0.4]])
    np.testing.assert_allclose(policy.probabilities(Prediction(scores)), 0.25)
    rule = rule_at(policy, Progress(version=2, events=10_000))
    for available in (None, np.array([[True, True, False, True]])):
        k = 4 if available is None else 3
        expected = 1 / (k + 3.0 * 10_000**0.25 * (0.5 - scores[0]))
        expected[2] *= available is None
        expected[1] = 1 - expected[[0, 2, 3]].sum()
        np.testing.assert_allclose(rule.probabilities(Prediction(scores), available)[0], expected)


def test_epsilon_decays_with_events():
    policy = DecayingEpsilon(start=0.8, half=100.0, power=0.5, least=0.1)
    found = [rule_at(policy, Progress(version=1, events=n)).epsilon for n in (0, 300, 10**9)]
    assert found == [0.8, 0.4, 0.1]
    assert importance_scale(rule_at(policy, Progress()), 4) == pytest.approx(0.2)


def test_rules_ship_as_names_and_parameters():
    for given_as in (
        {"name": "ucb", "alpha": 0.3, "floor": 0.1},
        {"name": "softmax", "beta": 0.2, "alpha": 0.5, "floor": 0.1},
        {"name": "thompson", "scale": 2.0},
        {"name": "bagging"},
        {"name": "falcon", "mu": None, "gamma": 5.0},
    ):
        name, parameters = given_as["name"], {k: v for k, v in given_as.items() if k != "name"}
        assert describe(make_policy(name, parameters)) == given_as


def test_a_floor_under_a_greedy_bound_scales_importance_by_its_smallest_probability():
    assert importance_scale(Floored(Ucb(), 0.2), 10) == pytest.approx(0.02)
    assert importance_scale(Floored(Greedy(), 0.2), 10) == pytest.approx(0.02)
    assert importance_scale(Floored(EpsilonGreedy(0.5), 0.2), 10) == pytest.approx(0.06)


def test_a_model_without_uncertainty_is_refused_in_one_line():
    plain = Prediction(np.zeros((1, 2)))
    for rule in (Ucb(), Thompson(), Optimistic(Softmax(), 1.0)):
        with pytest.raises(ValueError, match="does not say how sure it is"):
            rule.probabilities(plain)
    with pytest.raises(ValueError, match=r"no heads to vote; set model\.heads"):
        Bagging().probabilities(plain)
