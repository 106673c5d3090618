"""The model `linear-width`: scores of the linear model, widths by precisions, the same bits on devices."""

import numpy as np
import pytest
from builders import random_images, random_text

from fedbandit.acting import make_predictor
from fedbandit.assembly.experiment import build_experiment
from fedbandit.core.contexts import Candidates, Contexts, ItemSpec
from fedbandit.core.errors import ConfigError, DataError
from fedbandit.core.ragged import Ragged
from fedbandit.deploy import DeviceModel
from fedbandit.models import DataSpec, Layout, build_model

ITEMS = DataSpec("dense", (3,), 0, ItemSpec("dense", (4,), 4.0, 6))


def decisions(n=7):
    rng, bounds = np.random.default_rng(0), np.arange(0, 3 * n + 1, 3)
    features = rng.normal(size=(3 * n, 4)).astype(np.float32)
    shared = rng.normal(size=(n, 3)).astype(np.float32)
    return Contexts(shared, Candidates(bounds, np.arange(3 * n), features))


def parts(name, spec):
    model = build_model(name, spec)
    return model, Layout.of(model.init(0))


def matrix(contexts, spec, model):
    """The features of each context with a 1 for the bias, as the model takes them."""
    x = model.rows(contexts) if contexts.candidates is not None else contexts.shared
    if isinstance(x, Ragged):
        width = model.init(0)["weight"].shape[0]
        full = np.zeros((len(x), width))
        np.add.at(full, (x.row_of_entry(), x.ids), x.values)
    else:
        full = x.reshape(len(x), -1).astype(float)
        full /= np.maximum(np.linalg.norm(full, axis=1, keepdims=True), 1e-12)
    return np.concatenate([full, np.ones((len(full), 1))], axis=1)


def of_data(dataset):
    return DataSpec.of(dataset.header), dataset.train.contexts(np.arange(7))


@pytest.mark.parametrize("kind", ["text", "images", "candidates"])
def test_scores_of_the_linear_model_and_widths_of_ten_lines(kind):
    made = {"text": random_text, "images": random_images}
    spec, contexts = (ITEMS, decisions()) if kind == "candidates" else of_data(made[kind]())
    plain, layout = parts("linear", spec)
    sure, whole = parts("linear-width", spec)
    rng = np.random.default_rng(1)
    weights, precision = rng.normal(size=layout.size), rng.uniform(0.1, 9, layout.size)
    vector = np.concatenate([weights, precision])
    found = make_predictor(sure, whole).predict(vector, contexts)
    without = make_predictor(plain, layout).predict(weights, contexts)
    assert without.width is None
    np.testing.assert_array_equal(found.mean, without.mean)
    x = matrix(contexts, spec, plain)
    views = layout.split(precision)
    expected = np.sqrt(x**2 @ (1 / np.concatenate([views["weight"], views["bias"][None]])))
    expected = expected[:, 0] if kind == "candidates" else expected
    np.testing.assert_allclose(found.width, expected, rtol=1e-9)
    device = make_predictor(sure, whole, light=True).predict(vector, contexts)
    np.testing.assert_allclose(device.width, found.width, rtol=1e-12)
    if kind != "images":  # whose products are BLAS's on a device
        np.testing.assert_array_equal(device.width, found.width)


def test_it_cannot_be_trained():
    from core_samples import config

    with pytest.raises(ConfigError, match="linear-width is deployed, not trained"):
        build_experiment(config(model__name="linear-width"), random_text())


def test_a_file_with_wrong_precisions_is_refused():
    _, layout = parts("linear-width", DataSpec("dense", (2,), 2))
    facts = {"actions": ("a", "b"), "kind": "dense", "shape": (2,), "policy": {"name": "greedy"}}
    arrays = layout.split(np.ones(layout.size))
    made = DeviceModel(1, arrays, model={"name": "linear-width"}, **facts)
    assert DeviceModel.from_bytes(made.to_bytes()).weights.keys() == arrays.keys()
    arrays["weight_precision"] = np.zeros((2, 2))
    wrong = DeviceModel(1, arrays, model={"name": "linear-width"}, **facts)
    with pytest.raises(DataError, match="weight_precision: must be positive"):
        DeviceModel.from_bytes(wrong.to_bytes())
