"""Training on a device in numpy: the simulator's learners come to the same, and so does the update rule itself."""

from dataclasses import replace

import numpy as np
import pytest

from fedbandit import objectives
from fedbandit.acting import make_predictor
from fedbandit.core.contexts import Contexts
from fedbandit.core.errors import DataError
from fedbandit.core.ragged import Ragged
from fedbandit.deploy.device.training import LinearLearner, device_learner
from fedbandit.events import Events
from fedbandit.federated.learners.base import AutogradLearner, ClientSettings
from fedbandit.federated.learners.linear import DenseLinearLearner, SparseLinearLearner
from fedbandit.federated.learners.make_learner import Trainable, make_learner
from fedbandit.models import DataSpec, Layout, build_model

K, WORDS, SHAPE = 5, 12, (3, 4)
OBJECTIVES = {
    "regression": objectives.Regression,
    "weighted": lambda reduction: objectives.WeightedRegression(reduction, scale=0.3),
    "cross-entropy": objectives.CrossEntropy,
    "weighted cross-entropy": lambda reduction: objectives.WeightedCrossEntropy(
        reduction, scale=0.3
    ),
}


def some_events(kind: str, clients: tuple[int, ...] = (23, 0, 7)) -> Events:
    """Events of several clients, one of whom has none; texts may be empty, and words come back."""
    rng = np.random.default_rng(3)
    n = sum(clients)
    contexts: np.ndarray | Ragged = rng.normal(size=(n, *SHAPE)).astype(np.float32)
    if kind == "sparse":
        rows = [np.sort(rng.choice(WORDS, rng.integers(0, 6), replace=False)) for _ in range(n)]
        ids = np.concatenate(rows).astype(np.int32)
        contexts = Ragged(
            np.cumsum([0, *map(len, rows)]), ids, rng.random(len(ids)).astype(np.float32)
        )
    return Events(
        bounds=np.cumsum([0, *clients]),
        contexts=Contexts(contexts),
        actions=rng.integers(0, K - 1, n),  # the last action is never chosen
        rewards=rng.random(n).astype(np.float32),
        propensities=rng.uniform(0.1, 1, n),
        versions=np.zeros(n, np.int32),
        fresh=np.ones(n, bool),
    )


def a_model(kind: str):
    model = build_model("linear", DataSpec(kind, (WORDS,) if kind == "sparse" else SHAPE, K))
    layout = Layout.of(model.init(0))
    weights = np.random.default_rng(1).normal(scale=0.3, size=layout.size)
    return model, layout, weights


def trained(learner, weights, events, clip_norm):
    total = np.zeros_like(weights)
    update, norms = learner.train(weights, events, clip_norm)
    update.add_to(total)
    return total, norms


