"""Diagonal Newton against ten lines of numpy; the same bits wherever it runs; what it refuses."""

import json
from dataclasses import replace

import numpy as np
import pytest
from core_samples import config, images, played, text

from fedbandit.algorithms import diag_newton
from fedbandit.assembly.experiment import build_experiment
from fedbandit.core.errors import ConfigError
from fedbandit.core.ragged import Ragged
from fedbandit.engines import ThreadEngine
from fedbandit.runs.run import execute
from fedbandit.simulation import simulate

NEWTON = {"algorithm__name": "diag-newton"}
POPULATION = {
    "mode": "population",
    "population__events_per_period": 4,
    "population__cache_size": 10,
    "population__pull_probability": 0.6,
}


def matrix(contexts, features):
    """Contexts as rows of the model's features, with a 1 behind them for the bias."""
    x = np.ones((len(contexts), features + 1))
    if isinstance(contexts, Ragged):
        x[:, :-1] = 0
        np.add.at(x, (contexts.row_of_entry(), contexts.ids), contexts.values)
    else:
        flat = contexts.reshape(len(contexts), -1).astype(float)
        x[:, :-1] = flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-12)
    return x


def by_hand(simulation, rounds, rate, prior, keep, bias):
    """The weights and H after some rounds from the simulation's initial state, every weight at every step."""
    phase, state = simulation.experiment.bandit, simulation.state
    work, k = phase.work, phase.work.num_actions
    w, total = np.split(state.weights, 2)[0].reshape(-1, k), 0.0
    for number in range(1, rounds + 1):
        broadcast = work.broadcast(state)
        events = work.act(phase.cohorts.draw(number), broadcast)
        x, chosen = matrix(events.contexts.shared, len(w) - 1), np.eye(k)[events.actions]
        rewards = events.rewards[:, None] if events.targets is None else events.targets
        counts = work.learner.objective.weights(events.propensities)[:, None]
        counts = counts * (chosen if events.targets is None else np.ones_like(chosen))
        total = keep * total + (x**2).T @ counts
        rates = np.append(np.full(len(w) - 1, rate), bias * rate)[:, None]
        w = w - rates * (x.T @ (counts * (x @ w - rewards))) / (prior + total)
        deployed = dict(state.deployed)
        if number % phase.deploy_every == 0:
            whole = np.concatenate([w.reshape(-1), (prior + total).reshape(-1)])
            version = replace(deployed[max(deployed)], weights=whole)
            deployed[number // phase.deploy_every] = version
        state = replace(state, round=number, deployed=deployed)
    return w.reshape(-1), total.reshape(-1)


@pytest.mark.parametrize("mode", [{}, POPULATION], ids=["simple", "population"])
@pytest.mark.parametrize("scenario", ["scratch", "init-shift"])
@pytest.mark.parametrize("objective", ["regression", "weighted-regression", "doubly-robust"])
@pytest.mark.parametrize("data", [text, images], ids=["text", "images"])
def test_it_is_the_plain_rule(data, objective, scenario, mode, small_chunks):
    numbers = {"rate": 0.3, "prior": 0.7, "keep": 0.9, "bias": 0.4}
    settings = {f"algorithm__{name}": value for name, value in numbers.items()}
    settings |= {"policy__name": "epsilon-greedy", "policy__epsilon": 0.5, "scenario": scenario}
    chosen = config(**NEWTON, **settings, **mode, objective__name=objective, rounds=6)
    expected, total = by_hand(simulate(chosen, data()), 6, **numbers)
    _, simulation = played(chosen, data())
    weights, precision = np.split(simulation.state.weights, 2)
    np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-9)
    np.testing.assert_allclose(precision, 0.7 + total, rtol=0, atol=1e-9)
    moved = np.abs(weights - np.split(simulate(chosen, data()).state.weights, 2)[0])
    assert moved.max() > 1e-3


