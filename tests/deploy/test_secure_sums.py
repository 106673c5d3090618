"""What goes into a secure sum comes out of it: exactly for counts, within the documented bound for the rest."""

import numpy as np
import pytest

from fedbandit.deploy.secure_sums import (
    LEVELS,
    MODULUS,
    MOST,
    MOST_EVENTS,
    RANGE,
    STEP,
    Figures,
    ReportBounds,
    clip_share,
    decode,
    decode_private,
    encode,
    nothing,
    reward_error,
    to_grid,
    update_error,
    why_impossible,
)

BOUNDS = ReportBounds(events=1000, reward=2.0)


def some_figures(rng, clip_norm, size=50):
    update = rng.normal(size=size)
    update *= clip_norm * rng.random() / np.linalg.norm(update)
    events = int(rng.integers(BOUNDS.events + 1))
    return Figures(
        update.astype(np.float32),
        int(rng.integers(2)),
        events,
        float(rng.uniform(-2, 2) * events),
        float(rng.uniform(0, 1) * events),
    )


def summed(parts, rng, clip_norm, bounds=BOUNDS):
    levels = sum(encode(part, clip_norm, bounds, rng) for part in parts) % MODULUS
    return decode(levels, len(parts), clip_norm, bounds)


@pytest.mark.parametrize("devices", [3, 50, 1500])
def test_sums_come_back_within_the_bound(devices):
    rng = np.random.default_rng(devices)
    clip_norm = 0.7
    parts = [some_figures(rng, clip_norm) for _ in range(devices)]
    found = summed(parts, rng, clip_norm)
    assert found.unclipped == sum(part.unclipped for part in parts)
    assert found.events == sum(part.events for part in parts)
    assert found.devices == devices
    exact = np.sum([part.update.astype(np.float64) for part in parts], axis=0)
    assert np.abs(found.update - exact).max() < update_error(devices, clip_norm)
    assert abs(found.reward_sum - sum(part.reward_sum for part in parts)) < reward_error(
        devices, BOUNDS
    )
    assert why_impossible(found, devices, clip_norm, BOUNDS) is None


@pytest.mark.parametrize(("devices", "right"), [(MOST, True), (MOST + 1, False)])
def test_so_many_devices_at_their_limits_fit_and_no_more(devices, right):
    rng = np.random.default_rng(0)
    limit = Figures(np.array([1.0, 0.0]), 1, 1000, 2000.0, 1000.0)
    levels = devices * encode(limit, 1.0, BOUNDS, rng) % MODULUS
    found = decode(levels, devices, 1.0, BOUNDS)
    assert found.update[0] == pytest.approx(
        devices, rel=2e-6
    )  # clipped to a little less, so it fits in any case
    assert (found.reward_sum == devices * 2000.0) is right


def test_rounding_has_no_bias():
    rng = np.random.default_rng(3)
    value = Figures(np.full(20_000, 0.3 / np.sqrt(20_000)), 0, 0, 0.0, 0.0)
    errors = (summed([value] * 10, rng, 1.0).update - 10 * value.update) / update_error(1, 1.0)
    assert abs(errors.mean()) < 5 * np.sqrt(10 / 4 / 20_000)


def test_a_point_of_the_grid_stays_and_what_lies_between_two_becomes_one_of_them():
    rng = np.random.default_rng(4)
    points = np.array([-RANGE, -STEP, 0.0, STEP, RANGE])
    assert to_grid(points, rng).tolist() == [
        0,
        LEVELS // 2 - 1,
        LEVELS // 2,
        LEVELS // 2 + 1,
        LEVELS,
    ]
    between = to_grid(np.full(1000, 0.25 * STEP), rng) - LEVELS // 2
    assert set(between) == {0, 1}
    assert abs(between.mean() - 0.25) < 5 * np.sqrt(0.25 * 0.75 / 1000)


def test_counts_up_to_their_limit_are_exact():
    bounds = ReportBounds(MOST_EVENTS, 1.0)
    rng = np.random.default_rng(1)
    for events in (0, 1, 12345, MOST_EVENTS):
        found = summed([Figures(np.zeros(3), 1, events, 0.0, 0.0)] * 3, rng, 1.0, bounds)
        assert (found.events, found.unclipped) == (3 * events, 3)


