"""Learners for accelerators: all clients of a chunk train at once, one step of everybody's mini-batch at a time.

The same updates as the thread engine's learners up to rounding. Clients with fewer events sit out the later steps with
weight 0. Works on any torch device; knows nothing of rounds or policies.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedbandit.core.errors import ConfigError
from fedbandit.core.prediction import Prediction
from fedbandit.core.ragged import Ragged
from fedbandit.data.dataset import Contexts
from fedbandit.events import Events
from fedbandit.federated.learners.base import ClientSettings, Drift, Learner
from fedbandit.federated.pipeline import DenseSum, UpdateSum
from fedbandit.models.base import Layout, Model
from fedbandit.objectives import Objective, Pointwise

_SCORE_ROWS = 4096


def make_vectorised_learner(
    model: Model, layout: Layout, objective: Objective, settings: ClientSettings, device: str
) -> Learner:
    """The learner for a torch device; it needs to know the form of the objective, so only built-in ones will do."""
    if not isinstance(objective, Pointwise):
        raise ConfigError(f"objective.name: on device {device} only the built-in objectives work")
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device: {device} cannot be used here: {str(error).splitlines()[0]}") from None
    if model.heads or model.kernel == "sparse-mlp":
        what = "a model with heads" if model.heads else "an mlp on sparse features"
        raise ConfigError(f"model.name: {what} has no learner for device {device}")
    kind = VectorisedSparseLearner if model.kernel == "sparse-linear" else VectorisedLearner
    return kind(model, layout, objective, settings, device)


@dataclass(frozen=True)
class _Step:
    """One mini-batch of every client: rows [clients, batch] of the chunk's events, and what multiplies each error."""

    rows: np.ndarray  # int64; padded with row 0
    weights: np.ndarray  # [clients, batch]; 0 where there is no event
    active: np.ndarray  # bool [clients]: who has a mini-batch left


def _steps(events: Events, objective: Pointwise, settings: ClientSettings, num_actions: int) -> Iterator[_Step]:
    """The mini-batches in order, for all clients side by side."""
    starts, stops = events.bounds[:-1, None], events.bounds[1:, None]
    weights = objective.weights(events.propensities.astype(np.float64), events.weights)
    for _ in range(settings.epochs):
        for begin in range(0, int((stops - starts).max(initial=0)), settings.batch_size):
            rows = starts + begin + np.arange(settings.batch_size)
            present = rows < stops
            sizes = present.sum(axis=1)
            factors = np.array([objective.factor(max(1, int(size)), num_actions) for size in sizes])
            rows = np.where(present, rows, 0)
            yield _Step(rows, present * factors[:, None] * weights[rows], sizes > 0)


def _clipped_sum(deltas: Tensor, clip_norm: float) -> tuple[Tensor, np.ndarray]:
    """The sum of updates [clients, P], each clipped, without those that are not finite; and their norms."""
    norms = torch.linalg.vector_norm(deltas, dim=1)
    finite = torch.isfinite(norms)
    factors = torch.where(finite, (clip_norm / norms.clamp_min(1e-38)).clamp_max(1.0), 0.0)
    deltas = torch.where(finite[:, None], deltas, 0.0)
    return factors @ deltas, norms.cpu().numpy().astype(np.float64)


def _correction(local: Tensor, start: Tensor, step: _Step, pull: float, drift: Tensor | None) -> Tensor | float:
    """What is added to the gradients of those that take the step: pull · (w - received) + drift."""
    if not pull and drift is None:
        return 0.0
    added = pull * (local - start) if drift is None else pull * (local - start) + drift
    return _tensor(step.active, local.device).view(-1, *(1,) * (local.ndim - 1)) * added


def _each(deltas: Tensor, events: Events) -> Iterator[np.ndarray | None]:
    """One client's update after the other; None for clients without events."""
    for own, size in zip(deltas.cpu().numpy(), np.diff(events.bounds), strict=True):
        yield own if size else None


def _pointwise_loss(objective: Pointwise, scores: Tensor, rewards: Tensor, weights: Tensor) -> Tensor:
    """A loss whose derivative is weight · (link(score) - reward): what all built-in objectives share."""
    if objective.logistic:
        return (weights * (torch.nn.functional.softplus(scores) - rewards * scores)).sum()
    return (weights * (scores - rewards) ** 2 / 2).sum()


