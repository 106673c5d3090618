"""Do the learners of an accelerator agree with those of the CPU, and how fast are they? One command, one table.

`python -m benchmarks.accelerators --device cuda --out accelerators.md`; `--device cpu` runs the same learners on the
CPU device, which proves the command and says nothing about speed.
"""

import argparse
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np

from fedbandit.core.ragged import Ragged
from fedbandit.events import Events
from fedbandit.federated.learners.base import ClientSettings, Learner
from fedbandit.federated.learners.choosing import make_learner
from fedbandit.federated.learners.vectorised import make_vectorised_learner
from fedbandit.models import DataSpec, Layout, build_model
from fedbandit.objectives import CrossEntropy, FullInformation, Pointwise, Regression, WeightedRegression

MODELS = {"text": ("linear",), "images": ("linear", "mlp", "cnn")}
OBJECTIVES: tuple[Pointwise, ...] = (Regression(), WeightedRegression(scale=0.1), CrossEntropy(), FullInformation())
ALGORITHMS = {"fedavg": (0.0, False), "fedprox": (0.3, False), "scaffold": (0.0, True)}
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
        contexts = Ragged(np.arange(n + 1) * 10, ids.ravel(), np.full(10 * n, 10**-0.5, np.float32))
    return Events(
        bounds=np.concatenate([[0], np.cumsum(sizes)]),
        contexts=contexts,
        actions=rng.integers(0, ACTIONS, n),
        rewards=rng.random(n).astype(np.float32),
        propensities=rng.uniform(0.05, 1, n),
        versions=np.zeros(n, np.int32),
        fresh=np.ones(n, bool),
        targets=rng.random((n, ACTIONS)).astype(np.float32),
    )


def rows(device: str, clients: int, examples: int, repeats: int) -> Iterator[tuple[str, ...]]:
    """Model, objective, algorithm, largest difference in float64, milliseconds of CPU and device in float32."""
    settings = ClientSettings(learning_rate=0.05, batch_size=16, epochs=1)
    few = {kind: log(kind, 5, 20) for kind in MODELS}
    many = {kind: log(kind, clients, examples) for kind in MODELS}
    for kind, models in MODELS.items():
        for name, objective, (algorithm, (pull, drifts)) in product(models, OBJECTIVES, ALGORITHMS.items()):
            model = build_model(name, spec(kind))
            layout = Layout.of(model.init(0))
            pair = (
                make_learner(model, layout, objective, settings),
                make_vectorised_learner(model, layout, objective, settings, device),
            )
            weights = layout.flatten(model.init(0), np.dtype("float64"))
            found = [_updates(learner, weights, few[kind], pull, drifts) for learner in pair]
            scale = max(float(np.abs(one).max()) for one in found[0])
            apart = max(float(np.abs(one - other).max()) for one, other in zip(*found, strict=True)) / scale
            single = weights.astype(np.float32)
            times = [_milliseconds(learner, single, many[kind], pull, drifts, repeats) for learner in pair]
            timed = tuple(f"{value:.1f}" for value in times)
            yield (f"{kind}, {name}", type(objective).__name__, algorithm, f"{apart:.1e}", *timed)


def _updates(learner: Learner, weights: np.ndarray, events: Events, pull: float, drifts: bool) -> list[np.ndarray]:
    """Every client's update; with a drift as SCAFFOLD has it, or one sum as FedAvg and FedProx have it."""
    if drifts:
        drift = 0.01 * np.random.default_rng(1).standard_normal(len(weights)).astype(weights.dtype)
        return [one.copy() for one in learner.updates(weights, events, pull, lambda client: drift) if one is not None]
    total = np.zeros_like(weights)
    learner.train(weights, events, 1.0, pull)[0].add_to(total)
    return [total]


def _milliseconds(
    learner: Learner, weights: np.ndarray, events: Events, pull: float, drifts: bool, repeats: int
) -> float:
    """The median time of predicting and training, wall, after one try; results come back to the CPU each time."""
    tries = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        learner.predict(weights, events.contexts)
        _updates(learner, weights, events, pull, drifts)
        tries.append(time.perf_counter() - started)
    return 1e3 * float(np.median(tries[1:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", help="a torch device: cuda, cuda:1, mps, cpu")
    parser.add_argument("--out", type=Path, help="also write the table to this file, in Markdown")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--examples", type=int, default=64, help="a client")
    parser.add_argument("--repeats", type=int, default=5)
    chosen = parser.parse_args()
    head = ("model", "objective", "algorithm", "difference", "CPU ms", f"{chosen.device} ms")
    lines = [f"| {' | '.join(head)} |", "| --- | --- | --- | ---: | ---: | ---: |"]
    print("\n".join(lines), flush=True)
    worst = 0.0
    for row in rows(chosen.device, chosen.clients, chosen.examples, chosen.repeats):
        lines.append(f"| {' | '.join(row)} |")
        worst = max(worst, float(row[3]))
        print(lines[-1], flush=True)
    if chosen.out:
        chosen.out.write_text("\n".join(lines) + "\n")
    if not worst < 1e-9:
        raise SystemExit(f"the learners do not agree: {worst:.1e} of the largest entry")


if __name__ == "__main__":
    main()
