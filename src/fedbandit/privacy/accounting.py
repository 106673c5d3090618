"""Epsilon: by Rényi differential privacy after every round, by privacy loss distributions where it is worth the time.

All of it by `dp-accounting`, from the events of plans.
"""

import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np

from fedbandit.privacy.discrete import DeviceNoise
from fedbandit.privacy.plan import PrivacyPlan

Accountant = Literal["rdp", "pld"]
NoiseSource = Literal["seed", "system", "devices"]
_HOPELESS = 100.0  # an RDP epsilon above which a privacy loss distribution takes minutes to say nothing else
_INTERVAL = (
    1e-3  # of its grid; rounded up, so that a coarser grid states more epsilon and never less
)
_WHOLE_ORDERS = (*range(2, 64), 128, 256, 512, 1024)  # the whole ones of the accountant's own


def epsilon_of(event: Any, delta: float, accountant: Accountant = "rdp") -> float:
    """Epsilon of an event; infinite where there is no noise."""
    from dp_accounting import dp_event, get_epsilon_gaussian, pld, rdp

    if isinstance(event, dp_event.NonPrivateDpEvent):
        return math.inf
    with _quiet():
        by_rdp = rdp.RdpAccountant().compose(event).get_epsilon(delta)
    if accountant == "rdp" or hopeless(by_rdp):
        return float(by_rdp)
    if isinstance(event, dp_event.GaussianDpEvent):
        return float(get_epsilon_gaussian(event.noise_multiplier, delta))  # exact, and at once
    return float(
        pld.PLDAccountant(value_discretization_interval=_INTERVAL).compose(event).get_epsilon(delta)
    )


def hopeless(by_rdp: float) -> bool:
    """Whether epsilon by RDP is so large that no other accountant is worth asking."""
    return not by_rdp < _HOPELESS


def plan_epsilon(
    plan: PrivacyPlan, accountant: Accountant = "rdp", rounds: int | None = None
) -> float:
    """Epsilon of a plan's first rounds (None: of all of them)."""
    return epsilon_of(plan.event(rounds), plan.delta, accountant)


@dataclass(frozen=True)
class Redraws:
    """Rounds of Poisson sampling that are redrawn, and not released, where a sum has too few devices."""

    needed: int  # devices in a sum
    connected: int  # devices, at least, that would be in the sum if they were drawn

    def chance(self, probability: float, own: float | None = None) -> float:
        """Probability, at most, that a released round was only released because of one device.

        eta = own · P(|S'| = needed - 1) / P(|S| >= needed) for survivors S' among the others, each
        in a sum with `probability`, and S with that device, which is in it with `own` (None: the
        same). It never drops out itself, and the others' connections are fixed before the draw:
        then nothing is assumed of how drop-outs depend on each other.

        Examples:
            >>> f"{1600 * Redraws(needed=20, connected=342_477).chance(64 / 342_477):.0e}"
            '8e-12'
        """
        from scipy.stats import binom

        others, own = self.connected - 1, probability if own is None else own
        decisive = own * float(binom.pmf(self.needed - 1, others, probability))
        released = decisive + float(binom.sf(self.needed - 1, others, probability))
        return decisive / released if released > 0 else 1.0


