"""Clipping: no client moves the sum by more than the clip norm, and the adaptive norm finds its quantile."""

import math
from dataclasses import replace

import numpy as np
import pytest
from core_samples import config, images, text
from hypothesis import given
from hypothesis import strategies as st

from fedbandit.assembly.experiment import build_experiment
from fedbandit.federated.clients import Broadcast
from fedbandit.federated.pipeline import AdaptiveClipping, FixedClipping, clip_factor
from fedbandit.federated.state import Version

pytestmark = pytest.mark.usefixtures("small_chunks")

FINITE = st.floats(0, 1e30)


@given(FINITE, st.one_of(st.floats(1e-30, 1e30), st.just(math.inf)))
def test_a_clipped_norm_never_exceeds_the_clip(norm, clip):
    factor = clip_factor(norm, clip)
    assert 0 <= factor <= 1
    assert factor * norm <= clip * (1 + 1e-12)
    if norm <= clip:
        assert factor == 1


def work_and_broadcast(dataset, clip_norm, **settings):
    """The work of a chunk of clients in round 1, with a learning rate that makes long updates."""
    experiment = build_experiment(config(**{"client__learning_rate": 5.0, **settings}), dataset)
    weights = experiment.initial_weights()
    return experiment.bandit.work, Broadcast(
        1, {"weights": weights}, {0: Version(weights)}, clip_norm
    )


def dense_sum(result, like):
    total = np.zeros_like(like)
    result.sent.sums["weights"].add_to(total)
    return total


@pytest.mark.parametrize("objective", ["regression", "weighted-regression"])
@pytest.mark.parametrize("clip_norm", [1e-3, 0.1, 1.0])
@pytest.mark.parametrize(("data", "model"), [(text, "linear"), (images, "linear"), (images, "mlp")])
def test_leaving_one_client_out_changes_the_sum_by_at_most_the_clip(
    data, model, clip_norm, objective
):
    dataset = data()
    work, broadcast = work_and_broadcast(
        dataset, clip_norm, model__name=model, objective__name=objective
    )
    clients = np.arange(dataset.train.num_clients)
    everybody = work(clients, broadcast)
    total = dense_sum(everybody, broadcast.received["weights"])
    assert (everybody.norms > clip_norm).any()
    for left_out in clients:
        others = dense_sum(
            work(np.delete(clients, left_out), broadcast), broadcast.received["weights"]
        )
        expected = min(everybody.norms[left_out], clip_norm)
        assert np.linalg.norm(total - others) == pytest.approx(expected, abs=1e-9)


WORK, BROADCAST = work_and_broadcast(text(), 1.0)


@given(clip=st.floats(1e-6, 10))
def test_one_clients_update_is_never_longer_than_the_clip(clip):
    work, broadcast = WORK, replace(BROADCAST, clip_norm=clip)
    for client in (0, 3, 5):
        result = work(np.array([client]), broadcast)
        assert np.linalg.norm(dense_sum(result, broadcast.received["weights"])) <= clip * (
            1 + 1e-12
        )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("data", "model"), [(text, "linear"), (images, "mlp")])
def test_a_client_that_left_the_finite_numbers_is_kept_out_of_the_sum(data, model, dtype):
    """One client's rewards are not numbers: its norm says so, and the others' sum is as if it had not been there."""
    settings = {"model__name": model, "dtype": dtype, "client__learning_rate": 0.1}
    work, broadcast = work_and_broadcast(data(), 1.0, **settings)
    weights = broadcast.received["weights"]
    events = work.act(np.arange(3), broadcast)
    begin, end = events.bounds[1], events.bounds[2]
    events.rewards[begin:end] = np.nan
    update, norms = work.learner.train(weights, events, 1.0)
    assert np.isfinite(norms[[0, 2]]).all()
    assert not np.isfinite(norms[1])
    total, others = np.zeros_like(weights), np.zeros_like(weights)
    update.add_to(total)
    work(np.array([0, 2]), broadcast).sent.sums["weights"].add_to(others)
    np.testing.assert_allclose(total, others, rtol=0, atol=1e-6)


def test_a_fixed_norm_stays():
    assert FixedClipping(0.8).initial == 0.8
    assert FixedClipping(0.8).following(0.8, 0.1) == 0.8
    assert FixedClipping().initial == math.inf


def test_one_adaptive_step_by_hand():
    clipping = AdaptiveClipping(quantile=0.8, initial=1.0, rate=0.2)
    assert clipping.following(2.0, 0.8) == 2.0
    assert clipping.following(2.0, 1.0) == pytest.approx(2.0 * math.exp(-0.04))
    assert clipping.following(2.0, 0.0) == pytest.approx(2.0 * math.exp(0.16))


@pytest.mark.parametrize("initial", [0.01, 1.0, 50.0])
@pytest.mark.parametrize("quantile", [0.5, 0.8, 0.9])
def test_the_adaptive_norm_finds_its_quantile(quantile, initial):
    """Norms from an exponential distribution, whose quantiles are -log(1 - q)."""
    clipping = AdaptiveClipping(quantile, initial, rate=0.2)
    rng, norm, kept = np.random.default_rng(0), initial, []
    for round_number in range(600):
        norm = clipping.following(norm, float((rng.exponential(1.0, 64) <= norm).mean()))
        if round_number >= 300:
            kept.append(norm)
    assert np.mean(kept) == pytest.approx(-math.log(1 - quantile), rel=0.05)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FixedClipping(0.0), "norm must be positive"),
        (lambda: FixedClipping(float("nan")), "norm must be positive"),
        (lambda: AdaptiveClipping(quantile=1.0), "quantile must be between"),
        (lambda: AdaptiveClipping(initial=0.0), "initial must be positive"),
        (lambda: AdaptiveClipping(rate=-1.0), "rate must be positive"),
    ],
)
def test_bad_parameters_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
