"""The compiled draws are the plain ones: the same bits for the same addresses."""

import numpy as np
import numpy_loops
import pytest

from fedbandit.core import kernels, randomness
from fedbandit.core.randomness import Purpose


@pytest.mark.parametrize("loops", [numpy_loops, kernels])
@pytest.mark.parametrize("limit", [None, 1, 7, 100])
def test_examples_come_in_the_order_of_their_bits(loops, limit):
    sizes = np.array([3, 0, 25, 1, 12])
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    clients, times = np.array([2, 0, 1, 2, 4, 3]), np.array([5, 5, 5, 6, 1, 0])
    owner, positions, rows = loops.random_examples(11, times, clients, offsets, limit)
    for pair, (client, time) in enumerate(zip(clients, times, strict=True)):
        keys = randomness.bits(
            11, Purpose.EXAMPLES, int(time), int(client), np.arange(sizes[client])
        )
        expected = offsets[client] + np.argsort(keys, kind="stable")[:limit]
        np.testing.assert_array_equal(rows[owner == pair], expected)
        np.testing.assert_array_equal(positions[owner == pair], np.arange(len(expected)))
    assert (np.diff(owner) >= 0).all()
