"""The plan: one frozen object that says who may take part, how updates are clipped, what noise is added, what it costs.

Its parts are checked against each other when it is made. Knows nothing of configurations, models or data.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from fedbandit.core.errors import refuse
from fedbandit.core.randomness import Secret
from fedbandit.federated.cohorts import Cohorts, Sampling, sampled_cohorts
from fedbandit.federated.pipeline import AdaptiveClipping, FixedClipping
from fedbandit.privacy.strategies import (
    Banded,
    Blt,
    Independent,
    Restarted,
    Strategy,
    largest_column,
    mechanism_name,
    never_rises,
    noise_of_rounds,
    squared_sensitivities,
)


@dataclass(frozen=True, kw_only=True)
class PrivacyPlan:
    """Who may take part when, clipping, noise and its cost: the one source of every private run.

    Parts that do not fit together are refused with the name of the field.

    Examples:
        >>> plan = PrivacyPlan(
        ...     population=1000, clients_per_round=50, rounds=40, noise_multiplier=2.0
        ... )
        >>> plan.amplified, plan.probability, plan.turns()
        (True, 0.05, 40)
    """

    population: int  # clients that may take part
    clients_per_round: int  # exactly (fixed, min-separation) or on average (poisson, cyclic-poisson); divides the sum
    rounds: int
    noise_multiplier: float  # standard deviation of the independent normals, in clip norms
    delta: float = 1e-6
    clipping: FixedClipping | AdaptiveClipping = field(default_factory=lambda: FixedClipping(1.0))
    sampling: Sampling = "poisson"
    separation: int = (
        1  # min-separation, cyclic-poisson: a client takes part at most in every such round
    )
    strategy: Strategy = field(default_factory=Independent)
    figures_share: float = field(
        default=0.0, repr=False
    )  # part of z⁻² that pays for sums beside the model, ...
    gate_share: float = field(
        default=0.0, repr=False
    )  # ... and for what decides whether a model goes out
    unit: Literal["client", "user"] = field(
        default="client", repr=False
    )  # what `population` counts

    def __post_init__(self) -> None:
        independent, z = isinstance(self.strategy, Independent), self.noise_multiplier
        counts = {
            name: getattr(self, name)
            for name in ("population", "clients_per_round", "rounds", "separation")
        }
        refuse(
            *((n < 1, f"{name}: must be at least 1, not {n}") for name, n in counts.items()),
            (
                self.clients_per_round > self.population,
                f"clients_per_round: {self.clients_per_round} of {self.population} clients",
            ),
            (
                not (z >= 0 and math.isfinite(z)),
                f"noise_multiplier: must be finite and not negative, not {z}",
            ),
            (not 0 < self.delta < 1, f"delta: must lie between 0 and 1, not {self.delta}"),
            (
                not math.isfinite(self.clipping.initial),
                "clipping: without a clip norm there is nothing for the noise to hide",
            ),
            error=ValueError,
        )
        self._check_sampling(independent)
        refuse(
            (
                self.adaptive and not independent,
                "clipping: correlated noise needs a fixed norm (set clipping.norm)",
            ),
            (
                min(self.figures_share, self.gate_share) < 0 or not self.weights_share > 0,
                "figures_share: with gate_share it must leave something of the budget for the model",
            ),
            error=ValueError,
        )
        most = 2 * self.count_deviation * math.sqrt(self.weights_share)
        refuse(
            (
                self.adaptive and z >= most,
                f"noise_multiplier: {z:g} is not below {most:g}, the noise of the count that moves"
                " the clip norm; use more clients a round or a fixed clipping.norm",
            ),
            error=ValueError,
        )

    def _check_sampling(self, independent: bool) -> None:
        """Refuse sampling that this strategy, or this population, cannot have."""
        inner = self.strategy.strategy if isinstance(self.strategy, Restarted) else self.strategy
        bands = inner.bands if isinstance(inner, Banded) else 1
        rising = isinstance(inner, Blt) and not never_rises(inner.coefficients(self.rounds))
        refuse(
            (
                self.sampling == "poisson" and not independent,
                "sampling: poisson claims amplification, which correlated noise does not have for"
                " clients that may come in any round; use min-separation, fixed, or cyclic-poisson"
                " with banded noise",
            ),
            (
                self.sampling == "cyclic-poisson" and not isinstance(inner, Banded),
                "sampling: cyclic-poisson amplifies noise whose correlation ends before a client's"
                f" next turn, which is that of banded-mf and not of {mechanism_name(inner)}",
            ),
            (
                self.sampling not in ("min-separation", "cyclic-poisson") and self.separation != 1,
                f"separation: {self.separation} rounds are not kept by {self.sampling} sampling",
            ),
            (
                self.separation * self.clients_per_round > self.population,
                f"separation: {self.separation} blocks of at least {self.clients_per_round} clients"
                f" need more than the {self.population} there are; at most"
                f" {self.population // self.clients_per_round}",
            ),
            (
                bands > max(1, self.separation),
                f"bands: {bands}, more than the {self.separation} rounds between two participations",
            ),
            (
                rising,
                "strategy: the worst client of a blt is known only where its coefficients are not"
                " negative and never rise",
            ),
            error=ValueError,
        )

    @property
    def adaptive(self) -> bool:
        return isinstance(self.clipping, AdaptiveClipping)

    @property
    def amplified(self) -> bool:
        """Whether the accounting counts on clients being drawn by chance."""
        return self.sampling in ("poisson", "cyclic-poisson")

    @property
    def probability(self) -> float:
        """Probability that a client takes part in one of its turns: any round, or one in `separation`."""
        return self.clients_per_round * self.separation / self.population

    def turns(self, rounds: int | None = None) -> int:
        """The rounds, at most, that a client takes part in of the first ones (None: of all)."""
        return -(-(self.rounds if rounds is None else rounds) // self.separation)

    @property
    def identity(self) -> str:
        """The plan in words that are the same on every machine: computed coefficients, which need not be, are not."""
        words = (
            self.population, self.clients_per_round, self.rounds, f"{self.noise_multiplier:.9g}", f"{self.delta:g}",
            self.clipping, self.sampling, self.separation, mechanism_name(self.strategy),
        )  # fmt: skip
        return "; ".join(map(str, words))

    @property
    def count_deviation(self) -> float:
        """Standard deviation of the noise on the count of unclipped clients, which one client moves by 1/2."""
        return self.clients_per_round / 20

    @property
    def weights_share(self) -> float:
        """The part of the budget that is left for the model, and for the count that moves its clip norm."""
        return 1 - self.figures_share - self.gate_share

    @property
    def update_multiplier(self) -> float:
        """Noise on the sum of updates, in clip norms: with all else that is released it makes up `noise_multiplier`."""
        z = self.noise_multiplier
        if not self.adaptive or z == 0:
            return z / math.sqrt(self.weights_share)
        return float((self.weights_share * z**-2 - (2 * self.count_deviation) ** -2) ** -0.5)

    @cached_property
    def squared_sensitivities(self) -> np.ndarray:
        """[rounds + 1], in squared clip norms, after each round; what unamplified accounting rests on."""
        return squared_sensitivities(self.strategy, self.rounds, self.separation)

    @cached_property
    def noise_variances(self) -> np.ndarray:
        """[2, rounds]: of each round's noise, and of the sum of all rounds up to it, for a multiplier of 1."""
        return noise_of_rounds(self.strategy, self.rounds)

    @cached_property
    def turn_multiplier(self) -> float:
        """Noise multiplier of one turn of an amplified plan; a client's turns do not overlap in the noise."""
        return self.noise_multiplier / largest_column(self.strategy, self.rounds)

    def rho(self, rounds: int) -> float | None:
        """Zero-concentrated differential privacy (zCDP) of the first rounds; None where amplification is claimed."""
        if self.amplified:
            return None
        if self.noise_multiplier == 0:
            return math.inf if rounds else 0.0
        return float(self.squared_sensitivities[rounds] / (2 * self.noise_multiplier**2))

    def event(self, rounds: int | None = None) -> Any:
        """The `dp_accounting` event of the first rounds (None: of all)."""
        import dp_accounting

        rounds = self.rounds if rounds is None else rounds
        refuse(
            (not 0 <= rounds <= self.rounds, f"rounds: {rounds} of a plan for {self.rounds}"),
            error=ValueError,
        )
        if rounds == 0:
            return dp_accounting.NoOpDpEvent()
        if self.noise_multiplier == 0:
            return dp_accounting.NonPrivateDpEvent()
        if self.amplified:
            gaussian = dp_accounting.GaussianDpEvent(self.turn_multiplier)
            return dp_accounting.SelfComposedDpEvent(
                dp_accounting.PoissonSampledDpEvent(self.probability, gaussian), self.turns(rounds)
            )
        deviation = self.noise_multiplier / math.sqrt(self.squared_sensitivities[rounds])
        return dp_accounting.GaussianDpEvent(deviation)

    def cohorts(self, pool: range, seed: int | Secret) -> Cohorts:
        """The sampler that does what the accounting says, over clients `pool`."""
        problem = f"population: the plan is for {self.population} clients, not {len(pool)}"
        refuse((len(pool) != self.population, problem), error=ValueError)
        return sampled_cohorts(self.sampling, pool, self.clients_per_round, self.separation, seed)
