"""Where noise comes from, and how a sum is released with it. Two kinds that cannot be mistaken.

A simulation's noise is a function of the run, its seed and the round, so that it can be repeated
and resumed; who has the configuration can subtract it. That of deployments and of simulations with
`privacy.noise = "system"` comes from the operating system, takes no seed, and is added to whole
steps of a public grid: no low bits of floating point can tell what was summed.
"""

import hashlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from fedbandit.core.errors import FedbanditError, refuse
from fedbandit.core.randomness import Purpose, Secret, generator
from fedbandit.federated.server import PlainMean
from fedbandit.privacy.accounting import Ledger
from fedbandit.privacy.discrete import discrete_gaussians
from fedbandit.privacy.plan import PrivacyPlan
from fedbandit.privacy.strategies import Independent, Memory, Strategy, stays_whole

_UPDATE, _COUNT = 0, 1


class SimulatedNoise:
    """Noise that follows from a seed, in units of the deviation of its independent parts.

    Rounds may be asked for in any order; the next after the last one is fast.

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
        """Noise for a round's sum of updates, shaped and typed as `like`."""
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
        """Noise for a round's count of unclipped updates."""
        rng = generator(self._seed, Purpose.NOISE, self._run, number, _COUNT)
        return float(rng.standard_normal())


class DrawnOnce(FedbanditError, ValueError):
    """Noise that cannot be drawn again was asked for again."""


class GridNoise:
    """Noise from the operating system for sums of whole steps, `deviation` of them wide: int64.

    Discrete Gaussian where the strategy keeps it whole (independent, tree): every decision of the
    draw is exact. Other strategies mix normals with weights that are no whole numbers; what comes
    out is rounded. The sum is whole, so that is the noisy sum rounded. There is no seed and no
    second time.

    A strategy that remembers needs its memory to resume after a restart of the server: keep
    `memory` where the weights are kept, but secret, since it undoes the protection. Without it such
    a stream can only begin at round 1.
    """

    def __init__(
        self, strategy: Strategy, deviation: float, done: int = 0, memory: Memory | None = None
    ) -> None:
        self._strategy, self._deviation, self.done = strategy, deviation, done
        self._whole = stays_whole(strategy)
        steps = {at: value * float(deviation) for at, value in (memory or {}).items()}
        if self._whole:
            steps = {at: np.rint(value).astype(np.int64) for at, value in steps.items()}
        self._memory: Memory = steps

    @property
    def memory(self) -> dict[int, np.ndarray]:
        """Memory to keep, secretly, to resume after `done` rounds: in units of `deviation`."""
        return {at: value / self._deviation for at, value in self._memory.items()}

    def update(self, number: int, like: np.ndarray) -> np.ndarray:
        """Noise for the round's sum of updates, int64 shaped as `like`."""
        first = number == self.done + 1 or self._strategy.since(number) == number
        refuse(
            (
                number <= self.done or not first,
                f"noise for round {number} asked for after round {self.done}: it can be drawn only"
                " once, and noise that is correlated cannot be resumed without its memory; start"
                " anew",
            ),
            error=DrawnOnce,
        )
        noise, self._memory = self._strategy.step(number, self._fresh(number, like), self._memory)
        self.done = number
        return np.asarray(np.rint(noise), np.int64)

    def whole_count(self, deviation: float) -> int:
        """Noise for a whole number that is not one of the updates'."""
        return int(discrete_gaussians(deviation, 1)[0])

    def with_secret(self, secret: Secret) -> "GridNoise":
        """The same, from a secret that can be kept where the strategy remembers earlier rounds.

        Independent noise needs none: each draw comes from the operating system, and is forgotten.
        """
        if isinstance(self._strategy, Independent):
            return self
        return SecretNoise(self._strategy, self._deviation, secret)

    def _fresh(self, number: int, like: np.ndarray, **source: Any) -> np.ndarray:
        """Independent draws of the strategy's kind, float64 or whole, shaped as `like`."""
        if self._whole:
            return discrete_gaussians(self._deviation, like.size, **source).reshape(like.shape)
        return self._deviation * secret_normals(like.size, **source).reshape(like.shape)

    def __repr__(self) -> str:
        return f"GridNoise({self._deviation})"


class SecretNoise(GridNoise):
    """Correlated noise from 32 secret bytes: a resumed run draws the same noise again.

    Bytes are those of SHAKE-256. Who has the secret can undo the noise, as with its memory.
    """

    def __init__(self, strategy: Strategy, deviation: float, secret: Secret) -> None:
        super().__init__(strategy, deviation)
        self._secret = secret

    def update(self, number: int, like: np.ndarray) -> np.ndarray:
        first = self._strategy.since(number)
        if not first <= self.done + 1 <= number:
            self.done, self._memory = first - 1, {}
        for before in range(self.done + 1, number):
            super().update(before, like)
        return super().update(number, like)

    def _fresh(self, number: int, like: np.ndarray, **source: Any) -> np.ndarray:
        calls = count()

        def from_secret(size: int) -> bytes:
            block = self._secret.bits(Purpose.NOISE, number, next(calls))
            return hashlib.shake_256(block).digest(size)

        return super()._fresh(number, like, entropy=from_secret)


class NoiseInSum(GridNoise):
    """Noise that devices have added before the server sees the sum: it adds none."""

    def update(self, number: int, like: np.ndarray) -> np.ndarray:
        return np.zeros(like.shape, np.int64)


def secret_normals(size: int, entropy: Callable[[int], bytes] = os.urandom) -> np.ndarray:
    """float64 [size]: standard normals from random bytes, by default the operating system's.

    By Box and Muller's method. Radii beyond 9.4, one pair in 2^64, are never drawn.
    """
    pairs = (size + 1) // 2
    bits = np.frombuffer(entropy(16 * pairs), np.uint64).reshape(2, pairs)
    u, v = (bits + 0.5) * 2.0**-64
    radius, angle = np.sqrt(-2 * np.log(u)), 2 * np.pi * v
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:size]


