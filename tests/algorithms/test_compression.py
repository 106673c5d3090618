"""Stochastic quantisation and top-k: their published forms, exact bytes, and whole runs that report them."""

import json

import numpy as np
import pytest
from core_samples import config, played, text

from fedbandit.compression import Quantize, TopK
from fedbandit.core.errors import ConfigError
from fedbandit.engines import ThreadEngine
from fedbandit.federated.pipeline import Pipeline


def quantised(update, bits, uniforms):
    """The published rule: each entry goes to one of the two grid points around it, right on average."""
    levels = 2 ** (bits - 1) - 1
    scale = np.abs(update).max()
    place = update / scale * levels
    lower = np.floor(place)
    return (lower + (uniforms < place - lower)) * scale / levels


@pytest.mark.parametrize("bits", [2, 3, 8, 16])
def test_quantisation_is_the_published_rule(bits):
    update = np.random.default_rng(1).normal(size=1001)
    stage = Quantize(bits)
    payload = stage.encode(update, np.random.default_rng(5))
    expected = quantised(update, bits, np.random.default_rng(5).random(1001))
    np.testing.assert_allclose(stage.decode(payload, 1001), expected, rtol=0, atol=1e-12)
    assert payload["codes"].nbytes == -(-1001 * bits // 8)


def test_quantisation_is_right_on_average():
    update = np.random.default_rng(1).normal(size=50)
    stage = Quantize(bits=3)
    drawn = np.array(
        [stage.decode(stage.encode(update, np.random.default_rng(i)), 50) for i in range(4000)]
    )
    errors = (drawn.mean(axis=0) - update) / (drawn.std(axis=0) / np.sqrt(len(drawn)) + 1e-12)
    assert np.abs(errors).max() < 4.5


@pytest.mark.parametrize("fraction", [0.01, 0.1, 1.0])
def test_top_k_keeps_the_largest(fraction):
    update = np.random.default_rng(1).normal(size=300)
    stage = TopK(fraction)
    payload = stage.encode(update, np.random.default_rng(0))
    k = max(1, round(fraction * 300))
    kept = np.argsort(-np.abs(update), kind="stable")[:k]
    expected = np.zeros(300)
    expected[kept] = update[kept]
    np.testing.assert_array_equal(stage.decode(payload, 300), expected)
    assert sum(array.nbytes for array in payload.values()) == k * (4 + 8)
    ties = stage.decode(stage.encode(np.ones(300), np.random.default_rng(0)), 300)
    assert ties.sum() == k


@pytest.mark.parametrize("stage", [Quantize(), TopK(0.1)])
@pytest.mark.parametrize(
    "update", [np.zeros(7), np.array([np.nan, 1.0, 2.0]), np.array([1.0, np.inf])]
)
def test_zero_and_broken_updates(stage, update):
    decoded = stage.decode(stage.encode(update, np.random.default_rng(0)), len(update))
    assert np.isfinite(decoded).all() == np.isfinite(update).all()
    if not update.any():
        np.testing.assert_array_equal(decoded, 0)


def test_clipping_comes_after_the_stages_and_bounds_what_is_summed():
    updates = np.random.default_rng(0).normal(size=(6, 40)) * 5
    pipeline = Pipeline(clip_norm=1.0, stages=(Quantize(2),), seed=1, round=3)
    for i in range(6):
        found = pipeline.collect([{"weights": updates[i]}], np.array([i]), {"weights": 1.0})
        total = np.zeros(40)
        found.sums["weights"].add_to(total)
        assert found.norms[0] > 1
        assert np.linalg.norm(total) <= 1 + 1e-12


@pytest.mark.parametrize(
    ("settings", "bytes_of"),
    [
        (
            {"name": "quantize", "bits": 4},
            lambda size: -(-size // 2) + 4,
        ),  # half a byte each, and the scale
        (
            {"name": "top-k", "fraction": 0.1},
            lambda size: round(0.1 * size) * (4 + 4),
        ),  # place and value
    ],
)
def test_runs_report_bytes_and_have_the_same_bits_on_one_thread_and_on_many(settings, bytes_of):
    chosen = config(
        **{f"compression__{key}": value for key, value in settings.items()}, dtype="float32"
    )
    found = []
    for threads in (1, 4):
        rounds, simulation = played(chosen, text(), engine=ThreadEngine(threads))
        found.append((json.dumps(rounds), simulation.state.weights.tobytes()))
    assert found[0] == found[1]
    phase, size = simulation.experiment.bandit, simulation.experiment.layout.size
    for line in rounds:
        sending = np.count_nonzero(phase.work.split.sizes()[phase.cohorts.draw(line["round"])])
        assert line["sent_bytes"] == sending * bytes_of(size)


def test_compression_and_privacy_go_together():
    private = {
        "privacy__mechanism": "dp-fedavg",
        "privacy__noise_multiplier": 0.2,
        "compression__name": "quantize",
    }
    rounds, _ = played(config(**private), text())
    assert rounds[-1]["epsilon"] > 0
    assert rounds[-1]["sent_bytes"] >= 0


class Lists:
    def encode(self, update, rng):
        return {"values": update.tolist()}

    def decode(self, payload, size):
        return np.array(payload["values"])


class Short(TopK):
    def decode(self, payload, size):
        return super().decode(payload, size)[:-1]


@pytest.mark.parametrize(
    ("kind", "words"), [(Lists, "encode must return arrays"), (Short, "decode made")]
)
def test_what_a_stage_returns_is_looked_at(kind, words):
    with pytest.raises(ConfigError, match=f"compression.name: {kind.__name__}.{words}"):
        played(config(compression__name=f"{__name__}:{kind.__name__}"), text())
