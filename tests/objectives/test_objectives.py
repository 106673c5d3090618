"""Objectives: weights, reductions, gradients; and the sparse kernel against automatic differentiation."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from core_samples import config, images, played, text, weights_of

from fedbandit.acting import make_predictor
from fedbandit.acting.predictors import TorchPredictor
from fedbandit.assembly.experiment import build_experiment
from fedbandit.core.contexts import Contexts
from fedbandit.core.errors import ConfigError
from fedbandit.core.ragged import Ragged
from fedbandit.events import Events
from fedbandit.federated.learners.base import AutogradLearner, ClientSettings
from fedbandit.federated.learners.linear import SparseLinearLearner
from fedbandit.federated.learners.make_learner import make_learner
from fedbandit.models import DataSpec, Layout, build_model
from fedbandit.objectives import (
    BUILT_IN,
    SUPERVISED,
    Batch,
    CrossEntropy,
    Regression,
    WeightedRegression,
)

pytestmark = pytest.mark.usefixtures("small_chunks")

EVERY = {**BUILT_IN, **SUPERVISED}


def batch(n=5, k=4, seed=0):
    rng = np.random.default_rng(seed)
    return Batch(
        actions=torch.from_numpy(rng.integers(0, k, n)),
        rewards=torch.from_numpy(rng.random(n)),
        propensities=torch.from_numpy(rng.uniform(0.1, 1, n)),
        targets=torch.from_numpy(rng.random((n, k))),
    )


def make(name, reduction):
    return (
        EVERY[name](reduction=reduction, scale=0.3)
        if name.startswith("weighted")
        else EVERY[name](reduction=reduction)
    )


def closed_form(objective, scores, events):
    """factor · weight · (link(score) - reward), which the kernels use, as a gradient [n, K]."""
    n, k = scores.shape
    link = 1 / (1 + np.exp(-scores)) if objective.logistic else scores
    if objective.supervised:
        return objective.factor(n, k) * (link - events.targets.numpy())
    gradient = np.zeros((n, k))
    rows, actions = np.arange(n), events.actions.numpy()
    weights = objective.weights(events.propensities.numpy())
    gradient[rows, actions] = (
        objective.factor(n, k) * weights * (link[rows, actions] - events.rewards.numpy())
    )
    return gradient


@pytest.mark.parametrize("reduction", ["mean", "half-sum"])
@pytest.mark.parametrize("name", EVERY)
def test_gradients(name, reduction):
    objective, events = make(name, reduction), batch()
    scores = torch.from_numpy(np.random.default_rng(1).normal(0, 2, (5, 4))).requires_grad_()
    (gradient,) = torch.autograd.grad(objective.loss(scores, events), scores)
    np.testing.assert_allclose(
        gradient, closed_form(objective, scores.detach().numpy(), events), rtol=0, atol=1e-14
    )

    differences = np.zeros((5, 4))
    for i in np.ndindex(5, 4):
        for sign in (1, -1):
            moved = scores.detach().clone()
            moved[i] += sign * 1e-6
            differences[i] += sign * float(objective.loss(moved, events)) / 2e-6
    np.testing.assert_allclose(gradient, differences, rtol=0, atol=1e-8)


def test_the_mean_is_the_mean_squared_error_without_a_half():
    scores, events = torch.zeros((5, 4), dtype=torch.float64), batch()
    chosen = events.rewards.numpy() ** 2
    assert float(Regression().loss(scores, events)) == pytest.approx(chosen.mean())
    assert float(Regression("half-sum").loss(scores, events)) == pytest.approx(chosen.sum() / 2)
    assert float(make("full-information", "mean").loss(scores, events)) == pytest.approx(
        (events.targets**2).mean()
    )
    assert float(make("full-information", "half-sum").loss(scores, events)) == pytest.approx(
        (events.targets**2).sum() / 2
    )


def test_cross_entropy_is_binary_and_on_logits():
    events = batch()
    scores = torch.from_numpy(np.random.default_rng(1).normal(0, 2, (5, 4)))
    q = torch.sigmoid(scores[torch.arange(5), events.actions])
    expected = -(events.rewards * q.log() + (1 - events.rewards) * (1 - q).log())
    assert float(CrossEntropy().loss(scores, events)) == pytest.approx(float(expected.mean()))
    assert float(CrossEntropy("half-sum").loss(scores, events)) == pytest.approx(
        float(expected.sum())
    )


def test_cross_entropy_of_extreme_logits_is_finite():
    events = batch()
    scores = torch.full((5, 4), -1e4, dtype=torch.float64)
    assert np.isfinite(float(CrossEntropy().loss(scores, events)))
    assert np.isfinite(float(CrossEntropy().loss(-scores, events)))


def test_a_weighted_loss_is_divided_by_the_batch_and_not_by_its_weights():
    events = batch()
    scores = torch.zeros((5, 4), dtype=torch.float64)
    weights = 0.3 / events.propensities
    expected = (weights * events.rewards**2).sum() / 5
    assert float(WeightedRegression(scale=0.3).loss(scores, events)) == pytest.approx(
        float(expected)
    )
    np.testing.assert_allclose(
        WeightedRegression(scale=0.3).weights(events.propensities.numpy()), weights
    )
    np.testing.assert_allclose(Regression().weights(events.propensities.numpy()), 1)


def test_clipped_weights_are_the_same_in_kernel_and_autograd_and_capped():
    propensities = np.array([0.5, 0.1, 0.01])
    for scale, limit in ((None, 4.0), (0.2, 4.0), (0.2, None)):
        capped = np.minimum(1 / propensities, np.inf if limit is None else limit)
        expected = (1.0 if scale is None else scale) * capped
        objective = WeightedRegression(scale=scale, limit=limit)
        np.testing.assert_allclose(objective.weights(propensities), expected)
        scores = torch.tensor([[0.5, 0.0]] * 3, dtype=torch.float64, requires_grad=True)
        batch = Batch(
            torch.zeros(3, dtype=torch.int64), torch.zeros(3).double(), torch.tensor(propensities)
        )
        (gradient,) = torch.autograd.grad(objective.loss(scores, batch), scores)
        np.testing.assert_allclose(gradient[:, 0], 2 / 3 * expected * 0.5)
    with pytest.raises(ValueError, match="limit must be positive"):
        WeightedRegression(limit=0.0)


@pytest.mark.parametrize("data", [text, images], ids=["text", "images"])
def test_clipped_weights_in_a_run_are_those_of_a_limit_that_binds(data):
    def weights(**settings):
        run = config(objective__name="weighted-regression", objective__scale=1.0, **settings)
        return played(run, data())[1].state.weights

    np.testing.assert_array_equal(weights(objective__limit=1e9), weights())
    assert np.abs(weights(objective__limit=1.5) - weights()).max() > 1e-3


@pytest.mark.parametrize("bad", [0.0, -1.0, float("inf"), float("nan")])
def test_a_scale_that_is_not_positive_is_refused(bad):
    with pytest.raises(ValueError, match="scale must be positive"):
        WeightedRegression(scale=bad)


# --- the sparse kernel ---


def sparse_events(seed=0, clients=(9, 0, 1, 16), words=30, k=5):
    """Logged events of several clients, with words that repeat within a client and within a row, and empty rows."""
    rng = np.random.default_rng(seed)
    n = sum(clients)
    lengths = rng.integers(0, 6, n)
    contexts = Ragged(
        np.concatenate([[0], np.cumsum(lengths)]),
        rng.integers(0, words, lengths.sum()).astype(np.int32),
        rng.random(lengths.sum()).astype(np.float32),
    )
    return Events(
        bounds=np.concatenate([[0], np.cumsum(clients)]),
        contexts=Contexts(contexts),
        actions=rng.integers(0, k, n),
        rewards=rng.random(n).astype(np.float32),
        propensities=rng.uniform(0.05, 1, n),
        versions=np.zeros(n, np.int32),
        fresh=np.ones(n, bool),
        targets=rng.random((n, k)).astype(np.float32),
    )


@pytest.mark.parametrize("clip_norm", [0.3, np.inf])
@pytest.mark.parametrize("reduction", ["mean", "half-sum"])
@pytest.mark.parametrize("name", EVERY)
def test_the_sparse_kernel_equals_automatic_differentiation(name, reduction, clip_norm):
    events, model = sparse_events(), build_model("linear", DataSpec("sparse", (30,), 5))
    layout = Layout.of(model.init(0))
    weights = layout.flatten(model.init(0), np.dtype(np.float64))
    parts = (layout, make(name, reduction), ClientSettings(0.2, batch_size=4, epochs=2))
    kernel = make_learner(model, *parts)
    assert isinstance(kernel, SparseLinearLearner)
    (ours, our_norms), (theirs, norms) = (
        learner.train(weights, events, clip_norm)
        for learner in (kernel, AutogradLearner(model, *parts))
    )
    np.testing.assert_allclose(our_norms, norms, rtol=0, atol=1e-12)
    assert our_norms[1] == 0
    totals = np.zeros((2, layout.size))
    for total, update in zip(totals, (ours, theirs), strict=True):
        update.add_to(total)
    np.testing.assert_allclose(totals[0], totals[1], rtol=0, atol=1e-12)
    assert np.abs(totals[0]).max() > 1e-3
    scores = [
        predictor.predict(weights, events.contexts).mean
        for predictor in (make_predictor(model, layout), TorchPredictor(model, layout))
    ]
    np.testing.assert_allclose(scores[0], scores[1], rtol=0, atol=1e-12)


def test_the_sparse_kernel_leaves_the_weights_it_was_given_alone():
    events, model = sparse_events(), build_model("linear", DataSpec("sparse", (30,), 5))
    layout = Layout.of(model.init(0))
    weights = layout.flatten(model.init(0), np.dtype(np.float64))
    before = weights.copy()
    make_learner(model, layout, Regression(), ClientSettings(0.2)).train(weights, events, 1.0)
    np.testing.assert_array_equal(weights, before)


# --- an objective of one's own ---


@dataclass(frozen=True)
class HuberLike:
    """A user's objective: `Regression` and a little of its fourth power."""

    fourth: float = 0.0

    def loss(self, scores, batch):
        error = scores.gather(1, batch.actions[:, None])[:, 0] - batch.rewards
        return (error**2 + self.fourth * error**4).mean()


