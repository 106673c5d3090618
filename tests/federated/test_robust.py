"""Robust aggregation: how far one hostile device can move the model, and the same bits wherever updates are made."""

import json
from dataclasses import dataclass, replace

import numpy as np
import pytest
from core_samples import config, images, played, text
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from network_builders import (
    Network,
    a_deployment,
    coordinator,
    devices,
    settle,
    values,
    with_update,
)

from fedbandit.algorithms import FedAvg, RoundFacts
from fedbandit.assembly.experiment import build_experiment
from fedbandit.core.errors import ConfigError
from fedbandit.engines import ThreadEngine
from fedbandit.federated.pipeline import FixedClipping, IndividualUpdates, clip_factor
from fedbandit.federated.robust import Median, Robust, TrimmedMean
from fedbandit.federated.server import PlainMean, Server, Sgd
from fedbandit.runs.run import execute

TRIMMED = {"aggregation__name": "trimmed-mean", "aggregation__trim": 0.2}
MEDIAN = {"aggregation__name": "median"}
ROWS = arrays(
    np.float64,
    st.tuples(st.integers(1, 12), st.integers(1, 4)),
    elements=st.floats(-1e6, 1e6, width=32),
)


@given(ROWS, st.floats(0.01, 0.49))
def test_the_rules_are_what_they_say(updates, trim):
    rule = TrimmedMean(trim)
    out = rule.dropped(len(updates))
    assert out >= min(1, (len(updates) - 1) // 2)
    for column, found in zip(updates.T, rule.combine(updates), strict=True):
        np.testing.assert_allclose(
            found, np.mean(sorted(column)[out : len(column) - out]), rtol=1e-12, atol=1e-9
        )
    np.testing.assert_array_equal(Median().combine(updates), np.median(updates, axis=0))


def test_more_coordinates_than_are_sorted_at_once():
    updates = np.random.default_rng(0).normal(size=(5, 150_000)).astype(np.float32)
    found = TrimmedMean(0.2).combine(updates)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, np.sort(updates, axis=0)[1:4].mean(axis=0), rtol=0, atol=1e-6)


def moved(aggregation, honest: np.ndarray, hostile: np.ndarray, clip_norm: float) -> np.ndarray:
    """The model after a round from zero, with one hostile update among honest ones, as the server computes it."""
    clipped = [u * clip_factor(float(np.linalg.norm(u)), clip_norm) for u in (*honest, hostile)]
    like = np.zeros(honest.shape[1])
    accumulator = aggregation.accumulator({"weights": like.copy()})
    accumulator.add({"weights": IndividualUpdates(tuple(clipped))}, len(clipped))
    server = Server(FedAvg(Sgd(1.0)), FixedClipping(clip_norm), aggregation)
    count = len(clipped)
    return server.step(
        RoundFacts(1, count, count), {"weights": like}, clip_norm, accumulator.totals(), count, 0
    ).weights


@pytest.mark.parametrize("clip_norm", [1.0, 1e6])
@pytest.mark.parametrize("rule", [TrimmedMean(0.1), TrimmedMean(0.3), Median()])
def test_one_hostile_device_moves_the_model_no_further_than_honest_ones_differ(rule, clip_norm):
    """Between its extremes it moves each coordinate by (h[n-k] - h[k]) / (n - 2k), for honest values h in order.

    With the plain mean it is 2 · clip norm / n, whatever the honest devices say.
    """
    rng = np.random.default_rng(1)
    n, size = 20, 8
    honest = 0.3 + 0.05 * rng.normal(size=(n - 1, size))
    honest *= np.minimum(1.0, clip_norm / np.linalg.norm(honest, axis=1))[:, None]
    ordered = np.sort(honest, axis=0)
    k = rule.dropped(n) if isinstance(rule, TrimmedMean) else n // 2 - 1
    bound = (ordered[n - k - 1] - ordered[k - 1]) / (n - 2 * k)
    directions = [np.ones(size), np.eye(size)[2], rng.normal(size=size)]
    sizes = (1e-3, 0.3, 1.0, 1e3, 1e30)
    attacks = [sign * scale * way for way in directions for scale in sizes for sign in (-1, 1)]
    models = np.array([moved(Robust(rule), honest, attack, clip_norm) for attack in attacks])
    assert (np.ptp(models, axis=0) <= bound + 1e-12).all()
    assert (models >= ordered[0] - 1e-12).all()  # never outside what honest devices say
    assert (models <= ordered[-1] + 1e-12).all()
    plain = np.array([moved(PlainMean(), honest, attack, clip_norm) for attack in attacks])
    reach = max(np.linalg.norm(a - b) for a in plain for b in plain)
    assert reach == pytest.approx(2 * clip_norm / n, rel=1e-6)
    if clip_norm > 1:  # a norm that suits no update bounds nothing
        assert reach > 1e5 * np.linalg.norm(bound)


