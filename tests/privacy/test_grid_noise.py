"""Noise on a grid of whole numbers: the plan's covariance, no matter how a sum wraps, and bounded whatever is in it."""

from functools import partial

import numpy as np
import pytest
from noise_matrices import noise_matrix
from scipy.stats import norm
from test_privacy_noise import ROUNDS, STRATEGIES, in_the_middle, plan

from fedbandit.federated.pipeline import AdaptiveClipping, clip_factor, in_steps
from fedbandit.privacy import noise as noise_module
from fedbandit.privacy.discrete import discrete_gaussians
from fedbandit.privacy.noise import (
    RELEASE,
    DrawnOnce,
    Grid,
    GridMean,
    GridNoise,
    grid_epsilon,
    room_needed,
    secret_normals,
)
from fedbandit.privacy.strategies import Independent, Tree, stays_whole

GRID = Grid(2.0**-21, 2**40)
CLIP = 0.5


@pytest.fixture(autouse=True)
def same_bits_every_time(monkeypatch):
    rng = np.random.default_rng(5)
    monkeypatch.setattr(
        noise_module, "discrete_gaussians", partial(discrete_gaussians, entropy=rng.bytes)
    )
    monkeypatch.setattr(noise_module, "secret_normals", rng.standard_normal)


def mechanism(chosen, grid=GRID):
    noise = GridNoise(chosen.strategy, chosen.update_multiplier / grid.step)
    return GridMean(chosen, noise, grid=grid, dtype=np.dtype(np.float64))


