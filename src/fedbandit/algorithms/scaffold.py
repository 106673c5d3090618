"""SCAFFOLD (Karimireddy et al., 2020): control variates take the drift out of local training.

The server keeps a control variate c, every client remembers its own c_i. Each gradient gets c - c_i; after K local
steps of rate η from x to y a client's becomes c_i - c + (x - y) / (K η) (their option II). The server adds the clients'
changes to c, each counting 1/population.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedbandit.algorithms.fedavg import FedAvg
from fedbandit.federated.algorithm import Clients, RoundFacts
from fedbandit.federated.learners.base import Learner
from fedbandit.federated.pipeline import (
    Contribution,
    Memories,
    Pipeline,
    Vectors,
    clip_factor,
    joint_norm,
)


@dataclass(frozen=True)
class Scaffold(FedAvg):
    """FedAvg with control variates. A client remembers one vector as long as the model.

    The clip norm bounds the change of the weights alone, so SCAFFOLD cannot be private.
    """

    sends: ClassVar[Mapping[str, float | None]] = {"weights": 1.0, "control": None}
    memory_vectors: ClassVar[int] = 1

    def init(self, weights: np.ndarray) -> Vectors:
        return {**super().init(weights), "control": np.zeros_like(weights)}

    def broadcast(self, kept: Vectors) -> Vectors:
        return {"weights": kept["weights"], "control": kept["control"]}

    def train(
        self, learner: Learner, received: Vectors, clients: Clients, pipeline: Pipeline
    ) -> Contribution:
        control, rate = received["control"], learner.settings.learning_rate
        sizes = np.diff(clients.events.bounds)
        own = clients.remembered("control", control)

        def sent() -> Iterator[Vectors | None]:
            updates = learner.updates(
                received["weights"], clients.events, drift=lambda client: control - own[client]
            )
            for client, update in enumerate(updates):  # the drift is dense, so each is an array
                if update is None:
                    yield None
                    continue
                assert isinstance(update, np.ndarray)
                # The part of the update that the server will see: what was clipped off must not live on in c_i.
                factor = clip_factor(
                    joint_norm({"weights": update}, {"weights": 1.0}), pipeline.clip_norm
                )
                steps = learner.settings.steps(int(sizes[client]))
                change = -control - update * update.dtype.type(factor / (steps * rate))
                yield {"weights": update, "control": change}

        def remember(client: int, seen: Vectors) -> Memories:
            return {"control": own[client] + seen["control"]}

        return pipeline.collect(sent(), clients.ids, self.sends, remember)

    def step(self, kept: Vectors, mean: Vectors, facts: RoundFacts) -> Vectors:
        share = mean["control"].dtype.type(facts.clients / facts.population)
        return {
            **super().step(kept, mean, facts),
            "control": kept["control"] + share * mean["control"],
        }
