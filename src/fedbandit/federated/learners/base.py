"""Training of one client: by automatic differentiation for any model, by a kernel where there is
one.

A learner works on flat weight vectors and a chunk of clients at a time. It knows nothing of rounds,
policies or the server.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from typing import Any, ClassVar, Protocol, Self

import numpy as np

from fedbandit.acting.predictors import model_input, single_threaded_torch
from fedbandit.core.contexts import Contexts
from fedbandit.core.prediction import Prediction
from fedbandit.core.ragged import Ragged, SparseVector
from fedbandit.events import Events
from fedbandit.federated.pipeline import DenseSum, UpdateSum, clip_factor
from fedbandit.models import Freezing, Layout, Model
from fedbandit.objectives import Batch, Objective, Pointwise


@dataclass(frozen=True)
class ClientSettings:
    """One client's local training."""

    learning_rate: float
    batch_size: int = 16
    epochs: int = 1

    def steps(self, events: int) -> int:
        """Steps that a client with this many events takes."""
        return self.epochs * -(-events // self.batch_size)

    def moved_by_offset(self, events: int, proximal: float) -> float:
        """The distance that all steps move a weight by a gradient of 1 and the proximal alone."""
        rate, steps = self.learning_rate, self.steps(events)
        kept = 1 - rate * proximal
        return -rate * (steps if proximal == 0 else (1 - kept**steps) / (rate * proximal))


GradientOffset = Callable[[int], np.ndarray | SparseVector | None]
"""By a client's place in the chunk: the offset of each of its gradients, [P]; None: nothing."""


def offset_of(gradient_offset: GradientOffset | None, client: int) -> np.ndarray | None:
    """The gradient_offset of the client at a place in the chunk, as an array."""
    added = None if gradient_offset is None else gradient_offset(client)
    return None if added is None else np.asarray(added)


class Learner(Protocol):
    """Trains a chunk of clients.

    Every learner takes one affine correction per client: gradient + proximal · (w - received) +
    gradient_offset.
    """

    @property
    def chunk_events(self) -> int:
        """The events that a chunk needs for its work to outweigh the overhead of being a task."""
        ...

    @property
    def settings(self) -> ClientSettings: ...

    def train(
        self, weights: np.ndarray, events: Events, clip_norm: float, proximal: float = 0.0
    ) -> tuple[UpdateSum, np.ndarray]:
        """The sum of the clients' clipped updates, and each client's norm before clipping.

        A client whose norm is not finite is left out of the sum; a client without events has norm
        0.
        """
        ...

    def updates(
        self,
        weights: np.ndarray,
        events: Events,
        proximal: float = 0.0,
        gradient_offset: GradientOffset | None = None,
    ) -> Iterator[np.ndarray | SparseVector | None]:
        """Each client's change of the weights [P], not clipped; None for a client without events.

        With a sparse gradient_offset a learner of sparse contexts may give a `SparseVector`.
        """
        ...


Batches = list[tuple[int, int]]
"""A client's mini-batches in the order of its steps, each first:last of the chunk's events."""
Local = Callable[[Batches, float, np.ndarray | None], np.ndarray]
"""From mini-batches, proximal and gradient_offset [P] of a client to its update [P]."""


class ClientByClient:
    """Base of learners that train one client after the other, each from the received weights.

    A learner says in `local` how one client trains; the order of clients, epochs and mini-batches
    is the same for all.
    """

    settings: ClientSettings

    def local(self, weights: np.ndarray, events: Events) -> Local:
        """The training of any client of a chunk, from these weights."""
        raise NotImplementedError

    def train(
        self, weights: np.ndarray, events: Events, clip_norm: float, proximal: float = 0.0
    ) -> tuple[UpdateSum, np.ndarray]:
        updates = self.updates(weights, events, proximal)
        return clipped_sum_of(updates, np.zeros_like(weights), events, clip_norm)

    def updates(
        self,
        weights: np.ndarray,
        events: Events,
        proximal: float = 0.0,
        gradient_offset: GradientOffset | None = None,
    ) -> Iterator[Any]:
        """Each client's update; it may lie in a working copy, gone when the next is asked for."""
        train, size = self.local(weights, events), self.settings.batch_size
        for client, (first, last) in enumerate(pairwise(events.bounds.tolist())):
            if first == last:
                yield None
                continue
            epoch = [(begin, min(begin + size, last)) for begin in range(first, last, size)]
            added = offset_of(gradient_offset, client)
            yield train(self.settings.epochs * epoch, proximal, added)


@dataclass(frozen=True)
class KernelLearner(ClientByClient):
    """A learner with kernels for one built-in model, and for losses of the built-in form."""

    layout: Layout
    objective: Pointwise
    settings: ClientSettings
    chunk_events: ClassVar[int] = 256


@dataclass(frozen=True)
class AutogradLearner(ClientByClient):
    """Any model and any objective, by torch's automatic differentiation; one thread per chunk.

    With frozen parameters only the others are trained: weights and updates are then theirs alone,
    and `base` holds the whole model.
    """

    model: Model
    layout: Layout
    objective: Objective
    settings: ClientSettings
    freezing: Freezing | None = None
    base: np.ndarray | None = field(default=None, repr=False, compare=False)
    chunk_events: ClassVar[int] = 256

    def over(self, base: np.ndarray) -> Self:
        """The same learner for the trainable part of a whole model."""
        return replace(self, base=base)

    def whole(self, weights: np.ndarray) -> np.ndarray:
        """The whole model with these weights for its trainable part."""
        return weights if self.freezing is None else self.freezing.join(weights, self.base)

    @cached_property
    def trained(self) -> Layout:
        """The layout of the parameters that are trained."""
        return self.layout if self.freezing is None else self.freezing.trainable

    def local(self, weights: np.ndarray, events: Events) -> Local:
        torch = single_threaded_torch()
        start, rate = torch.from_numpy(self.whole(weights)), self.settings.learning_rate
        names = [name for name, _ in self.trained.shapes]

        def train(batches: Batches, proximal: float, added: np.ndarray | None) -> np.ndarray:
            end = start.clone()
            params = self.layout.split(end)
            views = [params[name].requires_grad_() for name in names]
            received = [self.layout.split(start)[name] for name in names] if proximal else []
            offsets = [] if added is None else self.trained.split(torch.from_numpy(added)).values()
            for batch in batches:
                x = model_input(events.contexts.slice(*batch), weights.dtype)
                loss = self._loss(self.model.scores(params, x), events, *batch)
                gradients = torch.autograd.grad(loss, views)
                with torch.no_grad():
                    if proximal:
                        moved = torch._foreach_sub(views, received)
                        gradients = torch._foreach_add(gradients, moved, alpha=proximal)
                    if offsets:
                        gradients = torch._foreach_add(gradients, list(offsets))
                    torch._foreach_add_(views, gradients, alpha=-rate)
            delta: np.ndarray = end.sub_(start).numpy()
            return delta if self.freezing is None else self.freezing.pick(delta)

        return train

    def _loss(self, scores: Any, events: Events, begin: int, end: int) -> Any:
        batch, loss = _batch(events, begin, end, scores.dtype), self.objective.loss
        if (shown := events.contexts.candidates) is not None:
            bounds = shown.bounds[begin : end + 1] - shown.bounds[begin]
            loss = partial(self._loss_over_candidates, bounds=bounds)
        if not self.model.heads:
            return loss(scores, batch)
        weights = batch.weights
        losses = [
            loss(
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
    """The events with the chosen candidate of each decision alone: a loss on one action needs no
    other.

    `rows` makes them rows of a linear model with one action.
    """
    contexts = events.contexts.chosen(events.actions)
    contexts = contexts if rows is None else Contexts(rows(contexts))
    return replace(events, contexts=contexts, actions=np.zeros(len(events), np.int64))


def every_candidate(events: Events, rows: Callable[[Contexts], Ragged]) -> Events:
    """Each candidate as an event whose reward is its target: n decisions become m events.

    For sums over events, which know no mini-batches, a squared loss over all candidates is then one
    on the chosen action.
    """
    shown, targets = events.contexts.candidates, events.targets
    assert shown is not None
    assert targets is not None
    owners = np.repeat(np.arange(len(events)), shown.counts)
    return Events(
        bounds=shown.bounds[events.bounds],
        contexts=Contexts(rows(events.contexts)),
        actions=np.zeros(len(owners), np.int64),
        rewards=targets,
        propensities=events.propensities[owners],
        versions=events.versions[owners],
        fresh=events.fresh[owners],
        weights=None if events.weights is None else events.weights[owners],
    )


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


def logged_of(
    events: Events, objective: Pointwise, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Actions, rewards, and how much each event counts: what the kernels read of a log."""
    importance = objective.weights(np.asarray(events.propensities, dtype), events.weights)
    return events.actions, np.asarray(events.rewards, dtype), importance


@lru_cache(maxsize=64)
def how_of(
    objective: Pointwise, settings: ClientSettings, num_actions: int, dtype: np.dtype
) -> tuple[bool, np.ndarray, int, int]:
    """Whether the loss is logistic, the step by events in a batch, batch size, epochs."""
    size = settings.batch_size
    factors = [objective.factor(events, num_actions) for events in range(1, size + 1)]
    steps = settings.learning_rate * np.array([0.0, *factors])
    return objective.logistic, steps.astype(dtype), size, settings.epochs
