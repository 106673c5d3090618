"""The server's door: unsound updates are refused, counted and named; sound ones are clipped and added."""

import numpy as np
import pytest

from fedbandit.federated.pipeline import clipped_sum, why_not

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

    assert re.match(reason, why_not(update, LIKE))
    found = clipped_sum([("good", SOUND), ("bad", update)], LIKE, 10.0)
    assert list(found.rejected) == ["bad"]
    assert found.accepted == 1
    np.testing.assert_array_equal(found.total, SOUND)


def test_sound_updates_are_clipped_and_added():
    small = np.array([0.1, 0, 0, 0], np.float32)
    found = clipped_sum([("a", SOUND), ("b", small)], LIKE, 1.0)
    np.testing.assert_allclose(found.total, SOUND / 5 + small, rtol=1e-6)
    np.testing.assert_allclose(found.norms, [5.0, 0.1], rtol=1e-6)
    assert found.rejected == {}


def test_huge_finite_updates_do_not_overflow():
    huge = np.full(4, 3e38, np.float32)
    found = clipped_sum([("huge", huge)], LIKE, 1.0)
    assert np.linalg.norm(found.total) == pytest.approx(1.0, rel=1e-6)


def test_a_client_counts_once():
    found = clipped_sum([("a", SOUND), ("a", SOUND)], LIKE, 10.0)
    assert found.accepted == 1
    assert found.rejected == {"a": "a second update in the same round"}


def test_nobody_is_a_sum_of_nothing():
    found = clipped_sum([], LIKE, 1.0)
    assert found.accepted == 0
    np.testing.assert_array_equal(found.total, LIKE)
