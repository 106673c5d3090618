"""Diagonal Newton: clients send gradient and curvature of a linear model, the server divides one by the other.

At the weights w that a round's clients received, each sends g = Σ c (score - r) x and h = Σ c x² for every weight,
with importance weights c, and takes no local steps. The server keeps H and steps once:

    H <- keep · H + Σ h
    w <- w - rate · Σ g / (prior + H)

A weight that many events have reached moves little, a rare word's weight moves far: Adagrad (Duchi et al., 2011) with
curvature in place of squared gradients, the diagonal of online Newton steps (Hazan et al., 2007), and FedNL
(Safaryan et al., 2022), whose clients send Hessians, where these are diagonal. Least squares is quadratic, so that H
does not depend on where it was measured, and one sum holds all rounds.
"""

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fedbandit.core.ragged import Ragged
from fedbandit.federated.algorithm import Clients, RoundFacts
from fedbandit.federated.learners.base import Learner
from fedbandit.federated.learners.curvature import curvature_sums, curvatures
from fedbandit.federated.pipeline import Contribution, Pipeline, Sends, Vectors
from fedbandit.models import DataSpec, Layout
from fedbandit.objectives import Pointwise

if TYPE_CHECKING:
    from fedbandit.federated.server import ServerOptimizer


@dataclass(frozen=True)
class DiagNewton:
    """Newton steps by the diagonal of the curvature, for the model `linear` and squared losses.

    `prior` is how many events of curvature 1 the initial weights count for, `keep` the part of H
    that lasts from round to round: below 1, what was learned long ago makes room after a drift. The
    learning rates of clients and server are not used. What is sent is exact: it is clipped, to the
    joint norm of g and h, only under privacy or to a `clipping.norm` of one's own.
    """

    optimizer: "ServerOptimizer" = field(repr=False)  # every algorithm is given one
    data: DataSpec
    layout: Layout = field(repr=False)
    objective: Pointwise
    rate: float = 0.4
    prior: float = 0.1
    keep: float = 1.0

    sends: ClassVar[Sends] = {"gradient": 1.0, "curvature": 1.0}
    exact_sums: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("rate", "prior"):
            if not 0 < getattr(self, name) < inf:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        if not 0 < self.keep <= 1:
            raise ValueError(f"keep must be above 0 and at most 1, not {self.keep}")
        fixed = self.data.items is None
        width, actions = int(np.prod(self.data.shape)), self.data.num_actions
        expected = (("weight", (width, actions)), ("bias", (actions,)))
        names = tuple(name for name, _ in self.layout.shapes)
        if self.layout.shapes != expected if fixed else names != ("weight", "bias"):
            raise ValueError("diag-newton needs model.name = linear, with no part of it frozen")
        if not fixed and getattr(self.objective, "supervised", True):
            raise ValueError("diag-newton over candidates needs a loss on the chosen one")
        if getattr(self.objective, "logistic", True):
            raise ValueError(
                f"diag-newton needs a squared loss, not {type(self.objective).__name__}"
            )

    def init(self, weights: np.ndarray) -> Vectors:
        return {"weights": weights, "curvature": np.zeros_like(weights)}

    def broadcast(self, kept: Vectors) -> Vectors:
        return {"weights": kept["weights"]}

    def train(
        self, learner: Learner, received: Vectors, clients: Clients, pipeline: Pipeline
    ) -> Contribution:
        events, weights, objective = clients.events, received["weights"], self.objective
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
        scalar = kept["weights"].dtype.type
        count = scalar(facts.clients)
        curvature = scalar(self.keep) * kept["curvature"] + count * mean["curvature"]
        curvature = np.maximum(curvature, 0)  # noise can take it below
        move = scalar(self.rate) * count * mean["gradient"] / (scalar(self.prior) + curvature)
        return {"weights": kept["weights"] - move, "curvature": curvature}

    def model(self, kept: Vectors) -> np.ndarray:
        return kept["weights"]

    def precision(self, kept: Vectors) -> np.ndarray:
        """prior + H for each weight, [P]: Σ x² / precision is the squared width of a score."""
        return np.asarray(kept["curvature"] + kept["curvature"].dtype.type(self.prior))
