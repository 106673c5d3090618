"""The compiled draws are the plain ones: the same bits for the same addresses."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbandit.core import kernels, plain, randomness
from fedbandit.core.kernels import _order, uniforms
from fedbandit.core.randomness import Purpose

SEEDS = st.integers(0, 2**63 - 1)
PLACES = st.lists(st.tuples(*(st.integers(0, 2**40) for _ in range(3))), max_size=20)


@given(SEEDS, st.sampled_from(Purpose), PLACES)
def test_uniforms_are_those_of_the_plain_form(seed, purpose, places):
    times, clients, positions = np.array(places, np.int64).reshape(-1, 3).T
    expected = randomness.uniforms(seed, purpose, times, clients, positions)
    np.testing.assert_array_equal(uniforms(seed, purpose, times, clients, positions), expected)


@pytest.mark.parametrize("loops", [plain, kernels])
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


@given(size=st.integers(0, 300), shared=st.sampled_from([0, 40, 60, 63]), seed=SEEDS)
def test_the_order_is_that_of_a_stable_sort(size, shared, seed):
    keys = np.random.default_rng(seed).integers(0, 2**64, size, np.uint64)
    keys = (keys >> np.uint64(shared)) << np.uint64(
        shared
    )  # few different ones, where much is shared
    order = np.empty(size, np.int64)
    _order(keys, np.empty(2 * size + 2, np.int64), order)
    np.testing.assert_array_equal(order, np.argsort(keys, kind="stable"))