@pytest.mark.parametrize("data", [text, images])
def test_an_objective_of_ones_own(data):
    """By its import path, on sparse and on dense data; where it is regression it trains as regression does."""
    dataset, name = data(), f"{__name__}:HuberLike"
    own, same, other = (
        weights_of(played(config(**settings), dataset)[1])["weight"]
        for settings in (
            {"objective__name": name},
            {"objective__name": "regression"},
            {"objective__name": name, "objective__fourth": 2.0},
        )
    )
    np.testing.assert_allclose(own, same, rtol=0, atol=1e-9)
    assert np.abs(own - other).max() > 1e-4


class OwnDoublyRobust:
    """The built-in objective, as a user would write it."""

    def targets(self, prediction, actions, rewards, propensities):
        targets, rows = prediction.mean.copy(), np.arange(len(actions))
        targets[rows, actions] += (rewards - targets[rows, actions]) / propensities
        return targets

    def loss(self, scores, batch):
        return ((scores - batch.targets) ** 2).mean()


class ShortTargets(OwnDoublyRobust):
    def targets(self, prediction, actions, rewards, propensities):
        return rewards


@pytest.mark.parametrize("data", [text, images], ids=["text", "images"])
def test_an_objective_of_ones_own_gets_the_targets_it_asks_for(data):
    own = played(config(objective__name="test_objectives:OwnDoublyRobust"), data())[1]
    built_in = played(config(objective__name="doubly-robust"), data())[1]
    start = own.experiment.initial_weights()
    np.testing.assert_allclose(own.state.weights, built_in.state.weights, rtol=0, atol=1e-11)
    assert np.abs(own.state.weights - start).max() > 1e-3


def test_targets_that_do_not_fit_are_refused_before_round_1():
    with pytest.raises(
        ConfigError, match=r"objective\.name: ShortTargets\.targets makes .* \(2,\)"
    ):
        build_experiment(config(objective__name="test_objectives:ShortTargets"), text())