@pytest.mark.parametrize("chosen", [TRIMMED, MEDIAN], ids=["trimmed mean", "median"])
@pytest.mark.parametrize("data", [text, images], ids=["text", "images"])
def test_a_round_steps_with_what_the_rule_makes_of_single_updates(chosen, data):
    settings = {
        "server__optimizer": "sgd",
        "server__learning_rate": 0.5,
        "clipping__norm": 0.2,
        "rounds": 1,
    }
    _, simulation = played(config(**chosen, **settings), data())
    phase = build_experiment(config(**settings), data()).bandit
    state = phase.start(simulation.experiment.initial_weights())
    work, cohort = phase.work, phase.cohorts.draw(1)
    broadcast = work.broadcast(state)
    updates = []
    for update in work.learner.updates(state.weights, work.act(cohort, broadcast)):
        update = np.zeros_like(state.weights) if update is None else update
        updates.append(update * clip_factor(float(np.linalg.norm(update)), 0.2))
    rule = simulation.experiment.bandit.aggregation.rule
    expected = state.weights + 0.5 * rule.combine(np.array(updates))
    np.testing.assert_allclose(simulation.state.weights, expected, rtol=0, atol=1e-12)
    assert np.abs(simulation.state.weights - state.weights).max() > 0


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
def test_the_same_bits_on_any_threads_and_after_a_pause(tmp_path, small_chunks, algorithm):
    chosen = config(**TRIMMED, algorithm__name=algorithm, dtype="float32", rounds=6)
    found = []
    for threads in (1, 3):
        rounds, simulation = played(chosen, text(), engine=ThreadEngine(threads))
        found.append(([json.dumps(line) for line in rounds], simulation.state.weights.tobytes()))
    assert found[0] == found[1]
    for until in (2, None):
        execute(chosen, tmp_path / "run", dataset=text(), until=until)
    assert (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[1:] == found[0][0]


def test_it_works_with_compression_and_frozen_layers():
    rounds, _ = played(config(**MEDIAN, compression__name="quantize", rounds=2), text())
    assert rounds[-1]["sent_bytes"] > 0
    frozen = config(**TRIMMED, model__name="mlp", model__freeze=["dense1"], rounds=2)
    _, simulation = played(frozen, images())
    assert np.isfinite(simulation.state.weights).all()


@dataclass(frozen=True)
class NearestToTheRest:
    """Krum's idea, as a user would write it: the update that is closest to the others."""

    scale: float = 1.0

    def combine(self, updates):
        apart = np.linalg.norm(updates[:, None] - updates[None], axis=-1).sum(axis=1)
        return self.scale * updates[np.argmin(apart)]


class TooShort:
    def combine(self, updates):
        return updates[0, :-1]


class NoRule:
    pass


def test_a_rule_of_ones_own_by_its_import_path():
    own = config(aggregation__name="test_robust:NearestToTheRest", aggregation__scale=0.5, rounds=2)
    _, simulation = played(own, text())
    assert type(simulation.experiment.bandit.aggregation.rule).__name__ == "NearestToTheRest"
    assert "test_robust:NearestToTheRest" in own.part_names()


class AddsUp(FedAvg):
    """An algorithm of an older kind, which sums its chunk by itself whatever the pipeline says."""

    def train(self, learner, received, clients, pipeline):
        return super().train(
            learner, received, clients, replace(pipeline, keep_individual_updates=False)
        )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"aggregation__name": "krum"}, "aggregation.name: unknown name 'krum'"),
        ({**TRIMMED, "aggregation__trim": 0.5}, "aggregation.trim"),
        ({**TRIMMED, "aggregation__trims": 1}, "aggregation.trims: unknown key"),
        (
            {**MEDIAN, "aggregation__memory_limit": 1000},
            "aggregation.memory_limit: median holds every update",
        ),
        (
            {
                **MEDIAN,
                "privacy__mechanism": "dp-fedavg",
                "privacy__noise_multiplier": 1.0,
                "clipping__norm": 1.0,
            },
            "aggregation.name: median needs single updates; privacy.mechanism",
        ),
        ({"aggregation__name": "test_robust:TooShort"}, "TooShort.combine made"),
        ({"aggregation__name": "test_robust:NoRule"}, "NoRule has no method `combine`"),
    ],
)
def test_what_cannot_be_is_refused_before_round_1(settings, said):
    with pytest.raises(ConfigError) as refused:
        build_experiment(config(**settings), text())
    assert said.partition(": ")[0] in str(refused.value)
    assert said.partition(": ")[2] in str(refused.value)


