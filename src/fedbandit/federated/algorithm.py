"""The seam of federated algorithms: a value with five pure functions, and what they are given.

Your own algorithm is a class with these methods in your own file; `fedbandit.algorithms` has the
built-in ones. It is made with the server's optimiser first; where its constructor has parameters
named `data`, `layout` or `objective`, it is told the `DataSpec`, the `Layout` of the weights that
it trains, and the objective. With `exact_sums = True` nothing is clipped unless a norm is set or
the run is private; `memory_vectors` says how many vectors as long as the model a client remembers,
`memory_numbers` how many other numbers. A parameter `seed` gets the run's, `plan` its privacy plan;
`on_devices` is True in a deployment.
With `personal(received, memory) -> Vectors | None` a client acts with weights of its own:
`received` has the deployed "weights", `memory` what the client remembers, and the answer the
"weights" that it uses in their place; nothing of it is sent. `who_gained(memories)` then makes rows
for a run's report. With `deploys(model)` what acts is
more than what is trained: see `deployed_model`; `restore(deployed)` then makes what the server
keeps when it goes back to such a version. Knows nothing of policies, rewards or engines.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from fedbandit.acting import Predictor
from fedbandit.core.contexts import Contexts
from fedbandit.core.errors import ConfigError
from fedbandit.core.prediction import Prediction
from fedbandit.core.ragged import SparseVector
from fedbandit.events import Events
from fedbandit.federated.learners.base import Learner
from fedbandit.federated.pipeline import Contribution, Memories, Pipeline, Sends, Vectors


@dataclass(frozen=True)
class Clients:
    """A chunk of clients in one round: who they are, what they logged, what they remember."""

    ids: np.ndarray  # int64 [clients]
    events: Events
    round: int
    seed: int
    memory: Mapping[int, Memories] = field(default_factory=dict)  # by client; nothing: missing
    logged: Events | None = None  # with all candidates, where `events` has the chosen ones alone
    predictor: Predictor | None = field(default=None, repr=False)  # of the model that acts

    def remembered(self, name: str, like: np.ndarray) -> list[np.ndarray | SparseVector]:
        """Each client's memory under a name; a sparse zero like `like` at first."""
        zero = SparseVector.zeros(like.size, like.dtype)
        return [self.memory.get(int(client), {}).get(name, zero) for client in self.ids]

    def logged_by(self, client: int) -> Events:
        """The events of one client of the chunk as they were logged, with all candidates."""
        return (self.events if self.logged is None else self.logged).of_client(client)

    def predict(self, weights: np.ndarray, contexts: Contexts) -> Prediction:
        """The model's prediction with these weights."""
        if self.predictor is None:
            raise ConfigError("algorithm.name: clients cannot ask the model here")
        return self.predictor.predict(weights, contexts)


@dataclass(frozen=True)
class RoundFacts:
    """The server's knowledge of a round beside the sums."""

    round: int
    clients: int  # in the mean: those accepted, or under privacy those expected
    population: int  # that may take part


class Algorithm(Protocol):
    """A way for clients to train and for the server to learn from them."""

    @property
    def sends(self) -> Sends:
        """The arrays that clients send, by name.

        A number is the scale of a vector as long as the weights in the joint clip norm; `Sent`
        declares another shape. With scale None it is not clipped, and so can never be private.
        """
        ...

    def init(self, weights: np.ndarray) -> Vectors:
        """The server's state before the first round, from the initial model; it is checkpointed."""
        ...

    def broadcast(self, server_state: Vectors) -> Vectors:
        """The arrays that the clients of a round receive."""
        ...

    def train(
        self, learner: Learner, received: Vectors, clients: Clients, pipeline: Pipeline
    ) -> Contribution:
        """The contribution of a chunk of clients."""
        ...

    def step(self, server_state: Vectors, mean: Vectors, facts: RoundFacts) -> Vectors:
        """The server's state after a round, given the mean of what was sent."""
        ...

    def model(self, server_state: Vectors) -> np.ndarray:
        """The flat weights that would be deployed now; usually `server_state["weights"]`.

        With `deploys`, the arrays of the model that acts, one after the other.
        """
        ...


def remembers(algorithm: Algorithm, vector_bytes: int = 1) -> int:
    """Bytes that a client remembers between rounds; 0 for most algorithms."""
    vectors, numbers = (getattr(algorithm, f"memory_{kind}", 0) for kind in ("vectors", "numbers"))
    return int(vectors * vector_bytes + 8 * numbers)


def deployed_model(algorithm: Algorithm, trained: Mapping[str, Any]) -> dict[str, Any]:
    """Name and parameters of the model that acts, given those of the trained one.

    They are the same unless the algorithm has a method `deploys(trained)` that names another model,
    built in or by import path. Its arrays, in the order of its `init`, lie one after the other in
    what `Algorithm.model` returns, and its `predict(params, contexts)` can give scores a width.
    Training vectors and messages stay as long as the trained weights; checkpoints, gate, devices
    and off-policy evaluation see the deployed vector alone.
    """
    deploys = getattr(algorithm, "deploys", None)
    return dict(trained if deploys is None else deploys(trained))
