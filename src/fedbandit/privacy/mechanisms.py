"""The mechanism: the sum of clipped updates in, a noisy mean out. The only place where noise meets an update."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedbandit.privacy.accounting import Ledger
from fedbandit.privacy.noise import NoiseStream
from fedbandit.privacy.plan import PrivacyPlan


@dataclass(frozen=True)
class PrivateMean:
    """Noise on the sum, divided by the expected number of clients; an empty cohort gives noise alone.

    The divisor must not depend on who took part: that would tell.
    """

    plan: PrivacyPlan
    noise: NoiseStream = field(repr=False)
    ledger: Ledger | None = field(default=None, repr=False)  # what the rounds are charged to; None: nothing is reported

    def mean(self, total: np.ndarray, accepted: int, number: int, clip_norm: float) -> np.ndarray:
        dtype = total.dtype.type
        deviation = self.plan.update_multiplier * clip_norm
        if deviation > 0:
            total = total + dtype(deviation) * self.noise.update(number, total)
        return total / dtype(self.plan.clients_per_round)

    def unclipped(self, below: int, accepted: int, number: int) -> float | None:
        if not self.plan.adaptive:
            return below / accepted if accepted else None
        # Each client sends 1/2 or -1/2, so that one more client moves the sum by no more than that.
        total = below - accepted / 2
        if self.plan.noise_multiplier > 0:
            total += self.plan.count_deviation * self.noise.count(number)
        return total / self.plan.clients_per_round + 0.5

    def metrics(self, number: int, deploys: bool) -> dict[str, Any]:
        return {} if self.ledger is None else self.ledger.metrics(number, deploys)
