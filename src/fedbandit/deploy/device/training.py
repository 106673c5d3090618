"""Training on a device: the parts that a server names, and the linear model in plain numpy.

The numpy learner agrees with the simulator's, which need numba or torch. It works on what one
device has logged, a few hundred events.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedbandit import algorithms, objectives
from fedbandit.acting import Actor, Predictor
from fedbandit.core.contexts import unit_rows
from fedbandit.core.errors import DataError, needing
from fedbandit.core.files import pack, read_packed, unpack, write_bytes
from fedbandit.core.parts import construct, require_trust, resolve
from fedbandit.core.ragged import Ragged
from fedbandit.deploy.device.model_files import DeviceModel
from fedbandit.deploy.private_files import make_private
from fedbandit.events import Events
from fedbandit.federated.algorithm import Algorithm
from fedbandit.federated.clients import personal_weights
from fedbandit.federated.learners.base import (
    ClientSettings,
    GradientOffset,
    Learner,
    logged_of,
    offset_of,
)
from fedbandit.federated.learners.make_learner import Trainable
from fedbandit.federated.pipeline import Memories, Pipeline, UpdateSum
from fedbandit.federated.server import NoOpOptimizer
from fedbandit.models import DataSpec, Freezing, Layout
from fedbandit.objectives import Objective, Pointwise


@dataclass(frozen=True)
class Training:
    """The parts that a model file and a server name, built on a device.

    `whole` and `received` are examples of the vectors that fit: one like what is deployed, one like
    what a server sends to train from.
    """

    trainable: Trainable
    acting: Trainable
    predictor: Predictor
    learner: Learner
    objective: Objective
    algorithm: Algorithm
    freezing: Freezing | None
    whole: np.ndarray
    received: np.ndarray

    def events(self, logged: Events) -> Events:
        """The events as they are trained on: over candidates, of the chosen one alone."""
        reduction = self.trainable.reduction(self.objective)
        return logged if reduction is None else reduction(logged)


@lru_cache(maxsize=4)
def build_training(what: str, trusted: frozenset[str]) -> Training:
    """From the JSON of [data, the model that acts, how to train]; what is not built in must be
    trusted.
    """
    data, described, learning = json.loads(what)
    named = learning.get("algorithm", {"name": "fedavg"})
    to_train = learning.get("model", described)
    asked = [described["name"], to_train["name"], learning["objective"], named["name"]]
    require_trust(asked, "the server", trusted, "it to `trusted`:")
    data = DataSpec.from_json(data)
    trainable = acting = Trainable.of(to_train, data)
    if described != to_train:
        acting = Trainable.of(described, data)
    make = resolve("objective.name", learning["objective"], objectives.BUILT_IN)
    objective = construct("objective", make, learning["objective_parameters"])
    parameters = {key: value for key, value in named.items() if key != "name"}
    make = resolve("algorithm.name", named["name"], algorithms.BUILT_IN)
    freeze = learning.get("freeze", ())
    freezing = Freezing.of(trainable.layout, freeze) if freeze else None
    layout = trainable.layout if freezing is None else freezing.trainable
    told = {"data": data, "layout": layout, "objective": objective, "on_devices": True}
    optimizer = NoOpOptimizer()  # steps are the server's
    algorithm = construct("algorithm", make, parameters, optimizer, told=told)
    settings = construct("client", ClientSettings, learning["client"])
    dtype = np.dtype(learning["dtype"])
    trained = trainable.initial(0, dtype)
    trained = trained if freezing is None else freezing.pick(trained)
    return Training(
        trainable,
        acting,
        acting.predictor(light=True),
        device_learner(to_train["name"], trainable, objective, settings, freezing),
        objective,
        algorithm,
        freezing,
        whole=acting.initial(0, dtype),
        received=algorithm.broadcast(algorithm.init(trained))["weights"],
    )


@dataclass(frozen=True)
class DeviceMemory:
    """An algorithm's memory on this device: a file beside the log, which is never sent.

    It holds the last two memories, each with the mark of the log up to which its events are
    counted. A server that asks again from the earlier mark finds the earlier memory, so that no
    event is remembered twice. A killed device has the file from before or after a change.
    """

    path: Path

    def at(self, mark: int) -> Memories:
        """The newest memory of nothing that was settled after the mark; empty at first."""
        _, kept = self._read()
        return kept[max(known)] if (known := [own for own in kept if own <= mark]) else {}

    def keep(self, before: int, after: int, memory: Memories, told: Any) -> None:
        """Remember this from the mark `after` on, made from what was remembered at `before`.

        `told` is of plain values: what the memory means, and to whom.
        """
        kept = {before: self.at(before), after: memory}
        arrays = {
            f"{m}/{name}": np.asarray(a) for m, own in kept.items() for name, a in own.items()
        }
        write_bytes(self.path, pack(arrays, {"told": json.dumps(told)}))
        make_private(self.path)

    def latest(self) -> tuple[Any, Memories]:
        """The newest memory, behind what was told with it."""
        told, kept = self._read()
        return told, kept[max(kept)] if kept else {}

    def _read(self) -> tuple[Any, dict[int, dict[str, np.ndarray]]]:
        try:
            arrays, texts = unpack(read_packed(self.path))
            kept: dict[int, dict[str, np.ndarray]] = {}
            for key, array in arrays.items():
                mark, _, name = key.partition("/")
                kept.setdefault(int(mark), {})[name] = array
            return json.loads(texts["told"]), kept
        except FileNotFoundError:
            return None, {}
        except (OSError, ValueError, KeyError, RecursionError) as error:
            said = f"damaged ({str(error)[:100]}); move it away, and the device learns it again"
            raise DataError(f"{self.path}: {said}") from None


def personal_actor(actor: Actor, model: DeviceModel, path: Path, trusted: frozenset[str]) -> Actor:
    """The actor with the weights that this device remembers as its own, if it has any."""
    told, memory = DeviceMemory(path).latest()
    if not memory or told["space"] != model.space:
        return actor
    training = build_training(described(model, told["learning"]), trusted)
    this_one = np.zeros(1, np.int64)
    own = personal_weights(training.algorithm, actor.weights, this_one, {0: memory})
    if own is None or not len(own.vectors):
        return actor
    if not np.isfinite(own.vectors[0]).all():
        raise DataError("they are not finite")
    return replace(actor, weights=own.vectors[0])


def described(model: DeviceModel, learning: Mapping[str, Any]) -> str:
    """The JSON that `build_training` takes: data and model of a file, and how to train."""
    return json.dumps([asdict(model.data), model.model, learning])


def device_learner(
    name: str,
    trainable: Trainable,
    objective: Objective,
    settings: ClientSettings,
    freezing: Freezing | None = None,
) -> Learner:
    """Numpy for the model `linear` and built-in objectives; torch for anything else."""
    if getattr(objective, "supervised", False):
        raise DataError(
            f"{type(objective).__name__} needs rewards of actions that devices do not log"
        )
    if name == "linear" and isinstance(objective, Pointwise) and freezing is None:
        return LinearLearner(trainable.layout, objective, settings)
    with needing(f"training {name} with {type(objective).__name__}"):
        import_module("torch")
    return trainable.learner(objective, settings, freezing=freezing)


@dataclass(frozen=True)
class LinearLearner:
    """Trains `weight [features, K]` and `bias [K]`, on dense features or text.

    An event moves the column of its own action a alone: with e = score - reward, the importance c
    of its choice and the objective's factor f, weight[:, a] loses rate · f · c · e · x and bias[a]
    loses rate · f · c · e. Dense features are scaled to length one, and sums have the simulator's
    order.
    """

    layout: Layout
    objective: Pointwise
    settings: ClientSettings
    chunk_events: ClassVar[int] = 2048

    def train(
        self, weights: np.ndarray, events: Events, clip_norm: float, proximal: float = 0.0
    ) -> tuple[UpdateSum, np.ndarray]:
        updates = self.updates(weights, events, proximal)
        sent = (None if update is None else {"weights": update} for update in updates)
        clients = np.arange(events.num_clients)
        found = Pipeline(clip_norm).collect(sent, clients, {"weights": 1.0})
        return found.sums["weights"], found.norms

    def updates(
        self,
        weights: np.ndarray,
        events: Events,
        proximal: float = 0.0,
        gradient_offset: GradientOffset | None = None,
    ) -> Iterator[np.ndarray | None]:
        for client in range(events.num_clients):
            own, offset = events.of_client(client), offset_of(gradient_offset, client)
            yield self._update(weights, own, proximal, offset) if len(own) else None

    def _update(
        self, received: np.ndarray, events: Events, proximal: float, offset: np.ndarray | None
    ) -> np.ndarray:
        """The update [P] of epochs over one client's events, in batches and in their order.

        A step goes against gradient + proximal · (w - received) + offset.
        """
        local, dtype = received.copy(), received.dtype
        params, objective = self.layout.split(local), self.objective
        weight, bias = params["weight"].reshape(-1), params["bias"]
        actions, rewards, importance = logged_of(events, objective, dtype)
        rows = _rows_of(events.contexts.shared, dtype)
        owners = rows.row_of_entry()
        entries = rows.ids.astype(np.int64) * len(bias) + actions[owners]  # of the weight
        values = np.asarray(rows.values, dtype)
        size, rate = self.settings.batch_size, self.settings.learning_rate
        with np.errstate(over="ignore", invalid="ignore"):  # the norm tells what has diverged
            for begin in list(range(0, len(events), size)) * self.settings.epochs:
                batch = slice(begin, min(begin + size, len(events)))
                among = slice(rows.offsets[batch.start], rows.offsets[batch.stop])
                at, x, row = entries[among], values[among], owners[among] - begin
                scores = bias[actions[batch]]
                np.add.at(scores, row, x * weight[at])  # in the order of the simulator's kernel
                if objective.logistic:
                    scores = 1 / (1 + np.exp(-scores))
                step = dtype.type(rate * objective.factor(len(scores), len(bias)))
                moves = step * importance[batch] * (scores - rewards[batch])
                if proximal:
                    local -= dtype.type(rate * proximal) * (local - received)
                if offset is not None:
                    local -= dtype.type(rate) * offset
                np.subtract.at(bias, actions[batch], moves)
                np.subtract.at(weight, at, moves[row] * x)
            update: np.ndarray = local - received
        return update


def _rows_of(contexts: np.ndarray | Ragged, dtype: np.dtype) -> Ragged:
    """Contexts as rows of features; a dense one, scaled to length one, is a row of all of them."""
    if isinstance(contexts, Ragged):
        return contexts
    x = unit_rows(contexts, dtype)
    n, width = x.shape
    return Ragged(np.arange(n + 1) * width, np.tile(np.arange(width), n), x.reshape(-1))
