"""From a run to an app: the scores of the run, of an Agent and of onnxruntime are the same."""

import json
import os
import sys

import numpy as np
import pytest
import typer
from builders import random_images, random_text
from typer.testing import CliRunner

from fedbandit import export, run
from fedbandit.cli import evaluate as commands
from fedbandit.config import Config
from fedbandit.core.contexts import Contexts
from fedbandit.core.errors import ConfigError, DataError
from fedbandit.core.parts import trusting
from fedbandit.core.ragged import Ragged
from fedbandit.data import open_dataset
from fedbandit.deploy import Agent, DeviceModel
from fedbandit.studies.trained_models import load_model, load_scorer

app = typer.Typer()
app.command()(commands.export)


def trained(folder, dataset, model="linear", **changes):
    """The results of a short run."""
    settings = {
        "scenario": "scratch",
        "rounds": 3,
        "clients_per_round": 2,
        "model": {"name": model},
        "client": {"learning_rate": 0.3},
        "policy": {"name": "softmax", "beta": 0.2},
        **changes,
    }
    return run(Config.build(settings), folder, dataset=dataset)


def device_scores(path, folder, rows):
    with Agent(folder) as agent:
        agent.install(path)
        used = agent._used()
        return np.concatenate([used.actor.predict(used.encode(row)).mean for row in rows])


def onnx_scores(path, dense):
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (scores,) = session.run(None, {"context": np.asarray(dense, np.float32)})
    return session, scores


def sparse_rows(features, rows):
    """Contexts as an app gives them, and as whole rows."""
    one = [features.slice(row, row + 1) for row in rows]
    whole = np.zeros((len(rows), int(features.ids.max()) + 1), np.float32)
    for i, row in enumerate(one):
        whole[i, row.ids] = row.values
    return [(row.ids, row.values) for row in one], whole


@pytest.mark.parametrize("name", ["linear", "mlp"])
@pytest.mark.parametrize("kind", ["text", "images"])
def test_run_agent_and_onnxruntime_agree(tmp_path, name, kind):
    if name == "mlp":
        pytest.importorskip("torch")
    dataset = random_text(words=30, num_actions=4) if kind == "text" else random_images(clients=4)
    results = trained(tmp_path / "run", dataset, name)
    rows = np.arange(10)
    contexts = dataset.train.contexts(rows)
    expected = load_scorer(tmp_path / "run", dataset.header).predict(contexts).mean
    path = results.export(tmp_path / "model.safetensors", dataset=dataset)
    onnx = export(tmp_path / "run", tmp_path / "model.onnx", dataset=dataset)
    if isinstance(contexts.shared, Ragged):
        given, whole = sparse_rows(contexts.shared, rows)
        whole = np.pad(whole, ((0, 0), (0, dataset.header.shape[0] - whole.shape[1])))
    else:
        given, whole = list(contexts.shared), contexts.shared
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(device_scores(path, tmp_path / "d", given), expected, atol=1e-6)
    session, scores = onnx_scores(onnx, whole)
    np.testing.assert_allclose(scores, expected, atol=1e-6)
    said = session.get_modelmeta().custom_metadata_map
    assert json.loads(said["actions"]) == list(dataset.header.actions)
    assert json.loads(said["policy"]) == {"name": "softmax", "beta": 0.2}


def test_the_cnn_agrees_in_onnxruntime(tmp_path):
    pytest.importorskip("torch")
    dataset = random_images(clients=3)
    trained(tmp_path / "run", dataset, "cnn", rounds=1)
    contexts = dataset.train.contexts(np.arange(6))
    expected = load_scorer(tmp_path / "run", dataset.header).predict(contexts).mean
    path = export(tmp_path / "run", tmp_path / "model.onnx", dataset=dataset)
    _, scores = onnx_scores(path, contexts.shared)
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_json_holds_all_that_a_linear_model_needs(tmp_path):
    dataset = random_text(words=30, num_actions=4)
    trained(tmp_path / "run", dataset)
    found = json.loads(export(tmp_path / "run", tmp_path / "m.json", dataset=dataset).read_text())
    _, whole = sparse_rows(dataset.train.features, np.arange(5))
    whole = np.pad(whole, ((0, 0), (0, 30 - whole.shape[1])))
    scores = whole @ np.array(found["weight"]) + np.array(found["bias"])
    contexts = Contexts(dataset.train.features.slice(0, 5))
    expected = load_scorer(tmp_path / "run", dataset.header).predict(contexts).mean
    np.testing.assert_allclose(scores, expected, atol=1e-6)
    assert found["policy"] == {"name": "softmax", "beta": 0.2}


def test_a_shop_names_its_items_and_describes_new_ones(tmp_path):
    """Exported models know items by the names of the table, and new ones by its columns."""
    shop = open_dataset("catalogue")
    trained(tmp_path / "run", shop)
    path = export(tmp_path / "run", tmp_path / "m.safetensors", dataset=shop)
    known, encoder = shop.train.catalogue, shop.header.item_encoder
    words = shop.item_vocabulary()
    with Agent(tmp_path / "device") as agent:
        agent.install(path)
        used = agent._used()
        assert used.model.catalogue.names == tuple(known.name(i) for i in range(len(known)))
        new = used.shown([known.name(3), ("new", {encoder.text[0]: words[5], "price": 12.0})])
        assert new.names == (known.name(3), "new")
        assert new.own.ids[0] == 5
        choice = agent.choose({"age": 30.0}, candidates=[known.name(3), ("new", {"stars": 4.0})])
        assert choice.name in (known.name(3), "new")