@pytest.mark.parametrize("kind", ["sparse", "dense"])
@pytest.mark.parametrize("reduction", ["mean", "half-sum"])
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("clip_norm", [0.02, np.inf])
def test_numpy_and_the_simulators_learners_agree(kind, reduction, objective, clip_norm):
    model, layout, weights = a_model(kind)
    events, settings = some_events(kind), ClientSettings(learning_rate=0.1, batch_size=5, epochs=3)
    made = OBJECTIVES[objective](reduction)
    reference = make_learner(model, layout, made, settings)
    assert isinstance(reference, SparseLinearLearner if kind == "sparse" else DenseLinearLearner)
    expected, expected_norms = trained(reference, weights, events, clip_norm)
    found, norms = trained(LinearLearner(layout, made, settings), weights, events, clip_norm)
    assert (expected_norms[[0, 2]] > 0.02).all()  # so that the smaller clip norm clips both
    assert norms[1] == 0
    np.testing.assert_allclose(norms, expected_norms, atol=1e-12, rtol=0)
    np.testing.assert_allclose(found, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_scores_are_those_of_the_simulators_learners(kind):
    model, layout, weights = a_model(kind)
    contexts = some_events(kind).contexts
    found, expected = (
        make_predictor(model, layout, light=light).predict(weights, contexts).mean
        for light in (True, False)
    )
    np.testing.assert_allclose(found, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", ["sparse", "dense"])
@pytest.mark.parametrize("pull", [0.0, 0.7])
def test_every_step_follows_the_gradient_and_the_pull(kind, pull):
    """The update rule once more, event by event on the whole matrix."""
    _, layout, received = a_model(kind)
    events, settings = (
        some_events(kind, (11,)),
        ClientSettings(learning_rate=0.2, batch_size=4, epochs=2),
    )
    rows = np.zeros((11, WORDS))
    x = events.contexts.shared
    if isinstance(x, Ragged):
        rows[x.row_of_entry(), x.ids] = x.values
    else:
        flat = x.reshape(11, -1).astype(np.float64)
        rows = flat / np.linalg.norm(flat, axis=1, keepdims=True)
    start = layout.split(received)
    weight, bias = start["weight"].copy(), start["bias"].copy()
    for _ in range(2):
        for begin in range(0, 11, 4):
            gradient, on_bias = pull * (weight - start["weight"]), pull * (bias - start["bias"])
            batch = range(begin, min(begin + 4, 11))
            for i in batch:
                action = events.actions[i]
                slope = (
                    2
                    / len(batch)
                    * (rows[i] @ weight[:, action] + bias[action] - events.rewards[i])
                )
                gradient[:, action] += slope * rows[i]
                on_bias[action] += slope
            weight, bias = weight - 0.2 * gradient, bias - 0.2 * on_bias
    learner = LinearLearner(layout, objectives.Regression(), settings)
    (moved,) = learner.updates(received, events, pull)
    np.testing.assert_allclose(
        received + moved, np.concatenate([weight.ravel(), bias]), atol=1e-12, rtol=0
    )
    _, norms = learner.train(received, events, np.inf, pull)
    assert norms[0] == pytest.approx(np.linalg.norm(moved), abs=1e-12)


@pytest.mark.parametrize("kind", ["sparse", "dense"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_client_that_diverges_is_left_out(kind, dtype):
    _, layout, weights = a_model(kind)
    events = some_events(kind)
    settings = ClientSettings(learning_rate=1e30, batch_size=1, epochs=20)
    total, norms = trained(
        LinearLearner(layout, objectives.Regression(), settings), weights.astype(dtype), events, 1.0
    )
    assert not np.isfinite(norms[0])
    assert np.isfinite(total).all()


def test_float32_stays_float32():
    _, layout, weights = a_model("sparse")
    events, settings = some_events("sparse"), ClientSettings(0.1)
    narrow, _ = trained(
        LinearLearner(layout, objectives.Regression(), settings), np.float32(weights), events, 1.0
    )
    wide, _ = trained(
        LinearLearner(layout, objectives.Regression(), settings), weights, events, 1.0
    )
    assert narrow.dtype == np.float32
    np.testing.assert_allclose(narrow, wide, atol=1e-6)


def test_other_models_and_objectives_are_trained_by_torch():
    model, layout, _ = a_model("dense")

    class Mine:
        def loss(self, scores, batch):
            return scores.sum()

    settings = ClientSettings(0.1)
    own = replace(model, kernel=None)
    for name, objective in (("linear", Mine()), ("my_module:linear", objectives.Regression())):
        assert isinstance(
            device_learner(name, Trainable(own, layout), objective, settings), AutogradLearner
        )


def test_an_objective_that_needs_unlogged_rewards_is_refused():
    model, layout, _ = a_model("dense")
    with pytest.raises(
        DataError, match="DoublyRobust needs rewards of actions that devices do not log"
    ):
        device_learner(
            "linear", Trainable(model, layout), objectives.DoublyRobust(), ClientSettings(0.1)
        )


def test_training_leaves_the_log_and_the_weights_alone():
    _, layout, weights = a_model("sparse")
    events = some_events("sparse")
    kept, before = weights.copy(), replace(events, rewards=events.rewards.copy())
    trained(
        LinearLearner(layout, objectives.Regression(), ClientSettings(0.1)), weights, events, 1.0
    )
    np.testing.assert_array_equal(weights, kept)
    np.testing.assert_array_equal(events.rewards, before.rewards)
