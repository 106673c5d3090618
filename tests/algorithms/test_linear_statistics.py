"""LinUCB and linear Thompson sampling from statistics: centralised ridge regression, once an event."""

import json

import numpy as np
import pytest
from core_samples import config, images, played, text

from fedbandit.acting import Actor
from fedbandit.algorithms import Statistics
from fedbandit.assembly.experiment import build_experiment
from fedbandit.core.errors import ConfigError
from fedbandit.core.process import Stopwatch
from fedbandit.data import FederatedDataset
from fedbandit.data.embedded import gallery
from fedbandit.deploy import DeviceModel
from fedbandit.deploy.device.model_in_use import open_model
from fedbandit.engines import ThreadEngine
from fedbandit.federated.memory import Memory
from fedbandit.federated.round import run_round
from fedbandit.models import DataSpec, Layout
from fedbandit.objectives import Regression
from fedbandit.policies import Floored, Ucb
from fedbandit.runs.run import execute

UCB = {
    "algorithm__name": "statistics",
    "policy__name": "ucb",
    "policy__alpha": 0.5,
    "policy__floor": 0.1,
    "rounds": 6,
}
POPULATION = {
    "mode": "population",
    "population__events_per_period": 4,
    "population__cache_size": 10,
    "population__pull_probability": 0.6,
}


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    """A function that opens a small gallery, where each decision has candidates of its own."""
    folder = gallery.generate(tmp_path_factory.mktemp("gallery") / "g", users=12)
    return lambda: FederatedDataset.open(folder)


@pytest.fixture(params=["dense", "text", "candidates"])
def data(request, photos):
    return {"dense": images, "text": text, "candidates": photos}[request.param]


def every_event(simulation):
    """All events of a run, each once: rows x, actions, rewards and rounds, by what was deployed then."""
    phase = simulation.experiment.bandit
    engine, found, seen = ThreadEngine(1), [], set()
    state = phase.start(simulation.experiment.initial_weights())
    memory, features = Memory(), phase.work.algorithm._features
    for number in range(1, simulation.state.round + 1):
        cohort = phase.cohorts.draw(number)
        events = phase.work.act(cohort, phase.work.broadcast(state))
        owners = np.repeat(cohort, np.diff(events.bounds))
        used = events if phase.work.reduction is None else phase.work.reduction(events)
        x = features(used.contexts.shared)
        logged = list(zip(owners.tolist(), events.times.tolist(), strict=True))
        for i, address in enumerate(logged):
            if address not in seen:
                found.append((x[i], int(used.actions[i]), float(events.rewards[i]), number))
        seen |= set(logged)
        state, _ = run_round(phase, state, engine, Stopwatch(), memory)
    np.testing.assert_array_equal(state.weights, simulation.state.weights)
    return found


def ridge(found, k, d, rounds, prior=1.0, keep=1.0):
    """A and b of each action in one place, with forgetting."""
    outer, products = np.tile(np.zeros((d, d)), (k, 1, 1)), np.zeros((k, d))
    for number in range(1, rounds + 1):
        outer, products = keep * outer, keep * products
        for x, action, reward, at in found:
            if at == number:
                outer[action] += np.outer(x, x)
                products[action] += reward * x
    return outer + prior * np.eye(d), products


@pytest.mark.parametrize("settings", [{}, {"algorithm__keep": 0.8, "algorithm__prior": 2.0}])
@pytest.mark.parametrize("mode", [{}, POPULATION], ids=["simple", "population"])
def test_it_is_centralised_ridge_regression(data, settings, mode):
    run = config(**UCB, algorithm__dimensions=12, **settings, **mode)
    _, simulation = played(run, data())
    experiment, algorithm = simulation.experiment, simulation.experiment.bandit.work.algorithm
    k, d = algorithm._features.actions, algorithm._features.size
    given = {key.removeprefix("algorithm__"): value for key, value in settings.items()}
    a, b = ridge(every_event(simulation), k, d, 6, **given)
    parts = simulation.experiment.acting.layout.split(simulation.state.weights)
    theta = np.linalg.solve(a, b[..., None])[..., 0]
    np.testing.assert_allclose(parts["theta"], theta, rtol=0, atol=1e-9)
    inverse = np.einsum("kij,kil->kjl", parts["root"], parts["root"])
    np.testing.assert_allclose(inverse, np.linalg.inv(a), rtol=0, atol=1e-9)
    assert np.abs(theta).max() > 0.01
    contexts = simulation.experiment.dataset.train.contexts(np.arange(5))
    told = Actor(
        simulation.experiment.bandit.work.predictor, simulation.state.weights, Ucb()
    ).predict(contexts)
    if data is images:
        x = algorithm._features(contexts.shared)
        width = np.sqrt(np.einsum("nd,kde,ne->nk", x, np.linalg.inv(a), x))
        np.testing.assert_allclose(told.width, width, rtol=0, atol=1e-9)
        np.testing.assert_allclose(told.mean, x @ theta.T, rtol=0, atol=1e-9)
    assert (told.heads is None) == (experiment.dataset.header.items is None)


