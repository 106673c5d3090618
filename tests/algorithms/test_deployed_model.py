"""An algorithm that deploys more than it trains: one vector for whoever acts, with the widths of its scores."""

import json
from dataclasses import dataclass

import numpy as np
import pytest
from core_samples import config, images, played
from test_statistics import Ridge

from fedbandit.acting import Actor
from fedbandit.assembly.experiment import build_experiment
from fedbandit.core.contexts import Contexts
from fedbandit.core.errors import ConfigError
from fedbandit.core.parts import trusting
from fedbandit.core.prediction import Prediction
from fedbandit.deploy import DeviceModel
from fedbandit.deploy.device.model_in_use import open_model
from fedbandit.engines import ThreadEngine
from fedbandit.evaluation.gate import Gate
from fedbandit.models import DataSpec, Model, build_model
from fedbandit.policies import Greedy
from fedbandit.runs.run import execute
from fedbandit.simulation import simulate
from fedbandit.studies.trained_models import load_scorer


def with_inverse(data: DataSpec) -> Model:
    """A linear model and the inverse of each action's X'X: width² = x' A⁻¹ x."""
    one, d = build_model("linear", data), int(np.prod(data.shape))

    def init(seed):
        return one.init(seed) | {"inverse": np.tile(np.eye(d), (data.num_actions, 1, 1))}

    def predict(params, contexts):
        x = contexts.shared.reshape(len(contexts), -1).astype(params["bias"].dtype)
        x = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
        mean = np.einsum("nd,dk->nk", x, params["weight"]) + params["bias"]
        return Prediction(mean, width=np.sqrt(np.einsum("nd,kde,ne->nk", x, params["inverse"], x)))

    return Model(init, predict=predict)


@dataclass(frozen=True)
class Sure(Ridge):
    def deploys(self, model):
        return {**model, "name": "test_deployed_model:with_inverse"}

    def model(self, kept):
        inverse = np.linalg.inv(kept["outer"]).astype(kept["weights"].dtype)
        return np.concatenate([kept["weights"], inverse.reshape(-1)])


@dataclass(frozen=True)
class Hopeful:
    floor: float = 0.1

    def probabilities(self, prediction, available=None):
        best = Prediction(prediction.mean + prediction.width)
        probabilities = Greedy().probabilities(best, available)
        return (1 - self.floor) * probabilities + self.floor / probabilities.shape[1]


OWN = {
    "algorithm__name": "test_deployed_model:Sure",
    "policy__name": "test_deployed_model:Hopeful",
    "clipping__enabled": False,
}
POPULATION = {
    "mode": "population",
    "population__events_per_period": 4,
    "population__cache_size": 10,
    "population__pull_probability": 0.6,
}


@pytest.mark.parametrize("mode", [{}, POPULATION], ids=["simple", "population"])
def test_widths_are_those_of_what_was_deployed(mode):
    _, simulation = played(config(**OWN, **mode, rounds=4), images())
    experiment, state = simulation.experiment, simulation.state
    k, d = experiment.acting.layout.shapes[2][1][:2]
    assert len(state.weights) == experiment.layout.size + k * d * d
    assert (
        len(experiment.bandit.work.algorithm.broadcast(state.server_state)["weights"])
        == (d + 1) * k
    )
    contexts = experiment.dataset.train.contexts(np.arange(5))
    found = experiment.bandit.work.actor(state.deployed[2]).predict(contexts)
    x = contexts.shared.reshape(5, -1).astype(float)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    outer = state.server_state["outer"]
    expected = [[np.sqrt(v @ np.linalg.solve(outer[a], v)) for a in range(k)] for v in x]
    np.testing.assert_allclose(found.width, expected, rtol=0, atol=1e-9)
    assert found.width.min() < 0.5 * found.width.max() <= 0.5  # some actions were tried more


def test_the_same_bits_on_any_threads_and_after_a_pause(tmp_path, small_chunks):
    chosen = config(**OWN, dtype="float32", rounds=4)
    found = []
    for threads in (1, 3):
        rounds, simulation = played(chosen, images(), engine=ThreadEngine(threads))
        found.append(([json.dumps(line) for line in rounds], simulation.state.weights.tobytes()))
    assert found[0] == found[1]
    for until in (2, None):
        execute(chosen, tmp_path / "run", dataset=images(), until=until)
    assert (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[1:] == found[0][0]
    with trusting("test_deployed_model"):
        scorer = load_scorer(tmp_path / "run", images().header)
    np.testing.assert_array_equal(scorer.weights, simulation.state.weights)
    assert scorer.predict(images().train.contexts(np.arange(3))).width is not None


@pytest.mark.parametrize("algorithm", ["test_deployed_model:Sure", "diag-newton"])
def test_a_device_acts_as_the_simulation_does(algorithm):
    chosen = OWN | {"algorithm__name": algorithm}
    _, simulation = played(config(**chosen, rounds=3), images())
    experiment, state = simulation.experiment, simulation.state
    payload = DeviceModel.of_experiment(experiment, state.weights, 1).to_bytes()
    trusted = ["test_deployed_model:with_inverse", "test_deployed_model:Hopeful"]
    device = open_model(DeviceModel.from_bytes(payload), None, trusted)
    contexts = experiment.dataset.train.contexts(np.arange(6))
    there = device.actor.predict(contexts)
    here = Actor(experiment.bandit.work.predictor, state.weights, Hopeful()).predict(contexts)
    np.testing.assert_allclose(there.mean, here.mean, rtol=0, atol=1e-12)
    np.testing.assert_allclose(there.width, here.width, rtol=0, atol=1e-12)
    one = Contexts(contexts.shared[:1])
    assert device.actor.choose(one, np.array([0.5])).propensities[0] > 0.1


def test_the_gate_weighs_what_would_act():
    gated = config(**OWN, rounds=4, gate__confidence=0.9, gate__clients=6)
    simulation = simulate(gated, images())
    assert isinstance(simulation.experiment.bandit.gate, Gate)
    verdicts = [line["gate"] for line in simulation if "gate" in line]
    assert len(verdicts) == 2


def test_a_part_of_such_a_model_cannot_be_frozen():
    with pytest.raises(ConfigError, match=r"model\.freeze: Sure deploys a model of its own"):
        build_experiment(config(**OWN, model__freeze=["bias"]), images())


class TooShort(Sure):
    def model(self, kept):
        return kept["weights"]


def test_a_vector_that_does_not_fit_is_refused_before_round_1():
    chosen = OWN | {"algorithm__name": "test_deployed_model:TooShort"}
    with pytest.raises(ConfigError, match=r"TooShort\.model gives float64 \(\d+,\), the model has"):
        build_experiment(config(**chosen), images())


def test_a_rule_over_widths_needs_a_model_that_has_them():
    chosen = OWN | {"algorithm__name": "fedavg"}
    with pytest.raises(ConfigError, match=r"policy\.name: .* does not give probabilities"):
        build_experiment(config(**chosen), images())
