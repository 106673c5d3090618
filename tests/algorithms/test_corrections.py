"""Every learner's correction, gradient + pull · (w - received) + drift, against a plain numpy form in float64."""

import numpy as np
import pytest
from builders import random_images, random_text

from fedbandit.acting.predictors import TorchPredictor
from fedbandit.events import Events
from fedbandit.federated.learners.base import AutogradLearner, ClientSettings
from fedbandit.federated.learners.make_learner import Trainable, make_learner
from fedbandit.federated.learners.vectorised import make_vectorised_learner
from fedbandit.models import DataSpec, Freezing
from fedbandit.objectives import FullInformation, Regression, WeightedRegression

PULLS = [0.0, 0.7]
SETTINGS = ClientSettings(learning_rate=0.2, batch_size=4, epochs=2)
SLOWER = ClientSettings(learning_rate=0.02, batch_size=4, epochs=2)  # networks diverge at the other


def log_of(dataset, heads=0):
    """A log of every client with random actions and rewards; the third client has no events."""
    rng = np.random.default_rng(3)
    split = dataset.train
    n, k = split.num_examples, dataset.header.num_actions
    bounds = np.asarray(split.offsets).copy()
    return Events(
        bounds=np.insert(bounds, 2, bounds[2]),
        contexts=split.contexts(np.arange(n)),
        actions=rng.integers(0, k, n),
        rewards=rng.random(n).astype(np.float32),
        propensities=rng.uniform(0.05, 1, n),
        versions=np.zeros(n, np.int32),
        fresh=np.ones(n, bool),
        targets=rng.random((n, k)).astype(np.float32),
        weights=rng.poisson(1.0, (n, heads)).astype(np.float32) if heads else None,
    )


def dense(contexts, words):
    """Sparse rows as a matrix."""
    matrix = np.zeros((len(contexts), words))
    np.add.at(matrix, (contexts.row_of_entry(), contexts.ids), contexts.values)
    return matrix


def by_hand(x, events, client, start, objective, pull, drift):
    """One client's epochs of a linear model, one step at a time, every weight at every step."""
    first, last = events.bounds[client], events.bounds[client + 1]
    features, k = x.shape[1], events.targets.shape[1]
    w = start.copy()
    for _ in range(SETTINGS.epochs):
        for begin in range(first, last, SETTINGS.batch_size):
            rows = np.arange(begin, min(begin + SETTINGS.batch_size, last))
            scores = x[rows] @ w[:-k].reshape(features, k) + w[-k:]
            weight = objective.weights(events.propensities[rows])[:, None]
            if objective.supervised:
                error = weight * (scores - events.targets[rows])
            else:
                chosen = np.eye(k)[events.actions[rows]]
                error = weight * chosen * (scores - events.rewards[rows][:, None])
            error *= objective.factor(len(rows), k)
            gradient = np.concatenate([(x[rows].T @ error).reshape(-1), error.sum(axis=0)])
            w = w - SETTINGS.learning_rate * (gradient + pull * (w - start) + drift)
    return w - start


