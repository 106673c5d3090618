"""Algorithms that are told their data and send arrays of their own shapes: ridge regression from moments."""

import json
from dataclasses import dataclass, replace

import numpy as np
import pytest
from core_samples import config, images, played

from fedbandit.algorithms import Sent
from fedbandit.assembly.experiment import build_experiment
from fedbandit.core.errors import ConfigError
from fedbandit.engines import ThreadEngine
from fedbandit.models import DataSpec, Layout
from fedbandit.runs.run import execute


@dataclass(frozen=True)
class Ridge:
    """One ridge regression for each action, from X'X [K, d, d] and X'r [K, d] of the chosen events."""

    optimizer: object
    data: DataSpec
    layout: Layout
    prior: float = 1.0

    @property
    def sends(self):
        k, d = self.data.num_actions, int(np.prod(self.data.shape))
        return {"outer": Sent((k, d, d), dtype="float64"), "products": Sent((k, d), scale=0.5)}

    def init(self, weights):
        k, d = self.data.num_actions, int(np.prod(self.data.shape))
        outer = np.tile(self.prior * np.eye(d), (k, 1, 1))
        return {"weights": weights, "outer": outer, "products": np.zeros((k, d))}

    def broadcast(self, kept):
        return {"weights": kept["weights"]}

    def train(self, learner, received, clients, pipeline):
        events, sent = clients.events, []
        x = events.contexts.shared.reshape(len(events), -1).astype(np.float64)
        x /= np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
        for i in range(events.num_clients):
            rows = slice(events.bounds[i], events.bounds[i + 1])
            chosen = np.eye(self.data.num_actions)[events.actions[rows]]
            outer = np.einsum("na,nd,ne->ade", chosen, x[rows], x[rows])
            products = np.einsum("na,nd,n->ad", chosen, x[rows], events.rewards[rows])
            dtype = received["weights"].dtype
            sent.append({"outer": outer, "products": products.astype(dtype)})
        return pipeline.collect(sent, clients.ids, self.sends)

    def step(self, kept, mean, facts):
        outer = kept["outer"] + facts.clients * mean["outer"]
        products = kept["products"] + facts.clients * mean["products"]
        theta = np.linalg.solve(outer, products[..., None])[..., 0]
        flat = self.layout.flatten({"weight": theta.T, "bias": np.zeros(len(theta))}, np.float64)
        weights = flat.astype(kept["weights"].dtype)
        return {"weights": weights, "outer": outer, "products": products}

    def model(self, kept):
        return kept["weights"]


OWN = {"algorithm__name": "test_statistics:Ridge", "clipping__enabled": False}


def logged(simulation):
    """What was sent in a run, from its cohorts and deployed versions, added up without the pipeline."""
    phase = simulation.experiment.bandit
    work, state = phase.work, phase.start(simulation.experiment.initial_weights())
    k, d = work.num_actions, int(np.prod(simulation.experiment.dataset.header.shape))
    outer, products = np.tile(np.eye(d), (k, 1, 1)), np.zeros((k, d))
    for number in range(1, simulation.state.round + 1):
        cohort = phase.cohorts.draw(number)
        events = work.act(cohort, work.broadcast(state))
        for x, a, r in zip(events.contexts.shared, events.actions, events.rewards, strict=True):
            x = x.reshape(-1).astype(np.float64)
            x /= np.linalg.norm(x)
            outer[a] += np.outer(x, x)
            products[a] += float(r) * x
        theta = np.array([np.linalg.solve(outer[a], products[a]) for a in range(k)])
        weights = np.concatenate([theta.T.reshape(-1), np.zeros(k)])
        state = replace(state, round=number, weights=weights)
        if number % phase.deploy_every == 0:
            version = replace(state.deployed[max(state.deployed)], weights=weights)
            state = replace(state, deployed={number // phase.deploy_every: version})
    return outer, products, state.weights


def test_what_is_sent_arrives_in_its_own_shape_and_type():
    _, simulation = played(config(**OWN, rounds=4), images())
    outer, products, weights = logged(simulation)
    np.testing.assert_allclose(simulation.state.server_state["outer"], outer, rtol=0, atol=1e-9)
    np.testing.assert_allclose(
        simulation.state.server_state["products"], products, rtol=0, atol=1e-9
    )
    np.testing.assert_allclose(simulation.state.weights, weights, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"aggregation__name": "trimmed-mean"},
        {"compression__name": "quantize"},
        {"compression__name": "top-k", "compression__fraction": 0.3},
    ],
    ids=["mean", "trimmed mean", "quantize", "top-k"],
)
def test_the_same_bits_on_any_threads_and_after_a_pause(settings, tmp_path, small_chunks):
    chosen = config(**OWN, **settings, dtype="float32", rounds=4)
    found = []
    for threads in (1, 3):
        rounds, simulation = played(chosen, images(), engine=ThreadEngine(threads))
        found.append(([json.dumps(line) for line in rounds], simulation.state.weights.tobytes()))
        assert simulation.state.server_state["outer"].dtype == np.float64
        assert simulation.state.weights.dtype == np.float32
    assert found[0] == found[1]
    for until in (2, None):
        execute(chosen, tmp_path / "run", dataset=images(), until=until)
    assert (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[1:] == found[0][0]


def test_all_that_is_sent_is_clipped_to_one_norm_under_privacy():
    private = {"privacy__mechanism": "dp-fedavg", "privacy__noise_multiplier": 1e-9}
    loose = {**OWN, "clipping__enabled": True, "clipping__norm": 0.25}
    chosen = config(**loose, **private, rounds=1, privacy__sampling="fixed")
    _, simulation = played(chosen, images())
    kept = simulation.state.server_state
    moved = kept["outer"] - np.eye(kept["outer"].shape[-1])
    sent = np.sqrt((moved**2).sum() + 0.5**2 * (kept["products"] ** 2).sum())
    assert 0 < sent <= 0.25 * chosen.clients_per_round * (1 + 1e-6)


class TooShort(Ridge):
    def train(self, learner, received, clients, pipeline):
        sent = super().train(learner, received, clients, pipeline)
        return replace(sent, sums={**sent.sums, "products": sent.sums["outer"]})


def test_what_does_not_fit_is_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"TooShort sends \(\d+, 16, 16\) where \(\d+, 16\) is"):
        played(config(**OWN | {"algorithm__name": "test_statistics:TooShort"}), images())
    with pytest.raises(ConfigError, match=r"algorithm\.data: unknown key"):
        build_experiment(config(**OWN, algorithm__data=3), images())
    limit = {"aggregation__name": "median", "aggregation__memory_limit": 10_000}
    k, each = images().header.num_actions, 8 * (16 * 16 + 16)
    with pytest.raises(ConfigError, match=f"6 clients of {k * each:,} bytes"):
        build_experiment(config(**OWN, **limit), images())
