"""How one client trains: by automatic differentiation for any model, by a kernel where there is one.

A learner works on flat weight vectors and a chunk of clients at a time. It knows nothing of rounds, policies or the
server.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import numpy as np

from fedbandit.acting.predictors import model_input, single_threaded_torch
from fedbandit.core.contexts import Contexts
from fedbandit.core.prediction import Prediction
from fedbandit.core.ragged import Ragged
from fedbandit.core.sparse import SparseVector
from fedbandit.events import Events
from fedbandit.federated.pipeline import DenseSum, EmptySum, UpdateSum, clip_factor
from fedbandit.models import Freezing, Layout, Model
from fedbandit.objectives import Batch, Objective


@dataclass(frozen=True)
class ClientSettings:
    """One client's local training."""

    learning_rate: float
    batch_size: int = 16
    epochs: int = 1

    def steps(self, events: int) -> int:
        """How many steps a client with so many events takes."""
        return self.epochs * -(-events // self.batch_size)

    def drifted(self, events: int, pull: float) -> float:
        """How far all steps move a weight whose gradient is 1 and nothing else but the pull."""
        rate, steps = self.learning_rate, self.steps(events)
        kept = 1 - rate * pull
        return -rate * (steps if pull == 0 else (1 - kept**steps) / (rate * pull))


Drift = Callable[[int], np.ndarray | SparseVector | None]
"""For the client at a place in the chunk: what is added to each of its gradients, [P]; None: nothing."""


def drift_of(drift: Drift | None, client: int) -> np.ndarray | None:
    """The drift of the client at a place in the chunk, as an array."""
    added = None if drift is None else drift(client)
    return None if added is None else np.asarray(added)


class Learner(Protocol):
    """Trains a chunk of clients.

    Every learner takes one affine correction per client: gradient + pull · (w - received) + drift.
    """

    @property
    def chunk_events(self) -> int:
        """How many events a chunk needs for its work to outweigh the overhead of being a task."""
        ...

    @property
    def settings(self) -> ClientSettings: ...

    def train(
        self, weights: np.ndarray, events: Events, clip_norm: float, pull: float = 0.0
    ) -> tuple[UpdateSum, np.ndarray]:
        """The sum of the clients' clipped updates, and each client's norm before clipping.

        A client whose norm is not finite is left out of the sum; a client without events has norm 0.
        """
        ...

    def updates(
        self, weights: np.ndarray, events: Events, pull: float = 0.0, drift: Drift | None = None
    ) -> Iterator[np.ndarray | SparseVector | None]:
        """Each client's change of the weights [P], not clipped; None for a client without events.

        With a sparse drift a learner of sparse contexts may give a `SparseVector`.
        """
        ...


@dataclass(frozen=True)
class AutogradLearner:
    """Any model and any objective, by torch's automatic differentiation; one thread per chunk.

    With frozen parameters only the others are trained: weights and updates are then theirs alone, and `base` holds the
    whole model.
    """

    model: Model
    layout: Layout
    objective: Objective
    settings: ClientSettings
    freezing: Freezing | None = None
    base: np.ndarray | None = field(default=None, repr=False, compare=False)
    chunk_events: ClassVar[int] = 256

    def over(self, base: np.ndarray) -> "AutogradLearner":
        """The same learner for the trainable part of a whole model."""
        return replace(self, base=base)

    def train(
        self, weights: np.ndarray, events: Events, clip_norm: float, pull: float = 0.0
    ) -> tuple[UpdateSum, np.ndarray]:
        return clipped_sum_of(
            self.updates(weights, events, pull), np.zeros_like(weights), events, clip_norm
        )

    def updates(
        self, weights: np.ndarray, events: Events, pull: float = 0.0, drift: Drift | None = None
    ) -> Iterator[np.ndarray | None]:
        torch = single_threaded_torch()
        start = torch.from_numpy(
            weights if self.freezing is None else self.freezing.join(weights, self.base)
        )
        for client in range(events.num_clients):
            first, last = int(events.bounds[client]), int(events.bounds[client + 1])
            if first == last:
                yield None
                continue
            added = drift_of(drift, client)
            delta = (
                self._local_training(start, events, first, last, pull, added).sub_(start).numpy()
            )
            yield delta if self.freezing is None else self.freezing.pick(delta)

    def _local_training(
        self,
        start: Any,
        events: Events,
        first: int,
        last: int,
        pull: float,
        drift: np.ndarray | None,
    ) -> Any:
        """The client's weights after its epochs, as one flat vector."""
        import torch

        local, dtype = start.clone(), start.numpy().dtype
        frozen = () if self.freezing is None else self.freezing.frozen
        params = {
            name: view if name in frozen else view.requires_grad_()
            for name, view in self.layout.split(local).items()
        }
        names = [name for name in params if name not in frozen]
        views = [params[name] for name in names]
        size, rate = self.settings.batch_size, self.settings.learning_rate
        received = [self.layout.split(start)[name] for name in names] if pull else []
        drifts = (
            []
            if drift is None
            else [self._trainable_views(torch.from_numpy(drift))[name] for name in names]
        )
        for _ in range(self.settings.epochs):
            for begin in range(first, last, size):
                end = min(begin + size, last)
                x = model_input(events.contexts.slice(begin, end), dtype)
                gradients = torch.autograd.grad(
                    self._loss(self.model.scores(params, x), events, begin, end), views
                )
                with torch.no_grad():
                    if pull:
                        moved = torch._foreach_sub(views, received)
                        gradients = torch._foreach_add(gradients, moved, alpha=pull)
                    if drifts:
                        gradients = torch._foreach_add(gradients, drifts)
                    torch._foreach_add_(views, gradients, alpha=-rate)
        return local

    def _trainable_views(self, vector: Any) -> dict[str, Any]:
        return (self.layout if self.freezing is None else self.freezing.trainable).split(vector)

    def _loss(self, scores: Any, events: Events, begin: int, end: int) -> Any:
        batch = _batch(events, begin, end, scores.dtype)
        if events.contexts.candidates is not None:
            bounds = events.contexts.candidates.bounds[begin : end + 1]
            return self._loss_over_candidates(scores, batch, bounds - bounds[0])
        if not self.model.heads:
            return self.objective.loss(scores, batch)
        weights = batch.weights
        losses = [
            self.objective.loss(
                scores[:, head],
                batch if weights is None else replace(batch, weights=weights[:, head]),
            )
            for head in range(self.model.heads)
        ]
        return sum(losses)

    def _loss_over_candidates(self, scores: Any, batch: Batch, bounds: np.ndarray) -> Any:
        """Objectives see decisions with equally many candidates together: scores [b, k]."""
        import torch

        sums, whole = getattr(self.objective, "reduction", "mean") == "half-sum", len(bounds) - 1
        total = scores.new_zeros(())
        for rows, at, _ in Prediction(np.empty(bounds[-1]), bounds=bounds).blocks():
            chosen, entries = torch.from_numpy(rows), torch.from_numpy(at)
            part = Batch(
                actions=batch.actions[chosen],
                rewards=batch.rewards[chosen],
                propensities=batch.propensities[chosen],
                targets=None if batch.targets is None else batch.targets[entries],
                weights=None if batch.weights is None else batch.weights[chosen],
            )
            share = 1.0 if sums else len(rows) / whole
            total = total + share * self.objective.loss(scores[entries], part)
        return total


def chosen_candidates(events: Events, rows: Callable[[Contexts], Ragged] | None) -> Events:
    """The events with the chosen candidate of each decision alone: a loss on one action needs no other.

    `rows` makes them rows of a linear model with one action.
    """
    contexts = events.contexts.chosen(events.actions)
    contexts = contexts if rows is None else Contexts(rows(contexts))
    return replace(events, contexts=contexts, actions=np.zeros(len(events), np.int64))


def clipped_sum_of(
    updates: Iterable[np.ndarray | None], total: np.ndarray, events: Events, clip_norm: float
) -> tuple[UpdateSum, np.ndarray]:
    """The sum of updates, each clipped, added up in `total`, and their norms."""
    import torch

    adding = torch.from_numpy(total)
    norms = np.zeros(events.num_clients)
    for client, update in enumerate(updates):
        if update is None:
            continue
        delta = torch.from_numpy(update)
        norms[client] = norm = float(torch.linalg.vector_norm(delta))
        if np.isfinite(norm):
            adding.add_(delta, alpha=clip_factor(norm, clip_norm))
    return DenseSum(total), norms


def _batch(events: Events, begin: int, end: int, dtype: Any) -> Batch:
    import torch

    def tensor(values: np.ndarray, first: int = begin, last: int = end) -> Any:
        return torch.from_numpy(np.ascontiguousarray(values[first:last])).to(dtype)

    targets, shown = events.targets, events.contexts.candidates
    if targets is not None and shown is not None:
        targets = tensor(targets, int(shown.bounds[begin]), int(shown.bounds[end]))
    elif targets is not None:
        targets = tensor(targets)
    return Batch(
        actions=torch.from_numpy(events.actions[begin:end]),
        rewards=tensor(events.rewards),
        propensities=tensor(events.propensities),
        targets=targets,
        weights=None if events.weights is None else tensor(events.weights),
    )


@dataclass(frozen=True)
class Untrained:
    """Stands in for another learner and never trains: the baseline of an initial model."""

    learner: Learner

    def over(self, base: np.ndarray) -> "Untrained":
        """The same for a part of a whole model: there is nothing to train in either."""
        return self

    @property
    def chunk_events(self) -> int:
        return self.learner.chunk_events

    @property
    def settings(self) -> ClientSettings:
        return self.learner.settings

    def train(
        self, weights: np.ndarray, events: Events, clip_norm: float, pull: float = 0.0
    ) -> tuple[UpdateSum, np.ndarray]:
        return EmptySum(), np.zeros(events.num_clients)

    def updates(
        self, weights: np.ndarray, events: Events, pull: float = 0.0, drift: Drift | None = None
    ) -> Iterator[np.ndarray | None]:
        return iter([None] * events.num_clients)
