"""The same bits wherever a cohort runs: any number of threads, chunks done in any order."""

import json
from dataclasses import replace

import numpy as np
import pytest
from builders import random_images
from core_samples import config, images, played, text

from fedbandit.assembly.experiment import build_experiment
from fedbandit.core.errors import PartFailed
from fedbandit.engines import ThreadEngine
from fedbandit.federated.clients import Broadcast
from fedbandit.simulation import simulate

pytestmark = pytest.mark.usefixtures("small_chunks")


class ReverseEngine:
    """Runs the last chunk first, and hands the results over in order."""

    def run(self, work, chunks, broadcast, memory=None):
        results = {i: work(chunks[i], broadcast) for i in reversed(range(len(chunks)))}
        for i in range(len(chunks)):
            yield results[i]

    def close(self):
        pass


RUNS = {
    "text": (text, {}),
    "text, population": (
        text,
        {"mode": "population", "population__pull_probability": 0.5, "rounds": 9},
    ),
    "text, pre-trained": (text, {"scenario": "init-shift", "pretraining__seed": 77}),
    "text, drifting clicks in a population": (
        text,
        {
            "mode": "population",
            "rounds": 9,
            "scenario": "drift",
            "drift__at": [4],
            "environment__name": "bernoulli",
            "environment__least": 0.1,
            "environment__most": 0.8,
            "environment__missing": 0.2,
            "environment__delay": 1,
        },
    ),
    "linear, linear rewards": (images, {"environment__name": "linear"}),
    "linear": (images, {}),
    "mlp": (images, {"model__name": "mlp"}),
    "mlp, text": (text, {"model__name": "mlp"}),
    "cnn": (lambda: random_images(clients=11, shape=(8, 8)), {"model__name": "cnn", "rounds": 3}),
}


def bytes_of(dataset, chosen, engine, monkeypatch, cache):
    """What a run writes: its lines of metrics, and its weights."""
    monkeypatch.setenv(
        "FEDBANDIT_CACHE", str(cache)
    )  # so that pre-training, too, runs on this engine
    rounds, simulation = played(chosen, dataset, engine=engine)
    return "\n".join(json.dumps(line) for line in rounds), simulation.state.weights.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", RUNS)
def test_threads_and_order_do_not_change_a_bit(name, dtype, monkeypatch, tmp_path):
    data, settings = RUNS[name]
    dataset, chosen = data(), config(dtype=dtype, clients_per_round=6, **settings)
    engines = {
        "1": ThreadEngine(1),
        "2": ThreadEngine(2),
        "5": ThreadEngine(5),
        "reverse": ReverseEngine(),
    }
    results = {
        key: bytes_of(dataset, chosen, engine, monkeypatch, tmp_path / key)
        for key, engine in engines.items()
    }
    assert len(results["1"][1]) > 0
    for key, (lines, weights) in results.items():
        assert lines == results["1"][0], key
        assert weights == results["1"][1], key


@pytest.mark.parametrize(
    "settings", [{}, {"client__max_examples": 5}, {"mode": "population"}], ids=str
)
def test_a_cohort_is_cut_by_itself_alone(settings):
    """In order, nobody lost, and a new chunk begins only once enough events have come together."""
    work = build_experiment(config(**settings), text()).bandit.work
    cohort = np.array([9, 2, 3, 7, 1, 5, 0, 12])
    chunks = work.chunks(cohort)
    np.testing.assert_array_equal(np.concatenate(chunks), cohort)
    counts = [int(work.event_counts(chunk).sum()) for chunk in chunks]
    assert len(chunks) > 1
    assert all(
        sum(counts[: i + 1]) >= (i + 1) * work.learner.chunk_events for i in range(len(chunks) - 1)
    )
    assert work.chunks(np.array([], np.int64)) == []


def test_what_work_is_measured_by_is_what_comes():
    dataset = text()
    everybody = np.arange(dataset.train.num_clients)
    for settings in (
        {},
        {"client__max_examples": 5},
        {"mode": "population", "population__events_per_period": 3},
    ):
        work = build_experiment(config(**settings), dataset).bandit.work
        late = work.plan.visits(dataset.train, everybody, 1000)  # every cache is full by then
        np.testing.assert_array_equal(work.event_counts(everybody), np.diff(late.bounds))


def test_an_error_in_a_chunk_reaches_the_caller():
    class Policy:
        def probabilities(self, prediction, available=None):
            raise RuntimeError("a mistake in somebody's policy")

    work = replace(build_experiment(config(), text()).bandit.work, policy=Policy())
    state = simulate(config(), text()).state
    broadcast = Broadcast(1, {"weights": state.weights}, state.deployed, 1.0)
    engine = ThreadEngine(2)
    with pytest.raises(PartFailed, match="RuntimeError: a mistake in somebody's policy"):
        list(engine.run(work, work.chunks(np.arange(12)), broadcast))
    engine.close()
