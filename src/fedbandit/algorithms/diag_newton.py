"""Diagonal Newton: clients send gradient and curvature of a linear model, the server divides one by the other.

At the weights w that a round's clients received, each sends g = Σ c (score - r) x and h = Σ c x² for every weight,
with importance weights c, and takes no local steps. The server keeps H and steps once:

    H <- keep · H + Σ h
    w <- w - rate · Σ g / (prior + H + (same_round - 1) · Σ h)

The events of one round all move from the same weights, and features that come together move
together: a diagonal does not see that their steps add up. As rounds go by, H holds them back; in the
first ones a round is most of H, and `same_round` counts its curvature that many times. Candidates
share their weights and have many features each, crosses included, so theirs is 5; fixed actions
have 1.

A weight that many events have reached moves little, a rare word's weight moves far: Adagrad (Duchi et al., 2011) with
curvature in place of squared gradients, the diagonal of online Newton steps (Hazan et al., 2007), and FedNL
(Safaryan et al., 2022), whose clients send Hessians, where these are diagonal. Least squares is quadratic, so that H
does not depend on where it was measured, and one sum holds all rounds.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from fedbandit.core.contexts import unit_rows
from fedbandit.core.parts import require
from fedbandit.core.ragged import Ragged, SparseVector
from fedbandit.events import Events
from fedbandit.federated.algorithm import Clients, RoundFacts
from fedbandit.federated.learners.base import Learner
from fedbandit.federated.pipeline import Contribution, EntrySum, Pipeline, Sends, Vectors
from fedbandit.models import DataSpec, Layout
from fedbandit.models.kernels import sparse_loops
from fedbandit.objectives import Pointwise, Regression

if TYPE_CHECKING:
    from fedbandit.federated.server import ServerOptimizer


@dataclass(frozen=True)
class DiagNewton:
    """Newton steps by the diagonal of the curvature, for the model `linear` and squared losses.

    `prior` is how many events of curvature 1 the initial weights count for, `keep` the part of H
    that lasts from round to round: below 1, what was learned long ago makes room after a drift.
    `bias` makes the bias's steps shorter than a feature's: its error is that of all features
    together, and a bias that follows it at full length takes from rare words what is theirs to say.
    `rate` is the length of steps, `same_round` how often a round's own curvature counts in its
    step: 0.5 and 1 for fixed actions, 1 and 5 over candidates, unless they are set.
    The learning rates of clients and server are not used. What is sent is exact: it is clipped, to
    the joint norm of g and h, only under privacy or to a `clipping.norm` of one's own.
    """

    optimizer: "ServerOptimizer" = field(repr=False)  # every algorithm is given one
    data: DataSpec
    layout: Layout = field(repr=False)
    objective: Pointwise
    rate: float | None = None
    prior: float = 0.2
    keep: float = 1.0
    bias: float = 0.1
    same_round: float | None = None

    sends: ClassVar[Sends] = {"gradient": 1.0, "curvature": 1.0}
    exact_sums: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(self, rate="positive", prior="positive", bias="positive")
        require(self, same_round="at least 1", keep="above 0 and at most 1")
        fixed = self.data.items is None
        width, actions = int(np.prod(self.data.shape)), self.data.num_actions
        expected = (("weight", (width, actions)), ("bias", (actions,)))
        names = tuple(name for name, _ in self.layout.shapes)
        if self.layout.shapes != expected if fixed else names != ("weight", "bias"):
            raise ValueError("diag-newton needs model.name = linear, with no part of it frozen")
        if getattr(self.objective, "logistic", True):
            raise ValueError(
                f"diag-newton needs a squared loss, not {type(self.objective).__name__}"
            )

    @property
    def _loss(self) -> Pointwise:
        """The loss of an event: with targets over candidates, each of them is an event of its own."""
        alone = self.data.items is not None and self.objective.supervised
        return Regression() if alone else self.objective

    @property
    def _steps(self) -> tuple[float, float]:
        """`rate` and `same_round`, as set or as this kind of data has them."""
        rate, same_round = (0.5, 1.0) if self.data.items is None else (1.0, 5.0)
        return self.rate or rate, self.same_round or same_round

    def deploys(self, model: Mapping[str, Any]) -> dict[str, Any]:
        """The linear model with prior + H as precision of each weight."""
        return {**model, "name": "linear-width"}

    def init(self, weights: np.ndarray) -> Vectors:
        return {"model": np.concatenate([weights, np.full_like(weights, self.prior)])}

    def broadcast(self, kept: Vectors) -> Vectors:
        return {"weights": kept["model"][: self.layout.size]}

    def train(
        self, learner: Learner, received: Vectors, clients: Clients, pipeline: Pipeline
    ) -> Contribution:
        events, weights, objective = clients.events, received["weights"], self._loss
        sparse = isinstance(events.contexts.shared, Ragged)
        if pipeline.only_clips and sparse and not objective.supervised:
            gradient, curvature, norms = curvature_sums(
                self.layout, objective, weights, events, pipeline.clip_norm
            )
            return Contribution({"gradient": gradient, "curvature": curvature}, norms)
        sent = (
            None if own is None else {"gradient": own[0], "curvature": own[1]}
            for own in curvatures(self.layout, objective, weights, events)
        )
        return pipeline.collect(sent, clients.ids, self.sends)

    def step(self, kept: Vectors, mean: Vectors, facts: RoundFacts) -> Vectors:
        scalar = kept["model"].dtype.type
        count, prior = scalar(facts.clients), scalar(self.prior)
        weights, precision = np.split(kept["model"], 2)
        rate, same_round = map(scalar, self._steps)
        own = count * mean["curvature"]
        curvature = scalar(self.keep) * (precision - prior) + own
        precision = prior + np.maximum(curvature, 0)  # noise can take it below
        bound = precision + (same_round - 1) * np.maximum(own, 0)
        move = rate * count * mean["gradient"] / bound
        move[-self.layout.shapes[-1][1][0] :] *= scalar(self.bias)
        return {"model": np.concatenate([weights - move, precision])}

    def model(self, kept: Vectors) -> np.ndarray:
        """Weights and precisions, which is all that is kept."""
        return kept["model"]


Curvature = tuple[np.ndarray, np.ndarray] | tuple[SparseVector, SparseVector]
"""Gradient and diagonal curvature of one client, [P] each."""


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
    from fedbandit.models.kernels import sparse_kernels

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
    sparse_kernels.add_rows(contexts.offsets, slots, x, errors, one, gradient)
    sparse_kernels.add_rows(contexts.offsets, slots, x * x, counts, one, curvature)
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
    """One client's on dense features of length one. Plain numpy loops: BLAS has other bits by
    threads.
    """
    params, counts = layout.split(weights), _weights(objective, own, weights.dtype)
    rows = np.concatenate([params["weight"], params["bias"][None]]).T  # [K, features + 1]
    x = np.ones((len(own), rows.shape[1]), weights.dtype)
    x[:, :-1] = unit_rows(own.contexts.shared, weights.dtype)
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
