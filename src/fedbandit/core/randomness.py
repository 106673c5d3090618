"""Randomness that is addressed, not consumed: every draw is a function of (seed, purpose, round,
client, position).

Nothing here has state, so nothing depends on who ran first, and a resumed run needs no generator to
be restored.
"""

import hashlib
import os
from dataclasses import dataclass
from enum import IntEnum
from math import exp, factorial

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


class Purpose(IntEnum):
    """The use of a draw. The numbers are part of every published result: never reuse or renumber
    one.
    """

    COHORT = 1
    EXAMPLES = 2
    ACTIONS = 3
    MODEL = 4
    DATA = 5
    NOISE = 6
    PULLS = 7
    SPLIT = 8
    BOOTSTRAP = 9
    PRETRAINING = 10
    SEARCH = 11
    GROUPS = 12
    DRIFT = 13
    GATE = 14
    COMPRESSION = 15
    HEADS = 16
    WORLD = 17
    POSTERIOR = 18


_Address = int | np.integer | np.ndarray


@dataclass(frozen=True, repr=False)
class Secret:
    """32 bytes in the place of a seed, for draws that nobody must be able to repeat without them.

    It shows itself by its digest alone, which tells two of them apart and gives neither away.
    """

    value: bytes

    @classmethod
    def fresh(cls) -> "Secret":
        """A new one from the operating system."""
        return cls(os.urandom(32))

    @property
    def digest(self) -> str:
        """32 hexadecimal digits that name the secret and may be published."""
        return hashlib.sha256(b"digest of " + self.value).hexdigest()[:32]

    def bits(self, purpose: Purpose, *address: int) -> bytes:
        """32 bytes for one address: as good as independent for who has not the secret."""
        text = " ".join(str(int(part)) for part in (purpose, *address))
        return hashlib.sha256(self.value + text.encode()).digest()

    def __repr__(self) -> str:
        return f"Secret({self.digest})"


def scramble(x: np.ndarray) -> np.ndarray:
    """The splitmix64 finaliser: each output bit depends on each input bit."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


def bits(seed: int, purpose: Purpose, *address: _Address) -> np.ndarray:
    """64 random bits for every address; the parts of the address broadcast against each other."""
    state = np.zeros((), np.uint64)
    with np.errstate(over="ignore"):  # arithmetic modulo 2^64 is the point
        for part in (seed, int(purpose), *address):
            state = scramble(state + GOLDEN + np.asarray(part).astype(np.uint64))
    return state


def uniforms(seed: int, purpose: Purpose, *address: _Address) -> np.ndarray:
    """A float64 in [0, 1) for every address."""
    return (bits(seed, purpose, *address) >> np.uint64(11)) * 2.0**-53


def normals(seed: int, purpose: Purpose, *address: _Address) -> np.ndarray:
    """A standard normal float64 for every address, by the method of Box and Muller."""
    first, second = (uniforms(seed, purpose, *address, draw) for draw in (1, 2))
    return np.asarray(np.sqrt(-2 * np.log1p(-first)) * np.cos(2 * np.pi * second))


def generator(seed: int | Secret, purpose: Purpose, *address: int) -> np.random.Generator:
    """A numpy generator for one address, for draws over a whole population or a whole model."""
    if isinstance(seed, Secret):
        key = int.from_bytes(seed.bits(purpose, *address)[:16], "little")
        return np.random.Generator(np.random.Philox(key=key))
    return np.random.Generator(np.random.Philox(key=int(bits(seed, purpose, *address))))


def poisson(uniform: np.ndarray) -> np.ndarray:
    """A Poisson(1) count for every uniform in [0, 1): how often a bootstrap would have drawn an
    event. float32.
    """
    return np.searchsorted(_POISSON, uniform, side="right").astype(np.float32)


_POISSON = np.cumsum([exp(-1) / factorial(k) for k in range(20)])
