"""What gives a sparse update away under Flower's SecAgg+ masks gives nothing away under ours.

Flower 1.41 draws masks from Mersenne twisters. They are linear over bits: the lowest bits of any number of masks,
added and taken away, are again those of one twister, with 19,937 bits of state. Most entries of a sparse update do
not change, and an unchanged entry is an even point of the grid. So the lowest bits of one masked vector are mostly
the twister's own; a long enough stretch of them tells all others, and where they differ an entry has changed.
"""

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from masked_round import MaskedRound

from fedbandit.deploy.masking.masked_sum import own_mask_seed, pair_mask_seed
from fedbandit.deploy.masking.primitives import add_mask, unpacked
from fedbandit.deploy.secure_sums import LEVELS, MODULUS

STATE = 19937
SIZE = 150_000
WORDS = 624


@pytest.fixture(scope="module")
def taps():
    """The recurrence of a twister's lowest bits, as distances to the bits that a bit is the sum of."""
    stream = np.random.RandomState(1).randint(0, 2**32, 2 * STATE + 100, dtype=np.uint32) & 1
    return np.array(berlekamp_massey(stream.tolist()))


def berlekamp_massey(bits):
    """The shortest recurrence that makes these bits, by Massey's algorithm; polynomials are whole numbers."""
    now, before, seen, length, since = 1, 1, 0, 0, 1
    for place, bit in enumerate(bits):
        seen = seen << 1 | bit
        if not (now & seen).bit_count() & 1:
            since += 1
        elif 2 * length > place:
            now ^= before << since
            since += 1
        else:
            now, before = now ^ before << since, now
            length, since = place + 1 - length, 1
    assert length == STATE
    return [distance for distance in range(1, length + 1) if now >> distance & 1]


def continued(bits, taps, number):
    """The next bits after `bits`, as the recurrence has them."""
    made = np.concatenate([bits, np.zeros(number, np.uint8)])
    for start in range(len(bits), len(made), step := int(taps.min())):
        for distance in taps:
            part = made[start - distance : min(start - distance + step, len(made) - distance)]
            made[start : start + len(part)] ^= part
    return made[len(bits) :]


def changed_entries(vector, taps):
    """The attack: the entries of a masked vector that have become odd points of the grid; None if it fails."""
    low = (vector & 1).astype(np.uint8)
    for start in range(0, len(low) - STATE - 300, 5000):
        window = low[start : start + STATE]
        after = low[start + STATE : start + STATE + 300]
        if (continued(window, taps, 300) != after).mean() < 0.1:
            later = continued(window, taps, len(low) - start - STATE)
            sooner = continued(window[::-1], STATE - np.append(taps[taps < STATE], 0), start)[::-1]
            return np.flatnonzero(np.concatenate([sooner, window, later]) != low)
    return None


def untempered(words):
    """A twister's state, from the 624 words that it has made of it."""
    made = words.astype(np.uint32)
    made ^= made >> 18
    made ^= made << 15 & np.uint32(0xEFC60000)
    found = made.copy()
    for _ in range(5):
        found = made ^ (found << 7 & np.uint32(0x9D2C5680))
    made = found.copy()
    for _ in range(3):
        made = found ^ made >> 11
    return made


def after_one_twister(vector):
    """The attack where one mask is left, the others being known: what comes after 624 unchanged entries, unmasked."""
    words = (vector[:WORDS] - LEVELS // 2).astype(np.uint32)
    twister = np.random.RandomState()
    twister.set_state(("MT19937", untempered(words), WORDS))
    rest = vector[WORDS:].astype(np.int64)
    found = (rest - twister.randint(0, 2**32, len(rest), dtype=np.uint32)) % 2**32
    return found if (found[:100] == LEVELS // 2).mean() > 0.9 else None


@pytest.fixture
def sparse():
    """A device's levels: a few entries changed, half of them to odd points of the grid."""
    rng = np.random.default_rng(11)
    levels = np.full(SIZE, LEVELS // 2)
    places = rng.choice(np.arange(WORDS + 200, SIZE), 12, replace=False)
    levels[places] += (
        np.where(np.arange(12) % 2, 2, 1) * rng.integers(-20, 20, 12) * 2 + np.arange(12) % 2
    )
    assert 4 <= (levels & 1).sum() <= 8
    return levels


def under_flowers_masks(levels, masks):
    """As Flower's mod does: its own mask, and one with each neighbour, added or taken away, modulo 2**32."""
    total = levels.copy()
    for number in range(masks):
        seed = np.random.default_rng(number).bytes(32)
        total += (-1) ** number * pseudo_rand_gen(seed, 2**32, [(len(levels),)])[0]
    return total % 2**32


def under_our_masks(levels):
    """What the server received of one device, and what it was masked with."""
    unchanged = np.full(SIZE, LEVELS // 2)
    round_ = MaskedRound({1: levels, **dict.fromkeys(range(2, 6), unchanged)})
    assert np.array_equal(round_.run() - 4 * unchanged, levels)
    return unpacked(round_.seen[1]), round_


def test_the_entries_that_changed_are_read_from_flowers_masks_and_not_from_ours(taps, sparse):
    odd = np.flatnonzero(sparse & 1)
    assert len(taps) < 200
    for masks in (1, 5, 25):
        np.testing.assert_array_equal(
            changed_entries(under_flowers_masks(sparse, masks), taps), odd
        )
    ours, _ = under_our_masks(sparse)
    assert changed_entries(ours, taps) is None
    guesses = (
        continued((ours & 1).astype(np.uint8)[:STATE], taps, 10_000)
        == (ours & 1)[STATE : STATE + 10_000]
    )
    assert abs(guesses.mean() - 0.5) < 5 / np.sqrt(4 * 10_000)


def test_the_whole_update_is_read_from_one_of_flowers_masks_and_not_from_one_of_ours(sparse):
    found = after_one_twister(under_flowers_masks(sparse, 1))
    np.testing.assert_array_equal(found, sparse[WORDS:])
    ours, round_ = under_our_masks(sparse)
    left = ours.astype(np.uint64)
    own, common = round_.own[1], round_.common.digest
    add_mask(left, own_mask_seed(common, 1, own.seed), -1)  # known to the server in the end
    for other in (2, 3, 4):  # say they collude
        add_mask(left, pair_mask_seed(common, own.mask, round_.announced[other].mask), -1)
    assert after_one_twister(left % 2**32) is None
    add_mask(left, pair_mask_seed(common, own.mask, round_.announced[5].mask), -1)
    np.testing.assert_array_equal(left % MODULUS, sparse.astype(np.uint64))
