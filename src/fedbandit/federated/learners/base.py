"""How one client scores and trains: by automatic differentiation for any model, by a kernel where there is one.

A learner works on flat weight vectors and a chunk of clients at a time. It knows nothing of rounds, policies or the
server.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from fedbandit.core.ragged import Ragged
from fedbandit.data.dataset import Contexts
from fedbandit.events import Events
from fedbandit.federated.pipeline import DenseSum, UpdateSum, clip_factor
from fedbandit.models.base import Layout, Model
from fedbandit.objectives import Batch, Objective, Pointwise

_SCORE_ROWS = 256  # contexts scored at a time: enough to keep a core busy, little enough to stay in its cache


@dataclass(frozen=True)
class ClientSettings:
    """One client's local training."""

    learning_rate: float
    batch_size: int = 16
    epochs: int = 1


class Learner(Protocol):
    """Scores contexts, and trains a chunk of clients."""

    @property
    def chunk_events(self) -> int:
        """How many events a chunk needs for its work to outweigh the overhead of being a task."""
        ...

    def scores(self, weights: np.ndarray, contexts: Contexts) -> np.ndarray:
        """[n, K]: the score of every action."""
        ...

    def train(self, weights: np.ndarray, events: Events, clip_norm: float) -> tuple[UpdateSum, np.ndarray]:
        """The sum of the clients' clipped updates, and each client's norm before clipping.

        A client whose norm is not finite is left out of the sum; a client without events has norm 0.
        """
        ...


def make_learner(
    model: Model, layout: Layout, objective: Objective, settings: ClientSettings, device: str = "cpu"
) -> Learner:
    """The fastest learner there is for this model and objective; all give the same updates up to rounding."""
    if device != "cpu":
        from fedbandit.federated.learners.vectorised import make_vectorised_learner

        return make_vectorised_learner(model, layout, objective, settings, device)
    if model.kernel == "sparse-linear" and isinstance(objective, Pointwise):
        from fedbandit.federated.learners.sparse import SparseLinearLearner

        return SparseLinearLearner(layout, objective, settings)
    if model.kernel == "cnn" and isinstance(objective, Pointwise):
        from fedbandit.federated.learners.cnn import CnnLearner

        return CnnLearner(layout, objective, settings)
    return AutogradLearner(model, layout, objective, settings)


def single_threaded_torch() -> Any:
    """Torch with one intra-op thread in the calling thread: torch keeps the number per thread, and it changes the bits.

    Chunks are the unit of parallel work; teams of threads inside them only get in the way.
    """
    import torch

    torch.set_num_threads(1)
    return torch


@dataclass(frozen=True)
class AutogradLearner:
    """Any model and any objective, by torch's automatic differentiation; one thread per chunk."""

    model: Model
    layout: Layout
    objective: Objective
    settings: ClientSettings
    chunk_events: ClassVar[int] = 256

    def scores(self, weights: np.ndarray, contexts: Contexts) -> np.ndarray:
        torch = single_threaded_torch()
        params = self.layout.split(torch.from_numpy(weights))
        with torch.no_grad():
            blocks = [
                self.model.scores(params, _context_tensor(contexts, start, start + _SCORE_ROWS, weights.dtype)).numpy()
                for start in range(0, len(contexts), _SCORE_ROWS)
            ]
        if not blocks:
            return np.zeros((0, 1), weights.dtype)
        return np.concatenate(blocks)

    def train(self, weights: np.ndarray, events: Events, clip_norm: float) -> tuple[UpdateSum, np.ndarray]:
        torch = single_threaded_torch()
        start = torch.from_numpy(weights)
        total = torch.zeros_like(start)
        norms = np.zeros(len(events.bounds) - 1)
        for client, (first, last) in enumerate(zip(events.bounds[:-1], events.bounds[1:], strict=True)):
            if first == last:
                continue
            delta = self._local_training(start, events, int(first), int(last)).sub_(start)
            norms[client] = norm = float(torch.linalg.vector_norm(delta))
            if np.isfinite(norm):
                total.add_(delta, alpha=clip_factor(norm, clip_norm))
        return DenseSum(total.numpy()), norms

    def _local_training(self, start: Any, events: Events, first: int, last: int) -> Any:
        """The client's weights after its epochs, as one flat vector."""
        import torch

        local, dtype = start.clone(), start.numpy().dtype
        params = {name: view.requires_grad_() for name, view in self.layout.split(local).items()}
        views = list(params.values())
        size, rate = self.settings.batch_size, self.settings.learning_rate
        for _ in range(self.settings.epochs):
            for begin in range(first, last, size):
                end = min(begin + size, last)
                x = _context_tensor(events.contexts, begin, end, dtype)
                loss = self.objective.loss(self.model.scores(params, x), _batch(events, begin, end, start.dtype))
                gradients = torch.autograd.grad(loss, views)
                with torch.no_grad():
                    torch._foreach_add_(views, gradients, alpha=-rate)
        return local


def _context_tensor(contexts: Contexts, begin: int, end: int, dtype: np.dtype) -> Any:
    """A block of contexts as the model wants them: a tensor, or sparse rows as they are."""
    import torch

    if isinstance(contexts, Ragged):
        return contexts.slice(begin, min(end, len(contexts)))
    return torch.from_numpy(np.ascontiguousarray(contexts[begin:end], dtype))


def _batch(events: Events, begin: int, end: int, dtype: Any) -> Batch:
    import torch

    def tensor(values: np.ndarray) -> Any:
        return torch.from_numpy(np.ascontiguousarray(values[begin:end])).to(dtype)

    return Batch(
        actions=torch.from_numpy(events.actions[begin:end]),
        rewards=tensor(events.rewards),
        propensities=tensor(events.propensities),
        targets=None if events.targets is None else tensor(events.targets),
    )


@dataclass(frozen=True)
class Untrained:
    """Scores like another learner and never trains: the baseline of an initial model left as it is."""

    learner: Learner

    @property
    def chunk_events(self) -> int:
        return self.learner.chunk_events

    def scores(self, weights: np.ndarray, contexts: Contexts) -> np.ndarray:
        return self.learner.scores(weights, contexts)

    def train(self, weights: np.ndarray, events: Events, clip_norm: float) -> tuple[UpdateSum, np.ndarray]:
        return DenseSum(np.zeros_like(weights)), np.zeros(len(events.bounds) - 1)
