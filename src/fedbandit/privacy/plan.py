"""The plan: one frozen object that says who may take part, how updates are clipped, what noise is added, what it costs.

Its parts are checked against each other when it is made. Knows nothing of configurations, models or data.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from fedbandit.federated.clients import BlockCohorts, Cohorts, FixedCohorts, PoissonCohorts
from fedbandit.federated.pipeline import AdaptiveClipping, FixedClipping
from fedbandit.privacy.strategies import Banded, Independent, Strategy, squared_sensitivities

Sampling = Literal["poisson", "fixed", "min-separation"]


@dataclass(frozen=True, kw_only=True)
class PrivacyPlan:
    """What every private run, and every command about epsilon, is made from."""

    population: int  # clients that may take part
    clients_per_round: int  # exactly (fixed, min-separation) or on average (poisson); the divisor of the sum
    rounds: int
    noise_multiplier: float  # standard deviation of the independent normals, in clip norms
    delta: float = 1e-6
    clipping: FixedClipping | AdaptiveClipping = field(default_factory=lambda: FixedClipping(1.0))
    sampling: Sampling = "poisson"
    separation: int = 1  # min-separation: a client takes part at most in every such round
    strategy: Strategy = field(default_factory=Independent)

    def __post_init__(self) -> None:
        independent = isinstance(self.strategy, Independent)
        for name in ("population", "clients_per_round", "rounds", "separation"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, not {getattr(self, name)}")
        if self.clients_per_round > self.population:
            raise ValueError(f"clients_per_round: {self.clients_per_round} of {self.population} clients")
        if not (self.noise_multiplier >= 0 and math.isfinite(self.noise_multiplier)):
            raise ValueError(f"noise_multiplier: must be finite and not negative, not {self.noise_multiplier}")
        if not 0 < self.delta < 1:
            raise ValueError(f"delta: must lie between 0 and 1, not {self.delta}")
        if not math.isfinite(self.clipping.initial):
            raise ValueError("clipping: without a clip norm there is nothing for the noise to hide")
        if self.sampling == "poisson" and not independent:
            raise ValueError("sampling: poisson claims amplification, which correlated noise does not have;"
                             " use min-separation or fixed")  # fmt: skip
        if self.sampling != "min-separation" and self.separation != 1:
            raise ValueError(f"separation: {self.separation} rounds are not kept by {self.sampling} sampling")
        if self.separation * self.clients_per_round > self.population:
            raise ValueError(
                f"separation: {self.separation} blocks of at least {self.clients_per_round} clients need more than the"
                f" {self.population} there are; at most {self.population // self.clients_per_round}"
            )
        if isinstance(self.strategy, Banded) and self.strategy.bands > max(1, self.separation):
            raise ValueError(f"bands: {self.strategy.bands}, more than the {self.separation} rounds between"
                             " two participations")  # fmt: skip
        if self.adaptive and not independent:
            raise ValueError("clipping: correlated noise needs a fixed norm (set clipping.norm)")
        if self.adaptive and self.noise_multiplier >= 2 * self.count_deviation:
            raise ValueError(
                f"noise_multiplier: {self.noise_multiplier:g} is not below {2 * self.count_deviation:g}, the noise of"
                " the count that moves the clip norm; use more clients a round or a fixed clipping.norm"
            )

    @property
    def adaptive(self) -> bool:
        return isinstance(self.clipping, AdaptiveClipping)

    @property
    def amplified(self) -> bool:
        """Whether the accounting counts on clients being drawn by chance."""
        return self.sampling == "poisson"

    @property
    def probability(self) -> float:
        """How likely it is that a given client takes part in a given round."""
        return self.clients_per_round / self.population

    @property
    def count_deviation(self) -> float:
        """Standard deviation of the noise on the count of unclipped clients, which one client moves by 1/2."""
        return self.clients_per_round / 20

    @property
    def update_multiplier(self) -> float:
        """Noise on the sum of updates, in clip norms: with that of the count it makes up `noise_multiplier`."""
        z = self.noise_multiplier
        if not self.adaptive or z == 0:
            return z
        multiplier: float = (z**-2 - (2 * self.count_deviation) ** -2) ** -0.5
        return multiplier

    @cached_property
    def squared_sensitivities(self) -> np.ndarray:
        """[rounds + 1], in squared clip norms, after each round; what unamplified accounting rests on."""
        return squared_sensitivities(self.strategy, self.rounds, self.separation)

    def event(self, rounds: int | None = None) -> Any:
        """The `dp_accounting` event of the first rounds (None: of all)."""
        import dp_accounting

        rounds = self.rounds if rounds is None else rounds
        if not 0 <= rounds <= self.rounds:
            raise ValueError(f"rounds: {rounds} of a plan for {self.rounds}")
        if rounds == 0:
            return dp_accounting.NoOpDpEvent()
        if self.noise_multiplier == 0:
            return dp_accounting.NonPrivateDpEvent()
        if self.amplified:
            gaussian = dp_accounting.GaussianDpEvent(self.noise_multiplier)
            return dp_accounting.SelfComposedDpEvent(
                dp_accounting.PoissonSampledDpEvent(self.probability, gaussian), rounds
            )
        deviation = self.noise_multiplier / math.sqrt(self.squared_sensitivities[rounds])
        return dp_accounting.GaussianDpEvent(deviation)

    def cohorts(self, pool: range, seed: int) -> Cohorts:
        """The sampler that does what the accounting says, over clients `pool`."""
        if len(pool) != self.population:
            raise ValueError(f"population: the plan is for {self.population} clients, not {len(pool)}")
        if self.sampling == "poisson":
            return PoissonCohorts(pool, self.probability, seed)
        if self.sampling == "min-separation":
            return BlockCohorts(pool, self.clients_per_round, self.separation, seed)
        return FixedCohorts(pool, self.clients_per_round, seed)
