"""Data sets that need no download: made from a seed, with statistics like those of the published
ones, each by a module of its name.

Here `realizable`, a world in memory whose truth is known: mean rewards are exactly linear in the
context, so that regret can be computed. Every client has contexts of its own kind and all share one
reward function, as the realisability assumption has it. The reward of every action is drawn once
per example and kept as the example's labels.
"""

from dataclasses import dataclass

import numpy as np

from fedbandit.core.contexts import Features
from fedbandit.core.ragged import Ragged
from fedbandit.core.randomness import Purpose, generator
from fedbandit.data.dataset import FederatedDataset, Header, Split

_STRENGTH = 0.45  # of the linear part: mean rewards lie in [0.05, 0.95]
_HOME = (
    1.0  # how far a client's contexts lean towards its own direction, against noise of norm about 1
)


@dataclass(frozen=True)
class RealizableEnvironment:
    """A data set, and the mean reward of every action in every context: bias + weightᵀ x."""

    dataset: FederatedDataset
    weight: np.ndarray  # float64 [features, K]
    bias: np.ndarray  # float64 [K]

    def mean_rewards(self, rows: np.ndarray) -> np.ndarray:
        """The expected reward of every action in rows of the training split: float64 [n, K]."""
        means: np.ndarray = self.bias + features_of(self.dataset.train.shared(rows)) @ self.weight
        return means

    def true_weights(self) -> np.ndarray:
        """The truth as the flat weights of the linear model."""
        return np.concatenate([self.weight.reshape(-1), self.bias])


def realizable(
    seed: int = 0, clients: int = 200, examples: int = 100, features: int = 8, actions: int = 5
) -> RealizableEnvironment:
    """A small world: all its features are kept as sparse rows, for which training is fastest."""
    rng = generator(seed, Purpose.DATA)
    weight = _STRENGTH * _unit(rng.standard_normal((actions, features))).T
    bias = np.full(actions, 0.5)
    homes = np.repeat(_unit(rng.standard_normal((clients, features))), examples, axis=0)
    noise = rng.standard_normal((clients * examples, features)) / np.sqrt(features)
    contexts = _unit(_HOME * homes + noise).astype(np.float32)
    means = bias + contexts.astype(np.float64) @ weight
    earned = rng.random(means.shape) < means
    row, action = np.nonzero(earned)
    labels = Ragged(np.searchsorted(row, np.arange(len(means) + 1)), action.astype(np.int32))
    header = Header(
        name=f"realizable-{seed}",
        kind="sparse",
        shape=(features,),
        actions=tuple(str(action) for action in range(actions)),
        action_counts=tuple(int(count) for count in earned.sum(axis=0)),
        multilabel=True,
        fingerprint=f"realizable-{seed}-{clients}-{examples}-{features}-{actions}",
    )
    ids = np.array([f"c{client:06d}".encode() for client in range(clients)])
    offsets = np.arange(clients + 1, dtype=np.int64) * examples
    columns = np.tile(np.arange(features, dtype=np.int32), len(contexts))
    rows = Ragged(
        np.arange(len(contexts) + 1, dtype=np.int64) * features, columns, contexts.reshape(-1)
    )
    return RealizableEnvironment(
        FederatedDataset(header, Split(ids, offsets, rows, labels)), weight, bias
    )


def features_of(contexts: Features) -> np.ndarray:
    """The contexts of a realisable environment as one array: float64 [n, features]."""
    assert isinstance(contexts, Ragged)
    assert contexts.values is not None
    return contexts.values.reshape(len(contexts), -1).astype(np.float64)


def _unit(vectors: np.ndarray) -> np.ndarray:
    scaled: np.ndarray = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return scaled
