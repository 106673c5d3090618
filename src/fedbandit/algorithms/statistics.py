"""LinUCB and linear Thompson sampling from statistics: clients send X'X and X'r, the server solves.

With x the features of an event with a 1 for the bias, and r its reward:

    A = λI + Σ x x'      b = Σ r x      θ = A⁻¹ b      width of a score = sqrt(x' A⁻¹ x)

One message of sums is all that is sent, and it is exact: no learning rate, no local steps, the same
θ as ridge regression on all events in one place. LinUCB (Li et al., 2010) acts by `policy.name =
"ucb"`, linear Thompson sampling (Agrawal and Goyal, 2013) by `"thompson"`; the federated and
private forms are those of Shariff and Sheffet (2018) and Dubey and Pentland (2020).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import sqrt
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from fedbandit.core.parts import require
from fedbandit.core.randomness import Purpose, normals
from fedbandit.federated.algorithm import Clients, RoundFacts
from fedbandit.federated.learners.base import Learner
from fedbandit.federated.pipeline import (
    Contribution,
    FixedClipping,
    Memories,
    Pipeline,
    Sends,
    Sent,
    Vectors,
)
from fedbandit.models import DataSpec, Layout
from fedbandit.models.statistics import FeatureMap
from fedbandit.objectives import Objective, Regression

if TYPE_CHECKING:
    from fedbandit.federated.server import ServerOptimizer

_LARGEST = 2**22  # numbers in A: what a version, a message and a choice may cost
_SLACK = 1.1  # times the expected size of the noise in A: what a private run adds to λ


@dataclass(frozen=True)
class Statistics:
    """Ridge regression for each fixed action, or one for all candidates.

    `prior` is λ, `keep` the part of all sums that lasts from round to round: below 1 forgets, for a
    world that changes. Sparse features beyond `dimensions` are folded into as many by a fixed hash.
    Over candidates each version ships `draws` draws of θ, which vote in `thompson`; for fixed
    actions widths are enough. Initial weights, learning rates and clipping (without privacy) are
    not used.

    A client remembers up to which time it has sent: in population mode an event counts once, also
    where its client is drawn twice in a period. With privacy a client's sums are clipped by their
    joint norm; the noise in A is symmetric, and A gets a shift of its expected size.
    """

    optimizer: "ServerOptimizer" = field(repr=False)  # every algorithm is given one
    data: DataSpec
    layout: Layout = field(repr=False)
    objective: Objective
    seed: int = 0
    plan: Any = None  # the privacy plan of a private run
    prior: float = 1.0
    keep: float = 1.0
    dimensions: int = 64
    draws: int = 32

    exact_sums: ClassVar[bool] = True
    memory_numbers: ClassVar[int] = 1  # the time up to which all was sent

    def __post_init__(self) -> None:
        require(self, prior="positive", keep="above 0 and at most 1")
        if type(self.objective) is not Regression:
            raise ValueError("statistics is ridge regression: it needs objective.name = regression")
        if [name for name, _ in self.layout.shapes] != ["weight", "bias"]:
            raise ValueError("statistics needs model.name = linear, with no part of it frozen")
        k, d = self._features.actions, self._features.size
        if k * d * d > _LARGEST:
            raise ValueError(
                f"dimensions: {k} regressions over {d} features have {k * d * d:,} products, more"
                f" than {_LARGEST:,}; set algorithm.name = diag-newton, or fewer dimensions"
            )
        if self.plan is not None:
            self._refuse_noise(k, d)

    @cached_property
    def _features(self) -> FeatureMap:
        return FeatureMap(self.data, self.layout.shapes[0][1][0], self.dimensions)

    def _refuse_noise(self, k: int, d: int) -> None:
        """Refuse a plan whose noise in A would exceed all that its rounds can add to it."""
        plan = self.plan
        if not isinstance(plan.clipping, FixedClipping):
            raise ValueError("statistics needs a clip norm that stays: set clipping.norm")
        noise = plan.noise_multiplier * sqrt(2 * d * plan.rounds)
        signal = plan.rounds * plan.clients_per_round / (k * d)
        if noise > signal:
            raise ValueError(
                f"dimensions: noise of size {noise:.3g} exceeds what {plan.clients_per_round:,}"
                f" clients a round add to each of {k * d:,} directions in {plan.rounds:,} rounds,"
                f" {signal:.3g} (in clip norms); take more clients or fewer features"
            )

    @property
    def sends(self) -> Sends:
        """A's triangle, off-diagonals times √2 so that its norm is A's, and b."""
        k, d = self._features.actions, self._features.size
        return {
            "outer": Sent((k, d * (d + 1) // 2), dtype="float64"),
            "products": Sent((k, d), dtype="float64"),
        }

    def deploys(self, model: Mapping[str, Any]) -> dict[str, Any]:
        """The regressions with their uncertainty."""
        draws = self.draws if self.data.items is not None else 0
        own = {"name": "linear-statistics", "dimensions": self.dimensions, "draws": draws}
        return {**model, **own}

    def init(self, weights: np.ndarray) -> Vectors:
        k, d = self._features.actions, self._features.size
        return {
            "weights": weights[:1],  # not used; its type is that of the run
            "outer": np.zeros((k, d, d)),
            "products": np.zeros((k, d)),
            "rounds": np.zeros(2),  # gone, and how many rounds of noise A holds
        }

    def broadcast(self, server_state: Vectors) -> Vectors:
        return {"weights": server_state["weights"]}

    def train(
        self, learner: Learner, received: Vectors, clients: Clients, pipeline: Pipeline
    ) -> Contribution:
        newest = [-1] * len(clients.ids)
        before = clients.remembered("sent", np.zeros(1))

        def sent() -> Iterator[Vectors | None]:
            for client in range(len(clients.ids)):
                own = clients.events.of_client(client)
                until = float(np.asarray(before[client])[0]) - 1  # 0 is remembered before anything
                own = own if own.times is None else own.where(own.times > until)
                if not len(own):
                    yield None
                    continue
                newest[client] = -1 if own.times is None else int(own.times.max())
                x = self._features(own.contexts.shared)
                yield self._sums(x, own.actions, np.asarray(own.rewards, np.float64))

        def remember(client: int, seen: Vectors) -> Memories:
            return {"sent": np.array([newest[client] + 1.0])}

        return pipeline.collect(sent(), clients.ids, self.sends, remember)

    def _sums(self, x: np.ndarray, actions: np.ndarray, rewards: np.ndarray) -> Vectors:
        """One client's sums over its events."""
        k, d = self._features.actions, self._features.size
        outer, products = np.zeros((k, d, d)), np.zeros((k, d))
        for action in np.unique(actions):
            rows = x[actions == action]
            outer[action] = np.einsum("nd,ne->de", rows, rows)
            products[action] = np.einsum("nd,n->d", rows, rewards[actions == action])
        upper, scale = _triangle(d)
        return {"outer": outer[:, *upper] * scale, "products": products}

    def step(self, server_state: Vectors, mean: Vectors, facts: RoundFacts) -> Vectors:
        outer, (gone, noisy) = server_state["outer"], server_state["rounds"]
        upper, scale = _triangle(outer.shape[-1])
        added = np.zeros_like(outer)
        added[:, *upper] = facts.clients * mean["outer"] / scale
        added += np.triu(added, 1).transpose(0, 2, 1)
        products = self.keep * server_state["products"] + facts.clients * mean["products"]
        return {
            "weights": server_state["weights"],
            "outer": self.keep * outer + added,
            "products": products,
            "rounds": np.array([gone + 1, self.keep**2 * noisy + 1]),
        }

    def model(self, server_state: Vectors) -> np.ndarray:
        """θ, a root of A⁻¹ and draws of θ, one after the other."""
        outer, (gone, noisy) = server_state["outer"], server_state["rounds"]
        shift = self.prior + self.shift(noisy)
        values, vectors = np.linalg.eigh(outer)
        values = np.maximum(values + shift, self.prior)  # noise can still take it below
        root = vectors.transpose(0, 2, 1) / np.sqrt(values)[..., None]
        theta = np.einsum("kij,kil,kl->kj", root, root, server_state["products"])
        parts = [theta, root]
        if self.data.items is not None and self.draws:
            shape = (self.draws, *theta.shape)
            at = np.arange(np.prod(shape)).reshape(shape)
            noise = normals(self.seed, Purpose.POSTERIOR, int(gone), at)
            parts.append(theta + np.einsum("ski,kij->skj", noise, root))
        dtype = server_state["weights"].dtype
        return np.concatenate([part.reshape(-1) for part in parts]).astype(dtype)

    def restore(self, deployed: np.ndarray) -> Vectors:
        """The server's state when it learns on from a deployed version: A and b of its θ."""
        k, d = self._features.actions, self._features.size
        theta, root = (part.astype(np.float64) for part in np.split(deployed, [k * d])[:2])
        root = root[: k * d * d].reshape(k, d, d)
        a = np.linalg.inv(np.einsum("kij,kil->kjl", root, root))
        products = np.einsum("kij,kj->ki", a, theta.reshape(k, d))
        kept = self.init(deployed[:1])
        return kept | {"outer": a - self.prior * np.eye(d), "products": products}

    def shift(self, rounds: float) -> float:
        """A private run's addition to λ: 1.1 times the expected norm of the rounds' noise."""
        if self.plan is None:
            return 0.0
        deviation = self.plan.noise_multiplier * self.plan.clipping.initial
        return float(_SLACK * deviation * sqrt(2 * self._features.size * rounds))


def _triangle(d: int) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    """The places of a symmetric matrix on and above its diagonal, and what scales them."""
    upper = np.triu_indices(d)
    return upper, np.where(upper[0] == upper[1], 1.0, sqrt(2))
