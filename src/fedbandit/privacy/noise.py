"""Where noise comes from. Two kinds that cannot be taken for each other: a simulation's and a deployment's.

A simulation's noise is a function of the run, its seed and the round, so that it can be repeated and resumed; whoever
has the configuration can subtract it. A deployment's comes from the operating system and takes no seed.
"""

import hashlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from fedbandit.core.errors import FedbanditError
from fedbandit.core.randomness import Purpose, generator
from fedbandit.federated.server import Summing
from fedbandit.privacy.accounting import Ledger
from fedbandit.privacy.discrete import discrete_gaussians
from fedbandit.privacy.plan import PrivacyPlan
from fedbandit.privacy.strategies import Memory, Strategy, stays_whole

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
    """Noise that follows from a seed. Rounds may be asked for in any order; the next after the last one is fast.

    The plan, and whatever else tells a run from others (`of`), is part of the noise's address: if two runs drew the
    same normals and scaled them differently, or added them to different sums, the difference would undo the noise.
    """

    def __init__(self, plan: PrivacyPlan, seed: int, of: str = "") -> None:
        self._strategy, self._seed = plan.strategy, seed
        digest = hashlib.sha256(f"{plan.identity}; {of}".encode()).digest()
        self._run = int.from_bytes(digest[:8], "little")
        self._done = 0
        self._memory: Memory = {}  # kept for speed alone: it can be made again from the seed

    def __repr__(self) -> str:
        return f"SimulatedNoise({self._seed}, {self._run})"

    def update(self, number: int, like: np.ndarray) -> np.ndarray:
        if number <= self._done:
            self._done, self._memory = 0, {}
        noise = np.empty(0)
        for round_ in range(max(self._done + 1, self._strategy.since(number)), number + 1):
            rng = generator(self._seed, Purpose.NOISE, self._run, round_, _UPDATE)
            fresh = rng.standard_normal(like.shape, dtype=like.dtype.type)
            noise, self._memory = self._strategy.step(round_, fresh, self._memory)
        self._done = number
        return noise

    def count(self, number: int) -> float:
        return float(
            generator(self._seed, Purpose.NOISE, self._run, number, _COUNT).standard_normal()
        )


class DrawnOnce(FedbanditError, ValueError):
    """Noise that cannot be drawn again was asked for again."""


class DeploymentNoise:
    """Noise from the operating system's randomness: no seed, no second time.

    A strategy that remembers needs its memory to resume after a restart of the server: keep `memory` where the weights
    are kept, but secret, since it undoes the protection. Without it such a stream can only begin at round 1.
    """

    def __init__(self, strategy: Strategy, done: int = 0, memory: Memory | None = None) -> None:
        self._strategy, self._done = strategy, done
        self._memory: Memory = dict(memory or {})

    @property
    def memory(self) -> Mapping[int, np.ndarray]:
        """What has to be kept, secretly, to resume after `done` rounds."""
        return dict(self._memory)

    @property
    def done(self) -> int:
        return self._done

    def update(self, number: int, like: np.ndarray) -> np.ndarray:
        if not self._can_draw(number):
            raise DrawnOnce(
                f"noise for round {number} asked for after round {self._done}: it can be drawn only once, and noise"
                " that is correlated cannot be resumed without its memory; start anew"
            )
        noise, self._memory = self._strategy.step(number, self._fresh(like), self._memory)
        self._done = number
        return noise

    def _fresh(self, like: np.ndarray) -> np.ndarray:
        return secret_normals(like.size).astype(like.dtype).reshape(like.shape)

    def _can_draw(self, number: int) -> bool:
        follows = number == self._done + 1
        return follows or (number > self._done and self._strategy.since(number) == number)

    def count(self, number: int) -> float:
        return float(secret_normals(1)[0])

    def __repr__(self) -> str:
        return "DeploymentNoise()"


class GridNoise(DeploymentNoise):
    """Noise for sums of whole numbers, `deviation` of their steps wide, and itself whole numbers: int64.

    Discrete Gaussian where the strategy keeps it whole (independent, tree). Other strategies mix normals with weights
    that are no whole numbers; what comes out is rounded. The sum is whole, so that is the noisy sum rounded.
    """

    def __init__(
        self, strategy: Strategy, deviation: float, done: int = 0, memory: Memory | None = None
    ) -> None:
        kept = dict(memory or {})
        if stays_whole(strategy):  # it may have been kept with numbers that are not
            kept = {at: np.rint(value).astype(np.int64) for at, value in kept.items()}
        super().__init__(strategy, done, kept)
        self._deviation = deviation

    def update(self, number: int, like: np.ndarray) -> np.ndarray:
        whole: np.ndarray = np.rint(super().update(number, like)).astype(np.int64)
        return whole

    def whole_count(self, deviation: float) -> int:
        """Noise for a whole number that is not one of the updates'."""
        return int(discrete_gaussians(deviation, 1)[0])

    def _fresh(self, like: np.ndarray) -> np.ndarray:
        if stays_whole(self._strategy):
            return discrete_gaussians(self._deviation, like.size).reshape(like.shape)
        return self._deviation * secret_normals(like.size).reshape(like.shape)

    def __repr__(self) -> str:
        return f"GridNoise({self._deviation})"