@pytest.mark.parametrize("policy", ["ucb", "thompson", "softmax"])
def test_the_same_bits_on_any_threads_and_after_a_pause(data, policy, tmp_path, small_chunks):
    settings = {**UCB, "policy__name": policy, "rounds": 4, "dtype": "float32"}
    if policy == "thompson":
        del settings["policy__alpha"]
    run = config(**settings, algorithm__dimensions=8)
    found = []
    for threads in (1, 3):
        rounds, simulation = played(run, data(), engine=ThreadEngine(threads))
        found.append(([json.dumps(line) for line in rounds], simulation.state.weights.tobytes()))
    assert found[0] == found[1]
    for until in (2, None):
        execute(run, tmp_path / "run", dataset=data(), until=until)
    assert (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[1:] == found[0][0]


def test_a_row_does_not_depend_on_its_neighbours_and_a_device_predicts_the_same(tmp_path):
    _, simulation = played(config(**UCB), images())
    experiment, state = simulation.experiment, simulation.state
    contexts = experiment.dataset.train.contexts(np.arange(20))
    told = experiment.bandit.work.predictor.predict(state.weights, contexts)
    for i in range(20):
        alone = experiment.bandit.work.predictor.predict(state.weights, contexts.slice(i, i + 1))
        np.testing.assert_array_equal(alone.width, told.width[i : i + 1])
        np.testing.assert_array_equal(alone.mean, told.mean[i : i + 1])
    light = experiment.acting.predictor(light=True).predict(state.weights, contexts)
    np.testing.assert_array_equal(light.width, told.width)


def test_draws_are_those_of_the_posterior(photos):
    run = config(**UCB, algorithm__draws=4000, algorithm__dimensions=5)
    _, simulation = played(run, photos())
    parts = simulation.experiment.acting.layout.split(simulation.state.weights)
    inverse = parts["root"][0].T @ parts["root"][0]
    drawn = parts["draws"][:, 0]
    np.testing.assert_allclose(drawn.mean(axis=0), parts["theta"][0], atol=0.1)
    np.testing.assert_allclose(np.cov(drawn.T), inverse, atol=0.1)


def test_private_sums_are_clipped_together_symmetric_and_positive_definite():
    private = {
        "privacy__mechanism": "dp-fedavg",
        "privacy__noise_multiplier": 0.02,
        "clipping__norm": 1.0,
        "client__max_examples": 8,
    }
    run = config(**UCB, **private)
    _, simulation = played(run, images())
    algorithm, kept = simulation.experiment.bandit.work.algorithm, simulation.state.server_state
    assert (kept["outer"] == kept["outer"].transpose(0, 2, 1)).all()
    d = kept["outer"].shape[-1]
    assert algorithm.shift(6.0) == pytest.approx(1.1 * 0.02 * np.sqrt(2 * d * 6))
    parts = simulation.experiment.acting.layout.split(simulation.state.weights)
    values = np.linalg.eigvalsh(np.einsum("kij,kil->kjl", parts["root"], parts["root"]))
    assert (values > 0).all()
    assert (values <= 1 + 1e-9).all()  # A is at least λI
    quiet = {**UCB, **private, "privacy__noise_multiplier": 1e-9, "rounds": 1}
    _, one = played(config(**quiet, privacy__sampling="fixed"), images())
    kept = one.state.server_state
    sent = np.sqrt((kept["outer"] ** 2).sum() + (kept["products"] ** 2).sum())
    assert 0 < sent <= 6 * (1 + 1e-6)
    with pytest.raises(ConfigError, match=r"noise of size .* exceeds what 6 clients a round"):
        build_experiment(config(**UCB, **{**private, "privacy__noise_multiplier": 1.0}), images())
    with pytest.raises(ConfigError, match=r"set clipping\.norm"):
        build_experiment(
            config(**UCB, **{k: v for k, v in private.items() if "norm" not in k}), images()
        )


def test_what_cannot_be_is_refused_in_one_line():
    for settings, message in (
        ({"objective__name": "weighted-regression"}, r"needs objective\.name = regression"),
        ({"algorithm__keep": 0.0}, r"algorithm\.keep must be above 0"),
        ({"algorithm__prior": 0.0}, r"algorithm\.prior must be positive"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_experiment(config(**UCB | settings), text())
    large, layout = DataSpec("dense", (3000,), 4), Layout((("weight", (3000, 4)), ("bias", (4,))))
    with pytest.raises(ValueError, match=r"more than 4,194,304; set algorithm\.name"):
        Statistics(None, large, layout, Regression())
    with pytest.raises(ConfigError, match="does not say how sure it is"):
        build_experiment(config(**UCB | {"algorithm__name": "fedavg"}), text())


def test_a_device_acts_by_width_as_the_simulator_does():
    _, simulation = played(config(**UCB), images())
    experiment, state = simulation.experiment, simulation.state
    payload = DeviceModel.of_experiment(experiment, state.weights, 1).to_bytes()
    device = open_model(DeviceModel.from_bytes(payload), None, [])
    assert device.actor.rule == Floored(Ucb(0.5), 0.1)
    contexts, uniforms = experiment.dataset.train.contexts(np.arange(9)), np.linspace(0, 0.99, 9)
    here = Actor(experiment.bandit.work.predictor, state.weights, Floored(Ucb(0.5), 0.1))
    expected, found = (one.choose(contexts, uniforms) for one in (here, device.actor))
    np.testing.assert_array_equal(found.actions, expected.actions)
    np.testing.assert_array_equal(found.propensities, expected.propensities)