@dataclass(frozen=True)
class PrivateMean(PlainMean):
    """Noise on the sum, divided by the expected number of clients; an empty cohort gives noise alone.

    The divisor must not depend on who took part: that would tell.
    """

    plan: PrivacyPlan
    noise: SimulatedNoise
    ledger: Ledger | None = field(
        default=None, repr=False
    )  # what the rounds are charged to; None: nothing is reported

    def mean(self, total: np.ndarray, accepted: int, number: int, clip_norm: float) -> np.ndarray:
        dtype = total.dtype.type
        deviation = self.plan.update_multiplier * clip_norm
        if deviation > 0:
            total = total + dtype(deviation) * self.noise.update(number, total)
        return np.asarray(total / dtype(self.plan.clients_per_round))

    def unclipped(self, below: int, accepted: int, number: int) -> float | None:
        if not self.plan.adaptive:
            return below / accepted if accepted else None
        # Each client sends 1/2 or -1/2, so that one more client moves the sum by no more than that.
        total = below - accepted / 2
        if self.plan.noise_multiplier > 0:
            total += self.plan.count_deviation * self.noise.count(number)
        return total / self.plan.clients_per_round + 0.5

    def denominator(self, accepted: int) -> int:
        return self.plan.clients_per_round

    def metrics(self, number: int, deploys: bool) -> dict[str, Any]:
        return {} if self.ledger is None else self.ledger.metrics(number, deploys)


@dataclass(frozen=True)
class Grid:
    """Whole steps, each `step` clip norms wide; secure sums know them modulo `modulus` alone."""

    step: float
    modulus: int | None = None

    def centred(self, steps: np.ndarray) -> np.ndarray:
        """The whole numbers nearest to 0 that these are modulo the modulus, where there is one."""
        if self.modulus is None:
            return steps
        half = self.modulus // 2
        return np.asarray((steps + half) % self.modulus - half)


SECURE = Grid(2.0**-21, 2**40)
"""Of secure sums."""

RELEASE = Grid(2.0**-24)
"""Of every private release that is not a secure sum: model, figures and count alike.

So fine that discrete Gaussian noise is Gaussian noise rounded to it (`grid_epsilon`), and so coarse
that rounded noise of float64 has the probability of each step right to about seven digits.
"""


def grid_epsilon(deviation: float, numbers: float) -> float:
    """Epsilon that accounting discrete Gaussian noise as Gaussian can miss over this many numbers.

    Rounded Gaussian noise is post-processing of Gaussian noise. For noise of x deviations, each σ
    steps wide, the logarithm of its probability differs from the discrete Gaussian's by at most
    (1 + x²)/24σ². Over n numbers x² adds up to n, and both worlds count: n/6σ².

    Examples:
        >>> f"{grid_epsilon(0.7 / RELEASE.step, 1e9):.1e}"
        '1.2e-06'
    """
    return numbers / (6 * deviation**2)


_RARE = 6  # standard deviations of what honest devices do not come to
_FINE = 2**24  # parts of a client, in which a count gets its noise


@dataclass(frozen=True)
class GridMean(PrivateMean):
    """The same of a sum of whole steps. What it releases is a function of that sum plus noise.

    Of secure sums only the residues are known. Noise is added to them before anything else is done.
    What follows (centring, scaling back a sum that no honest devices come to) then sees nothing but
    the true sum plus noise, modulo a constant: whatever other devices put in, however it wraps, one
    device moves the true sum by no more than its clip norm.
    """

    noise: GridNoise  # type: ignore[assignment] # its counts are whole
    grid: Grid = field(kw_only=True)
    dtype: np.dtype[Any] = field(kw_only=True)
    excess: float = field(default=1.0, kw_only=True)  # of devices' noise, where nobody drops out

    def mean(self, total: np.ndarray, accepted: int, number: int, clip_norm: float) -> np.ndarray:
        if self.plan.update_multiplier > 0:
            total = total + self.noise.update(number, total)
        values = self.grid.centred(total) * (self.grid.step * clip_norm)
        values *= self._scale(values, number, clip_norm) / self.plan.clients_per_round
        return values.astype(self.dtype)

    def _scale(self, values: np.ndarray, number: int, clip_norm: float) -> float:
        """Factor that shortens a noisy sum which honest devices cannot come to, to what they could.

        From the plan alone: who took part must not decide how much the others count.
        """
        if self.grid.modulus is None:  # each update was clipped by the server itself
            return 1.0
        noise = (
            self.excess
            * self.plan.update_multiplier
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
        parts = _FINE if self.grid.modulus is None else 1
        total = (2 * below - accepted) * parts  # each client adds 1 or -1
        if self.plan.noise_multiplier > 0:
            total += self.noise.whole_count(2 * self.plan.count_deviation * parts)
        noisy = int(self.grid.centred(np.array(total)))
        return min(max(noisy / (2 * self.plan.clients_per_round * parts) + 0.5, -1.0), 2.0)


def most_devices(plan: PrivacyPlan) -> float:
    """The largest number of devices in a round; under Poisson sampling, but for one in a billion."""
    n = plan.clients_per_round
    return n + _RARE * math.sqrt(n) if plan.amplified else n


def room_needed(plan: PrivacyPlan, excess: float = 1.0) -> float:
    """The largest entry of a noisy sum, in clip norms: what a grid's modulus must have room for."""
    loudest = excess * math.sqrt(plan.noise_variances[0].max())
    return most_devices(plan) + 2 * _RARE * plan.update_multiplier * loudest
