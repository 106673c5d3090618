"""Falls and recoveries are read off a curve rightly."""

import numpy as np
import pytest

from fedbandit.core.errors import ConfigError
from fedbandit.evaluation.metrics import recoveries


def test_falls_and_recoveries_are_read_off_a_curve():
    """0.8 before; a drop to 0.2 for 20 rounds, then half-way, then back."""
    curve = np.concatenate(
        [np.full(50, 0.8), np.full(20, 0.2), np.full(20, 0.5), np.full(60, 0.78)]
    )
    (found,) = recoveries(curve, [51], window=10, share=0.9)
    assert found.before == pytest.approx(0.8)
    assert found.fall == pytest.approx(0.6)
    assert found.last == pytest.approx(0.78)
    assert found.lost == pytest.approx(20 * 0.6 + 20 * 0.3 + 60 * 0.02)
    # Means of ten pass 0.72 when eight of the ten rounds are back: eight rounds after round 90.
    assert found.rounds == 48
    never = recoveries(curve[:90], [51], window=10)[0]
    assert never.rounds is None


def test_who_does_not_fall_has_nothing_to_recover_from():
    flat = np.full(60, 0.5)
    assert recoveries(flat, [31])[0].rounds == 0
    rng = np.random.default_rng(0)
    noisy = flat + rng.uniform(-0.04, 0.04, 60)  # within the tenth that counts as no fall
    assert recoveries(noisy, [31])[0].rounds == 0
    rising = np.concatenate([np.full(30, 0.5), np.linspace(0.5, 0.9, 30)])
    (found,) = recoveries(rising, [31])
    assert (found.rounds, found.fall < 0) == (0, True)


def test_a_recovery_is_counted_from_the_first_fall_and_not_from_the_deepest():
    """Down at once and back after 15 rounds; much later a deeper dip, which no change explains."""
    parts = [
        np.full(30, 0.8),
        np.full(15, 0.2),
        np.full(30, 0.8),
        np.full(10, 0.1),
        np.full(15, 0.8),
    ]
    (found,) = recoveries(np.concatenate(parts), [31])
    assert found.lowest == pytest.approx(0.1)
    assert found.rounds == 24  # nine of ten rounds are back: (0.2 + 9 · 0.8) / 10 is above 0.72
    late = np.concatenate([np.full(30, 0.8), np.full(12, 0.8), np.full(20, 0.2), np.full(20, 0.8)])
    assert recoveries(late, [31])[0].rounds == 12 + 20 + 9


def test_each_change_is_measured_up_to_the_next():
    curve = np.concatenate([np.full(30, 1.0), np.full(30, 0.4), np.full(30, 0.1)])
    first, second = recoveries(curve, [31, 61], window=5)
    assert (first.lowest, second.lowest) == (pytest.approx(0.4), pytest.approx(0.1))
    assert second.before == pytest.approx(0.4)
    with pytest.raises(
        ConfigError, match=r"needs 40 rounds on either side; there are 30 before it and 30 after"
    ):
        recoveries(curve, [31, 61], window=40)
    with pytest.raises(ConfigError, match="change before round 3 needs 10 rounds"):
        recoveries(np.ones(5), [3])