@pytest.mark.parametrize("pull", PULLS)
@pytest.mark.parametrize("drifting", [False, True])
@pytest.mark.parametrize(
    "objective", [Regression(), WeightedRegression(scale=0.1), FullInformation()]
)
@pytest.mark.parametrize("kind", ["sparse kernel", "autograd", "vectorised"])
def test_linear_models_on_text(kind, objective, drifting, pull):
    dataset = random_text()
    events = log_of(dataset)
    trainable = Trainable.of({"name": "linear"}, DataSpec.of(dataset.header))
    parts = (trainable.model, trainable.layout, objective, SETTINGS)
    learner = {
        "sparse kernel": lambda: make_learner(*parts),
        "autograd": lambda: AutogradLearner(*parts),
        "vectorised": lambda: make_vectorised_learner(*parts, "cpu"),
    }[kind]()
    start = trainable.initial(1, np.dtype("float64"))
    rng = np.random.default_rng(0)
    drifts = rng.normal(scale=0.05, size=(events.num_clients, len(start))) * drifting
    x = dense(events.contexts.shared, dataset.header.shape[0])
    found = list(
        learner.updates(start, events, pull, (lambda client: drifts[client]) if drifting else None)
    )
    assert [update is None for update in found] == (np.diff(events.bounds) == 0).tolist()
    for client, update in enumerate(found):
        if update is not None:
            expected = by_hand(x, events, client, start, objective, pull, drifts[client])
            np.testing.assert_allclose(update, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("pull", PULLS)
@pytest.mark.parametrize("model", ["linear", "mlp", "cnn"])
def test_every_learner_on_images_agrees_with_autograd(model, pull):
    dataset = random_images(shape=(8, 8))
    events = log_of(dataset)
    trainable = Trainable.of({"name": model}, DataSpec.of(dataset.header))
    parts = (trainable.model, trainable.layout, Regression(), SLOWER)
    start = trainable.initial(1, np.dtype("float64"))
    drifts = np.random.default_rng(0).normal(scale=0.01, size=(events.num_clients, len(start)))
    expected = list(
        AutogradLearner(*parts).updates(start, events, pull, lambda client: drifts[client])
    )
    for learner in (make_learner(*parts), make_vectorised_learner(*parts, "cpu")):
        for update, other in zip(
            learner.updates(start, events, pull, lambda client: drifts[client]),
            expected,
            strict=True,
        ):
            assert (update is None) == (other is None)
            if other is not None:
                np.testing.assert_allclose(update, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "model", ["text-linear", "image-linear", "image-mlp", "image-cnn", "text-linear-heads"]
)
@pytest.mark.parametrize("pull", PULLS)
def test_the_fused_sum_is_the_sum_of_single_updates_clipped(model, pull):
    kind, _, name = model.partition("-")
    dataset = random_text() if kind == "text" else random_images(shape=(8, 8))
    described = {"name": name, "heads": 3} if name == "linear-heads" else {"name": name}
    trainable = Trainable.of(described, DataSpec.of(dataset.header))
    events = log_of(dataset, trainable.model.heads)
    learner = trainable.learner(Regression(), SETTINGS if kind == "text" else SLOWER)
    start = trainable.initial(1, np.dtype("float64"))
    single = [
        np.zeros_like(start) if u is None else u.copy()
        for u in learner.updates(start, events, pull)
    ]
    norms = np.array([np.linalg.norm(update) for update in single])
    clip = float(np.median(norms))
    total = np.zeros_like(start)
    summed, found = learner.train(start, events, clip, pull)
    summed.add_to(total)
    expected = sum(
        update * min(1, clip / norm) if norm else update
        for update, norm in zip(single, norms, strict=True)
    )
    np.testing.assert_allclose(found, norms, rtol=0, atol=1e-10)
    np.testing.assert_allclose(total, expected, rtol=0, atol=1e-10)
    assert 0 < clip < norms.max()


def test_heads_train_as_so_many_single_models_do():
    dataset = random_text()
    data = DataSpec.of(dataset.header)
    trainable = Trainable.of({"name": "linear-heads", "heads": 3}, data)
    events = log_of(dataset, heads=3)
    start = trainable.initial(1, np.dtype("float64"))
    parts = (trainable.model, trainable.layout, Regression(), SETTINGS)
    kernel, autograd = make_learner(*parts), AutogradLearner(*parts)
    for one, other in zip(
        kernel.updates(start, events), autograd.updates(start, events), strict=True
    ):
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)
    prediction = trainable.predictor().predict(start, events.contexts)
    assert prediction.heads.shape == (len(events), 3, data.num_actions)
    np.testing.assert_allclose(prediction.mean, prediction.heads.mean(axis=1), atol=1e-12)
    plain = TorchPredictor(trainable.model, trainable.layout).predict(start, events.contexts)
    np.testing.assert_allclose(prediction.heads, plain.heads, atol=1e-12)
    assert np.abs(prediction.heads[:, 0] - prediction.heads[:, 1]).max() > 0.01


def test_frozen_parameters_are_not_trained_and_not_sent():
    dataset = random_images(shape=(8, 8))
    events = log_of(dataset)
    trainable = Trainable.of({"name": "mlp", "hidden": 5}, DataSpec.of(dataset.header))
    freezing = Freezing.of(trainable.layout, ["dense1"])
    start = trainable.initial(1, np.dtype("float64"))
    learner = trainable.learner(Regression(), SETTINGS, freezing=freezing).over(start)
    part = freezing.pick(start)
    assert len(part) == 5 * dataset.header.num_actions + dataset.header.num_actions
    np.testing.assert_array_equal(freezing.join(part, start), start)
    updates = [u for u in learner.updates(part, events, proximal=0.3) if u is not None]
    assert all(len(update) == len(part) for update in updates)
    # Training the last layer alone is training a linear model on the hidden features.
    views = trainable.layout.split(start)
    x = events.contexts.shared.reshape(len(events), -1).astype(np.float64)
    hidden = np.maximum(x @ views["dense1"] + views["dense1_bias"], 0)
    clients = [
        client
        for client in range(events.num_clients)
        if events.bounds[client] < events.bounds[client + 1]
    ]
    for client, update in zip(clients, updates, strict=True):
        expected = by_hand(hidden, events, client, part, Regression(), 0.3, 0.0)
        np.testing.assert_allclose(update, expected, rtol=0, atol=1e-12)
