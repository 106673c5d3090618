"""MLPs, and linear models on dense features, trained by hand, against automatic differentiation."""

import numpy as np
import pytest
from learner_agreement import (
    ACTIONS,
    OBJECTIVES,
    assert_same_training,
    events_of,
    learners,
    predictors,
    sparse,
)

from fedbandit.core.contexts import Contexts
from fedbandit.federated.learners.linear import DenseLinearLearner
from fedbandit.federated.learners.networks import ChosenMlpLearner, DenseLearner
from fedbandit.objectives import Regression

MODELS = {"linear": DenseLinearLearner, "mlp": ChosenMlpLearner}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: f"{type(o).__name__}-{o.reduction}")
def test_trains_like_automatic_differentiation(model, objective):
    chosen, *_ = learners(model, (6, 5), objective)
    by_hand = DenseLearner if objective.supervised and model == "mlp" else MODELS[model]
    assert type(chosen) is by_hand
    assert_same_training(model, (6, 5), objective)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "settings", [{"batch_size": 1}, {"batch_size": 5, "epochs": 3}, {"batch_size": 64}], ids=str
)
def test_any_batch_size_and_a_pull(model, settings):
    assert_same_training(model, (11,), Regression(), pull=0.3, **settings)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 2e-5)])
@pytest.mark.parametrize("count", [0, 1, 5000])
def test_scores_like_the_model(model, count, dtype, tolerance):
    fast, plain, weights_as = predictors(model, (4, 3))
    weights, contexts = (
        weights_as(dtype),
        np.random.default_rng(2).random((count, 4, 3)).astype(np.float32),
    )
    contexts[:1] = 0  # has no direction
    scores = fast.predict(weights, Contexts(contexts)).mean
    assert scores.dtype == weights.dtype
    if count:
        assert scores.shape == (count, ACTIONS)
        np.testing.assert_allclose(
            scores, plain.predict(weights, Contexts(contexts)).mean, rtol=0, atol=tolerance
        )


@pytest.mark.parametrize("model", MODELS)
def test_a_client_that_diverges_is_left_out(model):
    fast, _, weights_as = learners(model, (8, 8), Regression(), learning_rate=1e30)
    update, norms = fast.train(weights_as("float32"), events_of((8, 8)), 1.0)
    assert not np.isfinite(norms[0])
    assert np.isfinite(update.vector).all()


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: f"{type(o).__name__}-{o.reduction}")
def test_an_mlp_on_sparse_features_trains_like_automatic_differentiation(objective):
    chosen, *_ = learners("mlp", (30,), objective, "sparse")
    assert type(chosen) is (DenseLearner if objective.supervised else ChosenMlpLearner)
    assert_same_training("mlp", (30,), objective, kind="sparse")


@pytest.mark.parametrize(
    "settings", [{"batch_size": 1}, {"batch_size": 5, "epochs": 3}, {"batch_size": 64}], ids=str
)
def test_an_mlp_on_sparse_features_with_any_batch_size_and_a_pull(settings):
    assert_same_training("mlp", (30,), Regression(), pull=0.3, kind="sparse", **settings)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 2e-5)])
@pytest.mark.parametrize("count", [0, 1, 5000])
def test_an_mlp_scores_sparse_features_as_dense_ones(count, dtype, tolerance):
    fast, plain, weights_as = predictors("mlp", (12,), "sparse")
    weights, contexts = (
        weights_as(dtype),
        np.random.default_rng(2).random((count, 12)).astype(np.float32),
    )
    contexts[:1], contexts[contexts < 0.7] = 0, 0  # rows without any feature, too
    scores = fast.predict(weights, Contexts(sparse(contexts))).mean
    if count:
        same, *_ = predictors("mlp", (12,))
        np.testing.assert_allclose(
            scores, same.predict(weights, Contexts(contexts)).mean, rtol=0, atol=tolerance
        )
        np.testing.assert_allclose(
            scores, plain.predict(weights, Contexts(sparse(contexts))).mean, rtol=0, atol=tolerance
        )
