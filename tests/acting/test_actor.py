"""Parts of a user's own in acting: rules that ask for contexts, and models that say how sure they are."""

from dataclasses import dataclass

import numpy as np
import pytest
from builders import random_text
from small_runs import small_config

from fedbandit import simulate
from fedbandit.acting import Actor, Personal, make_predictor
from fedbandit.assembly.experiment import build_experiment
from fedbandit.core.contexts import Contexts
from fedbandit.core.errors import ConfigError
from fedbandit.core.prediction import Prediction
from fedbandit.data import open_dataset
from fedbandit.data.embedded import gallery
from fedbandit.evaluation.metrics import policy_value
from fedbandit.models import DataSpec, Layout, Model, build_model
from fedbandit.policies import Greedy, Softmax


@dataclass(frozen=True)
class Sees:
    """Uniform, and refuses to act without the contexts of just these decisions."""

    def probabilities(self, prediction, available=None, *, contexts):
        assert len(contexts) == len(prediction.mean)
        if contexts.candidates is not None:
            assert (contexts.candidates.counts == prediction.num_actions).all()
        return np.full(prediction.mean.shape, 1 / prediction.num_actions)


@dataclass(frozen=True)
class Hopeful:
    """Takes the action with the best mean + `times` widths."""

    times: float = 1.0

    def probabilities(self, prediction, available=None):
        return Greedy().probabilities(
            Prediction(prediction.mean + self.times * prediction.width), available
        )


def sure(data: DataSpec) -> Model:
    """Scores of zero, and one action that is less sure than the others."""

    def predict(params, contexts):
        width = np.zeros((len(contexts), data.num_actions), params["bias"].dtype)
        width[:, 1] = 1
        return Prediction(params["bias"] + np.zeros_like(width), width=width)

    def scores(params, x):
        return params["bias"].expand(len(x.offsets) - 1, -1)

    return Model(lambda seed: {"bias": np.zeros(data.num_actions)}, scores, predict=predict)


@pytest.mark.parametrize("floor", [{}, {"floor": 0.1}])
def test_a_rule_that_asks_for_contexts_is_given_them_in_runs(floor):
    config = small_config(rounds=3, policy={"name": f"{__name__}:Sees", **floor})
    dataset = random_text()
    found = simulate(config, dataset=dataset).collect()
    assert found["propensity"][-1] == pytest.approx(1 / dataset.header.num_actions)


def test_a_rule_over_candidates_is_given_the_contexts_of_its_block(tmp_path):
    dataset = open_dataset(str(gallery.generate(tmp_path / "gallery", users=20)))
    config = small_config(rounds=2, policy={"name": f"{__name__}:Sees"})
    assert len(simulate(config, dataset=dataset).collect()["reward"]) == 2


def test_a_model_that_says_how_sure_it_is_is_believed_in_runs():
    config = small_config(
        rounds=2,
        deploy_every=2,
        model={"name": f"{__name__}:sure"},
        policy={"name": f"{__name__}:Hopeful"},
    )
    assert simulate(config, dataset=random_text()).collect()["propensity"][-1] == 1


def test_an_actor_acts_by_the_widths_of_its_model():
    model = sure(DataSpec("dense", (3,), 4))
    layout = Layout.of(model.init(0))
    actor = Actor(make_predictor(model, layout, light=True), np.zeros(4), Hopeful())
    chosen = actor.choose(Contexts(np.ones((5, 3))), np.full(5, 0.5))
    np.testing.assert_array_equal(chosen.actions, 1)
    np.testing.assert_array_equal(actor.distribution(Contexts(np.ones((2, 3))))[1][:, 1], 1)


def test_the_value_of_a_rule_that_asks_for_contexts_is_measured():
    split, uniform = random_text().train, np.full(4, 0.25)

    def truth(rows):
        return np.tile(uniform, (len(rows), 1))

    found = policy_value(split, range(3), Sees(), lambda rows: Prediction(truth(rows)), truth)
    assert found == pytest.approx(0.25)


def test_a_model_whose_prediction_fails_is_named():
    config = small_config(model={"name": f"{__name__}:broken"})
    with pytest.raises(ConfigError, match=r"model\.name: .*:broken does not predict: 'weights'"):
        build_experiment(config, random_text())


def broken(data: DataSpec) -> Model:
    return Model(lambda seed: {"bias": np.zeros(1)}, predict=lambda params, x: params["weights"])


def test_each_row_is_predicted_with_the_weights_of_its_owner():
    model = build_model("linear", DataSpec("dense", (3,), 2))
    layout, rng = Layout.of(model.init(0)), np.random.default_rng(0)
    deployed, mine, yours = rng.normal(size=(3, layout.size))
    contexts, predictor = Contexts(rng.normal(size=(6, 3))), make_predictor(model, layout)
    actor = Actor(predictor, deployed, Softmax(0.3))
    personal = Personal([mine, yours], np.array([0, -1, 1, 1, 0, -1]))
    for row, weights in enumerate((mine, deployed, yours, yours, mine, deployed)):
        alone = predictor.predict(weights, contexts.slice(row, row + 1))
        found = actor.predict(contexts, personal)
        np.testing.assert_array_equal(found.mean[row : row + 1], alone.mean)
    chosen = actor.choose(contexts, np.full(6, 0.5), personal=personal)
    np.testing.assert_array_equal(chosen.prediction.mean, found.mean)
    expected = Softmax(0.3).probabilities(found)[np.arange(6), chosen.actions]
    np.testing.assert_array_equal(chosen.propensities, expected)
