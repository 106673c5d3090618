"""What is mostly zero stays sparse from a client's memory through training to the sum, with the same values."""

import re
from pathlib import Path

import numpy as np
import pytest
from core_samples import config, images, played, text
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedbandit.algorithms import FedAvg
from fedbandit.core.ragged import SparseVector
from fedbandit.runs.run import execute
from fedbandit.simulation import simulate

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
exec(re.search(r"<!-- file: my_feddyn.py -->\n```python\n(.*?)```", PAGE, re.DOTALL)[1])  # FedDyn


class DenseFedDyn(FedDyn):  # noqa: F821 - from the page
    """The same with whole vectors."""

    def train(self, learner, received, clients, pipeline):
        none = np.zeros_like(received["weights"])
        own = [
            np.asarray(clients.memory.get(int(i), {}).get("gradient", none)) for i in clients.ids
        ]
        updates = learner.updates(
            received["weights"], clients.events, self.alpha, lambda i: -own[i]
        )
        sent = (None if update is None else {"weights": update} for update in updates)
        return pipeline.collect(
            sent,
            clients.ids,
            self.sends,
            lambda i, seen: {"gradient": own[i] - self.alpha * seen["weights"]},
        )


SETTINGS = {"clipping__enabled": False, "rounds": 8, "client__learning_rate": 0.1}


@pytest.mark.parametrize("objective", ["regression", "weighted-regression", "doubly-robust"])
@pytest.mark.parametrize("data", [text, images], ids=["text", "images"])
def test_feddyn_of_the_docs_is_the_same_with_whole_vectors(data, objective):
    chosen = config(**SETTINGS, objective__name=objective)
    sparse, dense = (
        played(chosen.with_values({"algorithm.name": f"test_sparse_memory:{name}"}), data())[1]
        for name in ("FedDyn", "DenseFedDyn")
    )
    np.testing.assert_allclose(sparse.state.weights, dense.state.weights, rtol=0, atol=1e-11)
    plain = played(chosen, data())[1]
    assert np.abs(sparse.state.weights - plain.state.weights).max() > 1e-4


def test_feddyn_follows_the_published_rule():
    """The server's correction is the mean over all clients of what they remember (Acar et al., alg. 1)."""
    chosen = config(**SETTINGS, algorithm__name="test_sparse_memory:FedDyn")
    simulation = simulate(chosen, text())
    list(simulation)
    pool = simulation.experiment.bandit.cohorts.pool
    remembered = [m["gradient"] for m in simulation.memory.read(pool, 9).values()]
    assert all(isinstance(one, SparseVector) for one in remembered)
    mean = sum(remembered, SparseVector.zeros(remembered[0].size)) * (1 / len(pool))
    np.testing.assert_allclose(
        np.asarray(mean), simulation.state.server_state["correction"], rtol=0, atol=1e-12
    )
    assert np.abs(simulation.state.server_state["correction"]).max() > 1e-4
    simulation.close()


def test_sparse_memory_resumes_with_the_same_bytes(tmp_path):
    chosen = config(**SETTINGS, algorithm__name="test_sparse_memory:FedDyn", dtype="float32")
    execute(chosen, tmp_path / "whole", dataset=text())
    for until in (3, 5, None):
        execute(chosen, tmp_path / "parts", dataset=text(), until=until)
    for name in ("metrics.jsonl", "checkpoints/round-000008.safetensors"):
        whole, parts = (tmp_path / run / name for run in ("whole", "parts"))
        assert whole.read_bytes() == parts.read_bytes()


VECTORS = arrays(np.float64, 6, elements=st.sampled_from([0.0, -0.0, 1.5, -2.0, 1e300]))


@given(VECTORS, VECTORS, st.sampled_from([2, 0.5, np.float64(-3)]))
def test_sparse_vectors_add_up_as_arrays_do(one, other, number):
    a, b = SparseVector.of(one), SparseVector.of(other)
    for sparse, dense in (
        (a + b, one + other),
        (a - b, one - other),
        (number * a, number * one),
        (-a, -one),
    ):
        assert isinstance(sparse, SparseVector)
        np.testing.assert_array_equal(np.asarray(sparse), dense)
        assert (np.diff(sparse.entries) > 0).all()
    for mixed, dense in (
        (a + other, one + other),
        (one - b, one - other),
        (a - other, one - other),
    ):
        assert isinstance(mixed, np.ndarray)
        np.testing.assert_array_equal(mixed, dense)
    assert np.asarray(a).tobytes() == one.tobytes()


def test_only_an_algorithm_that_asks_for_it_sees_sparse_updates():
    experiment = simulate(config(), text()).experiment
    work = experiment.bandit.work
    state = experiment.bandit.start(experiment.initial_weights())
    events = work.act(np.arange(5), work.broadcast(state))
    for update in work.learner.updates(state.weights, events):
        assert update is None or isinstance(update, np.ndarray)
    assert issubclass(FedDyn, FedAvg)  # noqa: F821
