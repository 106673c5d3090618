"""Every rule by name: in simulations on any threads, over candidates, on a device, in evaluation."""

import json

import numpy as np
import pytest
from core_samples import config, images, played

from fedbandit.acting import Actor
from fedbandit.data import FederatedDataset
from fedbandit.data.embedded import gallery
from fedbandit.deploy import DeviceModel
from fedbandit.deploy.device.model_in_use import open_model
from fedbandit.engines import ThreadEngine
from fedbandit.evaluation.metrics import policy_value
from fedbandit.policies import describe

SURE = {"algorithm__name": "statistics", "algorithm__dimensions": 12}
HEADS = {"model__name": "linear-heads", "model__heads": 3}
RULES = {
    "squarecb": ({"policy__scale": 5.0}, {}),
    "decaying-epsilon": ({"policy__half": 50.0}, {}),
    "ucb": ({"policy__alpha": 0.5, "policy__floor": 0.1}, SURE),
    "thompson": ({"policy__scale": 0.5, "policy__floor": 0.1}, SURE),
    "softmax": ({"policy__alpha": 0.5, "policy__beta": 0.2}, SURE),
    "falcon": ({"policy__alpha": 0.5, "policy__gamma": 30.0}, {"algorithm__name": "diag-newton"}),
    "bagging": ({"policy__floor": 0.1}, HEADS),
}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = gallery.generate(tmp_path_factory.mktemp("gallery") / "g", users=12)
    return FederatedDataset.open(folder)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("data", ["fixed", "candidates"])
def test_a_rule_works_wherever_it_is_named(name, data, photos, small_chunks):
    rule, parts = RULES[name]
    if data == "candidates" and name == "bagging":
        pytest.skip("the ensemble has fixed actions; thompson votes by draws over candidates")
    dataset = photos if data == "candidates" else images()
    chosen = config(policy__name=name, **rule, **parts, rounds=4, deploy_every=1)
    found = []
    for threads in (1, 3):
        rounds, simulation = played(chosen, dataset, engine=ThreadEngine(threads))
        found.append([json.dumps(line) for line in rounds])
    assert found[0] == found[1]
    experiment, state = simulation.experiment, simulation.state
    work, version = experiment.bandit.work, state.deployed[max(state.deployed)]
    contexts, uniforms = dataset.train.contexts(np.arange(7)), np.linspace(0, 0.99, 7)
    prediction, probabilities = work.actor(version).distribution(contexts)
    sums = (
        probabilities.sum(axis=1)
        if prediction.bounds is None
        else np.add.reduceat(probabilities, prediction.bounds[:-1])
    )
    np.testing.assert_allclose(sums, 1)
    drawn = work.actor(version).choose(contexts, uniforms)
    at = drawn.actions + (0 if prediction.bounds is None else prediction.bounds[:-1])
    logged = probabilities[np.arange(7), at] if prediction.bounds is None else probabilities[at]
    np.testing.assert_allclose(drawn.propensities, logged, rtol=0, atol=1e-12)

    payload = DeviceModel.of_experiment(experiment, version.weights, 1, version.progress).to_bytes()
    device = open_model(DeviceModel.from_bytes(payload), None, [])
    assert describe(device.actor.rule) == describe(work.rule(version))
    here = Actor(work.predictor, version.weights, device.actor.rule).choose(contexts, uniforms)
    there = device.actor.choose(contexts, uniforms)
    np.testing.assert_array_equal(there.actions, here.actions)
    np.testing.assert_allclose(there.propensities, here.propensities, rtol=0, atol=1e-12)
    if data == "fixed":
        ones = np.ones(dataset.header.num_actions)
        value = policy_value(
            dataset.train, range(4), work.rule(version), work.predictions(version.weights),
            lambda rows: np.tile(ones, (len(rows), 1)),
        )  # fmt: skip
        assert value == pytest.approx(1)
