"""Gradient and diagonal curvature of a linear model's squared loss, at the weights that a client received.

For scores w·x + b, a client's events give g = Σ c (score - r) x and h = Σ c x² for each weight, with importance
weights c; the bias is the weight of a feature that is always 1. Work on sparse rows touches their entries alone.
"""

from collections.abc import Iterator
from math import inf

import numpy as np

from fedbandit.acting.predictors import sparse_loops
from fedbandit.core.ragged import Ragged
from fedbandit.core.sparse import SparseVector
from fedbandit.events import Events
from fedbandit.federated.pipeline import EntrySum
from fedbandit.models.base import Layout
from fedbandit.objectives import Pointwise

Curvature = tuple[np.ndarray, np.ndarray] | tuple[SparseVector, SparseVector]
"""Gradient and diagonal curvature of one client, [P] each."""

_LEAST = 1e-12  # a context shorter than this is not stretched to length one, as in dense learners


def curvatures(
    layout: Layout, objective: Pointwise, weights: np.ndarray, events: Events
) -> Iterator[Curvature | None]:
    """Each client's gradient and curvature; None for a client without events."""
    made = _of_sparse if isinstance(events.contexts.shared, Ragged) else _of_dense
    for client in range(events.num_clients):
        own = events.of_client(client)
        yield made(layout, objective, weights, own) if len(own) else None


def curvature_sums(
    layout: Layout, objective: Pointwise, weights: np.ndarray, events: Events, clip_norm: float
) -> tuple[EntrySum, EntrySum, np.ndarray]:
    """The sums of gradients and curvatures of all clients, and each client's joint norm.

    For sparse rows and losses on the chosen action, in one compiled loop. Each client is clipped to
    the norm of its gradient and curvature together; one whose norm is not finite is left out.
    """
    contexts, dtype = events.contexts.shared, weights.dtype
    assert isinstance(contexts, Ragged)
    params, norms = layout.split(weights), np.zeros(events.num_clients)
    entries = np.empty(len(contexts.ids), np.int64)
    moments = np.empty((2, len(entries)), dtype)
    biases = np.zeros((2, len(params["bias"])), dtype)
    found = sparse_loops.curvature_chosen(
        contexts.offsets, contexts.ids, np.asarray(contexts.values, dtype), events.bounds,
        events.actions, np.asarray(events.rewards, dtype), _weights(objective, events, dtype),
        clip_norm, params["weight"].reshape(-1), params["bias"], entries, moments, biases, norms,
    )  # fmt: skip
    gradient, curvature = (
        EntrySum(entries[:found], moment[:found], bias)
        for moment, bias in zip(moments, biases, strict=True)
    )
    return gradient, curvature, norms


def _weights(objective: Pointwise, events: Events, dtype: np.dtype) -> np.ndarray:
    return objective.weights(np.asarray(events.propensities, dtype), events.weights)


def _of_sparse(
    layout: Layout, objective: Pointwise, weights: np.ndarray, own: Events
) -> tuple[SparseVector, SparseVector]:
    """One client's on sparse rows: an entry for each word and chosen action, or whole rows."""
    if objective.supervised:
        return _of_rows(layout, objective, weights, own)
    gradient, curvature, (norm,) = curvature_sums(layout, objective, weights, own, inf)
    bias = np.arange(layout.size - len(gradient.bias), layout.size)
    entries = np.concatenate([gradient.entries, bias])
    order = np.argsort(entries)
    vectors = [
        SparseVector(entries[order], np.concatenate([s.values, s.bias])[order], layout.size)
        for s in (gradient, curvature)
    ]
    return (vectors[0] * (1.0 if np.isfinite(norm) else np.nan)), vectors[1]


def _of_rows(
    layout: Layout, objective: Pointwise, weights: np.ndarray, own: Events
) -> tuple[SparseVector, SparseVector]:
    """One client's with targets for all actions: its words reach whole rows."""
    contexts, dtype = own.contexts.shared, weights.dtype
    assert isinstance(contexts, Ragged)
    assert own.targets is not None
    params, counts = layout.split(weights), _weights(objective, own, dtype)[:, None]
    k, x = len(params["bias"]), np.asarray(contexts.values, dtype)
    scores = np.empty((len(own), k), dtype)
    sparse_loops.scores(params["weight"], params["bias"], contexts.offsets, contexts.ids, x, scores)
    errors = counts * (scores - np.asarray(own.targets, dtype))
    rows, slots = np.unique(contexts.ids, return_inverse=True)
    gradient, curvature = np.zeros((len(rows), k), dtype), np.zeros((len(rows), 1), dtype)
    one = dtype.type(1)
    sparse_loops.add_rows(contexts.offsets, slots, x, errors, one, gradient)
    sparse_loops.add_rows(contexts.offsets, slots, x * x, counts, one, curvature)
    entries = (rows[:, None].astype(np.int64) * k + np.arange(k)).reshape(-1)
    entries = np.concatenate([entries, np.arange(layout.size - k, layout.size)])
    every = np.concatenate([np.repeat(curvature, k), np.full(k, counts.sum())])
    return (
        SparseVector(entries, np.concatenate([gradient.reshape(-1), errors.sum(0)]), layout.size),
        SparseVector(entries, every.astype(dtype), layout.size),
    )


def _of_dense(
    layout: Layout, objective: Pointwise, weights: np.ndarray, own: Events
) -> tuple[np.ndarray, np.ndarray]:
    """One client's on dense features of length one. Plain numpy loops: BLAS has other bits by threads."""
    assert isinstance(own.contexts.shared, np.ndarray)
    params, counts = layout.split(weights), _weights(objective, own, weights.dtype)
    rows = np.concatenate([params["weight"], params["bias"][None]]).T  # [K, features + 1]
    x = np.ones((len(own), rows.shape[1]), weights.dtype)
    flat = own.contexts.shared.reshape(len(own), -1).astype(weights.dtype)
    x[:, :-1] = flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), _LEAST)
    if objective.supervised:
        assert own.targets is not None
        errors = np.einsum("nd,kd->nk", x, rows) - own.targets
        gradient = np.einsum("nk,nd->kd", counts[:, None] * errors, x)
        curvature = np.tile(np.einsum("n,nd->d", counts, x * x), (len(rows), 1))
    else:
        chosen = counts * (np.einsum("nd,nd->n", x, rows[own.actions]) - own.rewards)
        gradient, curvature = np.zeros_like(rows), np.zeros_like(rows)
        np.add.at(gradient, own.actions, chosen[:, None] * x)
        np.add.at(curvature, own.actions, counts[:, None] * (x * x))
    sent = [
        np.concatenate([one[:, :-1].T.reshape(-1), one[:, -1]]) for one in (gradient, curvature)
    ]
    return sent[0].astype(weights.dtype), sent[1].astype(weights.dtype)
