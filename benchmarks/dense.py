"""Tables: a round beside a numpy loop and plain torch, `python -m benchmarks.dense`.

32 clients with 64 examples, 62 actions, batches of 16, one core; contexts have 784 dense features, or 12 words of 2,000
and 20 numbers (`scipy.sparse` stands in for numpy there). All of them score every example, train on the chosen action
and sum clipped updates; contestants take turns, and medians of CPU time are compared.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from scipy.sparse import csr_array

from fedbandit.acting import Predictor, make_predictor
from fedbandit.core.contexts import Contexts, Features
from fedbandit.core.ragged import Ragged
from fedbandit.events import Events
from fedbandit.federated.learners.base import AutogradLearner, ClientSettings, Learner
from fedbandit.federated.learners.make_learner import make_learner
from fedbandit.models import DataSpec, Layout, build_model
from fedbandit.objectives import Regression

CLIENTS, EXAMPLES, ACTIONS, BATCH, RATE, CLIP = 32, 64, 62, 16, 0.1, 1.0
FEATURES = {"dense": 784, "sparse": 2020}
WORDS, NUMBERS = 12, 20  # in a context of text and numbers
Params = dict[str, np.ndarray]
Kind = Literal["dense", "sparse"]


def a_log(kind: Kind) -> Events:
    rng, n = np.random.default_rng(0), CLIENTS * EXAMPLES
    if kind == "dense":
        contexts: Features = rng.random((n, FEATURES[kind])).astype(np.float32)
    else:
        vocabulary = FEATURES[kind] - NUMBERS
        words = np.sort(np.argsort(rng.random((n, vocabulary)), axis=1)[:, :WORDS], axis=1)
        ids = np.hstack([words, np.tile(np.arange(vocabulary, FEATURES[kind]), (n, 1))]).astype(
            np.int32
        )
        values = np.hstack([np.full((n, WORDS), WORDS**-0.5), rng.normal(0, 0.2, (n, NUMBERS))])
        contexts = Ragged(
            np.arange(n + 1) * (WORDS + NUMBERS), ids.ravel(), values.astype(np.float32).ravel()
        )
    return Events(
        bounds=np.arange(CLIENTS + 1) * EXAMPLES,
        contexts=Contexts(contexts),
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
    if isinstance(log.contexts.shared, Ragged):
        rows = log.contexts.shared
        x: Any = csr_array((rows.values, rows.ids, rows.offsets), (len(rows), FEATURES["sparse"]))
    else:
        x = log.contexts.shared
        if name == "linear":
            x = x / np.linalg.norm(x, axis=1, keepdims=True)
    _forward(received, x)
    for first in range(0, x.shape[0], EXAMPLES):
        own = weights.copy()
        params = layout.split(own)
        for begin in range(first, first + EXAMPLES, BATCH):
            batch = slice(begin, begin + BATCH)
            _step(params, x[batch], log.actions[batch], log.rewards[batch])
        own -= weights
        total += own * min(1.0, CLIP / float(np.linalg.norm(own)))
    return total


def _forward(params: Params, x: Any) -> tuple[Any, np.ndarray]:
    if "weight" in params:
        return x, x @ params["weight"] + params["bias"]
    hidden = np.maximum(x @ params["dense1"] + params["dense1_bias"], 0)
    return hidden, hidden @ params["dense2"] + params["dense2_bias"]


def _step(params: Params, x: Any, actions: np.ndarray, rewards: np.ndarray) -> None:
    hidden, scores = _forward(params, x)
    errors, rows = np.zeros_like(scores), np.arange(len(actions))
    errors[rows, actions] = RATE * 2 / len(actions) * (scores[rows, actions] - rewards)
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
    found = {}
    for name, kind in (
        ("linear", "dense"),
        ("mlp", "dense"),
        ("linear", "sparse"),
        ("mlp", "sparse"),
    ):
        log = a_log(kind)
        model = build_model(name, DataSpec(kind, (FEATURES[kind],), ACTIONS))
        layout = Layout.of(model.init(0))
        weights = layout.flatten(model.init(0), np.dtype("float32"))
        settings, predictor = ClientSettings(RATE, BATCH), make_predictor(model, layout)

        def round_of(
            learner: Learner,
            weights: np.ndarray = weights,
            log: Events = log,
            predictor: Predictor = predictor,
        ) -> np.ndarray:
            predictor.predict(weights, log.contexts)
            update, _ = learner.train(weights, log, CLIP)
            total = np.zeros_like(weights)
            update.add_to(total)
            return total

        fast = make_learner(model, layout, Regression(), settings)
        plain = AutogradLearner(model, layout, Regression(), settings)
        contestants: dict[str, Callable[[], np.ndarray]] = {
            "fedbandit": lambda round_of=round_of, fast=fast: round_of(fast),
            "numpy": lambda name=name, layout=layout, weights=weights, log=log: numpy_round(
                name, layout, weights, log
            ),
            "torch autograd": lambda round_of=round_of, plain=plain: round_of(plain),
        }
        sums = [run() for run in contestants.values()]
        assert all(np.allclose(sums[0], other, atol=1e-4) for other in sums[1:]), (
            "they compute different things"
        )
        times: dict[str, list[float]] = {who: [] for who in contestants}
        for _ in range(turns):
            for who, run in contestants.items():
                began = time.process_time()
                run()
                times[who].append(1e3 * (time.process_time() - began))
        found[f"{name} on {'dense features' if kind == 'dense' else 'words and numbers'}"] = {
            who: float(np.median(values)) for who, values in times.items()
        }
    return found


def measure_on_one_core() -> dict[str, dict[str, float]]:
    """The same in a process of its own, in which no matrix product uses a second core."""
    command = [sys.executable, "-m", "benchmarks.dense", "--json"]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    said = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout
    found: dict[str, dict[str, float]] = json.loads(said)
    return found


def report(found: dict[str, dict[str, float]]) -> None:
    for name, row in found.items():
        ours = row["fedbandit"]
        shown = ", ".join(f"{who} {value / ours:.2f}" for who, value in row.items())
        print(f"{name} (1.00 = {ours:.1f} ms of CPU): {shown}")


if __name__ == "__main__":
    if "--json" in sys.argv:
        print(json.dumps(measure()))
    else:
        report(measure_on_one_core())