def test_a_run_over_candidates_becomes_an_agent_that_chooses_by_name(tmp_path):
    photos = open_dataset("gallery")
    trained(tmp_path / "run", photos)
    path = export(tmp_path / "run", tmp_path / "m.safetensors", dataset=photos)
    bare = export(tmp_path / "run", tmp_path / "bare.safetensors", dataset=photos, catalogue=False)
    assert bare.stat().st_size < path.stat().st_size / 2
    contexts = photos.train.contexts(np.arange(1))
    shown, expected = contexts.candidates, load_scorer(tmp_path / "run", photos.header)
    with Agent(tmp_path / "device") as agent:
        agent.install(path)
        used = agent._used()
        by_name = used.encode(contexts.shared[0], used.shown([str(i) for i in shown.items]))
        np.testing.assert_allclose(
            used.actor.predict(by_name).mean, expected.predict(contexts).mean, atol=1e-6
        )
    assert evaluate_file(path, photos).mean.shape == (len(shown.items),)
    with pytest.raises(ConfigError, match="not linear over candidates"):
        export(path, tmp_path / "m.onnx")


def evaluate_file(path, dataset):
    """A model file scores the data set that it was made for."""
    return load_scorer(path, dataset.header).predict(dataset.train.contexts(np.arange(1)))


def test_a_file_says_how_to_explore_and_which_model_it_is(tmp_path):
    dataset = random_text(words=30, num_actions=4)
    results = trained(tmp_path / "run", dataset, policy={"name": "falcon-schedule"})
    model = DeviceModel.from_bytes(
        results.export(tmp_path / "a.safetensors", dataset=dataset).read_bytes()
    )
    assert model.policy["name"] in ("falcon", "uniform")  # the rule of its round, not the schedule
    assert model.version == 3
    greedy = {"name": "greedy"}
    path = results.export(tmp_path / "b.safetensors", dataset=dataset, policy=greedy, version=9)
    model = DeviceModel.from_bytes(path.read_bytes())
    assert (dict(model.policy), model.version) == (greedy, 9)
    again = export(path, tmp_path / "c.onnx")  # and a file becomes one of another format
    assert again.read_bytes() == export(path, again, overwrite=True).read_bytes()


def test_what_cannot_be_exported_is_refused_in_one_line(tmp_path):
    dataset = random_text(words=30, num_actions=4)
    results = trained(tmp_path / "run", dataset, "linear-heads")
    for out, message in (
        ("m.pickle", "'pickle' is none of safetensors, onnx, json"),
        ("m.onnx", "onnx is for linear models, MLPs and the cnn, not linear-heads"),
        ("m.json", "json is for linear models, not linear-heads"),
        ("m.safetensors", None),
    ):
        if message is None:
            results.export(tmp_path / out, dataset=dataset)
            continue
        with pytest.raises(ConfigError, match=message):
            results.export(tmp_path / out, dataset=dataset)
    with pytest.raises(ConfigError, match="already exists"):
        results.export(tmp_path / "m.safetensors", dataset=dataset)
    with pytest.raises(DataError, match="neither a run folder"):
        export(tmp_path / "nowhere", tmp_path / "x.json")
    with pytest.raises(DataError, match="trained on other data"):
        export(tmp_path / "run", tmp_path / "x.json", dataset=open_dataset("topics"))


def test_the_command_goes_from_a_run_to_an_agent(tmp_path):
    settings = {"rounds": 2, "clients_per_round": 4, "scenario": "scratch"}
    run(Config.build(settings).with_values({"data.source": "topics"}), tmp_path / "run")
    words = [str(tmp_path / "run"), "-o", str(tmp_path / "model.safetensors")]
    result = CliRunner().invoke(app, [*words, "--policy", "epsilon-greedy", "--set", "epsilon=0.2"])
    assert result.exit_code == 0, result.output
    with Agent(tmp_path / "device") as agent:
        agent.install(tmp_path / "model.safetensors")
        decision = agent.choose("how do I sort a list in python")
        assert decision.propensity in (np.float32(0.804), np.float32(0.004))


def test_code_that_a_run_folder_names_is_not_executed_unasked(tiny_text, tmp_path, monkeypatch):
    marker = tmp_path / "executed"
    module = "from pathlib import Path\nfrom fedbandit.models import build_model\n"
    module += f"Path({str(marker)!r}).touch()\n\ndef Linear(data):\n    return build_model('linear', data)\n"
    (tmp_path / "sent_along.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    trained(tmp_path / "run", open_dataset(str(tiny_text)), "sent_along:Linear")
    marker.unlink()
    monkeypatch.delitem(sys.modules, "sent_along")
    with pytest.raises(DataError, match="--trust sent_along:Linear"):
        load_model(tmp_path / "run", open_dataset(str(tiny_text)))
    assert not marker.exists()
    with trusting("sent_along:Linear"):
        assert load_model(tmp_path / "run", open_dataset(str(tiny_text))).actions
    assert marker.exists()


@pytest.mark.usefixtures("no_wait")
@pytest.mark.parametrize("kind", ["pipe", "endless", "terabyte", "loop"])
def test_a_model_that_is_no_file_is_refused_at_once(tmp_path, kind):
    """`evaluate --model` and `export` waited at pipes, and read a terabyte of nothing."""
    path = tmp_path / "model.safetensors"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "terabyte":
        path.touch()
        os.truncate(path, 1 << 40)
    else:
        path.symlink_to("/dev/zero" if kind == "endless" else path.name)

    for read in (
        lambda: load_scorer(path, random_text().header),
        lambda: export(path, tmp_path / "out.safetensors"),
    ):
        with pytest.raises(DataError, match=r"^\S*model\.safetensors: .+$"):
            read()
