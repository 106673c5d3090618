"""The hand-written CNN learner against automatic differentiation, and its kernels against torch's."""

import numpy as np
import pytest
import torch
from learner_agreement import (
    ACTIONS,
    OBJECTIVES,
    assert_same_training,
    events_of,
    learners,
    predictors,
)

from fedbandit.core.contexts import Contexts
from fedbandit.federated.learners.networks import CnnLearner
from fedbandit.models.kernels import winograd
from fedbandit.objectives import Regression


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: f"{type(o).__name__}-{o.reduction}")
def test_trains_like_automatic_differentiation(objective):
    assert isinstance(learners("cnn", (28, 28), objective)[0], CnnLearner)
    assert_same_training("cnn", (28, 28), objective)


@pytest.mark.parametrize("shape", [(4, 4), (5, 7), (9, 10, 3), (32, 32, 3), (30, 14, 1)], ids=str)
def test_any_shape_of_image(shape):
    assert_same_training("cnn", shape, Regression())


@pytest.mark.parametrize(
    "settings", [{"batch_size": 1}, {"batch_size": 5, "epochs": 3}, {"batch_size": 64}], ids=str
)
def test_any_batch_size(settings):
    assert_same_training("cnn", (8, 8), Regression(), **settings)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 2e-5)])
@pytest.mark.parametrize("shape", [(28, 28), (9, 10, 3)], ids=str)
@pytest.mark.parametrize("count", [0, 1, 300])
def test_scores_like_the_model(shape, count, dtype, tolerance):
    fast, plain, weights_as = predictors("cnn", shape)
    weights, contexts = (
        weights_as(dtype),
        np.random.default_rng(2).random((count, *shape)).astype(np.float32),
    )
    scores = fast.predict(weights, Contexts(contexts)).mean
    assert scores.shape == (count, ACTIONS)
    assert scores.dtype == weights.dtype
    if count:
        np.testing.assert_allclose(
            scores, plain.predict(weights, Contexts(contexts)).mean, rtol=0, atol=tolerance
        )


def test_the_first_step_in_single_precision():
    """Whole epochs in float32 are chaotic (ties of relu and pooling flip); a single step is not."""
    fast, autograd, weights_as = learners("cnn", (28, 28), Regression(), learning_rate=0.5)
    weights, events = weights_as("float32"), events_of((28, 28), sizes=(16,))
    expected, _ = autograd.train(weights, events, np.inf)
    found, _ = fast.train(weights, events, np.inf)
    apart = np.linalg.norm(found.vector - expected.vector) / np.linalg.norm(expected.vector)
    assert apart < 1e-4


def test_a_flat_background_does_not_matter():
    """Where pooled values tie, any choice gives the same update; images with constant regions have many ties."""
    fast, autograd, weights_as = learners("cnn", (28, 28), Regression())
    weights, events = weights_as("float64"), events_of((28, 28))
    events.contexts.shared[:, :14] = 1.0
    events.contexts.shared[:, 20:] = 0.0
    expected, _ = autograd.train(weights, events, np.inf)
    found, _ = fast.train(weights, events, np.inf)
    np.testing.assert_allclose(found.vector, expected.vector, rtol=0, atol=1e-10)


def test_a_client_that_diverges_is_left_out():
    fast, _, weights_as = learners("cnn", (8, 8), Regression(), learning_rate=1e30)
    events = events_of((8, 8))
    update, norms = fast.train(weights_as("float32"), events, 1.0)
    assert not np.isfinite(norms[0])
    assert np.isfinite(update.vector).all()


@pytest.mark.parametrize("windows", [(1, 1), (5, 7), (4, 6)], ids=str)
def test_tiles_give_the_convolution(windows):
    rng = np.random.default_rng(0)
    (down, rows), (across, columns) = map(winograd.tiles_over, windows)
    h, w = 2 * windows[0], 2 * windows[1]
    padded = np.zeros((3, rows, columns, winograd.NARROW))
    padded[:, 2 : h + 2, 2 : w + 2] = rng.normal(size=(3, h, w, winograd.NARROW))
    kernel, bias = (
        rng.normal(size=(5, 5, winograd.NARROW, winograd.WIDE)),
        rng.normal(size=winograd.WIDE),
    )
    tiles = np.empty((winograd.TILE, 3 * down * across, winograd.NARROW))
    winograd.inputs_to_tiles(padded, tiles)
    products = tiles @ (winograd.KERNEL_TO_TILE @ kernel.reshape(25, -1)).reshape(
        winograd.TILE, *kernel.shape[2:]
    )
    found, chosen = (
        np.empty((3, *windows, winograd.WIDE)),
        np.empty((3, *windows, winograd.WIDE), np.int32),
    )
    winograd.pool_tiles(products, bias, found, chosen)

    x = torch.from_numpy(padded[:, : h + 4, : w + 4]).permute(0, 3, 1, 2)
    convolved = torch.conv2d(
        x, torch.from_numpy(kernel).permute(3, 2, 0, 1), torch.from_numpy(bias)
    )
    expected = torch.relu(torch.max_pool2d(convolved, 2)).permute(0, 2, 3, 1).numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)
    assert set(np.unique(chosen)) == {0, 1, 2, 3}
