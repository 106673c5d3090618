"""The Ray engine against the thread engine, bit for bit: on one machine, on two nodes, and with workers killed."""

import json
import os
import signal
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

from fedbandit.assembly.experiment import build_experiment
from fedbandit.config import Config
from fedbandit.core import identity as sources
from fedbandit.core.errors import ConfigError, DataError
from fedbandit.core.process import Stopwatch
from fedbandit.core.ragged import Ragged
from fedbandit.data import FederatedDataset
from fedbandit.data.embedded import topics
from fedbandit.data.writer import DatasetWriter
from fedbandit.engines import ThreadEngine
from fedbandit.federated.round import run_round
from fedbandit.simulation import simulate

ray = pytest.importorskip("ray")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # of Ray's own making
]

from fedbandit.engines import RayEngine  # noqa: E402 - needs ray

TEXT = {
    "scenario": "init-shift",
    "rounds": 6,
    "deploy_every": 2,
    "clients_per_round": 20,
    "evaluate_every": 3,
}
TEXT |= {"pretraining": {"rounds": 2, "clients": 30}, "seed": 3}
POPULATION = TEXT | {
    "mode": "population",
    "population": {"events_per_period": 8, "cache_size": 24, "pull_probability": 0.5},
}
IMAGES = {
    "scenario": "scratch",
    "rounds": 3,
    "deploy_every": 2,
    "clients_per_round": 12,
    "model": {"name": "mlp"},
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = topics.generate(tmp_path_factory.mktemp("data") / "text", users=150, words=1000)
    return FederatedDataset.open(path)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    rng = np.random.default_rng(0)
    sizes = rng.integers(5, 60, 40)
    labels = rng.integers(0, 6, int(sizes.sum()))
    features = (
        np.eye(6)[labels] @ rng.random((6, 36)) + 0.3 * rng.random((len(labels), 36))
    ).astype(np.float32)
    clients = np.repeat([f"c{i:03d}" for i in range(40)], sizes)
    out = tmp_path_factory.mktemp("data") / "images"
    with DatasetWriter(
        out, name="images", kind="dense", shape=(6, 6), actions=map(str, range(6))
    ) as writer:
        writer.add_many(
            clients,
            features.reshape(-1, 6, 6),
            Ragged.from_rows([[int(label)] for label in labels]),
        )
        return FederatedDataset.open(writer.finish())


@pytest.fixture(scope="module")
def own_parts(tmp_path_factory):
    """A folder in which every worker looks for modules, as the driver does."""
    folder = tmp_path_factory.mktemp("parts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(folder), *sys.path])
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
        yield folder


@pytest.fixture(scope="module")
def local(own_parts):
    """One cluster for the tests that need no other: two workers on this machine."""
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    yield
    ray.shutdown()


def metrics_of(config, dataset, engine):
    """The lines of `metrics.jsonl`, and the final weights to the last bit."""
    simulation = simulate(config, dataset, engine=engine)
    return [json.dumps(metrics) for metrics in simulation], simulation.state.weights.tobytes()


def fresh_cache(monkeypatch, folder):
    """Pre-train again, in place of taking what the other engine has kept."""
    monkeypatch.setenv("FEDBANDIT_CACHE", str(folder))


def on_threads(config, dataset, monkeypatch, folder):
    fresh_cache(monkeypatch, folder / "threads")
    engine = ThreadEngine(2)
    try:
        return metrics_of(config, dataset, engine)
    finally:
        engine.close()


FEDPROX = IMAGES | {"algorithm": {"name": "fedprox", "mu": 0.5}}
SCAFFOLD = TEXT | {"algorithm": {"name": "scaffold"}}
QUANTIZED = TEXT | {"compression": {"name": "quantize", "bits": 4}}
SPARSE = IMAGES | {"compression": {"name": "top-k", "fraction": 0.1}}
HEADS = TEXT | {
    "model": {"name": "linear-heads", "heads": 3},
    "policy": {"name": "falcon-schedule"},
}
FROZEN = IMAGES | {"model": {"name": "mlp", "freeze": ["dense1"]}}
ROBUST = TEXT | {"aggregation": {"name": "trimmed-mean", "trim": 0.2}}
NEWTON = POPULATION | {"algorithm": {"name": "diag-newton"}}
NEWTON_IMAGES = IMAGES | {
    "model": {"name": "linear"},
    "algorithm": {"name": "diag-newton", "rate": 0.1},
    "objective": {"name": "doubly-robust"},
}
EVERY = [
    (TEXT, "text"),
    (POPULATION, "text"),
    (IMAGES, "images"),
    (FEDPROX, "images"),
    (SCAFFOLD, "text"),
]
EVERY += [
    (QUANTIZED, "text"),
    (SPARSE, "images"),
    (HEADS, "text"),
    (FROZEN, "images"),
    (ROBUST, "text"),
    (NEWTON, "text"),
    (NEWTON_IMAGES, "images"),
]


@pytest.mark.parametrize(("values", "data"), EVERY)
def test_the_same_bits_as_on_threads(local, values, data, request, monkeypatch, tmp_path):
    config, dataset = Config.build(values), request.getfixturevalue(data)
    expected = on_threads(config, dataset, monkeypatch, tmp_path)
    fresh_cache(monkeypatch, tmp_path / "ray")
    engine = RayEngine()
    try:
        assert engine.workers == 2
        assert metrics_of(config, dataset, engine) == expected
        assert engine.traffic.replaced == 0
    finally:
        engine.close()


class Killing:
    """Kills a worker in the middle of the given rounds: it is stopped before the round, so its part cannot be done."""

    def __init__(self, engine, rounds):
        self.engine, self.rounds = engine, rounds

    def run(self, work, chunks, broadcast, memory=None):
        if broadcast.round in self.rounds and not work.supervised:
            victim = self.engine._idle()[-1]
            process = ray.get(victim.__ray_call__.remote(lambda worker: os.getpid()))
            os.kill(process, signal.SIGSTOP)
            threading.Timer(0.5, os.kill, (process, signal.SIGKILL)).start()
        return self.engine.run(work, chunks, broadcast, memory)


@pytest.mark.parametrize(("values", "data"), [(TEXT, "text"), (IMAGES, "images")])
def test_a_worker_killed_in_the_middle_of_a_round_changes_nothing(
    local, values, data, request, monkeypatch, tmp_path
):
    config, dataset = Config.build(values), request.getfixturevalue(data)
    expected = on_threads(config, dataset, monkeypatch, tmp_path)
    fresh_cache(monkeypatch, tmp_path / "ray")
    engine = RayEngine()
    try:
        assert metrics_of(config, dataset, Killing(engine, {2, 3})) == expected
        assert engine.traffic.replaced == 2
    finally:
        engine.close()


def test_what_travels_is_weights_once_a_round_and_a_sum_per_chunk(local, images):
    config = Config.build(IMAGES)
    engine = RayEngine()
    try:
        simulation = simulate(config, images, engine=engine)
        size, phase = simulation.state.weights.nbytes, simulation.experiment.bandit
        chunks = sum(len(phase.work.chunks(phase.cohorts.draw(number))) for number in (1, 2, 3))
        list(simulation)
        assert (
            engine.traffic.weights == (3 + 2) * size
        )  # three rounds, and versions 0 and 1 as they are deployed
        assert engine.traffic.sums == chunks * size
    finally:
        engine.close()


def test_data_that_is_not_on_disk_is_refused(local, images):
    config, in_memory = Config.build(IMAGES), replace(images, path=None)
    engine = RayEngine()
    try:
        with pytest.raises(ConfigError, match="on disk"):
            list(simulate(config, in_memory, engine=engine))
    finally:
        engine.close()


def test_a_worker_that_finds_other_data_says_so(local, images):
    other = replace(images, header=replace(images.header, fingerprint="another"))
    config = Config.build(IMAGES)
    engine = RayEngine()
    try:
        with pytest.raises(DataError, match="holds other data"):
            list(simulate(config, other, engine=engine))
    finally:
        engine.close()


def test_one_engine_computes_each_configuration_it_is_given(local, images, monkeypatch, tmp_path):
    slow, fast = (
        Config.build(IMAGES | {"client": {"learning_rate": rate}}) for rate in (0.01, 0.5)
    )
    expected = [on_threads(config, images, monkeypatch, tmp_path) for config in (slow, fast)]
    assert expected[0] != expected[1]
    engine = RayEngine()
    try:
        assert [metrics_of(config, images, engine) for config in (slow, fast)] == expected
    finally:
        engine.close()


def test_a_recipe_that_makes_other_work_is_refused(local, images):
    config = Config.build(IMAGES)
    phase = build_experiment(config, images).bandit
    others = replace(phase.work.learner.settings, learning_rate=7.0)
    changed = replace(
        phase, work=replace(phase.work, learner=replace(phase.work.learner, settings=others))
    )
    engine = RayEngine()
    try:
        with pytest.raises(ValueError, match="other work"):
            run_round(
                changed,
                phase.start(build_experiment(config, images).initial_weights()),
                engine,
                Stopwatch(),
            )
    finally:
        engine.close()


PART = """
import numpy as np

class Mine:
    def probabilities(self, prediction, available=None):
        found = np.full(prediction.mean.shape, 0.1)
        found[:, {action}] = 0.5
        return found
"""


def write_part(folder, action):
    """As a new driver finds it: of the same size and as old as ever, so that Python's compiled file would do."""
    (folder / "part_on_ray.py").write_text(PART.format(action=action))
    os.utime(folder / "part_on_ray.py", (10**9, 10**9))
    sys.modules.pop("part_on_ray", None)
    sources._executed.pop("part_on_ray", None)


def test_workers_execute_an_edited_part_as_it_is_now(
    local, own_parts, images, monkeypatch, tmp_path
):
    config = Config.build(IMAGES | {"policy": {"name": "part_on_ray:Mine"}})
    expected = []
    for action in (1, 2):
        write_part(own_parts, action)
        expected.append(on_threads(config, images, monkeypatch, tmp_path))
    assert expected[0] != expected[1]
    engine = RayEngine()
    try:
        for action in (1, 2):
            write_part(own_parts, action)
            assert metrics_of(config, images, engine) == expected[action - 1]
        simulation = simulate(config, images, engine=engine)
        (own_parts / "part_on_ray.py").write_text(
            PART.format(action=3)
        )  # the driver has executed another file
        for worker in engine._alive:  # they have the right one
            ray.kill(worker)
        engine._alive.clear()
        for _ in range(2):
            engine._start_worker()
        with pytest.raises(ConfigError, match=r"part_on_ray\.py: is other code on this machine"):
            list(simulation)
    finally:
        engine.close()
