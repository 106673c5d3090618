"""Policies: properties of the probabilities, and of drawing from them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedbandit.core.loops import draw_actions
from fedbandit.core.prediction import Prediction as P
from fedbandit.policies import BUILT_IN, EpsilonGreedy, Falcon, Greedy, Softmax, importance_scale

DTYPES = st.sampled_from([np.float32, np.float64])


def told(mean):
    """A prediction with all that any rule asks for: three heads that agree, equal widths."""
    mean = np.asarray(mean)
    heads = np.stack([mean.astype(float)] * 3, axis=-2)
    return P(mean, heads=heads, width=np.ones(mean.shape))


@st.composite
def policies(draw):
    kind = draw(st.sampled_from(["greedy", "epsilon-greedy", "softmax", "falcon"]))
    if kind == "epsilon-greedy":
        return EpsilonGreedy(draw(st.floats(0, 1)))
    if kind == "softmax":
        return Softmax(draw(st.floats(1e-6, 1e6)))
    if kind == "falcon":
        return Falcon(draw(st.floats(1e-3, 1e6)), draw(st.floats(0, 1e6)))
    return Greedy()


@st.composite
def score_arrays(draw, largest=1e30, min_actions=1, dims=(0, 1, 2)):
    """Scores [..., K] of either precision, small and extreme ones, with ties."""
    leading = tuple(draw(st.integers(1, 4)) for _ in range(draw(st.sampled_from(dims))))
    dtype = draw(DTYPES)
    width = 32 if dtype == np.float32 else 64
    bound = float(np.float32(largest))
    elements = st.one_of(
        st.sampled_from([0.0, 1.0, -1.0, bound, -bound]),
        st.floats(-2, 2, width=width),
        st.floats(-bound, bound, width=width),
    )
    return draw(hnp.arrays(dtype, (*leading, draw(st.integers(min_actions, 8))), elements=elements))


@st.composite
def scores_and_available(draw):
    scores = draw(score_arrays())
    available = draw(hnp.arrays(bool, scores.shape))
    rows = available.reshape(-1, scores.shape[-1])
    rows[~rows.any(axis=1), draw(st.integers(0, scores.shape[-1] - 1))] = True
    return scores, available


def tolerance(p):
    return 1e-5 if p.dtype == np.float32 else 1e-12


@given(policies(), score_arrays())
def test_probabilities_are_probabilities(policy, scores):
    p = policy.probabilities(P(scores))
    assert p.shape == scores.shape
    assert p.dtype == scores.dtype
    assert (p >= 0).all()
    np.testing.assert_allclose(p.sum(axis=-1), 1, atol=tolerance(p))


@given(policies(), scores_and_available())
def test_unavailable_actions_get_exactly_zero(policy, drawn):
    scores, available = drawn
    p = policy.probabilities(P(scores), available)
    assert (p[~available] == 0).all()
    assert (p >= 0).all()
    np.testing.assert_allclose(p.sum(axis=-1), 1, atol=tolerance(p))


@given(policies(), scores_and_available(), st.sampled_from([np.nan, np.inf, -np.inf, 5.0]))
def test_scores_of_unavailable_actions_do_not_matter(policy, drawn, other):
    scores, available = drawn
    np.testing.assert_array_equal(
        policy.probabilities(P(np.where(available, scores, scores.dtype.type(other))), available),
        policy.probabilities(P(np.where(available, scores, scores.dtype.type(0))), available),
    )


@given(policies(), score_arrays(dims=(1,)), st.data())
def test_unavailable_actions_might_as_well_not_exist(policy, scores, data):
    """K is the number of available actions: the others get what they would get among themselves."""
    k = scores.shape[-1]
    available = np.array(data.draw(st.lists(st.booleans(), min_size=k, max_size=k).filter(any)))
    p = policy.probabilities(P(scores), available)
    np.testing.assert_allclose(
        p[:, available], policy.probabilities(P(scores[:, available])), atol=tolerance(p)
    )


@given(policies(), score_arrays(dims=(2,)))
def test_many_rows_are_as_one_row_at_a_time(policy, scores):
    together = policy.probabilities(P(scores))
    for i in np.ndindex(scores.shape[:2]):
        np.testing.assert_allclose(
            together[i], policy.probabilities(P(scores[i])), atol=tolerance(together)
        )


@given(policies(), score_arrays())
def test_scores_are_left_alone(policy, scores):
    before = scores.copy()
    policy.probabilities(P(scores))
    np.testing.assert_array_equal(scores, before)


@given(score_arrays(), st.floats(0, 1))
def test_the_best_action_is_the_likeliest(scores, epsilon):
    k = scores.shape[-1]
    best = np.argmax(scores, axis=-1)[..., None]
    # FALCON promises it only where mu is at least the number of actions.
    for policy in (
        Greedy(),
        EpsilonGreedy(epsilon),
        Softmax(0.1),
        Falcon(mu=k, gamma=10),
        Falcon(mu=100 + k, gamma=0),
    ):
        p = policy.probabilities(P(scores))
        chosen = np.take_along_axis(p, best, axis=-1)
        assert (chosen >= p - tolerance(p)).all()


@given(score_arrays(min_actions=2), st.floats(1e-3, 1e3), st.floats(1, 1e3), st.floats(0, 1e3))
def test_better_scores_are_never_less_likely(scores, beta, mu, gamma):
    order = np.argsort(scores, axis=-1)
    softmax = np.take_along_axis(Softmax(beta).probabilities(P(scores)), order, axis=-1)
    assert (np.diff(softmax, axis=-1) >= 0).all()
    falcon = Falcon(mu, gamma).probabilities(P(scores))
    np.put_along_axis(falcon, np.argmax(scores, axis=-1)[..., None], -1, axis=-1)  # the others only
    others = np.take_along_axis(falcon, order, axis=-1)
    for row in others.reshape(-1, scores.shape[-1]):
        assert (np.diff(row[row >= 0]) >= 0).all()


@given(score_arrays())
def test_epsilon_zero_is_greedy(scores):
    np.testing.assert_array_equal(
        EpsilonGreedy(0.0).probabilities(P(scores)), Greedy().probabilities(P(scores))
    )


@given(score_arrays(), st.floats(0, 1))
def test_epsilon_greedy_as_in_the_paper(scores, epsilon):
    k = scores.shape[-1]
    p = EpsilonGreedy(epsilon).probabilities(P(scores))
    expected = np.full(scores.shape, epsilon / k)
    np.put_along_axis(
        expected, np.argmax(scores, axis=-1)[..., None], 1 - epsilon + epsilon / k, axis=-1
    )
    np.testing.assert_allclose(p, expected, atol=tolerance(p))


@given(
    hnp.arrays(np.float64, (3, 5), elements=st.floats(-3, 3)),
    st.floats(-100, 100),
    st.floats(0.05, 10),
)
def test_softmax_as_in_the_paper_and_blind_to_shifts(scores, shift, beta):
    p = Softmax(beta).probabilities(P(scores))
    weights = np.exp(scores / beta)
    np.testing.assert_allclose(p, weights / weights.sum(axis=-1, keepdims=True), rtol=1e-9)
    np.testing.assert_allclose(p, Softmax(beta).probabilities(P(scores + shift)), atol=1e-9)


@given(
    hnp.arrays(np.float64, (5,), elements=st.floats(-3, 3)), st.floats(5, 100), st.floats(0, 1000)
)
def test_falcon_as_in_the_paper(scores, mu, gamma):
    p = Falcon(mu, gamma).probabilities(P(scores))
    best = int(np.argmax(scores))
    for a in range(5):
        if a != best:
            assert p[a] == pytest.approx(1 / (mu + gamma * (scores[best] - scores[a])), abs=1e-12)
    assert p[best] == pytest.approx(1 - sum(p[a] for a in range(5) if a != best), abs=1e-12)


def test_falcon_rescales_when_the_others_sum_to_more_than_one():
    p = Falcon(mu=1.0, gamma=1.0).probabilities(P(np.array([1.0, 0.0, 0.0, -1.0])))
    raw = np.array([0, 1 / 2, 1 / 2, 1 / 3])
    np.testing.assert_allclose(p, raw / raw.sum())
    assert p[0] == 0


@pytest.mark.parametrize("policy", [Greedy(), EpsilonGreedy(0.2), Falcon(10, 5)])
def test_ties_go_to_the_lowest_index(policy):
    assert np.argmax(policy.probabilities(P(np.array([0.0, 2.0, 2.0, 2.0])))) == 1
    p = policy.probabilities(P(np.array([2.0, 2.0, 2.0])), np.array([False, True, True]))
    assert np.argmax(p) == 1


def test_softmax_shares_between_equals():
    np.testing.assert_allclose(
        Softmax(0.1).probabilities(P(np.array([3.0, 3.0, -1e30]))), [0.5, 0.5, 0]
    )


@pytest.mark.parametrize(
    "name",
    sorted(
        BUILT_IN.keys() - {"uniform", "constant", "falcon-schedule", "squarecb", "decaying-epsilon"}
    ),
)  # these look at no scores
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_extreme_scores(name, dtype):
    p = BUILT_IN[name]().probabilities(told(np.array([-1e30, 1e30, 0, 1e30], dtype)))
    assert np.isfinite(p).all()
    assert np.argmax(p) == 1
    assert p[0] <= p[1]


@pytest.mark.parametrize(
    "policy", [Greedy(), EpsilonGreedy(0.3), Softmax(1e-3), Falcon(4, 1e6), Falcon(4, 0)]
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_largest_numbers_there_are(policy, dtype):
    largest = np.finfo(dtype).max
    p = policy.probabilities(P(np.array([-largest, largest, 0], dtype)))
    np.testing.assert_allclose(p.sum(), 1, rtol=1e-6)
    assert np.argmax(p) == 1


@pytest.mark.parametrize("name", BUILT_IN)
def test_whole_numbers_and_lists_are_scores_too(name):
    policy = BUILT_IN[name]()
    np.testing.assert_allclose(
        policy.probabilities(told(np.array([1, 3, 2]))),
        policy.probabilities(told(np.array([1.0, 3.0, 2.0]))),
    )
    np.testing.assert_allclose(policy.probabilities(told([1, 3, 2])).sum(), 1)


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_single_action_is_certain(name):
    np.testing.assert_array_equal(
        BUILT_IN[name]().probabilities(told(np.array([[0.3], [-2.0]]))), 1
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EpsilonGreedy(-0.1), "epsilon must be from 0 to 1"),
        (lambda: EpsilonGreedy(1.1), "epsilon must be from 0 to 1"),
        (lambda: EpsilonGreedy(float("nan")), "epsilon must be"),
        (lambda: Softmax(0), "beta must be positive"),
        (lambda: Softmax(-1), "beta must be positive"),
        (lambda: Softmax(float("inf")), "beta must be"),
        (lambda: Falcon(mu=0), "mu must be positive"),
        (lambda: Falcon(gamma=-1), "gamma must be at least 0"),
        (lambda: Falcon(gamma=float("nan")), "gamma must be"),
    ],
)
def test_bad_parameters_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_scores_that_are_not_finite_are_refused(name, bad):
    with pytest.raises(ValueError, match="finite"):
        BUILT_IN[name]().probabilities(told(np.array([0.0, bad])))
    with pytest.raises(ValueError, match="finite"):
        BUILT_IN[name]().probabilities(told(np.array([0.0, bad])), np.array([False, True]))


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_row_without_available_actions_is_refused(name):
    with pytest.raises(ValueError, match="available"):
        BUILT_IN[name]().probabilities(
            told(np.zeros((2, 3))), np.array([[True, True, True], [False, False, False]])
        )


def test_importance_scales():
    assert importance_scale(EpsilonGreedy(0.2), 10) == pytest.approx(0.02)
    assert importance_scale(EpsilonGreedy(0.0), 10) == 1
    assert [importance_scale(policy, 10) for policy in (Greedy(), Softmax(), Falcon())] == [1, 1, 1]
    largest = (
        importance_scale(EpsilonGreedy(0.2), 10)
        / EpsilonGreedy(0.2).probabilities(P(np.arange(10.0))).min()
    )
    assert largest == pytest.approx(1)


# --- drawing ---

NEXT_TO_ONE = [0.0, 0.5, 1 - 2**-24, 1 - 2**-25, 1 - 2**-30, np.nextafter(1, 0)]


@given(
    policies(),
    score_arrays(dims=(1,)),
    st.one_of(st.sampled_from(NEXT_TO_ONE), st.floats(0, 1, exclude_max=True)),
)
def test_an_action_of_probability_zero_is_never_drawn(policy, scores, uniform):
    p = policy.probabilities(P(scores))
    actions, propensities = draw_actions(p, np.full(len(p), uniform))
    assert (propensities > 0).all()
    np.testing.assert_array_equal(propensities, p[np.arange(len(p)), actions])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("uniform", NEXT_TO_ONE)
def test_zeros_at_either_end_are_never_drawn(dtype, uniform):
    p = np.array(
        [[0, 0, 0.1, 0, 0.2, 0.7, 0, 0], [0, 1, 0, 0, 0, 0, 0, 0], [0.3] * 3 + [0.1] + [0] * 4],
        dtype,
    )
    actions, propensities = draw_actions(p, np.full(3, uniform))
    assert (propensities > 0).all()
    assert actions[1] == 1


@pytest.mark.parametrize("policy", [EpsilonGreedy(0.4), Softmax(0.5), Falcon(10, 5)])
def test_actions_come_as_often_as_their_probabilities_say(policy):
    """Chi-squared with 5 degrees of freedom: above 20.5 once in a thousand draws of the seed."""
    n, scores = 200_000, np.array([0.1, 0.9, -0.3, 0.4, 0.9, 0.0])
    p = policy.probabilities(P(scores))
    actions, _ = draw_actions(np.tile(p, (n, 1)), np.random.default_rng(0).random(n))
    counts = np.bincount(actions, minlength=6)
    assert ((counts - n * p) ** 2 / (n * p)).sum() < 20.5


def test_drawing_nothing():
    actions, propensities = draw_actions(np.zeros((0, 4)), np.zeros(0))
    assert len(actions) == len(propensities) == 0


@pytest.mark.parametrize(
    "policy", [Softmax(beta=1e-300), Falcon(mu=1e-60, gamma=0.0), Falcon(mu=1e-300, gamma=1.0)]
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_parameters_below_what_the_scores_can_hold_still_give_probabilities(policy, dtype):
    p = policy.probabilities(P(np.array([[0.1, 0.5, 0.2], [0.3, 0.3, 0.3]], dtype)))
    assert np.isfinite(p).all()
    np.testing.assert_allclose(p.sum(axis=1), 1, rtol=1e-6)
