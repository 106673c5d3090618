"""Do the learners of an accelerator agree with those of the CPU, and how fast are they? One command, one table.

`python -m benchmarks.accelerators --device cuda --out accelerators.md`; `--device cpu` runs the same learners on the
CPU device, which proves the command and says nothing about speed. All that is built in is covered: every model with
every algorithm and compression stage, and with every objective.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from fedbandit import algorithms, compression, objectives
from fedbandit.acting import Predictor
from fedbandit.algorithms import Algorithm, Clients, Pipeline
from fedbandit.core.contexts import Contexts
from fedbandit.core.ragged import Ragged
from fedbandit.events import Events
from fedbandit.federated.learners.base import ClientSettings, Learner
from fedbandit.federated.learners.make_learner import Trainable, make_learner
from fedbandit.federated.learners.vectorised import make_vectorised_learner
from fedbandit.federated.server import Sgd
from fedbandit.models import DataSpec, Freezing, builtin

MODELS = [
    *product(["text"], [name for name in builtin.BUILT_IN if name != "cnn"], [()]),
    *product(["images"], builtin.BUILT_IN, [()]),
    ("text", "mlp", ("dense1",)),
    ("images", "cnn", ("conv1", "conv2")),
]
OBJECTIVES: dict[str, Any] = {**objectives.BUILT_IN, **objectives.SUPERVISED}
PARAMETERS: dict[str, dict[str, Any]] = {
    "linear-heads": {"heads": 4},
    "weighted-regression": {"scale": 0.1},
    "weighted-cross-entropy": {"scale": 0.1},
    "fedprox": {"mu": 0.3},
}
PLAIN = ("regression", "fedavg", "none")
CASES = [
    *product(PLAIN[:1], algorithms.BUILT_IN, ["none", *compression.BUILT_IN]),
    *((name, *PLAIN[1:]) for name in OBJECTIVES if name != PLAIN[0]),
]
WORDS, ACTIONS, SIDE = 10_000, 50, 28


def spec(kind: str) -> DataSpec:
    """What a model has to fit."""
    shape = (WORDS,) if kind == "text" else (SIDE, SIDE)
    return DataSpec("sparse" if kind == "text" else "dense", shape, ACTIONS)


def log(kind: str, clients: int, examples: int) -> Events:
    """Random events of some clients, the last of which has half as many."""
    rng = np.random.default_rng(0)
    sizes = np.full(clients, examples)
    sizes[-1] = max(1, examples // 2)
    n = int(sizes.sum())
    contexts: np.ndarray | Ragged = rng.random((n, SIDE, SIDE), np.float32)
    if kind == "text":
        ids = np.sort(rng.integers(0, WORDS, (n, 10)), axis=1).astype(np.int32)
        contexts = Ragged(
            np.arange(n + 1) * 10, ids.ravel(), rng.uniform(0.2, 0.4, 10 * n).astype(np.float32)
        )
    return Events(
        bounds=np.concatenate([[0], np.cumsum(sizes)]),
        contexts=Contexts(contexts),
        actions=rng.integers(0, ACTIONS, n),
        rewards=rng.random(n).astype(np.float32),
        propensities=rng.uniform(0.05, 1, n),
        versions=np.zeros(n, np.int32),
        fresh=np.ones(n, bool),
        targets=rng.random((n, ACTIONS)).astype(np.float32),
    )


@dataclass(frozen=True)
class Case:
    """A model and what is done with it; two learners for it."""

    learners: tuple[Learner, Learner]  # of the CPU, of the device
    predictors: tuple[Predictor, Predictor]
    whole: np.ndarray
    trained: np.ndarray  # what of the weights is not frozen
    algorithm: Algorithm
    pipeline: Pipeline
    heads: int

    @classmethod
    def of(
        cls, model: tuple[str, str, tuple[str, ...]], case: tuple[str, str, str], device: str
    ) -> "Case":
        (kind, name, frozen), (objective_name, algorithm, stage) = model, case
        trainable = Trainable.of({"name": name, **PARAMETERS.get(name, {})}, spec(kind))
        freezing = Freezing.of(trainable.layout, frozen) if frozen else None
        objective = OBJECTIVES[objective_name](**PARAMETERS.get(objective_name, {}))
        parts = (
            trainable.model,
            trainable.layout,
            objective,
            ClientSettings(learning_rate=0.05, batch_size=16),
        )
        pair: Any = (
            make_learner(*parts, freezing=freezing),
            make_vectorised_learner(*parts, device, freezing),
        )
        # Away from the initial model, whose zeros make ties among the largest entries of an update.
        whole = trainable.initial(0, np.dtype("float64"))
        whole += 0.01 * np.random.default_rng(2).standard_normal(len(whole))
        return cls(
            learners=pair if freezing is None else tuple(learner.over(whole) for learner in pair),
            predictors=(trainable.predictor(), trainable.predictor(device)),
            whole=whole,
            trained=whole if freezing is None else freezing.pick(whole),
            algorithm=algorithms.BUILT_IN[algorithm](Sgd(), **PARAMETERS.get(algorithm, {})),
            pipeline=Pipeline(1.0, () if stage == "none" else (compression.BUILT_IN[stage](),)),
            heads=trainable.model.heads,
        )

    def round(self, which: int, events: Events, dtype: type) -> list[np.ndarray]:
        """Predictions, and all that clients send and remember."""
        if self.heads:
            counts = np.random.default_rng(3).poisson(1.0, (len(events), self.heads))
            events = replace(events, weights=counts.astype(np.float32))
        learner, predictor = self.learners[which], self.predictors[which]
        prediction = predictor.predict(self.whole.astype(dtype), events.contexts)
        received = self.algorithm.broadcast(self.algorithm.init(self.trained.astype(dtype)))
        for name in received.keys() - {"weights"}:  # a control variate, as it is in later rounds
            received[name] = 0.01 * np.random.default_rng(1).standard_normal(
                len(self.trained)
            ).astype(dtype)
        clients = Clients(np.arange(events.num_clients), events, round=1, seed=0)
        sent = self.algorithm.train(learner, received, clients, self.pipeline)
        found = [prediction.mean if prediction.heads is None else prediction.heads, sent.norms]
        for total in sent.sums.values():
            found.append(np.zeros(len(self.trained), dtype))
            total.add_to(found[-1])
        return found + [vector for own in sent.memory.values() for vector in own.values()]

    def difference(self, events: Events) -> float:
        """The largest in float64, relative to the largest entry of what it is found in."""
        found = [self.round(which, events, np.float64) for which in (0, 1)]
        both = zip(
            *found, strict=False
        )  # a client that is left out remembers nothing, and its norm is not finite
        return float(np.max([np.abs(one - other).max() / np.abs(one).max() for one, other in both]))

    def milliseconds(self, events: Events, repeats: int) -> Iterator[float]:
        """The median time of a round in float32, wall, after one try; results come back to the CPU each time."""
        for which in (0, 1):
            tries = []
            for _ in range(repeats + 1):
                started = time.perf_counter()
                self.round(which, events, np.float32)
                tries.append(time.perf_counter() - started)
            yield 1e3 * float(np.median(tries[1:]))


def rows(device: str, clients: int, examples: int, repeats: int) -> Iterator[tuple[str, ...]]:
    """Model, objective, algorithm, compression, largest difference, milliseconds of CPU and device."""
    few = {kind: log(kind, 5, 20) for kind in ("text", "images")}
    many = {kind: log(kind, clients, examples) for kind in few}
    for model, named in product(MODELS, CASES):
        kind, name, frozen = model
        case = Case.of(model, named, device)
        timed = (f"{value:.1f}" for value in case.milliseconds(many[kind], repeats))
        label = f"{kind}, {name}" + (f", {' and '.join(frozen)} frozen" if frozen else "")
        yield (label, *named, f"{case.difference(few[kind]):.1e}", *timed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--device", default="cuda", help="a torch device with float64: cuda, cuda:1, cpu"
    )
    parser.add_argument("--out", type=Path, help="also write the table to this file, in Markdown")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--examples", type=int, default=64, help="a client")
    parser.add_argument("--repeats", type=int, default=5)
    chosen = parser.parse_args()
    head = (
        "model",
        "objective",
        "algorithm",
        "compression",
        "difference",
        "CPU ms",
        f"{chosen.device} ms",
    )
    lines = [f"| {' | '.join(head)} |", "| --- | --- | --- | --- | ---: | ---: | ---: |"]
    print("\n".join(lines), flush=True)
    worst = 0.0
    for row in rows(chosen.device, chosen.clients, chosen.examples, chosen.repeats):
        lines.append(f"| {' | '.join(row)} |")
        worst = float(np.max([worst, float(row[4])]))  # a number that is none counts as the largest
        print(lines[-1], flush=True)
    if chosen.out:
        chosen.out.write_text("\n".join(lines) + "\n")
    if not worst < 1e-9:
        raise SystemExit(f"the learners do not agree: {worst:.1e} of the largest entry")


if __name__ == "__main__":
    main()
