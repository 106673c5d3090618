"""Whole runs of the real engine in float64 against the readable reference: the same metrics and weights to 1e-9."""

import numpy as np
import pytest
from core_samples import config, images, played, text, weights_of

from fedbandit import reference
from fedbandit.assembly.experiment import build_experiment
from fedbandit.data import FederatedDataset
from fedbandit.data.embedded import gallery

pytestmark = pytest.mark.usefixtures("small_chunks")

TOLERANCE = {"rtol": 0, "atol": 1e-9}
DATA = {"text": text, "images": images, "plain images": lambda: images(cased=False)}


def assert_agrees(data="text", **settings):
    dataset, chosen = DATA[data](), config(**settings)
    expected, expected_weights = reference.run(chosen, dataset)
    rounds, simulation = played(chosen, dataset)
    assert len(rounds) == len(expected) == chosen.rounds
    for ours, theirs in zip(rounds, expected, strict=True):
        for name, value in theirs.items():
            if value is None:
                assert ours[name] is None, name
            else:
                np.testing.assert_allclose(
                    ours[name], value, **TOLERANCE, err_msg=f"{name}, round {ours['round']}"
                )
    weights = weights_of(simulation)
    assert weights.keys() == expected_weights.keys()
    for name, value in expected_weights.items():
        np.testing.assert_allclose(weights[name], value, **TOLERANCE, err_msg=name)
    return expected


POLICIES = [
    {"policy__name": "greedy"},
    {"policy__name": "epsilon-greedy", "policy__epsilon": 0.3},
    {"policy__name": "softmax", "policy__beta": 0.1},
    {"policy__name": "falcon", "policy__mu": 8.0, "policy__gamma": 20.0},
    {
        "policy__name": "falcon",
        "policy__mu": 1.5,
        "policy__gamma": 2.0,
    },  # the others sum to more than 1
]


@pytest.mark.parametrize("data", ["text", "images"])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: "-".join(map(str, p.values())))
def test_policies(data, policy):
    assert_agrees(data, **policy)


@pytest.mark.parametrize(
    "model", [("text", "linear"), ("images", "linear"), ("images", "mlp")], ids="-".join
)
@pytest.mark.parametrize("reduction", ["mean", "half-sum"])
@pytest.mark.parametrize(
    "objective", ["regression", "weighted-regression", "cross-entropy", "weighted-cross-entropy"]
)
def test_objectives(model, reduction, objective):
    data, name = model
    settings = {
        "model__name": name,
        "objective__name": objective,
        "objective__reduction": reduction,
    }
    if name == "mlp":
        settings["model__hidden"] = 7
    assert_agrees(
        data,
        policy__name="epsilon-greedy",
        policy__epsilon=0.4,
        client__learning_rate=0.1,
        **settings,
    )


def test_importance_weights_of_softmax_and_with_a_scale():
    assert_agrees("text", objective__name="weighted-regression")
    assert_agrees("images", objective__name="weighted-cross-entropy", objective__scale=0.25)


@pytest.mark.parametrize("data", ["text", "images"])
@pytest.mark.parametrize("parameters", [{}, {"limit": 3.0}, {"reduction": "half-sum"}], ids=str)
def test_doubly_robust(data, parameters):
    settings = {f"objective__{key}": value for key, value in parameters.items()}
    assert_agrees(data, objective__name="doubly-robust", client__learning_rate=0.05, **settings)


