"""The server's door: unsound updates are refused, counted and named; sound ones are clipped and added."""

from types import SimpleNamespace

import numpy as np
import pytest

from fedbandit.deploy.server import gathering
from fedbandit.federated.pipeline import norm_or_reason, rejection_reason
from fedbandit.federated.server import PlainMean

LIKE = np.zeros(4, np.float32)
SOUND = np.array([3.0, 0.0, 4.0, 0.0], np.float32)


@pytest.mark.parametrize(
    ("update", "reason"),
    [
        (SOUND.astype(np.float64), "dtype float64, expected float32"),
        (SOUND.astype(np.int32), "dtype int32"),
        (SOUND[:3], r"shape \(3,\), expected \(4,\)"),
        (SOUND.reshape(2, 2), r"shape \(2, 2\)"),
        (np.array([0, np.nan, 0, np.inf], np.float32), "2 of 4 values are not finite"),
        ([3.0, 0.0, 4.0, 0.0], "not an array but list"),
        (None, "not an array but NoneType"),
    ],
)
def test_unsound_updates_have_a_reason(update, reason):
    import re

    assert re.match(reason, rejection_reason(update, LIKE))


def test_sound_updates_have_a_norm():
    assert rejection_reason(SOUND, LIKE) is None
    assert norm_or_reason(SOUND, LIKE) == 5.0
    assert norm_or_reason(np.full(4, 3e200), np.zeros(4)) == "its norm is not finite"


def summed(*updates, clip_norm):
    found = [SimpleNamespace(update=u, norm=norm_or_reason(u, LIKE)) for u in updates]
    return gathering.summed(found, LIKE, clip_norm, PlainMean())


def test_sound_updates_are_clipped_and_added():
    small = np.array([0.1, 0, 0, 0], np.float32)
    np.testing.assert_allclose(summed(SOUND, small, clip_norm=1.0), SOUND / 5 + small, rtol=1e-6)


def test_huge_finite_updates_do_not_overflow():
    huge = np.full(4, 3e38, np.float32)
    assert np.linalg.norm(summed(huge, clip_norm=1.0)) == pytest.approx(1.0, rel=1e-6)


def test_nobody_is_a_sum_of_nothing():
    np.testing.assert_array_equal(summed(clip_norm=1.0), LIKE)