def test_an_update_beyond_the_clip_norm_is_clipped_and_the_rest_is_refused():
    levels = encode(Figures(np.full(4, 10.0), 0, 0, 0.0, 0.0), 2.0, BOUNDS)
    assert 1 - 4 * STEP < np.linalg.norm(levels[:4] * STEP - RANGE) <= 1
    beyond = [
        Figures(np.zeros(4), 0, 1, 2001.0, 0.0),
        Figures(np.zeros(4), 0, 1, 0.0, 1001.0),
        Figures(np.zeros(4), 0, 1, float("nan"), 0.0),
        Figures(np.full(4, np.nan), 0, 1, 0.0, 0.0),
    ]
    for own in beyond:
        with pytest.raises(ValueError, match="beyond their bounds"):
            encode(own, 2.0, BOUNDS)


class Upwards:
    """A generator by which every entry that is no point of the grid is rounded up."""

    @staticmethod
    def random(shape):
        return np.zeros(shape)


@pytest.mark.parametrize("parameters", [1, 24, 5000])
@pytest.mark.parametrize("generator", [Upwards, np.random.default_rng(0)], ids=["up", "by chance"])
def test_what_is_rounded_is_never_longer_than_the_clip_norm(parameters, generator):
    """Whole steps, added up as whole numbers: at most 2²¹ of them is the clip norm."""
    rng = np.random.default_rng(parameters)
    for update in (rng.random(parameters), rng.normal(size=parameters), np.ones(parameters)):
        levels = encode(Figures(update * 1e3, 0, 0, 0.0, 0.0), 0.3, BOUNDS, generator)[:parameters]
        steps = [int(level) - LEVELS // 2 for level in levels]
        longest = LEVELS // 2
        assert (1 - 3 * STEP * np.sqrt(parameters)) * longest <= np.sqrt(sum(s * s for s in steps))
        assert sum(s * s for s in steps) <= longest**2


def test_a_model_that_rounding_alone_could_make_too_long_is_refused():
    assert clip_share(10**6) == pytest.approx(1 - STEP * 1000, rel=1e-6)
    with pytest.raises(ValueError, match="too many for the grid"):
        clip_share(2**42)


def test_a_private_sum_is_whole_steps_and_nothing_in_it_is_refused():
    rng = np.random.default_rng(6)
    parts = [*(some_figures(rng, 0.7) for _ in range(5)), nothing(50), nothing(50)]
    each = [encode(part, 0.7, BOUNDS, rng) for part in parts]
    found = decode_private(sum(each) % MODULUS, 7, BOUNDS)
    usual = decode(sum(each) % MODULUS, 7, 0.7, BOUNDS)
    np.testing.assert_allclose(
        centred(found.update) * STEP * 0.7, usual.update, rtol=1e-9, atol=1e-12
    )
    assert found.devices == 5
    assert (found.unclipped, found.events) == (usual.unclipped, usual.events)
    assert found.reward_sum == pytest.approx(usual.reward_sum)
    assert found.propensity_sum == pytest.approx(usual.propensity_sum)
    for lie in (2**35, -(2**35)):
        hostile = sum(each)
        hostile[51] += lie
        assert decode_private(hostile % MODULUS, 7, BOUNDS).events == usual.events + lie


def centred(steps):
    return (steps + MODULUS // 2) % MODULUS - MODULUS // 2


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"devices": 4}, "4 devices are in it, 5 should be"),
        ({"unclipped": 6}, "6 unclipped updates"),
        ({"events": -1}, "-1 events"),
        ({"events": 5001}, "5001 events"),
        ({"update": np.full(4, 3.0)}, "norm 6 of 5 updates"),
        ({"propensity_sum": 20.0}, "propensities"),
        ({"reward_sum": -30.0}, "rewards that add up to -30"),
    ],
)
def test_impossible_sums(changed, reason):
    sound = {
        "update": np.zeros(4),
        "unclipped": 2,
        "events": 10,
        "reward_sum": 5.0,
        "propensity_sum": 3.0,
    }
    assert why_impossible(Figures(**sound, devices=5), 5, 1.0, BOUNDS) is None
    assert reason in why_impossible(Figures(**{**sound, "devices": 5, **changed}), 5, 1.0, BOUNDS)
