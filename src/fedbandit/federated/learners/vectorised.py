"""The learner for accelerators: all clients of a chunk train at once, one step of everybody's
mini-batch at a time.

The same updates as the thread engine's learners up to rounding. Clients with fewer events sit out
the later steps with weight 0. Works on any torch device; knows nothing of rounds or policies.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedbandit.core.contexts import Features
from fedbandit.core.errors import ConfigError
from fedbandit.core.ragged import Ragged
from fedbandit.events import Events
from fedbandit.federated.learners.base import (
    AutogradLearner,
    ClientSettings,
    GradientOffset,
    offset_of,
)
from fedbandit.federated.pipeline import DenseSum, UpdateSum
from fedbandit.models.base import Freezing, Layout, Model
from fedbandit.objectives import Objective, Pointwise


def make_vectorised_learner(
    model: Model,
    layout: Layout,
    objective: Objective,
    settings: ClientSettings,
    device: str,
    freezing: Freezing | None = None,
) -> "VectorisedLearner":
    """The learner for a torch device; it needs to know the form of the objective, so only built-in
    ones will do.
    """
    if not isinstance(objective, Pointwise):
        raise ConfigError(f"objective.name: on device {device} only the built-in objectives work")
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"device: {device} cannot be used here: {str(error).splitlines()[0]}"
        ) from None
    return VectorisedLearner(model, layout, objective, settings, freezing, device=device)


@dataclass(frozen=True)
class _Step:
    """One mini-batch of every client: rows [clients, batch] of the chunk's events, and what
    multiplies each error.
    """

    rows: np.ndarray  # int64; padded with the client's last one
    weights: np.ndarray  # [clients, batch, heads], or 1 for all heads; 0 where there is no event
    active: np.ndarray  # bool [clients]: who has a mini-batch left


def _steps(
    events: Events, objective: Pointwise, settings: ClientSettings, num_actions: int
) -> Iterator[_Step]:
    """The mini-batches in order, for all clients side by side."""
    starts, stops = events.bounds[:-1, None], events.bounds[1:, None]
    counts = (
        events.weights[:, None]
        if events.weights is not None and events.weights.ndim == 1
        else events.weights
    )
    weights = objective.weights(events.propensities.astype(np.float64)[:, None], counts)
    for _ in range(settings.epochs):
        for begin in range(0, int((stops - starts).max(initial=0)), settings.batch_size):
            rows = starts + begin + np.arange(settings.batch_size)
            present = rows < stops
            sizes = present.sum(axis=1)
            factors = np.array([objective.factor(max(1, int(size)), num_actions) for size in sizes])
            rows = np.minimum(rows, np.maximum(stops - 1, 0))
            yield _Step(rows, (present * factors[:, None])[:, :, None] * weights[rows], sizes > 0)


@dataclass(frozen=True)
class _Words:
    """The words that each client of a chunk has in its contexts, ascending; nobody has any in dense
    ones.
    """

    ids: np.ndarray  # int64 [clients, most]; padded with 0
    counts: np.ndarray  # int64 [clients]
    places: np.ndarray  # int64 [entries]: where an entry's word stands among those of its client

    @classmethod
    def of(cls, contexts: Features, bounds: np.ndarray) -> "_Words":
        clients, keys, most = len(bounds) - 1, np.zeros(0, np.int64), 1
        if isinstance(contexts, Ragged):
            most = int(contexts.ids.max(initial=0)) + 1
            keys = (
                most * np.repeat(np.arange(clients), np.diff(contexts.offsets[bounds]))
                + contexts.ids
            )
        found, places = np.unique(keys, return_inverse=True)
        owners, words = np.divmod(found, most)
        counts = np.bincount(owners, minlength=clients)
        columns = np.arange(len(found)) - (np.cumsum(counts) - counts)[owners]
        ids = np.zeros((clients, counts.max(initial=0)), np.int64)
        ids[owners, columns] = words
        return cls(ids, counts, columns[places])


@dataclass(frozen=True)
class VectorisedLearner(AutogradLearner):
    """Any model on dense features and the built-in ones on sparse features, by `torch.func.vmap`
    over clients.

    A client's sparse contexts become a small matrix with a column for each of its own words, and
    its copy of the model has the rows of these words alone.
    """

    objective: Pointwise
    device: str = "cpu"
    chunk_events: ClassVar[int] = 4096

    def train(
        self, weights: np.ndarray, events: Events, clip_norm: float, proximal: float = 0.0
    ) -> tuple[UpdateSum, np.ndarray]:
        words = _Words.of(events.contexts.shared, events.bounds)
        deltas = self._deltas(weights, events, words, proximal, None)
        each = torch.stack(
            [torch.linalg.vector_norm(delta.flatten(1), dim=1) for delta in deltas.values()]
        )
        norms = torch.linalg.vector_norm(each, dim=0)
        finite = torch.isfinite(norms)
        factors = torch.where(finite, (clip_norm / norms.clamp_min(1e-38)).clamp_max(1.0), 0.0)
        total = torch.zeros(self.trained.size, dtype=norms.dtype, device=self.device)
        for name, view in self.trained.split(total).items():
            delta = torch.where(_beside(finite, deltas[name]), deltas[name], 0.0)
            if name in self._by_word:
                where = (_tensor(words.ids, self.device),)
                view.index_put_(where, _beside(factors, delta) * delta, accumulate=True)
            else:
                view += torch.tensordot(factors, delta, 1)
        return DenseSum(total.cpu().numpy()), norms.cpu().numpy().astype(np.float64)

    def updates(
        self,
        weights: np.ndarray,
        events: Events,
        proximal: float = 0.0,
        gradient_offset: GradientOffset | None = None,
    ) -> Iterator[np.ndarray | None]:
        words = _Words.of(events.contexts.shared, events.bounds)
        offsets = (
            None
            if gradient_offset is None
            else [offset_of(gradient_offset, i) for i in range(events.num_clients)]
        )
        deltas = {
            name: delta.cpu().numpy()
            for name, delta in self._deltas(weights, events, words, proximal, offsets).items()
        }
        for client, size in enumerate(np.diff(events.bounds)):
            if not size:
                yield None
                continue
            update, count = np.zeros_like(weights), words.counts[client]
            if (
                offsets is not None and (added := offsets[client]) is not None
            ):  # it moves words that the client lacks
                update += added * added.dtype.type(
                    self.settings.moved_by_offset(int(size), proximal)
                )
            for name, view in self.trained.split(update).items():
                if name in self._by_word:
                    view[words.ids[client, :count]] = deltas[name][client, :count]
                else:
                    view[...] = deltas[name][client]
            yield update

    def _deltas(
        self,
        weights: np.ndarray,
        events: Events,
        words: _Words,
        proximal: float,
        offsets: list[np.ndarray | None] | None,
    ) -> dict[str, Tensor]:
        """Every client's update of each parameter [clients, ...]; of words, that of its own
        [clients, most, units].
        """
        whole = self.layout.split(_tensor(self.whole(weights), self.device))
        start = self._reached(whole, _tensor(words.ids, self.device))
        local = {
            name: (
                start[name]
                if name in self._by_word
                else start[name].expand(events.num_clients, *shape)
            ).clone()
            for name, shape in self.trained.shapes
        }
        fixed = {name: own for name, own in start.items() if name not in local}
        added = None if offsets is None else self._offsets(offsets, words, weights)
        x = self._features(events.contexts.shared, words, weights.dtype)
        actions = _tensor(events.actions, self.device)
        rewards = events.targets if self.objective.supervised else events.rewards[:, None]
        targets = _tensor(rewards, self.device, weights.dtype)
        axes = {
            name: 0 if name in self._by_word else None for name in fixed
        }  # the others are the same for all clients
        gradient = torch.func.vmap(
            torch.func.grad(self._client_loss), in_dims=(0, axes, 0, 0, 0, 0)
        )
        for step in _steps(events, self.objective, self.settings, targets.shape[1]):
            rows, active = _tensor(step.rows, self.device), _tensor(step.active, self.device)
            factors = _tensor(step.weights, self.device, weights.dtype)
            moves = gradient(local, fixed, x[rows], actions[rows], targets[rows], factors)
            for name, own in local.items():
                move = moves[name]
                if proximal:
                    move = move + proximal * (own - start[name])
                if added is not None:
                    move = move + added[name]
                own.sub_(
                    torch.where(_beside(active, move), move, 0.0), alpha=self.settings.learning_rate
                )
        return {name: own - start[name] for name, own in local.items()}

    def _client_loss(
        self,
        trained: dict[str, Tensor],
        fixed: dict[str, Tensor],
        x: Tensor,
        actions: Tensor,
        targets: Tensor,
        weights: Tensor,
    ) -> Tensor:
        """One client's loss on a mini-batch; its derivative is weight · (link(score) - target)."""
        scores = self.model.scores(trained | fixed, x)
        if not self.model.heads:
            scores = scores[:, None]
        if not self.objective.supervised:
            scores = scores.gather(2, actions[:, None, None].expand(-1, scores.shape[1], 1))
        targets = targets[:, None]
        if self.objective.logistic:
            losses = torch.nn.functional.softplus(scores) - targets * scores
        else:
            losses = (scores - targets) ** 2 / 2
        return (weights[:, :, None] * losses).sum()

    @cached_property
    def _by_word(self) -> tuple[str, ...]:
        """The parameters that have a row for each word of sparse contexts."""
        matrices = tuple(name for name, shape in self.layout.shapes if len(shape) == 2)
        return {"sparse-linear": matrices, "sparse-mlp": matrices[:1]}.get(
            self.model.kernel or "", ()
        )

    def _reached(self, params: dict[str, Any], words: Any) -> dict[str, Any]:
        """Of parameters by word the rows of some words; the others as they are."""
        return {
            name: values[words] if name in self._by_word else values
            for name, values in params.items()
        }

    def _features(self, contexts: Features, words: _Words, dtype: np.dtype) -> Tensor:
        """Dense contexts as they are, sparse ones [n, most] by the words of their client."""
        if not isinstance(contexts, Ragged):
            return _tensor(contexts, self.device, dtype)
        values = _tensor(contexts.values, self.device, dtype)
        where = (_tensor(contexts.row_of_entry(), self.device), _tensor(words.places, self.device))
        return values.new_zeros(len(contexts), words.ids.shape[1]).index_put_(
            where, values, accumulate=True
        )

    def _offsets(
        self, offsets: list[np.ndarray | None], words: _Words, like: np.ndarray
    ) -> dict[str, Tensor]:
        """The offsets that are added to the gradients of each parameter: [clients, ...]."""
        none = np.zeros_like(like)
        each = [
            self._reached(
                self.trained.split(none if gradient_offset is None else gradient_offset), ids
            )
            for gradient_offset, ids in zip(offsets, words.ids, strict=True)
        ]
        return {
            name: _tensor(np.stack([own[name] for own in each]), self.device)
            for name, _ in self.trained.shapes
        }


def _beside(values: Tensor, other: Tensor) -> Tensor:
    """Values of clients [clients], to go with something of theirs [clients, ...]."""
    return values.view(-1, *(1,) * (other.ndim - 1))


def _tensor(values: Any, device: Any, dtype: Any = None) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype)).to(device)
