"""The seam of federated algorithms: a value with five pure functions, and what they are given.

Your own algorithm is a class with these methods in your own file; `fedbandit.algorithms` has the
built-in ones. It is made with the server's optimiser first; where its constructor has parameters
named `data`, `layout` or `objective`, it is told the `DataSpec`, the `Layout` of the weights that
it trains, and the objective. With `exact_sums = True` nothing is clipped unless a norm is set or
the run is private; `memory_vectors` says how many vectors as long as the model a client remembers.
Knows nothing of policies, rewards or engines.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from fedbandit.core.sparse import SparseVector
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

    def remembered(self, name: str, like: np.ndarray) -> list[np.ndarray | SparseVector]:
        """What each client of the chunk remembers under a name; a sparse zero like `like` at first."""
        zero = SparseVector.zeros(like.size, like.dtype)
        return [self.memory.get(int(client), {}).get(name, zero) for client in self.ids]


@dataclass(frozen=True)
class RoundFacts:
    """What the server knows about a round beside the sums."""

    round: int
    clients: int  # in the mean: those accepted, or under privacy those expected
    population: int  # that may take part


class Algorithm(Protocol):
    """How clients train and how the server learns from them."""

    @property
    def sends(self) -> Sends:
        """What clients send, by name.

        A number is the scale of a vector as long as the weights in the joint clip norm; `Sent`
        declares another shape. With scale None it is not clipped, and so can never be private.
        """
        ...

    def init(self, weights: np.ndarray) -> Vectors:
        """What the server keeps between rounds, from the initial model; checkpointed as it is."""
        ...

    def broadcast(self, kept: Vectors) -> Vectors:
        """What the clients of a round receive."""
        ...

    def train(
        self, learner: Learner, received: Vectors, clients: Clients, pipeline: Pipeline
    ) -> Contribution:
        """What a chunk of clients sends."""
        ...

    def step(self, kept: Vectors, mean: Vectors, facts: RoundFacts) -> Vectors:
        """What the server keeps after a round, given the mean of what was sent."""
        ...

    def model(self, kept: Vectors) -> np.ndarray:
        """The flat weights that would be deployed now; usually `kept["weights"]`."""
        ...


def remembers(algorithm: Algorithm) -> int:
    """How many vectors as long as the model a client remembers between rounds; 0 for most algorithms."""
    return int(getattr(algorithm, "memory_vectors", 0))
