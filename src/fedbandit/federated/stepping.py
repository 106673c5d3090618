"""The server's step: from the sum of a round's clipped updates to the next weights and the next clip norm.

The simulator and the deployment both call it, so that they cannot come to differ. Knows nothing of clients.
"""

from dataclasses import dataclass

import numpy as np

from fedbandit.errors import Diverged
from fedbandit.federated.aggregation import Aggregation
from fedbandit.federated.clipping import Clipping
from fedbandit.federated.optimizers import OptimizerState, ServerOptimizer


@dataclass(frozen=True)
class Step:
    """What a round's updates come to."""

    weights: np.ndarray
    optimizer: OptimizerState
    clip_norm: float
    update: np.ndarray  # the mean by which the optimizer stepped


@dataclass(frozen=True)
class Stepping:
    """How the server learns from a sum."""

    optimizer: ServerOptimizer
    clipping: Clipping
    aggregation: Aggregation

    def step(
        self,
        number: int,
        weights: np.ndarray,
        optimizer: OptimizerState,
        clip_norm: float,
        total: np.ndarray,
        accepted: int,
        below: int,
    ) -> Step:
        """Round `number`'s step from the sum over `accepted` clients, `below` of which were not clipped."""
        update = self.aggregation.mean(total, accepted, number, clip_norm)
        state, moved = self.optimizer.step(optimizer, weights, update)
        if not np.isfinite(moved).all():
            raise Diverged(f"diverged at round {number}: the model's weights are not finite")
        learned = self.aggregation.unclipped(below, accepted, number)
        following = clip_norm if learned is None else self.clipping.following(clip_norm, learned)
        return Step(moved, state, following, update)
