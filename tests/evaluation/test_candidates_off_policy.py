"""Off-policy evaluation where every decision has a list of its own."""

from contextlib import closing

import numpy as np
import pytest
import typer
from candidate_logs import logged, world
from typer.testing import CliRunner

from fedbandit import Agent, evaluate
from fedbandit.cli import evaluate as commands
from fedbandit.config import Config
from fedbandit.core.errors import ConfigError
from fedbandit.core.prediction import Prediction
from fedbandit.data import open_dataset
from fedbandit.deploy import DeviceModel
from fedbandit.engines import ThreadEngine
from fedbandit.evaluation.logs import (
    action_means,
    estimated_propensities,
    linear_rewards,
    records_of,
)
from fedbandit.ope import BUILT_IN as ESTIMATORS
from fedbandit.ope import Bootstrap, estimate
from fedbandit.policies import Greedy, Uniform
from fedbandit.studies.tuning import tune

app = typer.Typer()
app.command()(commands.train_offline)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return logged(tmp_path_factory.mktemp("log") / "candidates")


def truth_scores(split):
    """Predictions of a model that knows what every item pays."""
    _, pays = world()

    def predict(rows):
        shown = split.contexts(rows).candidates
        return Prediction(pays[shown.items], bounds=shown.bounds)

    return predict


def test_every_estimator_finds_what_another_policy_earns(log):
    dataset, uniform, best = log
    split = dataset.train
    rewards = linear_rewards(split, 0)
    for policy, truth in ((Uniform(), uniform), (Greedy(), best)):
        records = records_of(split, policy, 0, truth_scores(split), rewards)
        for name, one in estimate(records, ESTIMATORS, bootstrap=Bootstrap(200)).items():
            assert abs(one.value - truth) < 4 * max(one.standard_error, 0.01), (name, one.value)


def test_a_propensity_does_not_depend_on_the_decisions_beside_it(log):
    split = log[0].train
    whole = records_of(split, Greedy(), 0, truth_scores(split))
    shown = split.candidates
    for row in (0, 7, 200):
        items = shown.ids[shown.offsets[row] : shown.offsets[row + 1]]
        best = int(np.argmax(world()[1][items]))
        assert whole.target[row] == float(split.log.actions[row] == best)


def test_reward_models_speak_of_items_and_not_of_places(log):
    split = log[0].train
    rows, (_, pays) = np.arange(split.num_examples), world()
    items = split.candidates.ids
    for model in (action_means, linear_rewards):
        predicted = model(split, 0)(rows)
        assert predicted.shape == items.shape
        assert np.corrcoef(predicted, pays[items])[0, 1] > 0.7


def test_estimated_propensities_are_those_of_the_log_on_average(log):
    split = log[0].train
    for guess in estimated_propensities(split, 0):
        assert ((guess > 0) & (guess <= 1)).all()
    guess = estimated_propensities(split, 0)[0]
    assert np.corrcoef(guess, split.log.propensities)[0, 1] > 0.9
    assert abs((guess / split.log.propensities).mean() - 1) < 0.1


def test_the_command_evaluates_held_out_decisions(log):
    dataset, uniform, _ = log
    found = evaluate(dataset, "uniform")
    assert found["dr"].events == dataset.test.num_examples
    assert abs(found["dr"].value - uniform) < 4 * found["dr"].standard_error
    assert evaluate(dataset, "uniform", estimate_propensities=True)["snips"].value == pytest.approx(
        found["snips"].value, abs=0.05
    )
    with pytest.raises(ConfigError, match="constant takes a fixed action"):
        evaluate(dataset, {"name": "constant", "action": "a"})


def test_training_from_logs_over_candidates_finds_what_pays(log, tmp_path):
    dataset, uniform, best = log
    out = tmp_path / "model.safetensors"
    for objective in ("regression", "weighted-regression", "doubly-robust"):
        words = ["--objective", objective, "--rounds", "60", "--force"]
        words += ["--set", "client.learning_rate=2", "--set", "server.learning_rate=0.1"]
        result = CliRunner().invoke(app, [str(dataset.path), "-o", str(out), *words])
        assert result.exit_code == 0, result.output
        found = evaluate(dataset, "greedy", model=out)
        assert not found.cautions
        assert found["dr"].value > uniform + 0.6 * (best - uniform), objective


def test_training_from_estimated_propensities_says_so(log, tmp_path):
    dataset, out = log[0], tmp_path / "model.safetensors"
    words = ["--estimate-propensities", "--rounds", "2", "--version", "7"]
    result = CliRunner().invoke(app, [str(dataset.path), "-o", str(out), *words])
    assert "note: propensities are estimated" in result.output
    model = DeviceModel.from_bytes(out.read_bytes())
    assert (model.version, model.policy["epsilon"]) == (7, 0.1)
    with Agent(tmp_path / "device") as agent:
        agent.install(model)
        decision = agent.choose([1.0, 1.0], candidates=[3, 5, np.ones(4)])
        assert decision.propensity > 0.9 or decision.propensity < 0.04  # explores, and sensibly


def test_tuning_over_candidates_chooses_from_the_logs_of_one_period():
    photos = open_dataset("gallery")
    settings = {"rounds": 4, "deploy_every": 4, "clients_per_round": 12, "scenario": "scratch"}
    config = Config.build({**settings, "policy": {"name": "epsilon-greedy", "epsilon": 0.5}})
    with closing(ThreadEngine(1)) as engine:
        tuned = tune(
            config,
            photos,
            server_rates=[0.1],
            client_rates=[0.5],
            exploration=[0.1, 0.5],
            engine=engine,
        )
    assert {candidate.settings["policy.epsilon"] for candidate in tuned.candidates} == {0.1, 0.5}
    assert tuned.events > 0
    assert all(np.isfinite(candidate.estimate.value) for candidate in tuned.candidates)
