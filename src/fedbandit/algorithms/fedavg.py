"""Generalised FedAvg (Algorithm 3), and two algorithms that correct its local training.

Clients run local SGD, the server steps with the mean of their updates. FedProx draws clients back
to what they received; SCAFFOLD takes the differences between clients out of their gradients.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fedbandit.core.parts import require
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

if TYPE_CHECKING:  # a device trains without ever making an optimiser
    from fedbandit.federated.server import ServerOptimizer

_MOMENTS = "optimizer/"


@dataclass(frozen=True)
class FedAvg:
    """Keeps the weights and the optimiser's moments; clients receive the weights, send their
    change.

    Examples:
        >>> from fedbandit.federated.server import Sgd
        >>> algorithm = FedAvg(Sgd(learning_rate=1.0))
        >>> server_state, mean = algorithm.init(np.zeros(2)), {"weights": np.array([1.0, -1.0])}
        >>> algorithm.step(server_state, mean, RoundFacts(1, 64, 1000))["weights"]
        array([ 1., -1.])
    """

    optimizer: "ServerOptimizer"

    sends: ClassVar[Mapping[str, float | None]] = {"weights": 1.0}

    @property
    def proximal(self) -> float:
        """The strength that draws local training back to the received weights."""
        return 0.0

    def init(self, weights: np.ndarray) -> Vectors:
        return {"weights": weights, **_prefixed(self.optimizer.init(weights))}

    def broadcast(self, server_state: Vectors) -> Vectors:
        return {"weights": server_state["weights"]}

    def train(
        self, learner: Learner, received: Vectors, clients: Clients, pipeline: Pipeline
    ) -> Contribution:
        if pipeline.only_clips:
            total, norms = learner.train(
                received["weights"], clients.events, pipeline.clip_norm, self.proximal
            )
            return Contribution({"weights": total}, norms)
        updates = learner.updates(received["weights"], clients.events, self.proximal)
        sent = (None if update is None else {"weights": update} for update in updates)
        return pipeline.collect(sent, clients.ids, self.sends)

    def step(self, server_state: Vectors, mean: Vectors, facts: RoundFacts) -> Vectors:
        moments = {
            name.removeprefix(_MOMENTS): value
            for name, value in server_state.items()
            if name.startswith(_MOMENTS)
        }
        moments, weights = self.optimizer.step(moments, server_state["weights"], mean["weights"])
        return {"weights": weights, **_prefixed(moments)}

    def model(self, server_state: Vectors) -> np.ndarray:
        return server_state["weights"]


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedProx (Li et al., 2020): FedAvg whose clients are drawn back to the model they received.

    Each local loss gets (mu / 2) · ||w - received||², so each gradient gets mu · (w - received).
    For clients that differ much, or that take many local steps; `mu` 0 is FedAvg.
    """

    mu: float = 0.01

    def __post_init__(self) -> None:
        require(self, mu="at least 0")

    @property
    def proximal(self) -> float:
        return self.mu


@dataclass(frozen=True)
class Scaffold(FedAvg):
    """SCAFFOLD (Karimireddy et al., 2020): control variates take the drift out of local training.

    The server keeps a control variate c, every client remembers its own c_i. Each gradient gets c -
    c_i; after K local steps of rate η from x to y a client's becomes c_i - c + (x - y) / (K η)
    (their option II). The server adds the clients' changes to c, each counting 1/population. A
    client remembers one vector as long as the model. The clip norm bounds the change of the weights
    alone, so SCAFFOLD cannot be private.
    """

    sends: ClassVar[Mapping[str, float | None]] = {"weights": 1.0, "control": None}
    memory_vectors: ClassVar[int] = 1

    def init(self, weights: np.ndarray) -> Vectors:
        return {**super().init(weights), "control": np.zeros_like(weights)}

    def broadcast(self, server_state: Vectors) -> Vectors:
        return {"weights": server_state["weights"], "control": server_state["control"]}

    def train(
        self, learner: Learner, received: Vectors, clients: Clients, pipeline: Pipeline
    ) -> Contribution:
        control, rate = received["control"], learner.settings.learning_rate
        sizes = np.diff(clients.events.bounds)
        own = clients.remembered("control", control)

        def sent() -> Iterator[Vectors | None]:
            updates = learner.updates(
                received["weights"],
                clients.events,
                gradient_offset=lambda client: control - own[client],
            )
            for client, update in enumerate(updates):  # the offset is dense, so each is an array
                if update is None:
                    yield None
                    continue
                assert isinstance(update, np.ndarray)
                # What the server will see of the update: what was clipped off must not live on in
                # c_i.
                factor = clip_factor(
                    joint_norm({"weights": update}, {"weights": 1.0}), pipeline.clip_norm
                )
                steps = learner.settings.steps(int(sizes[client]))
                change = -control - update * update.dtype.type(factor / (steps * rate))
                yield {"weights": update, "control": change}

        def remember(client: int, seen: Vectors) -> Memories:
            return {"control": own[client] + seen["control"]}

        return pipeline.collect(sent(), clients.ids, self.sends, remember)

    def step(self, server_state: Vectors, mean: Vectors, facts: RoundFacts) -> Vectors:
        share = mean["control"].dtype.type(facts.clients / facts.population)
        return {
            **super().step(server_state, mean, facts),
            "control": server_state["control"] + share * mean["control"],
        }


def _prefixed(moments: Vectors) -> Vectors:
    return {f"{_MOMENTS}{name}": value for name, value in moments.items()}
