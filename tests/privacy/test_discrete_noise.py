"""Discrete Gaussian noise: drawn exactly, as wide as asked, and its Rényi moments are those of the Gaussian."""

import time
from decimal import Decimal, localcontext

import numpy as np
import pytest
from scipy.special import comb
from scipy.stats import chisquare

from fedbandit.privacy.discrete import _envelope, _exactly, discrete_gaussians


def seeded(seed):
    return np.random.default_rng(seed).bytes


def probabilities(deviation, reach):
    weights = np.exp(-(np.arange(-reach, reach + 1.0) ** 2) / (2 * deviation**2))
    return weights / weights.sum()


@pytest.mark.parametrize(("deviation", "reach"), [(0.3, 1), (1.0, 4), (6.4, 25), (37.0, 140)])
def test_each_number_comes_as_often_as_it_should(deviation, reach):
    """Widths below, at and above one number a block; rare numbers are counted together."""
    drawn, expected = (
        discrete_gaussians(deviation, 400_000, seeded(1)),
        probabilities(deviation, 20 * reach),
    )
    counts = np.bincount(
        np.clip(drawn, -20 * reach, 20 * reach) + 20 * reach, minlength=len(expected)
    )
    common = expected * len(drawn) > 20
    found = chisquare(
        np.append(counts[common], counts[~common].sum()),
        len(drawn) * np.append(expected[common], expected[~common].sum()),
    )
    assert found.pvalue > 1e-4


@pytest.mark.parametrize("deviation", [0.7 * 2**21, 2.0**33])
def test_wide_noise_is_as_wide_as_asked(deviation):
    drawn = discrete_gaussians(deviation, 300_000, seeded(2))
    assert drawn.dtype == np.int64
    assert abs(drawn.mean()) < 5 * deviation / np.sqrt(300_000)
    assert drawn.var() / deviation**2 == pytest.approx(1, abs=5 * np.sqrt(2 / 300_000))
    assert abs((drawn % 2).mean() - 0.5) < 5 / np.sqrt(4 * 300_000)  # no low bit tells anything


@pytest.mark.parametrize("deviation", [3.3, 0.7 * 2**21])
def test_exact_arithmetic_decides_as_float64_does_where_float64_is_sure(deviation):
    """With half of all proposals in doubt, each of them is decided by fractions: the same numbers come out."""
    sure = discrete_gaussians(deviation, 2000, seeded(3))
    np.testing.assert_array_equal(discrete_gaussians(deviation, 2000, seeded(3), doubt=0.5), sure)


def test_exact_arithmetic_asks_for_more_bits_where_those_it_has_do_not_decide():
    """53 bits that begin the acceptance probability itself: only the bits that follow can say on which side it is."""
    with localcontext(prec=60):
        wanted = (
            -Decimal(25) / 32
        ).exp()  # of the number 5 at a width of 4, in a block as high as the whole
    for following, taken in ((b"\x00" * 8, True), (b"\xff" * 8, False)):
        asked = []
        found = _exactly(
            5, 2**12, 4.0, int(wanted * 2**53), lambda n, f=following, a=asked: a.append(n) or f
        )
        assert (found, asked) == (taken, [8])


def test_the_staircase_is_never_below_the_density():
    for deviation in (0.05, 0.3, 1.0, 7.9, 8.0, 100.0, 0.7 * 2**21, 2.0**47):
        width, heights, blocks = _envelope(deviation)
        starts = np.arange(len(heights)) * float(width)
        assert (heights / 2**12 > np.exp(-0.5 * (starts / deviation) ** 2)).all()
        assert width * len(heights) > 13 * deviation
        assert (np.bincount(blocks[blocks >= 0], minlength=len(heights)) == heights).all()


@pytest.mark.parametrize("deviation", [0.0, -1.0, float("nan"), 2.0**48])
def test_a_width_that_cannot_be_drawn_is_refused(deviation):
    with pytest.raises(ValueError, match="deviation"):
        discrete_gaussians(deviation, 1)


@pytest.mark.parametrize(("deviation", "shift"), [(0.6, 1), (1.3, 2), (5.0, 3)])
def test_moments_at_whole_orders_are_the_gaussians_and_never_more_between(deviation, shift):
    """The accounting rests on this: E[(P/Q)^a] for whole shifts, by summing over all whole numbers."""
    numbers = np.arange(-400, 401)
    log_q = -(numbers**2) / (2 * deviation**2)
    log_p = -((numbers - shift) ** 2) / (2 * deviation**2)
    total = np.logaddexp.reduce(log_q)
    for order in (2, 3, 4, 7, 1.5, 2.25, 5.7):
        moment = np.logaddexp.reduce(order * log_p + (1 - order) * log_q) - total
        gaussian = order * (order - 1) * shift**2 / (2 * deviation**2)
        assert moment <= gaussian + 1e-9
        if order == int(order):
            assert moment == pytest.approx(gaussian, abs=1e-9)


@pytest.mark.parametrize(("deviation", "shift"), [(0.6, 1), (1.3, 2), (5.0, 3)])
@pytest.mark.parametrize("probability", [0.01, 0.3, 0.9])
def test_with_sampling_both_orders_of_neighbours_cost_at_most_what_the_gaussian_costs(
    deviation, shift, probability
):
    numbers = np.arange(-400, 401)
    log_q = -(numbers**2) / (2 * deviation**2)
    log_q = log_q - np.logaddexp.reduce(log_q)
    log_p = np.roll(log_q, shift)
    mixed = np.logaddexp(np.log1p(-probability) + log_q, np.log(probability) + log_p)
    for order in (2, 3, 5, 8):
        terms = [
            np.log(comb(order, k)) + (order - k) * np.log1p(-probability) + k * np.log(probability)
            + k * (k - 1) * shift**2 / (2 * deviation**2)
            for k in range(order + 1)
        ]  # fmt: skip
        gaussian = np.logaddexp.reduce(terms)
        added = np.logaddexp.reduce(order * mixed + (1 - order) * log_q)
        removed = np.logaddexp.reduce(order * log_q + (1 - order) * mixed)
        assert added == pytest.approx(gaussian, abs=1e-9)
        assert removed <= gaussian + 1e-9


@pytest.mark.slow
def test_the_noise_of_a_large_model_is_drawn_in_three_seconds_of_cpu():
    began = time.process_time()
    assert len(discrete_gaussians(0.7 * 2**21, 1_700_000)) == 1_700_000
    assert time.process_time() - began < 3
