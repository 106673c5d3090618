"""Dense features: a round's scoring and training beside a numpy loop and plain torch, `python -m benchmarks.dense`.

32 clients with 64 examples of 784 features, 62 actions, batches of 16, one core. All of them score every example, train
on the chosen action and sum clipped updates; contestants take turns, and medians of CPU time are compared.
"""

import time
from collections.abc import Callable

import numpy as np
import torch

from fedbandit.events import Events
from fedbandit.federated.learners.base import AutogradLearner, ClientSettings, Learner
from fedbandit.federated.learners.choosing import make_learner
from fedbandit.models import DataSpec, Layout, build_model
from fedbandit.objectives import Regression

CLIENTS, EXAMPLES, FEATURES, ACTIONS, BATCH, RATE, CLIP = 32, 64, 784, 62, 16, 0.1, 1.0
Params = dict[str, np.ndarray]


def a_log() -> Events:
    rng, n = np.random.default_rng(0), CLIENTS * EXAMPLES
    return Events(
        bounds=np.arange(CLIENTS + 1) * EXAMPLES,
        contexts=rng.random((n, FEATURES)).astype(np.float32),
        actions=rng.integers(0, ACTIONS, n),
        rewards=rng.random(n).astype(np.float32),
        propensities=np.ones(n),
        versions=np.zeros(n, np.int32),
        fresh=np.ones(n, bool),
    )


def numpy_round(name: str, layout: Layout, weights: np.ndarray, log: Events) -> np.ndarray:
    """The loop that anybody would write in numpy."""
    received = layout.split(weights)
    total = np.zeros_like(weights)
    x = np.asarray(log.contexts)
    if name == "linear":
        x = x / np.linalg.norm(x, axis=1, keepdims=True)
    _forward(received, x)
    for first in range(0, len(x), EXAMPLES):
        own = weights.copy()
        params = layout.split(own)
        for begin in range(first, first + EXAMPLES, BATCH):
            rows = slice(begin, begin + BATCH)
            _step(params, x[rows], log.actions[rows], log.rewards[rows])
        own -= weights
        total += own * min(1.0, CLIP / float(np.linalg.norm(own)))
    return total


def _forward(params: Params, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if "weight" in params:
        return x, x @ params["weight"] + params["bias"]
    hidden = np.maximum(x @ params["dense1"] + params["dense1_bias"], 0)
    return hidden, hidden @ params["dense2"] + params["dense2_bias"]


def _step(params: Params, x: np.ndarray, actions: np.ndarray, rewards: np.ndarray) -> None:
    hidden, scores = _forward(params, x)
    errors, rows = np.zeros_like(scores), np.arange(len(x))
    errors[rows, actions] = RATE * 2 / len(x) * (scores[rows, actions] - rewards)
    if "weight" in params:
        params["weight"] -= x.T @ errors
        params["bias"] -= errors.sum(0)
        return
    below = (errors @ params["dense2"].T) * (hidden > 0)
    params["dense2"] -= hidden.T @ errors
    params["dense2_bias"] -= errors.sum(0)
    params["dense1"] -= x.T @ below
    params["dense1_bias"] -= below.sum(0)


def measure(turns: int = 25) -> dict[str, dict[str, float]]:
    """CPU milliseconds of a round, by model and contestant."""
    torch.set_num_threads(1)
    log, found = a_log(), {}
    for name in ("linear", "mlp"):
        model = build_model(name, DataSpec("dense", (FEATURES,), ACTIONS))
        layout = Layout.of(model.init(0))
        weights = layout.flatten(model.init(0), np.dtype("float32"))
        settings = ClientSettings(RATE, BATCH)

        def round_of(learner: Learner, weights: np.ndarray = weights) -> np.ndarray:
            learner.predict(weights, log.contexts)
            update, _ = learner.train(weights, log, CLIP)
            total = np.zeros_like(weights)
            update.add_to(total)
            return total

        fast = make_learner(model, layout, Regression(), settings)
        plain = AutogradLearner(model, layout, Regression(), settings)
        contestants: dict[str, Callable[[], np.ndarray]] = {
            "fedbandit": lambda round_of=round_of, fast=fast: round_of(fast),
            "numpy": lambda name=name, layout=layout, weights=weights: numpy_round(name, layout, weights, log),
            "torch autograd": lambda round_of=round_of, plain=plain: round_of(plain),
        }
        sums = [run() for run in contestants.values()]
        assert all(np.allclose(sums[0], other, atol=1e-4) for other in sums[1:]), "they compute different things"
        times: dict[str, list[float]] = {who: [] for who in contestants}
        for _ in range(turns):
            for who, run in contestants.items():
                began = time.process_time()
                run()
                times[who].append(1e3 * (time.process_time() - began))
        found[name] = {who: float(np.median(values)) for who, values in times.items()}
    return found


def main() -> None:
    for name, row in measure().items():
        ours = row["fedbandit"]
        shown = ", ".join(f"{who} {value / ours:.2f}" for who, value in row.items())
        print(f"{name} on dense features (1.00 = {ours:.1f} ms of CPU): {shown}")


if __name__ == "__main__":
    main()