@dataclass(frozen=True)
class VectorisedLearner:
    """Any dense model, by `torch.func.vmap` over the clients of a chunk."""

    model: Model
    layout: Layout
    objective: Pointwise
    settings: ClientSettings
    device: str
    chunk_events: ClassVar[int] = 4096

    def predict(self, weights: np.ndarray, contexts: Contexts) -> Prediction:
        assert isinstance(contexts, np.ndarray)
        params = self.layout.split(_tensor(weights, self.device))
        with torch.no_grad():
            blocks = [
                self.model.scores(
                    params, _tensor(contexts[start : start + _SCORE_ROWS], self.device, weights.dtype)
                ).cpu()
                for start in range(0, len(contexts), _SCORE_ROWS)
            ]
        return Prediction(torch.cat(blocks).numpy() if blocks else np.zeros((0, 1), weights.dtype))

    def train(
        self, weights: np.ndarray, events: Events, clip_norm: float, pull: float = 0.0
    ) -> tuple[UpdateSum, np.ndarray]:
        total, norms = _clipped_sum(self._deltas(weights, events, pull, None), clip_norm)
        return DenseSum(total.cpu().numpy()), norms

    def updates(
        self, weights: np.ndarray, events: Events, pull: float = 0.0, drift: Drift | None = None
    ) -> Iterator[np.ndarray | None]:
        added = None
        if drift is not None:
            none = np.zeros_like(weights)
            given = [drift(client) for client in range(events.num_clients)]
            added = np.stack([none if own is None else own for own in given])
        yield from _each(self._deltas(weights, events, pull, added), events)

    def _deltas(self, weights: np.ndarray, events: Events, pull: float, drift: np.ndarray | None) -> Tensor:
        """Every client's update: [clients, P]."""
        assert isinstance(events.contexts, np.ndarray)
        start = _tensor(weights, self.device)
        local = start.expand(events.num_clients, -1).clone()
        contexts = _tensor(events.contexts, self.device, weights.dtype)
        chosen = _tensor(events.actions, self.device)
        supervised = self.objective.supervised
        targets = _tensor(events.targets if supervised else events.rewards, self.device, weights.dtype)
        drifts = None if drift is None else _tensor(drift, self.device)
        gradient = torch.func.vmap(torch.func.grad(self._loss))
        for step in _steps(events, self.objective, self.settings, self._num_actions(events)):
            rows = _tensor(step.rows, self.device)
            moves = gradient(
                local, contexts[rows], chosen[rows], targets[rows], _tensor(step.weights, self.device, weights.dtype)
            )
            moves += _correction(local, start, step, pull, drifts)
            local -= self.settings.learning_rate * moves
        return local - start

    def _loss(self, flat: Tensor, x: Tensor, actions: Tensor, rewards: Tensor, weights: Tensor) -> Tensor:
        scores = self.model.scores(self.layout.split(flat), x)
        if self.objective.supervised:
            return _pointwise_loss(self.objective, scores, rewards, weights[:, None])
        return _pointwise_loss(self.objective, scores.gather(1, actions[:, None])[:, 0], rewards, weights)

    def _num_actions(self, events: Events) -> int:
        return events.targets.shape[1] if events.targets is not None else 1