def test_an_algorithm_that_adds_up_by_itself_is_named():
    with pytest.raises(ConfigError, match="AddsUp adds up its updates"):
        played(config(**MEDIAN, algorithm__name="test_robust:AddsUp"), text())


# Deployments


def deployed(folder, hostile=None, **aggregation):
    """The model after a round of seven devices, one of which may lie."""
    given = values()
    given["clipping"] = {"norm": 5.0}
    given |= {"aggregation": aggregation} if aggregation else {}
    network, deployment = Network(devices(folder, 7)), a_deployment(folder, given)
    settle(deployment, network.participants)
    if hostile is not None:
        network.faults[103] = with_update(hostile)
    server = coordinator(deployment, network)
    metrics = server.attempt()
    assert metrics["clients"] == 7
    assert not metrics["refused"]
    return server.state.weights - deployment.initial


def as_large_as_allowed(update):
    return np.full_like(update, 5.0 / np.sqrt(update.size))


@pytest.mark.parametrize("rule", [{"name": "trimmed-mean", "trim": 0.2}, {"name": "median"}])
def test_a_deployment_bounds_what_one_device_can_do(tmp_path, rule):
    moves = {}
    for name, aggregation in (("plain", {}), ("robust", rule)):
        honest = deployed(tmp_path / name / "honest", **aggregation)
        lied = deployed(tmp_path / name / "lied", as_large_as_allowed, **aggregation)
        moves[name] = float(np.linalg.norm(lied - honest))
    assert moves["plain"] == pytest.approx(5.0 / 7, rel=0.2)
    assert moves["robust"] < 0.1 * moves["plain"]


def test_a_deployment_that_sees_sums_only_refuses_it(tmp_path):
    secure = {"secure_aggregation": True, "min_reports": 3}
    with pytest.raises(ConfigError, match="the server sees sums only"):
        a_deployment(tmp_path, {**values(**secure), "aggregation": {"name": "median"}})
    private = {
        "privacy": {"mechanism": "dp-fedavg", "noise_multiplier": 1.0},
        "clients_per_round": 10,
    }
    with pytest.raises(ConfigError, match="median needs single updates"):
        a_deployment(
            tmp_path, {**values(population=100), **private, "aggregation": {"name": "median"}}
        )
