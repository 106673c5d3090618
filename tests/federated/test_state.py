"""A state is written and read as it is, and what version 0.1 wrote is read as it was meant."""

import json
from dataclasses import replace

import numpy as np
import pytest
from core_samples import config, played, text
from safetensors.numpy import save

from fedbandit.building.experiment import build_experiment
from fedbandit.core.prediction import Progress
from fedbandit.core.timing import Stopwatch
from fedbandit.engines import ThreadEngine
from fedbandit.federated.round import run_round
from fedbandit.federated.state import load_state, save_state


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
def test_a_state_comes_back_as_it_was(algorithm, tmp_path):
    _, simulation = played(config(algorithm__name=algorithm), text())
    state = simulation.state
    save_state(state, tmp_path / "state.safetensors")
    again = load_state(tmp_path / "state.safetensors")
    assert again.kept["weights"] is again.weights  # written once
    for name in ("kept", "deployed"):
        assert set(getattr(again, name)) == set(getattr(state, name))
    for name, value in state.kept.items():
        np.testing.assert_array_equal(again.kept[name], value)
    for number, version in state.deployed.items():
        np.testing.assert_array_equal(again.deployed[number].weights, version.weights)
        assert again.deployed[number].progress == version.progress
    plain = {"kept": {}, "deployed": {}, "weights": None}
    assert replace(again, **plain) == replace(state, **plain)


def as_version_0_1_wrote_it(state, noise):
    """The layout of 0.1: `optimizer/...` beside the weights, and a server's memory of noise among them."""
    tensors = {"weights": state.weights}
    tensors |= {f"deployed/{number}": version.weights for number, version in state.deployed.items()}
    tensors |= {name: value for name, value in state.kept.items() if name.startswith("optimizer/")}
    tensors |= {f"optimizer/noise/{number}": value for number, value in noise.items()}
    scalars = {
        "round": state.round,
        "clip_norm": state.clip_norm,
        "reward_total": state.reward_total,
        "rewarded_rounds": state.rewarded_rounds,
        "extra": state.extra,
    }
    return save(tensors, metadata={"state": json.dumps(scalars)})


def test_a_state_of_0_1_is_migrated_and_continues_with_the_same_bits(tmp_path):
    experiment = build_experiment(config(), text())
    phase, engine = experiment.bandit, ThreadEngine(1)
    state = phase.start(experiment.initial_weights())
    for _ in range(3):
        state, _ = run_round(phase, state, engine, Stopwatch())
    noise = {2: np.arange(3.0)}
    (tmp_path / "old.safetensors").write_bytes(as_version_0_1_wrote_it(state, noise))
    old = load_state(tmp_path / "old.safetensors")
    assert set(old.kept) == {*state.kept, "noise/2"}
    np.testing.assert_array_equal(old.kept.pop("noise/2"), noise[2])
    assert old.deployed[1].progress == Progress(version=1)
    following, continued = (run_round(phase, s, engine, Stopwatch())[0] for s in (state, old))
    np.testing.assert_array_equal(following.weights, continued.weights)
