"""Randomness: every draw belongs to its address, and draws of different addresses are independent."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbandit.core.randomness import Purpose, bits, generator, uniforms

SEEDS = st.integers(0, 2**64 - 1)
PLACES = st.integers(0, 2**40)


@given(SEEDS, st.sampled_from(Purpose), st.lists(PLACES, max_size=4))
def test_the_same_address_is_the_same_draw(seed, purpose, address):
    assert bits(seed, purpose, *address) == bits(seed, purpose, *address)
    assert 0 <= uniforms(seed, purpose, *address) < 1


@given(SEEDS, st.lists(PLACES, min_size=1, max_size=5), st.lists(PLACES, min_size=1, max_size=5))
def test_broadcasting_is_as_one_address_at_a_time(seed, rounds, clients):
    together = uniforms(
        seed, Purpose.ACTIONS, np.array(rounds)[:, None], np.array(clients)[None, :]
    )
    assert together.shape == (len(rounds), len(clients))
    for i, t in enumerate(rounds):
        for j, client in enumerate(clients):
            assert together[i, j] == uniforms(seed, Purpose.ACTIONS, t, client)


def plain(*parts):
    """splitmix64 over the parts of an address, with Python's whole numbers."""
    mask, state = 2**64 - 1, 0
    for part in parts:
        x = (state + 0x9E3779B97F4A7C15 + part) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        state = x ^ (x >> 31)
    return state


@given(SEEDS, st.sampled_from(Purpose), st.lists(PLACES, max_size=4))
def test_bits_are_splitmix64(seed, purpose, address):
    assert int(bits(seed, purpose, *address)) == plain(seed, int(purpose), *address)


def test_known_values():
    """The numbers are part of every published result: a change here changes them all."""
    assert [int(purpose) for purpose in Purpose] == list(range(1, len(Purpose) + 1))
    assert int(bits(0, Purpose.ACTIONS, 1, 2, 3)) == 10132371903448172024
    assert int(bits(12345, Purpose.EXAMPLES, 7)) == 10585161216794365820


def test_the_order_of_an_address_matters():
    assert bits(0, Purpose.ACTIONS, 1, 2) != bits(0, Purpose.ACTIONS, 2, 1)
    assert bits(0, Purpose.ACTIONS) != bits(0, Purpose.ACTIONS, 0)
    assert bits(1, Purpose.COHORT, 2) != bits(2, Purpose.COHORT, 1)


def test_no_collisions_among_a_million_addresses():
    """64 bits: the chance of one is below 1e-7."""
    seeds, purposes = range(5), list(Purpose)[:10]
    rounds, clients = np.arange(100)[:, None], np.arange(200)[None, :]
    drawn = np.concatenate(
        [bits(seed, purpose, rounds, clients).ravel() for seed in seeds for purpose in purposes]
    )
    assert len(drawn) == 1_000_000
    assert len(np.unique(drawn)) == len(drawn)


@pytest.mark.parametrize("axis", ["seed", "round", "client", "position"])
def test_uniforms_are_uniform_along_every_part_of_an_address(axis):
    """Chi-squared with 99 degrees of freedom: above 149 once in a thousand."""
    n = 100_000
    running = np.arange(n)
    if axis == "seed":
        drawn = np.array([uniforms(seed, Purpose.ACTIONS, 1, 2, 3) for seed in range(n // 10)])
    else:
        address = [running if axis == part else 5 for part in ("round", "client", "position")]
        drawn = uniforms(9, Purpose.ACTIONS, *address)
    counts = np.bincount((drawn * 100).astype(int), minlength=100)
    expected = len(drawn) / 100
    assert ((counts - expected) ** 2 / expected).sum() < 149


def test_neighbouring_addresses_are_uncorrelated():
    """The standard error of a correlation over a million pairs is 0.001."""
    grid = uniforms(3, Purpose.ACTIONS, np.arange(1000)[:, None], np.arange(1001)[None, :])
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.004
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.004
    other = uniforms(4, Purpose.ACTIONS, np.arange(1000)[:, None], np.arange(1001)[None, :])
    assert abs(np.corrcoef(grid.ravel(), other.ravel())[0, 1]) < 0.004


def test_each_bit_is_fair():
    drawn = bits(1, Purpose.EXAMPLES, np.arange(100_000))
    for bit in range(64):
        share = ((drawn >> np.uint64(bit)) & np.uint64(1)).mean()
        assert share == pytest.approx(0.5, abs=0.007)  # more than four standard errors


def test_generators_belong_to_their_address_alone():
    first = generator(1, Purpose.COHORT, 2)
    expected = first.random(5)
    generator(1, Purpose.COHORT, 3).random(1000)  # somebody else's draws
    np.random.default_rng(0).random(10)
    np.testing.assert_array_equal(generator(1, Purpose.COHORT, 2).random(5), expected)
    for other in (
        generator(2, Purpose.COHORT, 2),
        generator(1, Purpose.MODEL, 2),
        generator(1, Purpose.COHORT, 3),
    ):
        assert (other.random(5) != expected).all()


def test_the_global_generator_is_left_alone():
    before = np.random.get_state()[1].copy()  # noqa: NPY002 - that nobody touches it is the point
    generator(1, Purpose.COHORT, 2).random(5)
    uniforms(1, Purpose.ACTIONS, np.arange(10))
    np.testing.assert_array_equal(np.random.get_state()[1], before)  # noqa: NPY002
