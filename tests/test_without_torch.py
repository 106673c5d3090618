"""Linear models need no torch: every way to train them gives the same bits without it, the rest is refused in one line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from core_samples import config, images, played, text

from fedbandit.core.errors import CPU_TORCH

DATA = {"text": text, "dense": images}
RUNS = {
    "fedavg": {"evaluate_every": 2},
    "fedprox": {"algorithm__name": "fedprox"},
    "scaffold": {"algorithm__name": "scaffold"},
    "quantised": {"compression__name": "quantize"},
    "top-k": {"compression__name": "top-k"},
    "median": {"aggregation__name": "median"},
    "population": {"mode": "population"},
    "pre-trained": {"scenario": "init"},
    "doubly robust": {"objective__name": "doubly-robust"},
    "cross-entropy": {"objective__name": "cross-entropy"},
    "gated": {"gate__confidence": 0.9},
    "private": {
        "privacy__mechanism": "dp-fedavg",
        "privacy__noise_multiplier": 1.0,
        "privacy__delta": 1e-3,
        "clipping__norm": 0.5,
    },
}
REFUSED = {
    "mlp": ({"model__name": "mlp"}, "model.name: mlp"),
    "cnn": ({"model__name": "cnn"}, "model.name: cnn"),
    "heads": ({"model__name": "linear-heads"}, "model.heads on dense features"),
    "freeze": ({"model__freeze": ("bias",)}, "model.freeze"),
    "device": ({"device": "cuda"}, "device: cuda"),
    "objective": ({"objective__name": f"{__name__}:Own"}, "objective.name: Own"),
    "module": ({"model__name": "torch_of_mine:tiny"}, "model.name: torch_of_mine"),
}
CHILD = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
from light_device import block
block({"torch"})
import test_without_torch
print(json.dumps(getattr(test_without_torch, sys.argv[2])()))
"""


class Own:
    """An objective as a user writes it."""

    def loss(self, scores, batch):
        return (scores.gather(1, batch.actions[:, None])[:, 0] - batch.rewards).square().mean()


def some_runs(names=("fedavg", "pre-trained")):
    """Metrics of every round and the final weights, by data and kind of run."""
    found = {}
    for data, make in DATA.items():
        for name in names:
            settings = RUNS[name]
            rounds, simulation = played(config(dtype="float32", **settings), make())
            weights = simulation.state.weights.tobytes().hex()
            found[f"{name} on {data}"] = json.dumps([rounds, weights])
    return found


def all_runs():
    return some_runs(RUNS)


def all_refusals():
    """What is said about runs that need torch."""
    found = {}
    for name, (settings, _) in REFUSED.items():
        try:
            played(config(**settings), images())
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def _child(what, *folders):
    here = Path(__file__).parent
    path = json.dumps([str(here), str(here / "helpers"), *map(str, folders)])
    done = subprocess.run(
        [sys.executable, "-c", CHILD, path, what], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("runs", [some_runs, pytest.param(all_runs, marks=pytest.mark.slow)])
def test_linear_models_train_to_the_same_bits_without_torch(runs):
    without = _child(runs.__name__)
    for name, expected in runs().items():
        assert without[name] == expected, f"{name}: not the same without torch"


def test_an_ensemble_on_text_needs_no_torch():
    assert len(_child("ensemble")) == 5


def ensemble():
    return played(config(model__name="linear-heads"), text())[0]


def test_what_needs_torch_says_so_in_one_line(tmp_path):
    (tmp_path / "torch_of_mine.py").write_text("import torch\n", encoding="utf-8")
    said = _child("all_refusals", tmp_path)
    for name, (_, what) in REFUSED.items():
        assert said[name] == (
            f"MissingExtra: {what} needs fedbandit[torch]: pip install 'fedbandit[torch]'"
            f" (without a GPU, first: {CPU_TORCH})"
        )


@pytest.mark.parametrize("data", DATA)
def test_a_linear_run_does_not_import_torch(data):
    program = (
        "import sys, json; sys.path[:0] = json.loads(sys.argv[1]);"
        f" from core_samples import config, {DATA[data].__name__} as data, played;"
        " played(config(), data()); print('torch' in sys.modules)"
    )
    helpers = json.dumps([str(Path(__file__).parent / "helpers")])
    done = subprocess.run([sys.executable, "-c", program, helpers], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
