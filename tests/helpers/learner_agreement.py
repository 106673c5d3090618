"""A fast learner beside automatic differentiation: the same training in float64, whatever the objective."""

import numpy as np

from fedbandit.acting import make_predictor
from fedbandit.acting.predictors import TorchPredictor
from fedbandit.core.contexts import Contexts
from fedbandit.core.ragged import Ragged
from fedbandit.events import Events
from fedbandit.federated.learners.base import AutogradLearner, ClientSettings
from fedbandit.federated.learners.make_learner import make_learner
from fedbandit.models import DataSpec, Layout, build_model
from fedbandit.objectives import (
    CrossEntropy,
    FullInformation,
    FullInformationCrossEntropy,
    Regression,
    WeightedCrossEntropy,
    WeightedRegression,
)

OBJECTIVES = [
    Regression(),
    Regression(reduction="half-sum"),
    WeightedRegression(scale=0.1),
    CrossEntropy(),
    WeightedCrossEntropy(scale=0.1),
    FullInformation(),
    FullInformationCrossEntropy(),
]
ACTIONS = 7


def events_of(shape, sizes=(19, 0, 3, 16), seed=0, kind="dense"):
    rng = np.random.default_rng(seed)
    n = sum(sizes)
    contexts = rng.random((n, *shape)).astype(np.float32)
    return Events(
        bounds=np.cumsum([0, *sizes]),
        contexts=Contexts(
            contexts if kind == "dense" else sparse(np.where(contexts < 0.3, contexts, 0))
        ),
        actions=rng.integers(0, ACTIONS, n),
        rewards=rng.random(n).astype(np.float32),
        propensities=rng.uniform(0.05, 1, n),
        versions=np.zeros(n, np.int32),
        fresh=np.ones(n, bool),
        targets=rng.random((n, ACTIONS)).astype(np.float32),
    )


def sparse(contexts):
    """The same contexts as rows of their features that are not zero."""
    rows, ids = np.nonzero(contexts)
    offsets = np.searchsorted(rows, np.arange(len(contexts) + 1))
    return Ragged(offsets, ids.astype(np.int32), contexts[rows, ids])


def _model(name, shape, kind):
    """A model, its layout, and initial weights by type."""
    model = build_model(name, DataSpec(kind, shape, ACTIONS))
    arrays = model.init(1)
    # Biases that are not zero, so that an error in them cannot hide.
    rng = np.random.default_rng(5)
    arrays = {
        name: rng.normal(0, 0.1, a.shape) if name.endswith("bias") else a
        for name, a in arrays.items()
    }
    layout = Layout.of(arrays)
    return model, layout, lambda dtype: layout.flatten(arrays, np.dtype(dtype))


def predictors(name, shape, kind="dense"):
    """The predictor that is chosen for a model, the one by its `scores`, and initial weights by type."""
    model, layout, weights_as = _model(name, shape, kind)
    return make_predictor(model, layout), TorchPredictor(model, layout), weights_as


def learners(name, shape, objective, kind="dense", **settings):
    """The learner that is chosen for a model, the one by automatic differentiation, and initial weights by type."""
    model, layout, weights_as = _model(name, shape, kind)
    parts = (model, layout, objective, ClientSettings(**{"learning_rate": 0.05, **settings}))
    return make_learner(*parts), AutogradLearner(*parts), weights_as


def assert_same_training(name, shape, objective, pull=0.0, kind="dense", **settings):
    """Sums of clipped updates, and every client's own update, agree."""
    fast, autograd, weights_as = learners(name, shape, objective, kind, **settings)
    weights, events = weights_as("float64"), events_of(shape, kind=kind)
    before = weights.copy()
    _, unclipped = autograd.train(weights, events, np.inf, pull)
    clip_norm = float(np.median(unclipped[unclipped > 0]))
    expected, expected_norms = autograd.train(weights, events, clip_norm, pull)
    found, norms = fast.train(weights, events, clip_norm, pull)
    assert norms[1] == 0
    assert (unclipped > clip_norm).any()
    np.testing.assert_allclose(norms, expected_norms, rtol=0, atol=1e-10)
    np.testing.assert_allclose(found.vector, expected.vector, rtol=0, atol=1e-10)
    added = np.random.default_rng(7).normal(0, 0.01, len(weights))
    for own, other in zip(
        fast.updates(weights, events, pull, lambda client: added),
        autograd.updates(weights, events, pull, lambda client: added),
        strict=True,
    ):
        assert (own is None) == (other is None)
        if own is not None:
            np.testing.assert_allclose(own, other, rtol=0, atol=1e-10)
    np.testing.assert_array_equal(weights, before)