@pytest.mark.parametrize("grid", [GRID, RELEASE], ids=["secure", "release"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_the_covariance_of_prefix_sums_is_the_plans(strategy, grid):
    made, size = mechanism(plan(strategy), grid), 20_000
    released = np.stack(
        [made.mean(np.zeros(size, np.int64), 0, t, CLIP) for t in range(1, ROUNDS + 1)]
    )
    prefixes = np.cumsum(released, axis=0) * 20
    expected = np.cumsum(noise_matrix(strategy, ROUNDS), axis=0) * 1.5 * CLIP
    white = np.linalg.solve(np.linalg.cholesky(expected @ expected.T), prefixes)
    assert in_the_middle((white**2).sum(), ROUNDS * size)
    measured = white @ white.T / size
    assert (np.abs(measured - np.eye(ROUNDS)) < 5 * np.sqrt((1 + np.eye(ROUNDS)) / size)).all()


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_all_of_it_is_whole_and_a_tree_remembers_whole_numbers(strategy):
    noise = GridNoise(strategy, 2.0**34 / 3)
    drawn = [noise.update(t, np.zeros(5, np.int64)) for t in range(1, 6)]
    assert all(each.dtype == np.int64 for each in drawn)
    again = GridNoise(strategy, 2.0**34 / 3, 5, noise.memory)
    assert again._memory.keys() == noise._memory.keys()
    for at, value in again._memory.items():
        assert value.dtype == (np.int64 if stays_whole(strategy) else np.float64)
        np.testing.assert_allclose(value, noise._memory[at], rtol=1e-15)
        assert not stays_whole(strategy) or np.array_equal(value, noise._memory[at])
    assert again.update(6, np.zeros(5, np.int64)).dtype == np.int64
    with pytest.raises(DrawnOnce):
        again.update(6, np.zeros(5, np.int64))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_the_width_of_each_rounds_noise(strategy):
    rows = np.linalg.norm(noise_matrix(strategy, ROUNDS), axis=1)
    np.testing.assert_allclose(np.sqrt(plan(strategy).noise_variances[0]), rows, rtol=1e-9)


@pytest.mark.parametrize("place", [0, 2**39 - 3, -(2**39), 2**39 - 2**20])
def test_where_the_modulus_wraps_changes_nothing_of_what_one_device_moves(monkeypatch, place):
    """Others may bring a sum to the edge of the modulus: with or without a device, what is released differs by it."""
    made = mechanism(plan(Independent()))
    monkeypatch.setattr(
        GridNoise, "update", lambda self, number, like: np.arange(like.size)
    )  # known noise
    monkeypatch.setattr(GridMean, "_scale", lambda *_: 1.0)
    total, own = np.full(8, place), np.array([3, -2, 1, 0, 5, -5, 4, 2])
    without, with_it = (
        made.mean(t % GRID.modulus, 9, 1, CLIP) * 20 / CLIP / GRID.step
        for t in (total, total + own)
    )
    np.testing.assert_array_equal(
        GRID.centred(with_it.astype(np.int64) - without.astype(np.int64)), own
    )


@pytest.mark.parametrize("strategy", [Independent(), Tree()], ids=str)
def test_sums_that_honest_devices_come_to_are_left_alone_and_longer_ones_are_scaled_back(strategy):
    chosen = plan(strategy, noise_multiplier=0.8)
    size, longest = 1000, 20  # clip norms: all of a round's devices in one direction
    for times, alone in ((0.0, True), (0.5, True), (1.0, True), (40.0, False), (1000.0, False)):
        total = np.zeros(size, np.int64)
        total[7] = round(times * longest / GRID.step)
        released = mechanism(chosen).mean(total % GRID.modulus, 20, 1, CLIP) * 20 / CLIP
        if alone:
            assert released[7] == pytest.approx(times * longest, abs=6 * 0.8)
            assert np.std(np.delete(released, 7)) == pytest.approx(0.8, rel=0.2)
        else:
            assert np.linalg.norm(released) < 2.5 * longest + 0.8 * np.sqrt(size)


def test_without_noise_the_sum_is_exact_up_to_its_length():
    made = mechanism(plan(Independent(), noise_multiplier=0.0))
    total = np.array([3, -4, 2**21]) % GRID.modulus
    np.testing.assert_allclose(
        made.mean(total, 3, 1, CLIP) * 20 / CLIP / GRID.step, [3, -4, 2**21], rtol=1e-12
    )


def test_the_count_of_unclipped_devices_is_noised_as_a_whole_number_and_kept_within_bounds():
    chosen = plan(Independent(), clipping=AdaptiveClipping(0.1, 0.5), clients_per_round=40)
    made = mechanism(chosen)
    shares = np.array([made.unclipped(30, 40, 1) for _ in range(4000)])
    assert shares.mean() == pytest.approx(30 / 40, abs=5 * 0.05 / np.sqrt(4000))
    assert shares.std() == pytest.approx(0.05, rel=0.1)
    np.testing.assert_allclose(shares * 80, np.rint(shares * 80), atol=1e-9)
    assert (made.unclipped(10**9, 0, 1), made.unclipped(0, 10**9, 1)) == (2.0, -1.0)


def test_the_room_that_a_plan_needs():
    assert room_needed(plan(Independent(), noise_multiplier=0.0, sampling="fixed")) == 20
    assert room_needed(plan(Tree())) == pytest.approx(20 + 12 * 1.5 * 2)  # round 8 ends four nodes


@pytest.mark.parametrize("deviation", [3.0, 40.0, 1e4])
def test_discrete_noise_is_rounded_noise_up_to_the_stated_difference(deviation):
    """Logarithms of both probabilities at every step within nine deviations, and their sum."""
    steps = np.arange(-int(9 * deviation), int(9 * deviation) + 1)
    x = steps / deviation
    discrete = np.exp(-0.5 * x**2)
    discrete /= discrete.sum()
    rounded = norm.cdf((-np.abs(steps) + 0.5) / deviation) - norm.cdf(
        (-np.abs(steps) - 0.5) / deviation
    )
    apart = np.abs(np.log(discrete / rounded))
    assert (apart <= (1 + x**2) / (24 * deviation**2) + 1e-10).all()
    assert 2 * (discrete * (1 + x**2)).sum() / (24 * deviation**2) <= grid_epsilon(deviation, 1) * (
        1 + 1e-9
    )


def test_rounded_float64_noise_has_the_probabilities_of_gaussian_noise():
    """On a coarse grid and on a fine one, by every step's share of a million draws."""
    for deviation in (2.0, 50.0):
        drawn = np.rint(deviation * secret_normals(10**6))
        steps = np.arange(-int(3 * deviation), int(3 * deviation) + 1)
        expected = norm.cdf((steps + 0.5) / deviation) - norm.cdf((steps - 0.5) / deviation)
        found = np.array([(drawn == step).mean() for step in steps])
        assert (np.abs(found - expected) < 7 * np.sqrt(expected / 10**6)).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_no_update_is_longer_than_its_clip_norm_in_whole_steps(dtype):
    """Summed exactly, by Python's own whole numbers, for norms on both sides of the clip norm."""
    rng = np.random.default_rng(2)
    for size in (1, 3, 1000, 200_000):
        for norm_ in (0.01, CLIP * (1 - 1e-9), CLIP, 3.0, 1e6):
            update = rng.normal(size=size)
            update = (update * (norm_ / np.linalg.norm(update))).astype(dtype)
            own = float(np.sqrt(np.square(update, dtype=np.float64).sum()))
            steps = in_steps(update, clip_factor(own, CLIP), RELEASE.step * CLIP)
            square = sum(int(step) ** 2 for step in steps)
            assert square <= int(1 / RELEASE.step) ** 2
            longest = min(own, CLIP)
            assert np.sqrt(square) * RELEASE.step * CLIP == pytest.approx(
                longest, abs=2 * np.sqrt(size) * RELEASE.step * CLIP
            )


def test_a_count_in_parts_of_a_client_has_the_plans_noise():
    chosen = plan(Independent(), clipping=AdaptiveClipping(0.1, 0.5), clients_per_round=40)
    made = mechanism(chosen, RELEASE)
    shares = np.array([made.unclipped(30, 40, 1) for _ in range(4000)])
    assert shares.mean() == pytest.approx(30 / 40, abs=5 * 0.05 / np.sqrt(4000))
    assert shares.std() == pytest.approx(0.05, rel=0.1)
    assert len(set(shares)) > 3900
