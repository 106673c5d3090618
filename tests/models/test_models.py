"""Models: their sizes, their initial weights, the CNN against plain loops, and a model of one's own."""

import sys

import numpy as np
import pytest
import torch
from core_samples import config, images, played, text

from fedbandit.assembly.experiment import build_experiment
from fedbandit.core.errors import ConfigError
from fedbandit.models import DataSpec, Layout, build_model
from fedbandit.models.base import glorot_normal, glorot_uniform

pytestmark = pytest.mark.usefixtures("small_chunks")

EMNIST = DataSpec("dense", (28, 28), 62)


def shapes(name, spec, **parameters):
    return {key: value.shape for key, value in build_model(name, spec, parameters).init(0).items()}


def test_the_cnn_is_the_papers():
    arrays = build_model("cnn", EMNIST).init(0)
    assert sum(array.size for array in arrays.values()) == 1_690_046
    assert Layout.of(arrays).size == 1_690_046
    assert {name: array.shape for name, array in arrays.items()} == {
        "conv1": (5, 5, 1, 32),
        "conv1_bias": (32,),
        "conv2": (5, 5, 32, 64),
        "conv2_bias": (64,),
        "dense1": (3136, 512),
        "dense1_bias": (512,),
        "dense2": (512, 62),
        "dense2_bias": (62,),
    }


def test_shapes_of_the_small_models():
    assert shapes("linear", EMNIST) == {"weight": (784, 62), "bias": (62,)}
    assert shapes("linear", DataSpec("sparse", (100,), 50)) == {"weight": (100, 50), "bias": (50,)}
    expected = {"dense1": (784, 7), "dense1_bias": (7,), "dense2": (7, 62), "dense2_bias": (62,)}
    assert shapes("mlp", EMNIST, hidden=7) == expected


def test_initial_weights_of_the_cnn():
    """Truncated Glorot normal as Keras has it, biases of zero."""
    arrays = build_model("cnn", EMNIST).init(4)
    fans = {
        "conv1": (25, 25 * 32),
        "conv2": (25 * 32, 25 * 64),
        "dense1": (3136, 512),
        "dense2": (512, 62),
    }
    for name, (fan_in, fan_out) in fans.items():
        std = np.sqrt(2 / (fan_in + fan_out))
        assert (arrays[f"{name}_bias"] == 0).all()
        assert np.abs(arrays[name]).max() <= 2 * std / 0.87962566103423978
        error = (
            3 * std / np.sqrt(2 * arrays[name].size)
        )  # three standard errors of a standard deviation
        assert arrays[name].std() == pytest.approx(std, abs=error)
        assert abs(arrays[name].mean()) < 4 * std / np.sqrt(arrays[name].size)


def test_truncation_keeps_the_variance_and_cuts_at_two_standard_deviations():
    values = glorot_normal(np.random.default_rng(0), (400, 600))
    cut = 2 * np.sqrt(2 / 1000) / 0.87962566103423978
    assert 0.99 * cut < np.abs(values).max() <= cut
    assert values.std() == pytest.approx(np.sqrt(2 / 1000), rel=0.005)


def test_glorot_uniform_fills_its_limits():
    limit = np.sqrt(6 / 1000)
    values = glorot_uniform(np.random.default_rng(0), (400, 600))
    assert 0.999 * limit < values.max() <= limit
    assert -limit <= values.min() < -0.999 * limit
    assert values.std() == pytest.approx(limit / np.sqrt(3), rel=0.005)


def test_initial_weights_of_the_linear_models():
    dense = build_model("linear", EMNIST).init(0)
    assert all((array == 0).all() for array in dense.values())
    sparse = build_model("linear", DataSpec("sparse", (1000,), 50)).init(0)
    limit = np.sqrt(6 / 1050)
    assert 0.99 * limit < np.abs(sparse["weight"]).max() <= limit
    assert (sparse["bias"] == 0).all()


@pytest.mark.parametrize(
    ("name", "spec"), [("cnn", EMNIST), ("mlp", EMNIST), ("linear", DataSpec("sparse", (9,), 4))]
)
def test_initial_weights_belong_to_the_seed(name, spec):
    model = build_model(name, spec)
    first, again, other = model.init(1), model.init(1), model.init(2)
    for key in first:
        np.testing.assert_array_equal(first[key], again[key])
    assert any((first[key] != other[key]).any() for key in first)


def tensors(arrays):
    return {name: torch.from_numpy(np.asarray(array, np.float64)) for name, array in arrays.items()}


def perturbed(model, seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: array + 0.1 * rng.standard_normal(array.shape)
        for name, array in model.init(seed).items()
    }


