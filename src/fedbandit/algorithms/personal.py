"""Personal parts: FedAvg for all, and beside it a bias or a last layer of each client's own.

FedAvg's update from the received weights is sent. In addition a client trains the model from the
received weights plus its own part, and keeps what that changes in its part: the split of FedPer
(Arivazhagan et al., 2019) and FedRep (Collins et al., 2021), as an offset to the deployed model, so
that a client without a part acts with the deployed one, and all gain when that learns.

A client acts with its part only once it has proved itself on events that it was not trained on.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from typing import Any, Literal

import numpy as np

from fedbandit.acting import explore
from fedbandit.algorithms.fedavg import FedAvg
from fedbandit.core.parts import require
from fedbandit.core.prediction import Prediction, at_actions, over_actions
from fedbandit.core.ragged import SparseVector
from fedbandit.events import Events
from fedbandit.federated.algorithm import Clients, RoundFacts
from fedbandit.federated.learners.base import Learner
from fedbandit.federated.pipeline import (
    Contribution,
    DenseSum,
    Memories,
    Pipeline,
    Sends,
    Sent,
    Vectors,
)
from fedbandit.models import DataSpec, Layout
from fedbandit.policies import Greedy

_LARGEST = 10.0  # of the importance weights by which events count in a client's gain
_KEEP = 0.8  # of earlier gains, each time a client takes part: its part has changed since
_MODELS = {
    "weight": ("weight", "bias"),
    "dense1": ("dense1", "dense1_bias", "dense2", "dense2_bias"),
}


@dataclass(frozen=True)
class PersonalPart(FedAvg):
    """FedAvg whose clients act with a `part` of their own: their "bias", or the "last-layer".

    For the models `linear` (whose last layer is all of it) and `mlp`; over candidates, which share
    one bias, the last layer. A part is trained at `rate` times the clients' learning rate, and
    drawn towards 0 by the ridge penalty `prior` / 2n · ‖part‖² for n events: about as many events
    of its own a client needs before its part has its say.

    Each time a client takes part in a round, its part is judged on the new events before it is
    trained on them, by `gains`. It is adopted when at least `least` events have been judged and
    their mean gain, shrunk towards the mean over all clients as if by `least` events of that, is
    positive; otherwise the deployed model acts.

    Parts stay with their clients. The sums of gains are sent; private runs and devices do not send
    them, and shrink towards 0.
    """

    data: DataSpec
    layout: Layout = field(repr=False)
    plan: Any = None  # the privacy plan of a private run
    on_devices: bool = False  # a deployment's, whose messages are the weights alone
    part: Literal["bias", "last-layer"] = "bias"
    rate: float = 0.25
    prior: float = 10.0
    least: int = 16

    def __post_init__(self) -> None:
        names = tuple(name for name, _ in self.layout.shapes)
        if names != _MODELS.get(names[0]):
            raise ValueError("personal needs model.name = linear or mlp, with no part of it frozen")
        if self.part not in ("bias", "last-layer"):
            raise ValueError(f"part must be bias or last-layer, not {self.part}")
        if self.part == "bias" and self.data.items is not None:
            raise ValueError("part: candidates share one bias; set algorithm.part = last-layer")
        require(self, rate="positive", prior="at least 0", least="at least 1")

    @property
    def size(self) -> int:
        """Numbers in a client's part, which lie at the end of the weights."""
        layers = self.layout.shapes[-1 if self.part == "bias" else -2 :]
        return sum(prod(shape) for _, shape in layers)

    @property
    def memory_numbers(self) -> int:
        """The part, and three numbers of how it has done."""
        return self.size + 3

    @property
    def _alone(self) -> bool:
        """Whether nobody learns how the parts of others do."""
        return self.on_devices or self.plan is not None

    @property
    def sends(self) -> Sends:  # type: ignore[override]
        gains = {"gains": Sent((2,), scale=None, dtype="float64")}  # events judged, their gains
        return {"weights": 1.0, **({} if self._alone else gains)}

    def init(self, weights: np.ndarray) -> Vectors:
        return {**super().init(weights), "gains": np.zeros(2)}

    def broadcast(self, server_state: Vectors) -> Vectors:
        return {name: server_state[name] for name in self.sends}

    def train(
        self, learner: Learner, received: Vectors, clients: Clients, pipeline: Pipeline
    ) -> Contribution:
        weights, (judged, gained) = received["weights"], received.get("gains", np.zeros(2))
        usual = gained / judged if judged else 0.0
        found = list(self._clients(learner, weights, clients, usual))
        gains, parts = np.array([each[0] for each in found]), [each[1] for each in found]
        if pipeline.only_clips:
            total, norms = learner.train(weights, clients.events, pipeline.clip_norm)
            accepted = np.isfinite(norms)
            sent = Contribution(
                {"weights": total, "gains": DenseSum(gains[accepted].sum(0))}, norms
            )
        else:
            updates = learner.updates(weights, clients.events)
            each = (
                None if update is None else {"weights": update, "gains": gains[client]}
                for client, update in enumerate(updates)
            )
            sent = pipeline.collect(each, clients.ids, self.sends)
        return replace(
            sent,
            sums={name: sent.sums[name] for name in self.sends},
            memory={
                int(client): part
                for client, part, norm in zip(clients.ids, parts, sent.norms, strict=True)
                if part is not None and np.isfinite(norm)
            },
        )

    def _clients(
        self, learner: Learner, weights: np.ndarray, clients: Clients, usual: float
    ) -> Iterator[tuple[np.ndarray, Memories | None]]:
        """Each client's new sums of gains, and its next memory; `usual` is everybody's gain."""
        settings = replace(
            learner.settings, learning_rate=self.rate * learner.settings.learning_rate
        )
        slower = replace(learner, settings=settings)  # type: ignore[type-var]
        nothing = SparseVector.zeros(len(weights), weights.dtype)  # keeps updates on text sparse
        parts = clients.remembered("part", weights[-self.size :])
        records = clients.remembered("record", np.zeros(3))
        for client, (part, record) in enumerate(zip(parts, records, strict=True)):
            own = clients.events.of_client(client)
            if not len(own):
                yield np.zeros(2), None
                continue
            start = self._with(weights, part)
            logged = clients.logged_by(client)
            before, after = (clients.predict(w, logged.contexts) for w in (weights, start))
            new = np.array([len(logged), gains(logged, before, after).sum()]) * (part.nbytes > 0)
            count, total = _KEEP * np.asarray(record)[:2] + new
            mean = (total + self.least * usual) / (count + self.least)
            (update,) = slower.updates(start, own, 0.0, lambda _: nothing)
            pull = settings.learning_rate * settings.steps(len(own)) * self.prior / len(own)
            moved = (part + np.asarray(update)[-self.size :]) / weights.dtype.type(1 + pull)
            if not np.isfinite(moved).all():  # diverged: it keeps what it had
                yield new, None
                continue
            adopted = count >= self.least and mean > 0
            yield new, {"part": moved, "record": np.array([count, total, adopted])}

    def step(self, server_state: Vectors, mean: Vectors, facts: RoundFacts) -> Vectors:
        following, gained = super().step(server_state, mean, facts), server_state["gains"]
        if "gains" in mean:
            gained = gained + facts.clients * mean["gains"]
        return {**following, "gains": gained}

    def personal(self, received: Vectors, memory: Memories) -> Vectors | None:
        """The deployed weights with the client's own part; None unless it was adopted."""
        if not np.asarray(memory["record"])[2]:
            return None
        return {"weights": self._with(received["weights"], memory["part"])}

    def who_gained(self, memories: Iterable[Memories]) -> list[dict[str, float]]:
        """Rows of clients by the events that their parts were judged on, for a run's report.

        `gained` and `lost` count those that act with a part, by the sign of their own mean gain;
        `gain` is the mean of these means.
        """
        records = np.array([np.asarray(own["record"]) for own in memories]).reshape(-1, 3)
        count, total, adopted = records.T
        gain, rows = total / np.maximum(count, 1e-9), []
        for low, high in pairwise((0, 8, 16, 32, np.inf)):
            own = (count >= low) & (count < high)
            acts = gain[own & (adopted > 0)]
            rows.append({
                "judged_from": low, "clients": int(own.sum()), "adopted": len(acts),
                "gained": int((acts > 0).sum()), "lost": int((acts < 0).sum()),
                "gain": float(acts.mean()) if len(acts) else 0.0,
            })  # fmt: skip
        return rows

    def _with(self, weights: np.ndarray, part: np.ndarray | SparseVector) -> np.ndarray:
        whole = weights.copy()
        whole[-self.size :] += np.asarray(part)
        return whole


def gains(events: Events, deployed: Prediction, own: Prediction) -> np.ndarray:
    """The gain at each event of the best actions by `own` over those by `deployed`: [n].

    The doubly robust estimate from what was logged, with the deployed scores as its model of
    rewards, and importance weights of at most 10.
    """
    bounds, q = deployed.bounds, deployed.mean.astype(np.float64)
    first, second = (explore(Greedy(), each, events.available) for each in (deployed, own))
    change = (second - first).astype(np.float64)
    weights = np.minimum(1 / events.propensities.astype(np.float64), _LARGEST)
    errors = events.rewards - at_actions(q, events.actions, bounds)
    corrected = at_actions(change, events.actions, bounds) * weights * errors
    return np.asarray(over_actions(change * q, bounds) + corrected)