@dataclass(frozen=True)
class Ledger:
    """Privacy spent round by round: by a plan, and by that of a pre-training that is accounted for.

    Examples:
        >>> plan = PrivacyPlan(
        ...     population=100_000, clients_per_round=500, rounds=400, noise_multiplier=1.0
        ... )
        >>> ledger = Ledger(plan, budget=1.25)
        >>> f"{ledger.epsilon(400):.2f} after 400 rounds; {ledger.last_round} are paid for"
        '1.29 after 400 rounds; 285 are paid for'
    """

    plan: PrivacyPlan
    pretraining: PrivacyPlan | None = None
    budget: float | None = None  # epsilon at which the run stops
    accountant: Accountant = "rdp"  # of the budget
    public_pretraining: bool = False  # declared so in the configuration
    source: NoiseSource = "seed"  # of a simulation's noise
    reason: str | None = None  # why this mechanism, where it was chosen by its error
    discrete: bool = False  # the noise is discrete Gaussian: its moments are known at whole orders, its PLD is not
    redraws: Redraws | None = None  # of secure sums under Poisson sampling
    tolerance: DeviceNoise | None = None  # of noise that devices add themselves

    def events(self, rounds: int) -> list[Any]:
        """The releases of the first `rounds` rounds: one event for each group of clients.

        The initial clients take no part in the bandit phase, and who is one is fixed by a public list: the ids of the
        data set's first clients as they were when it was made. Removing a user leaves a gap in the list and moves
        nobody to the other group, so a user pays for their own group alone.
        """
        from dp_accounting import NonPrivateDpEvent

        if self.pretraining is None:
            return [self.plan.event(rounds)]
        if self.plan.noise_multiplier == 0:
            return [NonPrivateDpEvent()]
        return [self.pretraining.event(), self.plan.event(rounds)]

    def epsilon(self, rounds: int) -> float:
        """Epsilon by RDP after `rounds` rounds; cheap enough for every round."""
        from dp_accounting import rdp

        if self.plan.noise_multiplier == 0:
            return math.inf if rounds or self.pretraining else 0.0
        groups = [self._rdp(self.plan, rounds)]
        if self.pretraining is not None:
            groups.append(self._rdp(self.pretraining, self.pretraining.rounds))
        eta = self.redraw_chance
        delta = self.plan.delta - rounds * eta
        if delta <= 0:
            return math.inf
        with _quiet():
            found = max(
                float(rdp.compute_epsilon(self._orders, spent, delta)[0]) for spent in groups
            )
        return found - rounds * math.log1p(-eta)

    @cached_property
    def redraw_chance(self) -> float:
        """The cost of redraws: so much delta in a round, and -log(1 - this) of epsilon."""
        return 0.0 if self.redraws is None else self.redraws.chance(self.plan.probability)

    def tight_epsilon(self, rounds: int) -> float:
        """Epsilon by privacy loss distributions; where that would say nothing (`has_pld`), by RDP."""
        by_rdp = self.epsilon(rounds)
        return min(by_rdp, _kept_pld_epsilon(self, rounds)) if self.has_pld(by_rdp) else by_rdp

    def has_pld(self, by_rdp: float) -> bool:
        """Whether privacy loss distributions can say something: not of discrete noise, nor of a hopeless epsilon."""
        return not (self.discrete or self.redraws is not None or hopeless(by_rdp))

    @cached_property
    def last_round(self) -> int:
        """The last round that the budget pays for; 0 if it pays for none."""
        if self.budget is None:
            return self.plan.rounds
        spent = self.epsilon if self.accountant == "rdp" else self.tight_epsilon
        return bisect_right(range(1, self.plan.rounds + 1), self.budget, key=spent)

    def metrics(self, number: int, deploys: bool) -> dict[str, Any]:
        """`epsilon` every round, `epsilon_pld` at deployments and at the end; null where there is none to state."""
        by_rdp = self.epsilon(number)
        found = {"epsilon": finite(by_rdp)}
        if deploys or number == self.last_round:
            found["epsilon_pld"] = self.tight_epsilon(number) if self.has_pld(by_rdp) else None
        return found

    @cached_property
    def _orders(self) -> np.ndarray:
        from dp_accounting import rdp

        return np.asarray(rdp.RdpAccountant(_WHOLE_ORDERS if self.discrete else None).orders)

    def _rdp(self, plan: PrivacyPlan, rounds: int) -> np.ndarray:
        """Rényi divergence of a plan's first rounds, at each of the accountant's orders."""
        if rounds == 0:
            return np.zeros(len(self._orders))
        if plan.amplified:
            return plan.turns(rounds) * _rdp_of_one(plan.event(1), self.discrete)
        spent = self._orders * plan.squared_sensitivities[rounds]
        return np.asarray(spent / (2 * plan.noise_multiplier**2))


def least_noise(epsilon_at: Callable[[float], float], target: float) -> float:
    """The smallest noise multiplier, to four digits, at which a falling `epsilon_at` is at most `target`."""
    from scipy.optimize import brentq

    high = 1.0
    while epsilon_at(high) > target:
        high *= 2
        if high > 2**24:
            raise ValueError(f"epsilon: {target:g} cannot be reached with any reasonable noise")
    low = high / 2
    while epsilon_at(low) <= target:
        low, high = low / 2, low
        if low < 2**-10:
            return high

    def gap(
        log_noise: float,
    ) -> float:  # nearly a straight line in logarithms, so a few steps will do
        return math.log(max(epsilon_at(math.exp(log_noise)), 1e-12) / target)

    found = math.exp(brentq(gap, math.log(low), math.log(high), xtol=1e-5))
    digit = 10.0 ** (math.floor(math.log10(found)) - 3)
    steps = math.ceil(found / digit)
    while epsilon_at(steps * digit) > target:
        steps += 1
    return float(f"{steps * digit:.4g}")


def finite(epsilon: float) -> float | None:
    """As JSON has it: null where there is no guarantee."""
    return epsilon if math.isfinite(epsilon) else None


@lru_cache(maxsize=256)
def _rdp_of_one(event: Any, discrete: bool) -> np.ndarray:
    from dp_accounting import rdp

    with _quiet():
        accountant = rdp.RdpAccountant(_WHOLE_ORDERS if discrete else None)
        return np.asarray(accountant.compose(event).rdp)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the library's warnings of orders that it leaves out: that only makes epsilon larger."""
    logger = logging.getLogger("absl")
    previous = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(previous)


@lru_cache(maxsize=256)
def _kept_pld_epsilon(ledger: Ledger, rounds: int) -> float:
    return max(epsilon_of(event, ledger.plan.delta, "pld") for event in ledger.events(rounds))
