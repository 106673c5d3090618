"""Where noise comes from. Two kinds that cannot be taken for each other: a simulation's and a deployment's.

A simulation's noise is a function of the seed and the round, so that a run can be repeated and resumed; whoever knows
the seed can subtract it. A deployment's comes from the operating system and takes no seed.
"""

import os
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from fedbandit.privacy.strategies import Memory, Strategy
from fedbandit.randomness import Purpose, generator

_UPDATE, _COUNT = 0, 1


class NoiseStream(Protocol):
    """The noise of round after round, in units of one standard deviation of its independent parts."""

    def update(self, number: int, like: np.ndarray) -> np.ndarray:
        """Noise for a round's sum of updates, shaped and typed as `like`."""
        ...

    def count(self, number: int) -> float:
        """Noise for a round's count of unclipped updates."""
        ...


class SimulatedNoise:
    """Noise that follows from a seed. Rounds may be asked for in any order; going on from the last one is fast."""

    def __init__(self, strategy: Strategy, seed: int) -> None:
        self._strategy, self._seed = strategy, seed
        self._done = 0
        self._memory: Memory = {}  # kept for speed alone: it can be made again from the seed

    def update(self, number: int, like: np.ndarray) -> np.ndarray:
        if number <= self._done:
            self._done, self._memory = 0, {}
        noise = np.empty(0)
        for round_ in range(max(self._done + 1, self._strategy.since(number)), number + 1):
            rng = generator(self._seed, Purpose.NOISE, round_, _UPDATE)
            fresh = rng.standard_normal(like.shape, dtype=like.dtype.type)
            noise, self._memory = self._strategy.step(round_, fresh, self._memory)
        self._done = number
        return noise

    def count(self, number: int) -> float:
        return float(generator(self._seed, Purpose.NOISE, number, _COUNT).standard_normal())


class DeploymentNoise:
    """Noise from the operating system's randomness: no seed, no second time.

    A strategy that remembers needs its memory to go on after a restart of the server: keep `memory` where the weights
    are kept, but secret, since it undoes the protection. Without it a stream can only begin at round 1.
    """

    def __init__(self, strategy: Strategy, done: int = 0, memory: Memory | None = None) -> None:
        self._strategy, self._done = strategy, done
        self._memory: Memory = dict(memory or {})

    @property
    def memory(self) -> Mapping[int, np.ndarray]:
        """What has to be kept, secretly, to go on after `done` rounds."""
        return dict(self._memory)

    @property
    def done(self) -> int:
        return self._done

    def update(self, number: int, like: np.ndarray) -> np.ndarray:
        if number != self._done + 1:
            raise ValueError(f"noise for round {number} asked for after round {self._done}: it can be drawn only once")
        fresh = secret_normals(like.size).astype(like.dtype).reshape(like.shape)
        noise, self._memory = self._strategy.step(number, fresh, self._memory)
        self._done = number
        return noise

    def count(self, number: int) -> float:
        return float(secret_normals(1)[0])


def secret_normals(size: int) -> np.ndarray:
    """float64 [size]: standard normals from the operating system's random bytes, by Box and Muller's method."""
    pairs = (size + 1) // 2
    bits = np.frombuffer(os.urandom(16 * pairs), np.uint64).reshape(2, pairs)
    u, v = (bits >> np.uint64(11)) * 2.0**-53
    radius, angle = np.sqrt(-2 * np.log1p(-u)), 2 * np.pi * v
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:size]
