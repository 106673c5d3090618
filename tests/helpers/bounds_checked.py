"""Every compiled function of fedbandit at work, to be run under NUMBA_BOUNDSCHECK=1 and in a cache folder of its own.

As a program: a folder to work in, one JSON object on standard output: function -> for how many types it was compiled.
"""

import importlib
import json
import pkgutil
import sys
from pathlib import Path

import numpy as np
from builders import random_text
from core_samples import config, played, text
from numba.core.dispatcher import Dispatcher
from test_wrong_bytes import make

import fedbandit
from fedbandit.assembly.experiment import build_experiment
from fedbandit.core import kernels
from fedbandit.data import FederatedDataset
from fedbandit.data.embedded import glyphs, topics
from fedbandit.data.importers.tables import TableOptions, import_table
from fedbandit.evaluation.metrics import held_out_metrics


def compiled() -> dict[str, int]:
    """All compiled functions of the package by name, with the number of types that they were called with."""
    found = {}
    for module in pkgutil.walk_packages(fedbandit.__path__, "fedbandit."):
        if module.name == "fedbandit.__main__":
            continue
        for name, value in vars(importlib.import_module(module.name)).items():
            own = isinstance(value, Dispatcher) and value.py_func.__module__ == module.name
            if (
                own and value.targetoptions.get("inline") != "always"
            ):  # those are compiled as a part of others
                found[f"{module.name}.{name}"] = len(value.signatures)
    return found


def work(folder: Path) -> None:
    """Small runs that between them call everything."""
    words = FederatedDataset.open(topics.generate(folder / "topics", users=40, words=1000))
    letters = FederatedDataset.open(
        glyphs.generate(folder / "glyphs", writers=12, mean_examples=10)
    )
    for dtype in ("float32", "float64"):
        played(config(dtype=dtype, rounds=2, scenario="init-shift", evaluate_every=1), words)
        for model in ("cnn", "linear", "mlp"):
            played(
                config(
                    dtype=dtype, rounds=2, model__name=model, clients_per_round=3, evaluate_every=2
                ),
                letters,
            )
    for more in (
        {
            "mode": "population",
            "population__events_per_period": 4,
            "population__pull_probability": 0.5,
        },
        {
            "client__max_examples": 3,
            "server__optimizer": "yogi",
            "objective__name": "weighted-regression",
        },
        {"model__name": "linear-heads", "model__heads": 2},
        {"model__name": "mlp", "model__hidden": 40},
        {"algorithm__name": "scaffold"},
        {"algorithm__name": "fedprox", "algorithm__mu": 0.1},
        {"algorithm__name": "diag-newton"},
        {"algorithm__name": "diag-newton", "objective__name": "doubly-robust"},
        {"aggregation__name": "median"},
        {"policy": {"name": "falcon"}},
        {"policy": {"name": "uniform"}},
        {"scenario": "drift", "drift__kind": "rotate", "drift__at": [2]},
    ):
        played(config(rounds=3, **more), text())
    played(config(rounds=1, scenario="init", objective__name="cross-entropy"), words)
    played(config(rounds=1, objective__name="doubly-robust", clients_per_round=3), letters)
    (folder / "t.csv").write_text(
        "user,title,tags\n" + "".join(f"u{i % 9},a word{i % 5},t{i % 3}\n" for i in range(60))
    )
    options = TableOptions(client="user", labels="tags", text=["title"], vocabulary=5, actions=3)
    import_table(folder / "t.csv", folder / "table", options)
    for kind in ("sparse", "dense", "logged"):
        FederatedDataset.open(make(folder / kind, kind), verify=True)
    experiment = build_experiment(config(), random_text())
    held_out_metrics(
        experiment.bandit.work.predictor, experiment.initial_weights(), random_text().train, True
    )
    for one, other in (([0, 2], [1, 2, 5]), ([3], []), ([], [3]), ([7, 8], [1])):
        pair = np.array(one, np.int64), np.array(other, np.int64)
        arguments = (value for entries in pair for value in (entries, entries.astype(float)))
        room = np.empty(len(one) + len(other), np.int64), np.empty(len(one) + len(other))
        assert kernels.merge(*arguments, 1.0, *room) == len({*one, *other})


if __name__ == "__main__":
    np.seterr(all="ignore")
    work(Path(sys.argv[1]))
    print(json.dumps(compiled()))
