"""The accelerator learners, on the CPU device, against the thread engine's in float64."""

import numpy as np
import pytest
from builders import random_images, random_text

from fedbandit.events import Events
from fedbandit.federated.learners.base import ClientSettings
from fedbandit.federated.learners.choosing import make_learner
from fedbandit.federated.learners.vectorised import make_vectorised_learner
from fedbandit.models import DataSpec, Layout, build_model
from fedbandit.objectives import (
    CrossEntropy,
    FullInformation,
    FullInformationCrossEntropy,
    Regression,
    WeightedRegression,
)

OBJECTIVES = [
    Regression(),
    Regression(reduction="half-sum"),
    WeightedRegression(scale=0.1),
    CrossEntropy(),
    FullInformation(),
    FullInformationCrossEntropy(),
]


def _events(dataset):
    """A log of every client with random actions and rewards; some clients have few events, one none."""
    rng = np.random.default_rng(3)
    split = dataset.train
    n, k = split.num_examples, dataset.header.num_actions
    return Events(
        bounds=np.asarray(split.offsets),
        contexts=split.contexts(np.arange(n)),
        actions=rng.integers(0, k, n),
        rewards=rng.random(n).astype(np.float32),
        propensities=rng.uniform(0.05, 1, n),
        versions=np.zeros(n, np.int32),
        fresh=np.ones(n, bool),
        targets=rng.random((n, k)).astype(np.float32),
    )


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: f"{type(o).__name__}-{o.reduction}")
@pytest.mark.parametrize("name", ["text-linear", "image-linear", "image-mlp", "image-cnn"])
def test_agrees_with_the_thread_engine(name, objective):
    kind, model_name = name.split("-")
    dataset = random_text() if kind == "text" else random_images(shape=(8, 8))
    model = build_model(model_name, DataSpec.of(dataset.header))
    arrays = model.init(1)
    layout = Layout.of(arrays)
    weights = layout.flatten(arrays, np.dtype("float64"))
    settings = ClientSettings(learning_rate=0.05, batch_size=4, epochs=2)
    events = _events(dataset)
    threads = make_learner(model, layout, objective, settings)
    vectorised = make_vectorised_learner(model, layout, objective, settings, "cpu")

    np.testing.assert_allclose(
        *(learner.predict(weights, events.contexts).mean for learner in (vectorised, threads)),
        rtol=0,
        atol=1e-12,
    )
    _, unclipped = threads.train(weights, events, np.inf)
    clip_norm = float(np.median(unclipped))  # half of the clients are clipped
    expected, expected_norms = threads.train(weights, events, clip_norm)
    found, norms = vectorised.train(weights, events, clip_norm)
    sums = np.zeros((2, len(weights)))
    expected.add_to(sums[0])
    found.add_to(sums[1])
    assert 0 < clip_norm < unclipped.max() < np.inf
    np.testing.assert_allclose(norms, expected_norms, rtol=0, atol=1e-10)
    np.testing.assert_allclose(sums[1], sums[0], rtol=0, atol=1e-10)


def test_a_device_that_is_not_there_is_refused():
    from fedbandit.building.experiment import build_experiment
    from fedbandit.config import Config
    from fedbandit.core.errors import ConfigError

    config = Config.build({"scenario": "scratch", "clients_per_round": 2, "device": "cuda:99"})
    with pytest.raises(ConfigError, match="device: cuda:99"):
        build_experiment(config, random_text())


def _drift(size):
    rng = np.random.default_rng(5)
    added = {client: None if client % 3 == 0 else 0.1 * rng.standard_normal(size) for client in range(50)}
    return added.__getitem__


@pytest.mark.parametrize("with_drift", [False, True], ids=["", "drift"])
@pytest.mark.parametrize("pull", [0.0, 0.3])
@pytest.mark.parametrize("name", ["text-linear", "image-linear", "image-mlp", "image-cnn"])
def test_single_updates_agree_as_every_algorithm_and_compression_asks_for_them(name, pull, with_drift):
    """FedProx pulls, SCAFFOLD drifts, and compression and robust rules see one client's update at a time."""
    kind, model_name = name.split("-")
    dataset = random_text() if kind == "text" else random_images(shape=(8, 8))
    model = build_model(model_name, DataSpec.of(dataset.header))
    layout = Layout.of(model.init(1))
    weights = layout.flatten(model.init(1), np.dtype("float64"))
    settings = ClientSettings(learning_rate=0.05, batch_size=4, epochs=2)
    events = _events(dataset)
    drift = _drift(len(weights)) if with_drift else None
    each = [
        [None if one is None else one.copy() for one in learner.updates(weights, events, pull, drift)]  # used at once
        for learner in (
            make_vectorised_learner(model, layout, Regression(), settings, "cpu"),
            make_learner(model, layout, Regression(), settings),
        )
    ]
    assert len(each[0]) == len(each[1]) == events.num_clients
    for found, expected in zip(*each, strict=True):
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)
            assert np.abs(expected).max() > 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model.name": "linear-heads"}, "model.name: a model with heads has no learner for device meta"),
        ({"model.freeze": ["bias"]}, "model.freeze: not on device meta"),
    ],
)
def test_what_has_no_learner_for_a_device_is_refused(changes, said):
    from fedbandit.building.experiment import build_experiment
    from fedbandit.config import Config
    from fedbandit.core.errors import ConfigError

    config = Config.build({"scenario": "scratch", "clients_per_round": 2, "device": "meta"}).with_values(changes)
    with pytest.raises(ConfigError, match=said):
        build_experiment(config, random_text())
