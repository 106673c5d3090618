"""Generalised FedAvg (Algorithm 3): clients run local SGD, the server steps with the mean of their updates."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fedbandit.federated.algorithm import Clients, RoundFacts
from fedbandit.federated.learners.base import Learner
from fedbandit.federated.pipeline import Contribution, Pipeline, Vectors

if TYPE_CHECKING:  # a device trains without ever making an optimiser
    from fedbandit.federated.server import ServerOptimizer

_MOMENTS = "optimizer/"


@dataclass(frozen=True)
class FedAvg:
    """Keeps the weights and the optimiser's moments; clients receive the weights and send their change.

    Examples:
        >>> from fedbandit.federated.server import Sgd
        >>> algorithm = FedAvg(Sgd(learning_rate=1.0))
        >>> kept = algorithm.init(np.zeros(2))
        >>> algorithm.step(kept, {"weights": np.array([1.0, -1.0])}, RoundFacts(1, 64, 1000))["weights"]
        array([ 1., -1.])
    """

    optimizer: "ServerOptimizer"

    sends: ClassVar[Mapping[str, float | None]] = {"weights": 1.0}

    @property
    def pull(self) -> float:
        """How strongly local training is drawn back to the received weights."""
        return 0.0

    def init(self, weights: np.ndarray) -> Vectors:
        return {"weights": weights, **_prefixed(self.optimizer.init(weights))}

    def broadcast(self, kept: Vectors) -> Vectors:
        return {"weights": kept["weights"]}

    def train(
        self, learner: Learner, received: Vectors, clients: Clients, pipeline: Pipeline
    ) -> Contribution:
        if pipeline.only_clips:
            total, norms = learner.train(
                received["weights"], clients.events, pipeline.clip_norm, self.pull
            )
            return Contribution({"weights": total}, norms)
        updates = learner.updates(received["weights"], clients.events, self.pull)
        sent = (None if update is None else {"weights": update} for update in updates)
        return pipeline.collect(sent, clients.ids, self.sends)

    def step(self, kept: Vectors, mean: Vectors, facts: RoundFacts) -> Vectors:
        moments = {
            name.removeprefix(_MOMENTS): value
            for name, value in kept.items()
            if name.startswith(_MOMENTS)
        }
        moments, weights = self.optimizer.step(moments, kept["weights"], mean["weights"])
        return {"weights": weights, **_prefixed(moments)}

    def model(self, kept: Vectors) -> np.ndarray:
        return kept["weights"]


def _prefixed(moments: Vectors) -> Vectors:
    return {f"{_MOMENTS}{name}": value for name, value in moments.items()}