def naive_cnn(params, image):
    """The FedAvg CNN on one image [height, width, channels] in plain loops: relu, then pooling."""
    x = image
    for layer in ("conv1", "conv2"):
        kernel, bias = params[layer], params[f"{layer}_bias"]
        height, width, _ = x.shape
        padded = np.pad(x, ((2, 2), (2, 2), (0, 0)))
        convolved = np.zeros((height, width, kernel.shape[3]))
        for i in range(height):
            for j in range(width):
                window = padded[i : i + 5, j : j + 5]
                convolved[i, j] = np.einsum("hwc,hwco->o", window, kernel) + bias
        active = np.maximum(convolved, 0)
        x = np.zeros((height // 2, width // 2, kernel.shape[3]))
        for i in range(height // 2):
            for j in range(width // 2):
                x[i, j] = active[2 * i : 2 * i + 2, 2 * j : 2 * j + 2].max(axis=(0, 1))
    hidden = np.maximum(x.reshape(-1) @ params["dense1"] + params["dense1_bias"], 0)
    return hidden @ params["dense2"] + params["dense2_bias"]


@pytest.mark.parametrize("shape", [(8, 8), (9, 6), (8, 5, 3)])
def test_the_cnn_against_plain_loops(shape):
    model = build_model("cnn", DataSpec("dense", shape, 4))
    params, image = perturbed(model), np.random.default_rng(1).standard_normal(shape)
    scores = model.scores(tensors(params), torch.from_numpy(image[None]))
    np.testing.assert_allclose(
        scores[0], naive_cnn(params, image.reshape(*shape[:2], -1)), rtol=0, atol=1e-11
    )


def test_the_linear_model_normalises_its_contexts():
    model = build_model("linear", DataSpec("dense", (2, 3), 4))
    params, x = perturbed(model), np.random.default_rng(1).standard_normal((5, 2, 3))
    x[4] = 0
    flat = x.reshape(5, 6)
    unit = flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-12)
    expected = unit @ params["weight"] + params["bias"]
    np.testing.assert_allclose(
        model.scores(tensors(params), torch.from_numpy(x)), expected, rtol=0, atol=1e-13
    )


def test_the_mlp():
    model = build_model("mlp", DataSpec("dense", (6,), 4), {"hidden": 5})
    params, x = perturbed(model), np.random.default_rng(1).standard_normal((3, 6))
    hidden = np.maximum(x @ params["dense1"] + params["dense1_bias"], 0)
    expected = hidden @ params["dense2"] + params["dense2_bias"]
    np.testing.assert_allclose(
        model.scores(tensors(params), torch.from_numpy(x)), expected, rtol=0, atol=1e-13
    )


@pytest.mark.parametrize(
    ("name", "spec", "parameters", "message"),
    [
        ("cnn", DataSpec("sparse", (100,), 5), {}, "needs images"),
        ("cnn", DataSpec("dense", (100,), 5), {}, "needs images"),
        ("cnn", DataSpec("dense", (3, 8), 5), {}, "at least 4x4"),
        ("mlp", EMNIST, {"hidden": 0}, "model.hidden"),
        ("mlp", EMNIST, {"hiden": 3}, "model.hiden: unknown key; did you mean hidden"),
        ("liner", EMNIST, {}, "did you mean linear"),
        ("no_such_module:thing", EMNIST, {}, "cannot import no_such_module"),
        ("fedbandit.models.builtin:nothing", EMNIST, {}, "has no nothing"),
        ("fedbandit.models.base:glorot_uniform", EMNIST, {}, "model"),
    ],
)
def test_what_does_not_fit_is_refused(name, spec, parameters, message):
    with pytest.raises(ConfigError, match=message):
        build_model(name, spec, parameters)


# --- a model of one's own ---

OWN_MODEL = '''
import numpy as np

from fedbandit.models import Model


def shifted(data, shift: float = 0.0):
    """Linear, with every score moved by the same amount."""
    features = int(np.prod(data.shape))

    def init(seed):
        return {"w": np.full((features, data.num_actions), 0.01)}

    def scores(params, x):
        return x.flatten(1) @ params["w"] + shift

    return Model(init, scores)


finished = Model(lambda seed: {"w": np.zeros((16, 6))}, lambda params, x: x.flatten(1) @ params["w"])
too_narrow = Model(lambda seed: {"w": np.zeros((16, 5))}, lambda params, x: x.flatten(1) @ params["w"])
for_other_data = Model(lambda seed: {"w": np.zeros((17, 6))}, lambda params, x: x.flatten(1) @ params["w"])


def not_a_model(data):
    return "a string"
'''


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "models_of_my_own.py").write_text(OWN_MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # gets the working folder put in front of it
    monkeypatch.delitem(sys.modules, "models_of_my_own", raising=False)
    return "models_of_my_own"


def test_a_model_of_ones_own_is_one_file(own_module):
    settings = {
        "model__name": f"{own_module}:shifted",
        "model__shift": 0.5,
        "client__learning_rate": 0.05,
    }
    rounds, simulation = played(config(**settings), images())
    assert len(rounds) == 5
    assert simulation.experiment.layout.shapes == (("w", (16, 6)),)
    assert np.ptp(simulation.state.weights) > 0
    finished = build_experiment(config(model__name=f"{own_module}:finished"), images())
    assert finished.layout.shapes == (("w", (16, 6)),)
    assert not finished.initial_weights().any()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("too_narrow", "scores 5 actions, the data set has 6"),
        ("for_other_data", "cannot score contexts"),
        ("not_a_model", "made a str"),
    ],
)
def test_a_model_of_ones_own_that_does_not_fit(own_module, name, message):
    with pytest.raises(ConfigError, match=message):
        build_experiment(config(model__name=f"{own_module}:{name}"), images())


def test_a_finished_model_takes_no_parameters(own_module):
    with pytest.raises(ConfigError, match=r"model\.width: .* takes no parameters"):
        build_experiment(config(model__name=f"{own_module}:finished", model__width=3), images())


def test_a_dense_model_on_text_is_refused(own_module):
    with pytest.raises(ConfigError, match="cannot score contexts"):
        build_experiment(config(model__name=f"{own_module}:finished"), text())


def test_layout_round_trip():
    arrays = {"a": np.arange(6.0).reshape(2, 3), "b": np.array([7.0])}
    layout = Layout.of(arrays)
    vector = layout.flatten(arrays, np.dtype(np.float32))
    assert vector.dtype == np.float32
    for name, view in layout.split(vector).items():
        np.testing.assert_array_equal(view, arrays[name])
        assert view.base is not None  # a view, not a copy
