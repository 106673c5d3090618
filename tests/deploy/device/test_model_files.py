"""Models on a device: complete or not there, never silently another, and back to an earlier one on request."""

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from builders import random_images, random_text
from device_builders import dense_model, text_model

from fedbandit.assembly.experiment import build_experiment
from fedbandit.config import Config
from fedbandit.core.contexts import Contexts
from fedbandit.core.errors import DataError
from fedbandit.deploy import Agent, DeviceModel
from fedbandit.deploy.device.model_files import ModelFiles


@pytest.mark.parametrize("model", [text_model(7), dense_model(3)], ids=["text", "dense"])
def test_a_model_survives_the_way_to_the_device(model):
    read = DeviceModel.from_bytes(model.to_bytes())
    assert replace(read, weights=model.weights) == model
    for name in ("weight", "bias"):
        assert np.array_equal(read.weights[name], model.weights[name])
    assert read.space == model.space


def test_the_newest_installed_model_is_in_use_and_a_few_are_kept(tmp_path):
    files = ModelFiles(tmp_path, keep=2)
    assert files.current() is None
    with pytest.raises(DataError, match="no model yet"):
        files.load_current()
    for version in (1, 2, 5):
        assert files.install(text_model(version, seed=version).to_bytes())
    assert files.versions() == [2, 5]
    assert files.load_current().version == 5
    assert not files.install(text_model(5, seed=5).to_bytes())  # the same again


def test_a_deployment_that_comes_late_does_not_take_a_device_back(tmp_path):
    files = ModelFiles(tmp_path)
    files.install(text_model(5).to_bytes())
    assert not files.install(text_model(4).to_bytes())
    assert files.load_current().version == 5
    assert files.install(text_model(4).to_bytes(), older=True)
    assert files.load_current().version == 4
    files.use(5)
    assert files.load_current().version == 5
    with pytest.raises(DataError, match="not on this device"):
        files.use(3)


def test_one_version_has_one_set_of_weights(tmp_path):
    files = ModelFiles(tmp_path)
    files.install(text_model(5, seed=1).to_bytes())
    with pytest.raises(DataError, match="other weights"):
        files.install(text_model(5, seed=2).to_bytes())


@pytest.mark.parametrize(
    "payload", [b"", b"garbage" * 100, text_model().to_bytes()[:-10], text_model().to_bytes()[:40]]
)
def test_garbage_is_refused(tmp_path, payload):
    files = ModelFiles(tmp_path)
    files.install(text_model().to_bytes())
    with pytest.raises(DataError):
        files.install(payload)
    assert files.load_current().version == 1


def test_a_flipped_bit_anywhere_is_noticed_before_a_model_is_installed():
    whole = text_model().to_bytes()
    for place in range(0, len(whole), 7):
        changed = bytearray(whole)
        changed[place] ^= 1 << place % 8
        try:
            assert (
                DeviceModel.from_bytes(bytes(changed)).to_bytes() == whole
            )  # only in what is not said, as a space
        except DataError:
            continue


def test_a_model_of_0_1_without_a_checksum_is_read():
    from safetensors.numpy import save

    model = text_model()
    header = model.to_bytes()
    facts = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])["__metadata__"][
        "model"
    ]
    again = DeviceModel.from_bytes(save(dict(model.weights), metadata={"model": facts}))
    assert again.to_bytes() == header


def test_a_safetensors_file_that_is_no_model_is_refused(tmp_path):
    from safetensors.numpy import save

    with pytest.raises(DataError, match="not a fedbandit model"):
        DeviceModel.from_bytes(save({"weight": np.zeros(3)}))
    later = save(
        {}, metadata={"model": json.dumps({"format": "fedbandit-model", "format_version": 9})}
    )
    with pytest.raises(DataError, match="format"):
        DeviceModel.from_bytes(later)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {
                "weights": {
                    "weight": np.full((7, 4), np.nan, np.float32),
                    "bias": np.zeros(4, np.float32),
                }
            },
            "not finite",
        ),
        (
            {"weights": {"weight": np.zeros((7, 5), np.float32), "bias": np.zeros(4, np.float32)}},
            "linear model has",
        ),
        ({"version": -1}, "negative"),
        ({"actions": ("a", "a", "b", "c")}, "differ"),
        ({"vocabulary": ("one", "word")}, "do not fit"),
    ],
)
def test_a_model_that_cannot_act_is_refused(change, message):
    with pytest.raises(DataError, match=message):
        replace(text_model(), **change)


