"""Discrete Gaussian noise: whole numbers, exp(-x²/2σ²) as likely as 0, from the operating system's randomness.

Knows nothing of plans or rounds, and needs numpy alone. Every decision is exact, so that no low
bits of floating point can tell anything. `DeviceNoise` is the share that each device of a secure sum
adds itself, so that its server never sees an exact sum: the shares of the honest devices that stay
make up the plan's noise.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fedbandit.core.errors import refuse

_REACH = (
    13  # deviations: beyond lies less than 2·exp(-13²/2) < 2⁻¹²⁰, all that a draw can be wrong by
)
_HEIGHTS = 2**12  # how finely the steps of the envelope are cut
_LARGEST = 2.0**48  # so that whole numbers have an exact square root of their place in float64
_AT_ONCE = 2**18
_DOUBT = 2.0**-40  # relative; float64 knows an acceptance probability far better than this
_BITS = 53  # of the uniform number that most decisions are made with


class _Envelope(NamedTuple):
    """A staircase above the density: blocks of `width` whole numbers, block b as high as `heights[b]` / _HEIGHTS."""

    width: int  # a power of two
    heights: np.ndarray  # int64 [blocks]
    blocks: (
        np.ndarray
    )  # int16, a power of two of them: each block as often as it is high, the rest -1


def discrete_gaussians(
    deviation: float, size: int, entropy: Callable[[int], bytes] = os.urandom, doubt: float = _DOUBT
) -> np.ndarray:
    """int64 [size]: independent draws with parameter σ = `deviation`, by rejection from a staircase.

    A proposal is a block (as likely as it is high), a place in it and a sign: all of them whole powers of two of random
    bits. It is taken with probability exp(-x²/2σ²) over the block's height. That is decided in float64 where float64
    is sure, otherwise (less than once in 10¹¹ proposals) by exact arithmetic with more random bits.
    """
    found, missing = [], size
    while missing > 0:
        proposals = min(_AT_ONCE, 2 * missing + 64)
        kept = _accepted(deviation, proposals, entropy, doubt)[:missing]
        found.append(kept)
        missing -= len(kept)
    return np.concatenate(found) if found else np.empty(0, np.int64)


def _accepted(
    deviation: float, proposals: int, entropy: Callable[[int], bytes], doubt: float
) -> np.ndarray:
    envelope = _envelope(deviation)
    bits = np.frombuffer(entropy(16 * proposals), np.uint64)
    place, chance = bits[:proposals], bits[proposals:] >> np.uint64(64 - _BITS)
    which = (len(envelope.blocks) - 1).bit_length()
    block = envelope.blocks[place & np.uint64(len(envelope.blocks) - 1)]
    negative = (place >> np.uint64(which)) & np.uint64(1) == 1
    offset = (place >> np.uint64(which + 1)) & np.uint64(envelope.width - 1)
    value = block.astype(np.int64) * envelope.width + offset.astype(np.int64)
    possible = (block >= 0) & ~(negative & (value == 0))  # zero has one sign
    block, value, negative, chance = (of[possible] for of in (block, value, negative, chance))
    heights = envelope.heights[block]
    wanted = np.exp(-0.5 * np.square(value / deviation)) * (_HEIGHTS / heights)
    drawn = chance * 2.0**-_BITS  # and up to 2⁻⁵³ more
    taken = drawn + 2.0**-_BITS <= wanted * (1 - doubt)
    for index in np.flatnonzero(~taken & (drawn < wanted * (1 + doubt))):
        taken[index] = _exactly(
            int(value[index]), int(heights[index]), deviation, int(chance[index]), entropy
        )
    return np.asarray(np.where(negative, -value, value)[taken])


def _exactly(
    value: int, height: int, deviation: float, chance: int, entropy: Callable[[int], bytes]
) -> bool:
    """Whether a uniform number that begins with the bits `chance` lies below the acceptance probability."""
    exponent = Fraction(value) ** 2 / (2 * Fraction(deviation) ** 2)
    bits, digits = _BITS, 40
    while True:
        with localcontext() as context:
            context.prec = digits
            wanted = (-Decimal(exponent.numerator) / Decimal(exponent.denominator)).exp()
            wanted = wanted * _HEIGHTS / height
            error = wanted * Decimal(10) ** (
                6 - digits
            )  # exponents are below 100, each step rounds correctly
            low, high = Fraction(wanted - error), Fraction(wanted + error)
        if Fraction(chance + 1, 2**bits) <= low:
            return True
        if Fraction(chance, 2**bits) >= high:
            return False
        chance, bits = (chance << 64) | int.from_bytes(entropy(8), "little"), bits + 64
        digits += 20


@lru_cache(maxsize=8)
def _envelope(deviation: float) -> _Envelope:
    problem = f"deviation: must lie above 0 and below 2^48 steps of the grid, not {deviation}"
    refuse((not 0 < deviation < _LARGEST, problem), error=ValueError)
    width = 2 ** max(0, math.floor(math.log2(deviation / 8)))
    blocks = math.ceil(_REACH * deviation / width) + 1
    starts = np.arange(blocks) * float(width)
    # Rounded up, and once more against errors of floating point: never below the density at a block's first number.
    heights = (
        np.floor(_HEIGHTS * (1 + 1e-9) * np.exp(-0.5 * np.square(starts / deviation))).astype(
            np.int64
        )
        + 1
    )
    table = np.full(2 ** math.ceil(math.log2(heights.sum())), -1, np.int16)
    table[: heights.sum()] = np.repeat(np.arange(blocks, dtype=np.int16), heights)
    return _Envelope(width, heights, table)


@dataclass(frozen=True)
class DeviceNoise:
    """Tolerance of devices' own noise: what may go wrong while it is still that of the plan.

    Of a cohort that has exchanged keys, a part may drop out before its vector is in the sum, and a
    part may work with the server and tell it their own noise.

    Examples:
        >>> tolerance = DeviceNoise(dropout=0.2, colluders=0.1)
        >>> tolerance.survivors(100), tolerance.honest(100)
        (80, 70)
        >>> f"{tolerance.share(100, 7.0):.3f} clip norms each, {tolerance.excess(100):.3f} too much"
        '0.837 clip norms each, 1.195 too much'
    """

    dropout: float = 0.2
    colluders: float = 0.1

    def __post_init__(self) -> None:
        lost, lying = self.dropout, self.colluders
        refuse(
            (not 0 <= lost < 1, f"dropout: from 0 to below 1, not {lost}"),
            (not 0 <= lying < 1 / 3, f"colluders: from 0 to below a third, not {lying}"),
            (not lost + lying < 1, "dropout: with colluders it must leave some honest devices"),
            error=ValueError,
        )

    def survivors(self, cohort: int) -> int:
        """The devices that must be in a sum, or it is not unmasked."""
        return math.ceil((1 - self.dropout) * cohort - 1e-9)

    def honest(self, cohort: int) -> int:
        """Those of them, at least, whose noise the server does not know."""
        found = self.survivors(cohort) - math.floor(self.colluders * cohort + 1e-9)
        refuse(
            (found < 1, f"clients_per_round: {cohort} devices leave no honest one"),
            error=ValueError,
        )
        return found

    def share(self, cohort: int, multiplier: float) -> float:
        """Deviation of one device's noise, in units of the whole."""
        return multiplier / math.sqrt(self.honest(cohort))

    def excess(self, cohort: int) -> float:
        """Factor of the noise if nobody drops out: the price of tolerance."""
        return math.sqrt(cohort / self.honest(cohort))

    def drawn(self, size: int, cohort: int, multiplier: float, step: float) -> np.ndarray:
        """One device's share in whole steps of `step` clip norms: int64 [size], discrete Gaussian."""
        return discrete_gaussians(self.share(cohort, multiplier) / step, size)


def sum_divergence(deviation: float, devices: int) -> float:
    """Distance of a sum of discrete Gaussians from one: tau of Kairouz, Liu and Steinke (2021).

    With `deviation` steps each, their sum costs as much as noise of root(devices) times that, but
    for tau·root(numbers) beside the sensitivity over the noise (theorem 1 of arXiv 2102.06387).

    Examples:
        >>> sum_divergence(10.0, 1000) < 1e-300
        True
    """
    first = 2 * math.pi**2 * deviation**2
    shares = np.arange(1, devices)
    return 10 * float(np.exp(-first * shares / (shares + 1)).sum())


def gaussian_epsilon(multiplier: float, turns: int, delta: float) -> float:
    """Epsilon of this many turns with this noise, by Rényi divergence: what a device can check itself."""
    orders = 1 + np.geomspace(1e-2, 1e4, 2000)
    rho = turns / (2 * multiplier**2)
    spent = rho * orders + (np.log1p(-1 / orders) - (np.log(delta) + np.log(orders)) / (orders - 1))
    return max(0.0, float(spent.min()))