def secret_normals(size: int) -> np.ndarray:
    """float64 [size]: standard normals from the operating system's random bytes, by Box and Muller's method."""
    pairs = (size + 1) // 2
    bits = np.frombuffer(os.urandom(16 * pairs), np.uint64).reshape(2, pairs)
    u, v = (bits >> np.uint64(11)) * 2.0**-53
    radius, angle = np.sqrt(-2 * np.log1p(-u)), 2 * np.pi * v
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:size]


@dataclass(frozen=True)
class PrivateMean(Summing):
    """Noise on the sum, divided by the expected number of clients; an empty cohort gives noise alone.

    The divisor must not depend on who took part: that would tell.
    """

    plan: PrivacyPlan
    noise: NoiseStream
    ledger: Ledger | None = field(
        default=None, repr=False
    )  # what the rounds are charged to; None: nothing is reported

    def mean(self, total: np.ndarray, accepted: int, number: int, clip_norm: float) -> np.ndarray:
        dtype = total.dtype.type
        deviation = self.plan.update_multiplier * clip_norm
        if deviation > 0:
            total = total + dtype(deviation) * self.noise.update(number, total)
        mean: np.ndarray = total / dtype(self.plan.clients_per_round)
        return mean

    def unclipped(self, below: int, accepted: int, number: int) -> float | None:
        if not self.plan.adaptive:
            return below / accepted if accepted else None
        # Each client sends 1/2 or -1/2, so that one more client moves the sum by no more than that.
        total = below - accepted / 2
        if self.plan.noise_multiplier > 0:
            total += self.plan.count_deviation * self.noise.count(number)
        return total / self.plan.clients_per_round + 0.5

    def counted(self, accepted: int) -> int:
        return self.plan.clients_per_round

    def metrics(self, number: int, deploys: bool) -> dict[str, Any]:
        return {} if self.ledger is None else self.ledger.metrics(number, deploys)


@dataclass(frozen=True)
class Grid:
    """Where secure sums live: whole steps, as wide as `step` clip norms, counted modulo `modulus`."""

    step: float
    modulus: int

    def centred(self, residues: np.ndarray) -> np.ndarray:
        """The whole numbers nearest to 0 that these are modulo the modulus."""
        half = self.modulus // 2
        found: np.ndarray = (residues + half) % self.modulus - half
        return found


_RARE = 6  # standard deviations of what honest devices do not come to


@dataclass(frozen=True)
class GridMean(PrivateMean):
    """The same of a sum of whole numbers, of which only the residues are known.

    Noise is added to the residues before anything else is done. What follows (centring, scaling back a sum that no
    honest devices come to) then sees nothing but the true sum plus noise, modulo a constant: whatever other devices
    put in, however it wraps, one device moves the true sum by no more than its clip norm.
    """

    noise: GridNoise
    grid: Grid = field(kw_only=True)
    dtype: np.dtype[Any] = field(kw_only=True)

    def mean(self, total: np.ndarray, accepted: int, number: int, clip_norm: float) -> np.ndarray:
        if self.plan.update_multiplier > 0:
            total = total + self.noise.update(number, total)
        values = self.grid.centred(total) * (self.grid.step * clip_norm)
        values *= self._scale(values, number, clip_norm) / self.plan.clients_per_round
        return values.astype(self.dtype)

    def _scale(self, values: np.ndarray, number: int, clip_norm: float) -> float:
        """What makes a noisy sum that honest devices cannot come to as long as they could have made it.

        From the plan alone: who took part must not decide how much the others count.
        """
        noise = (
            self.plan.update_multiplier
            * clip_norm
            * math.sqrt(self.plan.noise_variances[0, number - 1])
        )
        longest = most_devices(self.plan) * clip_norm
        allowed = longest**2 + _RARE * noise * (noise * math.sqrt(2 * values.size) + 2 * longest)
        found = float(values @ values) - values.size * noise**2
        return 1.0 if found <= allowed else math.sqrt(allowed / found)

    def unclipped(self, below: int, accepted: int, number: int) -> float | None:
        if not self.plan.adaptive:
            return below / accepted if accepted else None
        total = 2 * below - accepted  # each client adds 1 or -1
        if self.plan.noise_multiplier > 0:
            total += self.noise.whole_count(2 * self.plan.count_deviation)
        share = int(self.grid.centred(np.array(total))) / (2 * self.plan.clients_per_round) + 0.5
        return min(max(share, -1.0), 2.0)


def most_devices(plan: PrivacyPlan) -> float:
    """How many devices a round has at most; under Poisson sampling, but for one round in a billion."""
    n = plan.clients_per_round
    return n + _RARE * math.sqrt(n) if plan.amplified else n


def room_needed(plan: PrivacyPlan) -> float:
    """How large an entry of a noisy sum can become, in clip norms: what a grid's modulus must have room for."""
    loudest = math.sqrt(plan.noise_variances[0].max())
    return most_devices(plan) + 2 * _RARE * plan.update_multiplier * loudest