@dataclass(frozen=True)
class VectorisedSparseLearner:
    """A linear model on sparse text, by gathering and adding up the touched entries of all clients at once."""

    model: Model
    layout: Layout
    objective: Pointwise
    settings: ClientSettings
    device: str
    chunk_events: ClassVar[int] = 4096

    def predict(self, weights: np.ndarray, contexts: Contexts) -> Prediction:
        assert isinstance(contexts, Ragged)
        params = self.layout.split(_tensor(weights, self.device))
        entry_row = _tensor(contexts.row_of_entry(), self.device)
        ids = _tensor(contexts.ids, self.device, np.int64)
        values = _tensor(contexts.values, self.device, weights.dtype)
        scores = params["bias"].expand(len(contexts), -1).clone()
        scores.index_add_(0, entry_row, values[:, None] * params["weight"][ids])
        return Prediction(scores.cpu().numpy())

    def train(
        self, weights: np.ndarray, events: Events, clip_norm: float, pull: float = 0.0
    ) -> tuple[UpdateSum, np.ndarray]:
        words, deltas = self._deltas(weights, events, pull, None)
        total, norms = _clipped_sum(deltas.reshape(len(deltas), -1), clip_norm)
        flat = np.zeros_like(weights)
        self._place(flat, words, total.reshape(deltas.shape[1:]).cpu().numpy())
        return DenseSum(flat), norms

    def updates(
        self, weights: np.ndarray, events: Events, pull: float = 0.0, drift: Drift | None = None
    ) -> Iterator[np.ndarray | None]:
        rate, sizes = self.settings.learning_rate, np.diff(events.bounds)
        given = [None if drift is None else drift(client) for client in range(events.num_clients)]
        words, deltas = self._deltas(weights, events, pull, given)
        for client, (added, delta) in enumerate(zip(given, deltas.cpu().numpy(), strict=True)):
            if not sizes[client]:
                yield None
                continue
            flat = np.zeros_like(weights)
            if added is not None:  # where no word of the chunk reaches, the drift alone has moved the weights
                steps, kept = self.settings.steps(int(sizes[client])), 1 - rate * pull
                flat += added * added.dtype.type(-rate * (steps if pull == 0 else (1 - kept**steps) / (rate * pull)))
            self._place(flat, words, delta)
            yield flat

    def _deltas(
        self, weights: np.ndarray, events: Events, pull: float, drift: list[np.ndarray | None] | None
    ) -> tuple[np.ndarray, Tensor]:
        """The words of the chunk, and every client's update of their rows and the bias: [clients, words + 1, K]."""
        assert isinstance(events.contexts, Ragged)
        words, entries = _compact_with_bias(events.contexts)
        base = self._rows(weights, words)
        local = base.expand(events.num_clients, -1, -1).clone()
        drifts = None
        if drift is not None and any(own is not None for own in drift):
            rows = [torch.zeros_like(base) if own is None else self._rows(own, words) for own in drift]
            drifts = torch.stack(rows)
        for step in _steps(events, self.objective, self.settings, base.shape[1]):
            correction = _correction(local, base, step, pull, drifts)
            self._descend(local, step, events, entries)
            local -= self.settings.learning_rate * correction
        return words, local - base

    def _rows(self, vector: np.ndarray, words: np.ndarray) -> Tensor:
        """The rows of some words of a flat vector, with the bias for a last one."""
        params = self.layout.split(_tensor(vector, self.device))
        return torch.cat([params["weight"][_tensor(words, self.device, np.int64)], params["bias"][None]])

    def _place(self, flat: np.ndarray, words: np.ndarray, rows: np.ndarray) -> None:
        views = self.layout.split(flat)
        views["weight"][words] = rows[:-1]
        views["bias"][:] = rows[-1]

    def _descend(self, local: Tensor, step: _Step, events: Events, entries: Ragged) -> None:
        """One mini-batch of every client: all errors first, then all updates."""
        client, place = np.nonzero(step.weights)
        event = step.rows[client, place]
        taken = entries.take(event)
        row = taken.row_of_entry()
        dtype = np.float64 if local.dtype == torch.float64 else np.float32
        who, slot = _tensor(client[row], self.device), _tensor(taken.ids, self.device, np.int64)
        value = _tensor(taken.values, self.device, dtype)
        weight = _tensor(step.weights[client, place], self.device, dtype)
        row_of_entry = _tensor(row, self.device)
        where: tuple[Tensor, ...] = (who, slot)
        rewards = events.rewards
        if self.objective.supervised:
            assert events.targets is not None
            rewards, value, weight = events.targets, value[:, None], weight[:, None]
        else:
            where = (who, slot, _tensor(events.actions[event][row], self.device))
        scores = torch.zeros((len(event), *rewards.shape[1:]), dtype=local.dtype, device=self.device)
        scores.index_add_(0, row_of_entry, value * local[where])
        error = (torch.sigmoid(scores) if self.objective.logistic else scores) - _tensor(
            rewards[event], self.device, dtype
        )
        move = self.settings.learning_rate * weight * error
        local.index_put_(where, -move[row_of_entry] * value, accumulate=True)


def _compact_with_bias(contexts: Ragged) -> tuple[np.ndarray, Ragged]:
    """The words of a chunk, and its rows with places among them for ids; the bias is one more word of value 1."""
    words, slots = np.unique(contexts.ids, return_inverse=True)
    ends = contexts.offsets[1:]
    assert contexts.values is not None
    return words, Ragged(
        contexts.offsets + np.arange(len(contexts) + 1),
        np.insert(slots.astype(np.int32), ends, len(words)),
        np.insert(contexts.values, ends, 1),
    )


def _tensor(values: Any, device: Any, dtype: Any = None) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype)).to(device)