def test_a_damaged_file_is_noticed(tmp_path):
    files = ModelFiles(tmp_path)
    files.install(text_model().to_bytes())
    path = tmp_path / "model-1.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"model-1.safetensors: damaged"):
        files.load_current()
    assert files.install(text_model().to_bytes())  # and mended by installing it again
    assert files.load_current().version == 1
    (tmp_path / "current.json").write_text("{")
    with pytest.raises(DataError, match=r"current.json: damaged.*install a model again"):
        files.load_current()
    assert files.install(text_model().to_bytes())
    assert files.load_current().version == 1


def test_of_two_that_install_at_once_the_newer_stays_in_use(tmp_path):
    newer = threading.Thread(target=lambda: ModelFiles(tmp_path).install(text_model(2).to_bytes()))

    class Slow(ModelFiles):
        """Has found no model in use, and lets somebody else install one before it goes on."""

        def _write(self, path, payload):
            if newer.ident is None:
                newer.start()
                newer.join(timeout=0.5)  # which is not to come about before this one is done
            super()._write(path, payload)

    Slow(tmp_path).install(text_model(1).to_bytes())
    newer.join()
    assert ModelFiles(tmp_path).load_current().version == 2


INSTALLER = """
import sys
sys.path.insert(0, sys.argv[2])
from device_builders import text_model
from fedbandit.deploy import Agent
agent = Agent(sys.argv[1])
for version in range(2, 10_000):
    agent.install(text_model(version, seed=version))
    print(version, flush=True)
"""


def test_killed_while_installing(tmp_path):
    """Whatever moment the installer dies at, the device has a whole model: the last one it was told of, or the next."""
    with Agent(tmp_path) as agent:
        agent.install(text_model(1))
        for turn in range(4):
            here = str(Path(__file__).parents[2] / "helpers")
            command = [sys.executable, "-c", INSTALLER, str(tmp_path), here]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            last = [process.stdout.readline() for _ in range(3 + 7 * turn)][-1]
            process.kill()
            last = ([last, *process.stdout.readlines()])[-1]
            process.stdout.close()
            process.wait()
            decision = agent.choose("cat")  # the app, meanwhile, in a process of its own
            assert decision.logged
            assert decision.model_version in (int(last), int(last) + 1)
            with Agent(tmp_path) as again:
                assert again.model.version == decision.model_version
            os.remove(tmp_path / "models" / "current.json")
            agent.install(text_model(1))


@pytest.mark.parametrize("name", ["linear", "mlp"])
def test_other_models_act_with_the_functions_that_trained_them(tmp_path, name):
    dataset = random_images(clients=3)
    config = Config.build(
        {
            "scenario": "scratch",
            "clients_per_round": 2,
            "model": {"name": name},
            "policy": {"name": "softmax", "beta": 0.3},
        }
    )
    experiment = build_experiment(config, dataset)
    weights = np.random.default_rng(0).normal(size=experiment.layout.size).astype(np.float32)
    with Agent(tmp_path) as agent:
        agent.install(DeviceModel.of_experiment(experiment, weights, 4))
        used = agent._used()
        rows = np.arange(20)
        expected = experiment.bandit.work.predictor.predict(
            weights, dataset.train.contexts(rows)
        ).mean
        encoded = [used.encode(dataset.train.features[row]) for row in rows]
        ours = np.concatenate([used.actor.predict(contexts).mean for contexts in encoded])
    np.testing.assert_allclose(
        ours, expected, atol=1e-5, rtol=1e-5
    )  # scores reach 40 here, in float32


def test_text_is_scored_bit_for_bit_like_in_the_simulation(tmp_path):
    dataset = random_text(words=40, num_actions=6)
    experiment = build_experiment(
        Config.build({"scenario": "scratch", "clients_per_round": 2}), dataset
    )
    weights = np.random.default_rng(0).normal(size=experiment.layout.size).astype(np.float32)
    with Agent(tmp_path) as agent:
        agent.install(DeviceModel.of_experiment(experiment, weights, 0))
        used, features = agent._used(), dataset.train.features
        for row in range(len(features)):
            sentence = features.slice(row, row + 1)
            ours = used.actor.predict(used.encode((sentence.ids, sentence.values))).mean
            assert np.array_equal(
                ours, experiment.bandit.work.predictor.predict(weights, Contexts(sentence)).mean
            )


def test_a_model_file_cannot_name_code_that_the_app_does_not_trust(tmp_path):
    model = text_model(policy={"name": "fedbandit.policies:EpsilonGreedy", "epsilon": 0.5})
    with Agent(tmp_path) as agent:
        with pytest.raises(DataError, match="does not trust"):
            agent.install(model)
        assert agent.model_version is None
    with Agent(tmp_path, trusted=["fedbandit.policies:EpsilonGreedy"]) as agent:
        agent.install(model)
        assert agent.choose("cat").propensity in (np.float32(0.625), np.float32(0.125))