@pytest.mark.parametrize("objective", ["regression", "weighted-regression"])
def test_sums_in_one_loop_are_those_of_single_clients(objective):
    experiment = build_experiment(config(**NEWTON, objective__name=objective), text())
    phase, algorithm = experiment.bandit, experiment.bandit.work.algorithm
    state = phase.start(experiment.initial_weights())
    events = phase.work.act(np.arange(8), phase.work.broadcast(state))
    weights = algorithm.broadcast(state.server_state)["weights"]
    what = (algorithm.layout, algorithm.objective, weights, events)
    *sums, norms = diag_newton.curvature_sums(*what, 0.5)
    singles = list(diag_newton.curvatures(*what))
    totals = np.zeros((2, len(weights)))
    for one, norm in zip(singles, norms, strict=True):
        if one is None:
            assert norm == 0
            continue
        both = np.array([np.asarray(part) for part in one])
        np.testing.assert_allclose(np.linalg.norm(both), norm, rtol=1e-12)
        totals += both * min(1, 0.5 / norm)
    assert (norms > 0.5).any()
    for total, found in zip(totals, sums, strict=True):
        added = np.zeros_like(total)
        found.add_to(added)
        np.testing.assert_allclose(added, total, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"objective__name": "doubly-robust"},
        {"compression__name": "quantize"},
        {"aggregation__name": "trimmed-mean"},
        POPULATION,
    ],
    ids=["plain", "doubly robust", "quantize", "trimmed mean", "population"],
)
@pytest.mark.parametrize("data", [text, images], ids=["text", "images"])
def test_the_same_bits_on_any_threads_and_after_a_pause(data, settings, tmp_path, small_chunks):
    chosen = config(**NEWTON, **settings, dtype="float32", rounds=5)
    found = []
    for threads in (1, 3):
        rounds, simulation = played(chosen, data(), engine=ThreadEngine(threads))
        found.append(([json.dumps(line) for line in rounds], simulation.state.weights.tobytes()))
    assert found[0] == found[1]
    for until in (2, None):
        execute(chosen, tmp_path / "run", dataset=data(), until=until)
    assert (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[1:] == found[0][0]


def test_nothing_is_clipped_unless_a_norm_is_set():
    plain = played(config(**NEWTON), text())[0]
    assert {line["clip_norm"] for line in plain} == {None}
    clipped = played(config(**NEWTON, clipping__norm=0.5), text())[0]
    assert {line["clip_norm"] for line in clipped} == {0.5}
    assert min(line["unclipped"] for line in clipped) < 1
    assert {line["clip_norm"] for line in played(config(), text())[0]} != {None}  # FedAvg is


@pytest.mark.parametrize("data", [text, images], ids=["text", "images"])
def test_it_can_be_private(data):
    private = {"privacy__mechanism": "dp-fedavg", "privacy__noise_multiplier": 1.0}
    rounds, simulation = played(config(**NEWTON, **private, clipping__norm=1.0), data())
    assert rounds[-1]["epsilon"] > 0
    _, precision = np.split(simulation.state.weights, 2)
    assert (precision >= 0.2).all()  # the prior, whatever noise does to H
    assert np.isfinite(simulation.state.weights).all()


class HuberLike:
    def loss(self, scores, batch):
        return scores.abs().mean()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model__name": "mlp"}, "needs model.name = linear"),
        ({"model__name": "linear-heads"}, "needs model.name = linear"),
        ({"model__freeze": ["bias"]}, "needs model.name = linear"),
        ({"objective__name": "cross-entropy"}, "needs a squared loss, not CrossEntropy"),
        ({"objective__name": "test_diag_newton:HuberLike"}, "needs a squared loss, not HuberLike"),
        ({"algorithm__rate": 0.0}, "algorithm.rate must be positive"),
        ({"algorithm__prior": -1.0}, "algorithm.prior must be positive"),
        ({"algorithm__same_round": 0.5}, "algorithm.same_round must be at least 1"),
        ({"algorithm__keep": 1.5}, "algorithm.keep must be above 0 and at most 1"),
        ({"algorithm__layout": 1}, "algorithm.layout: unknown key"),
    ],
)
def test_what_it_cannot_do_is_refused_before_round_1(settings, words):
    with pytest.raises(ConfigError, match=words):
        build_experiment(config(**NEWTON, **settings), text())