@pytest.mark.parametrize("data", ["text", "images"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd", "momentum", "adagrad", "yogi"])
def test_server_optimizers(data, optimizer):
    assert_agrees(data, server__optimizer=optimizer)


def test_server_optimizers_with_parameters_of_their_own():
    assert_agrees("text", server__optimizer="momentum", server__momentum=0.5)
    assert_agrees(
        "text",
        server__optimizer="adam",
        server__beta_1=0.5,
        server__beta_2=0.9,
        server__epsilon=1e-3,
    )


@pytest.mark.parametrize("data", ["text", "images"])
@pytest.mark.parametrize(
    "clipping",
    [
        {"clipping__quantile": 0.5, "clipping__initial": 0.3, "clipping__rate": 0.7},
        {"clipping__norm": 0.2},
        {"clipping__enabled": False},
    ],
    ids=["adaptive", "fixed", "none"],
)
def test_clipping(data, clipping):
    rounds = assert_agrees(data, **clipping)
    fractions = {line["unclipped"] for line in rounds}
    assert (
        fractions == {1.0} if "clipping__enabled" in clipping else fractions - {1.0}
    )  # otherwise some were clipped


@pytest.mark.parametrize("data", ["text", "images", "plain images"])
@pytest.mark.parametrize("scenario", ["scratch", "init", "init-shift", "init-shift-released"])
def test_scenarios(data, scenario):
    assert_agrees(data, scenario=scenario)


@pytest.mark.parametrize(
    ("data", "model"), [("text", "linear"), ("images", "linear"), ("images", "mlp")]
)
@pytest.mark.parametrize(
    "pretraining",
    [
        {"objective": "full-information", "client_learning_rate": 0.8, "seed": 5},
        {"objective": "full-information-cross-entropy", "server_learning_rate": 0.01},
        {"server_optimizer": "sgd", "server_learning_rate": 0.9},
        {"reduction": "half-sum", "client_learning_rate": 0.1},
        {"clients_per_round": 4, "max_examples": 5, "clip_norm": 0.05},
        {"clients_per_round": 99, "max_examples": "all", "clip_norm": "none"},
    ],
    ids=["squared", "cross-entropy", "own optimizer", "half-sum", "own sizes", "all, not clipped"],
)
def test_pretraining(data, model, pretraining):
    settings = {f"pretraining__{key}": value for key, value in pretraining.items()}
    assert_agrees(data, scenario="init", model__name=model, **settings)


@pytest.mark.parametrize("data", ["text", "images"])
@pytest.mark.parametrize(
    "client", [{"epochs": 2}, {"max_examples": 7}, {"batch_size": 1}, {"batch_size": 64}], ids=str
)
def test_local_training(data, client):
    assert_agrees(data, **{f"client__{key}": value for key, value in client.items()})


@pytest.mark.parametrize("data", ["text", "images"])
@pytest.mark.parametrize(
    "population",
    [
        {"events_per_period": 5, "cache_size": 12},
        {"events_per_period": 4, "cache_size": 10, "pull_probability": 0.4},
        {"events_per_period": 6, "cache_size": 3, "pull_probability": 0.3, "longest_lag": 2},
    ],
    ids=["caches", "stale models", "small cache"],
)
def test_population(data, population):
    settings = {f"population__{key}": value for key, value in population.items()}
    rounds = assert_agrees(data, mode="population", rounds=9, **settings)
    assert rounds[-1]["model_version"] == 4


@pytest.mark.parametrize("data", ["text", "images"])
def test_population_meets_no_more_examples_than_a_client_may(data):
    capped = {
        "client__max_examples": 2,
        "population__events_per_period": 5,
        "population__cache_size": 12,
    }
    rounds = assert_agrees(data, mode="population", rounds=5, **capped)
    assert max(line["events"] for line in rounds) <= 2 * config().clients_per_round


def test_population_after_pretraining_with_epochs():
    assert_agrees(
        "images", mode="population", scenario="init-shift", model__name="mlp", client__epochs=2
    )


@pytest.mark.parametrize("data", ["text", "images"])
def test_baseline_without_training(data):
    rounds = assert_agrees(data, scenario="init", training=False, policy__name="greedy")
    assert {line["update_norm"] for line in rounds} == {0.0}


@pytest.mark.parametrize("data", ["text", "images"])
@pytest.mark.parametrize(
    "settings",
    [
        {"scenario": "scratch", "environment__least": 0.1, "environment__most": 0.7},
        {"scenario": "init-shift"},
        {"mode": "population", "rounds": 9, "environment__most": 0.6},
    ],
    ids=["scratch", "init-shift", "population"],
)
def test_clicks(data, settings):
    rounds = assert_agrees(data, environment__name="bernoulli", **settings)
    assert all("regret" in line for line in rounds)


def test_what_the_runs_above_are_made_of():
    """Several chunks in every round, chunks of several clients, last smaller batches, a client without events."""
    for data in (text(), images()):
        phase = build_experiment(config(), data).bandit
        cohorts = [phase.cohorts.draw(t) for t in range(1, 6)]
        for cohort in cohorts:
            chunks = phase.work.chunks(cohort)
            assert len(chunks) > 1
            assert max(len(chunk) for chunk in chunks) > 1
        drawn = data.train.sizes()[np.concatenate(cohorts)]
        assert (drawn == 0).any()
        assert (drawn % config().client.batch_size > 0).any()


@pytest.mark.parametrize(
    "settings",
    [
        {"privacy__mechanism": "dp-fedavg"},
        {"scenario": "drift"},
        {"environment__name": "linear"},
        {"environment__missing": 0.1},
        {"model__name": "cnn"},
        {"objective__name": "m:mine"},
    ],
)
def test_what_the_reference_does_not_have_is_refused(settings):
    with pytest.raises(ValueError, match="the reference has no"):
        reference.run(config(**settings), images())


def test_cohorts_without_any_events():
    """One client a round, and two of the clients have no examples: some rounds have no events and no reward."""
    rounds = assert_agrees("text", clients_per_round=1, rounds=25)
    rewards = [line["reward"] for line in rounds]
    assert None in rewards
    assert any(reward is not None for reward in rewards)


@pytest.mark.parametrize("data", ["text", "images", "candidates"])
@pytest.mark.parametrize("environment", ["labels", "bernoulli"])
def test_linucb_over_fixed_actions_and_candidates(data, environment, tmp_path):
    if data == "candidates":
        folder = gallery.generate(tmp_path / "gallery", users=12, dimension=3, shown=4)
        dataset = FederatedDataset.open(folder)
    else:
        dataset = DATA[data]()
    chosen = config(
        algorithm__name="statistics", algorithm__prior=0.5, algorithm__keep=0.9,
        algorithm__dimensions=500, policy__name="ucb", policy__alpha=0.4, policy__floor=0.1,
        environment__name=environment, rounds=6, client__max_examples=6,
    )  # fmt: skip
    expected, thetas = reference.run_linucb(chosen, dataset)
    rounds, simulation = played(chosen, dataset)
    for ours, theirs in zip(rounds, expected, strict=True):
        for name, value in theirs.items():
            np.testing.assert_allclose(ours[name], value, **TOLERANCE, err_msg=name)
    found = simulation.experiment.acting.layout.split(simulation.state.weights)["theta"]
    np.testing.assert_allclose(found, thetas, **TOLERANCE)
    assert np.abs(found).max() > 0.01
