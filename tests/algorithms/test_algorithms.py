"""FedProx and SCAFFOLD as whole runs: published rules, same bits wherever chunks run, memory that survives a kill."""

import json
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from core_samples import config, images, played, text

from fedbandit.algorithms import FedAvg, FedProx, RoundFacts, Scaffold
from fedbandit.assembly.experiment import build_experiment
from fedbandit.core.errors import ConfigError, DataError
from fedbandit.core.ragged import SparseVector
from fedbandit.engines import ThreadEngine
from fedbandit.federated.memory import Memory
from fedbandit.federated.server import Sgd
from fedbandit.runs.run import execute
from fedbandit.simulation import simulate

SCAFFOLD = {"algorithm__name": "scaffold", "clipping__enabled": False, "server__optimizer": "sgd"}


def test_fedprox_without_its_term_is_fedavg():
    plain = played(config(), text())
    prox = played(config(algorithm__name="fedprox", algorithm__mu=0.0), text())
    assert json.dumps(plain[0]) == json.dumps(prox[0])
    np.testing.assert_array_equal(plain[1].state.weights, prox[1].state.weights)


def test_fedprox_stays_nearer_to_what_it_received():
    norms = []
    for mu in (0.0, 1.0, 10.0):
        settings = {
            "algorithm__name": "fedprox",
            "algorithm__mu": mu,
            "clipping__enabled": False,
            "client__epochs": 4,
        }
        norms.append(
            played(config(**settings, client__learning_rate=0.05), text())[0][0][
                "client_norm_median"
            ]
        )
    assert norms[0] > norms[1] > norms[2] > 0


def by_hand(experiment, rounds):
    """SCAFFOLD with option II as published, every client's control variate in a dictionary."""
    phase = experiment.bandit
    work, learner = phase.work, phase.work.learner
    x = experiment.initial_weights()
    c, own = np.zeros_like(x), {}
    state = phase.start(x)
    population, rate = len(phase.cohorts.pool), learner.settings.learning_rate
    for number in range(1, rounds + 1):
        cohort = phase.cohorts.draw(number)
        events = work.act(cohort, work.broadcast(replace(state, round=number - 1)))
        dy, dc = np.zeros_like(x), np.zeros_like(x)
        for i, client in enumerate(cohort):
            mine = events.of_client(i)
            if not len(mine):
                continue
            ci = own.get(client, np.zeros_like(x))
            (delta,) = learner.updates(x, mine, gradient_offset=lambda _, ci=ci, c=c: c - ci)
            new = ci - c - delta / (learner.settings.steps(len(mine)) * rate)
            dy, dc, own[client] = dy + delta, dc + new - ci, new
        x = x + phase.work.algorithm.optimizer.learning_rate * dy / len(cohort)
        c = c + dc / population
        state = replace(state, weights=x)
        if number % phase.deploy_every == 0:
            version = replace(state.deployed[max(state.deployed)], weights=x)
            state = replace(state, deployed={number // phase.deploy_every: version})
    return x, c


@pytest.mark.parametrize("data", [text, images], ids=["text", "images"])
def test_scaffold_follows_the_published_rule(data):
    chosen = config(**SCAFFOLD, rounds=6, client__learning_rate=0.1, server__learning_rate=0.7)
    experiment = build_experiment(chosen, data())
    _, simulation = played(chosen, data())
    x, c = by_hand(experiment, 6)
    np.testing.assert_allclose(simulation.state.weights, x, rtol=0, atol=1e-11)
    np.testing.assert_allclose(simulation.state.server_state["control"], c, rtol=0, atol=1e-11)
    assert np.abs(c).max() > 1e-3


def test_scaffold_has_the_same_bits_on_one_thread_and_on_many():
    found = []
    for threads in (1, 4):
        engine = ThreadEngine(threads)
        rounds, simulation = played(config(**SCAFFOLD, dtype="float32"), text(), engine=engine)
        found.append((json.dumps(rounds), simulation.state.weights.tobytes()))
    assert found[0] == found[1]


def test_memory_reads_what_was_there_before_the_round_and_forgets_what_came_after_a_checkpoint(
    tmp_path,
):
    memory = Memory(tmp_path / "memory.sqlite")
    for number in (1, 3, 5):
        memory.write(number, {7: {"control": np.full(2, float(number))}})
        memory.keep(number, number - 2)
    read = lambda number: memory.read([7, 8], number)  # noqa: E731
    assert read(1) == {}
    assert read(4)[7]["control"].tolist() == [3, 3]
    assert read(6)[7]["control"].tolist() == [5, 5]
    memory.close()
    again = Memory(tmp_path / "memory.sqlite")
    again.resume(4)
    assert again.read([7], 9)[7]["control"].tolist() == [3, 3]
    again.write(6, {7: {"control": np.zeros(2)}})
    again.close()  # not kept
    last = Memory(tmp_path / "memory.sqlite")
    assert last.read([7], 9)[7]["control"].tolist() == [5, 5]
    last.close()


def test_what_no_checkpoint_needs_is_dropped_also_of_clients_that_were_not_drawn_again(tmp_path):
    path = tmp_path / "memory.sqlite"
    memory = Memory(path)
    for number in (1, 2, 3, 4):
        memory.write(number, {8 if number > 2 else 7: {"control": np.full(2, float(number))}})
        memory.keep(number, number - 1)
    memory.close()
    with closing(sqlite3.connect(path)) as database:
        found = database.execute("SELECT client, round FROM memory ORDER BY client, round")
        assert found.fetchall() == [(7, 2), (8, 3), (8, 4)]
    again = Memory(path)  # the checksum over all is that of what is left
    assert again.read([7], 4)[7]["control"].tolist() == [2, 2]
    again.close()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE memory SET value = zeroblob(16) WHERE client = 7",
        "UPDATE memory SET client = 8 WHERE client = 7",
        "UPDATE memory SET round = 1 WHERE client = 7",
        "UPDATE memory SET dtype = 'x' WHERE client = 7",
        "UPDATE memory SET digest = 'x' WHERE client = 7",
        "DELETE FROM memory WHERE client = 7",
        "UPDATE kept SET round = 'x'",
        "UPDATE kept SET round = NULL",
        "DROP TABLE memory",
    ],
)
def test_a_changed_memory_is_refused_in_one_line(tmp_path, statement):
    path = tmp_path / "memory.sqlite"
    memory = Memory(path)
    memory.write(2, {client: {"control": np.full(2, float(client))} for client in (5, 7)})
    memory.keep(2, 2)
    memory.close()
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(statement)
    with pytest.raises(DataError, match=r"memory\.sqlite: the clients' memory cannot be used: "):
        Memory(path).resume(2)


def test_memory_gives_back_every_bit_and_writes_what_is_mostly_zero_in_few_bytes(tmp_path):
    mostly_zero = np.zeros((100, 50), np.float32)
    mostly_zero[3, 7], mostly_zero[9, 0] = 1.5, -0.0
    kept = {
        "dense": np.random.default_rng(0).normal(size=(4, 3)),
        "mostly zero": mostly_zero,
        "nothing": np.zeros(1000),
        "sparse": SparseVector(np.array([2, 999_999]), np.array([0.0, np.nan]), 1_000_000),
        "counts": np.arange(3),
    }
    memory = Memory(tmp_path / "memory.sqlite")
    memory.write(1, {7: kept})
    memory.keep(1, 1)
    memory.close()
    again = Memory(tmp_path / "memory.sqlite")
    found = again.read([7], 2)[7]
    for name, value in kept.items():
        assert type(found[name]) is type(value)
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
        assert np.asarray(found[name]).tobytes() == np.asarray(value).tobytes()
    np.testing.assert_array_equal(found["sparse"].entries, [2, 999_999])  # a zero that was kept
    forms = dict(again._db.execute("SELECT name, form FROM memory"))
    assert forms == {
        "dense": "dense",
        "mostly zero": "sparse",
        "nothing": "sparse",
        "sparse": "entries",
        "counts": "dense",
    }
    again.close()
    assert (tmp_path / "memory.sqlite").stat().st_size < 50_000


def test_memory_refuses_a_checkpoint_that_is_older_than_what_it_still_holds(tmp_path):
    memory = Memory(tmp_path / "memory.sqlite")
    for number in (2, 4, 6):
        memory.write(number, {7: {"control": np.full(2, float(number))}})
        memory.keep(number, number - 2)
    memory.close()
    gone = "is newer than the checkpoint of round 2, and serves round 4 at the earliest"
    for number in (6, 4, 2, 0):  # a run that starts over needs nothing of it
        with closing(Memory(tmp_path / "memory.sqlite")) as again:
            if number != 2:
                again.resume(number)
                continue
            with pytest.raises(DataError, match=gone):
                again.resume(number)


RUN = """
import sys
from contextlib import closing
from pathlib import Path
from core_samples import config, text
from fedbandit.runs.run import run
settings = dict({settings!r}, rounds=40, dtype="float32", threads=2)
run(config(**settings), Path(sys.argv[1]), dataset=text(), checkpoint_seconds=0.0)
"""


KILLED = {
    "scaffold": SCAFFOLD,
    "fedprox": {"algorithm__name": "fedprox", "algorithm__mu": 0.5},
    "quantize": {"compression__name": "quantize"},
    "top-k": {"compression__name": "top-k", "compression__fraction": 0.1},
    "diag-newton": {"algorithm__name": "diag-newton"},
}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(settings, id=name, marks=[pytest.mark.slow] if name != "scaffold" else [])
        for name, settings in KILLED.items()
    ],
)
def test_a_killed_run_ends_with_the_same_bytes(settings, tmp_path):
    script = tmp_path / "run.py"
    script.write_text(RUN.replace("{settings!r}", repr(settings)), encoding="utf-8")
    environment = {"PYTHONPATH": ":".join(sys.path)}

    def command(folder):
        return [sys.executable, str(script), str(tmp_path / folder)]

    subprocess.run(command("whole"), check=True, env=environment)
    killed = subprocess.Popen(command("killed"), env=environment)
    lines = tmp_path / "killed" / "metrics.jsonl"
    while killed.poll() is None and not (lines.exists() and lines.read_bytes().count(b"\n") >= 5):
        time.sleep(0.005)
    killed.kill()
    killed.wait()
    subprocess.run(command("killed"), check=True, env=environment)
    for name in ("metrics.jsonl", "checkpoints/round-000040.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "killed" / name).read_bytes()


def test_too_much_memory_is_refused_with_the_reason():
    with pytest.raises(
        ConfigError, match=r"algorithm.memory_limit: scaffold remembers .* for each of \d+ clients"
    ):
        build_experiment(config(**SCAFFOLD, algorithm__memory_limit=1000), text())


def test_what_is_not_clipped_cannot_be_private():
    private = {
        "privacy__mechanism": "dp-fedavg",
        "privacy__noise_multiplier": 1.0,
        "clipping__norm": 0.5,
    }
    with pytest.raises(
        ConfigError, match=r"algorithm.name: scaffold sends 'control' without a scale"
    ):
        build_experiment(config(algorithm__name="scaffold", **private), text())
    assert played(config(algorithm__name="fedprox", **private), text())[0][-1]["epsilon"] > 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"algorithm__name": "fedprx"}, "did you mean fedprox"),
        (
            {"algorithm__name": "fedprox", "algorithm__mu": -1.0},
            "algorithm.mu must be at least 0",
        ),
        ({"algorithm__name": "fedavg", "algorithm__mu": 1.0}, "algorithm.mu: unknown key"),
        ({"algorithm__name": "builtins:dict"}, "algorithm"),
        ({"compression__name": "zip"}, "compression.name: unknown name"),
        ({"compression__name": "quantize", "compression__bits": 1}, "bits must be from 2 to 16"),
        ({"compression__bits": 3}, "compression.bits"),
        ({"model__freeze": ["wieght"]}, "did you mean weight"),
        ({"model__freeze": ["weight", "bias"]}, "nothing would be left"),
    ],
)
def test_wrong_settings_name_their_key(settings, words):
    with pytest.raises(ConfigError, match=words):
        build_experiment(config(**settings), text())


def test_algorithms_are_values():
    optimizer = Sgd(0.5)
    for algorithm in (FedAvg(optimizer), FedProx(optimizer, mu=0.1), Scaffold(optimizer)):
        kept = algorithm.init(np.zeros(3))
        mean = {name: np.ones(3) for name in algorithm.sends}
        after = algorithm.step(kept, mean, RoundFacts(round=1, clients=2, population=10))
        np.testing.assert_array_equal(kept["weights"], 0)
        np.testing.assert_array_equal(algorithm.model(after), 0.5)
        assert set(after) == set(kept)
    np.testing.assert_allclose(after["control"], 0.2)


def test_frozen_parameters_stay_and_the_rest_learns():
    frozen = config(
        model__name="mlp", model__freeze=["dense1"], client__learning_rate=0.02, scenario="init"
    )
    _, simulation = played(frozen, images())
    _, free = played(
        config(model__name="mlp", client__learning_rate=0.02, scenario="init"), images()
    )
    start = simulate(frozen, images()).state
    layout = simulation.experiment.layout
    before, after, other = (
        layout.split(state.weights) for state in (start, simulation.state, free.state)
    )
    for name in ("dense1", "dense1_bias"):
        np.testing.assert_array_equal(before[name], after[name])
        assert (before[name] != other[name]).any()
    assert np.abs(before["dense2"] - after["dense2"]).max() > 1e-4
    assert len(simulation.state.server_state["weights"]) < layout.size
    assert simulation.state.deployed[max(simulation.state.deployed)].weights.shape == (layout.size,)


def test_memory_holds_one_record_a_client_beside_those_of_checkpoints(tmp_path):
    memory = Memory(tmp_path / "memory.sqlite")
    for number in range(1, 50):
        memory.write(number, {7: {"control": np.zeros(2)}})
    count = lambda: memory._db.execute("SELECT count(*) FROM memory").fetchone()[0]  # noqa: E731
    assert count() == 1
    memory.keep(49, 49)
    for number in range(50, 60):
        memory.write(number, {7: {"control": np.zeros(2)}})
    assert count() == 2
    memory.close()


def test_a_run_whose_memory_is_gone_is_refused(tmp_path):
    chosen = config(**SCAFFOLD, rounds=6)
    execute(chosen, tmp_path / "run", dataset=text(), until=4)
    (tmp_path / "run" / "memory.sqlite").unlink()
    with pytest.raises(
        DataError, match="memory is missing or older than the checkpoint of round 4"
    ):
        execute(chosen, tmp_path / "run", dataset=text())


@pytest.mark.parametrize("compression", ["none", "quantize", "top-k"])
@pytest.mark.parametrize("clip", [None, 0.01])
def test_the_servers_control_variate_is_the_mean_of_the_clients(compression, clip):
    settings = {"algorithm__name": "scaffold", "compression__name": compression, "rounds": 8}
    settings |= {"clipping__enabled": False} if clip is None else {"clipping__norm": clip}
    simulation = simulate(config(**settings, client__learning_rate=0.1), text())
    list(simulation)
    phase = simulation.experiment.bandit
    remembered = simulation.memory.read(phase.cohorts.pool, 9).values()
    mean = sum(vectors["control"] for vectors in remembered) / len(phase.cohorts.pool)
    np.testing.assert_allclose(simulation.state.server_state["control"], mean, rtol=0, atol=1e-12)
    assert np.abs(mean).max() > 1e-4
    simulation.close()


def test_an_update_that_is_clipped_leaves_no_more_than_the_clip_in_the_control_variate():
    clip, rate = 0.01, 0.1
    simulation = simulate(
        config(
            algorithm__name="scaffold", clipping__norm=clip, client__learning_rate=rate, rounds=1
        ),
        text(),
    )
    list(simulation)
    for vectors in simulation.memory.read(simulation.experiment.bandit.cohorts.pool, 2).values():
        assert np.linalg.norm(vectors["control"]) <= clip / rate + 1e-12  # at least one step
    simulation.close()


class Base:
    """FedAvg again, written out, for the mistakes below."""

    sends = {"weights": 1.0}  # noqa: RUF012

    def __init__(self, optimizer):
        self.inner = FedAvg(optimizer)

    def init(self, weights):
        return self.inner.init(weights)

    def broadcast(self, kept):
        return self.inner.broadcast(kept)

    def train(self, learner, received, clients, pipeline):
        return self.inner.train(learner, received, clients, pipeline)

    def step(self, kept, mean, facts):
        return self.inner.step(kept, mean, facts)

    def model(self, kept):
        return self.inner.model(kept)


class Forgetful(Base):
    def train(self, learner, received, clients, pipeline):
        return None


class Nameless(Base):
    def broadcast(self, kept):
        return {"model": kept["weights"]}


class Shorter(Base):
    def step(self, kept, mean, facts):
        return {**self.inner.step(kept, mean, facts), "weights": kept["weights"][:3]}


class Whole(Base):
    def init(self, weights):
        return {**self.inner.init(weights), "rounds": 3}


class Wider(Base):
    def model(self, kept):
        return kept["weights"].astype(np.longdouble)


class Remembering(Base):
    def train(self, learner, received, clients, pipeline):
        sent = self.inner.train(learner, received, clients, pipeline)
        return replace(sent, memory={int(clients.ids[0]): {"seen": np.ones(1)}})


class Scaleless(Base):
    sends = {"weights": 0.0}  # noqa: RUF012


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Forgetful, "train must return a Contribution"),
        (Nameless, "broadcast returns no 'weights'"),
        (Shorter, r"step gives float64 \(3,\)"),
        (Whole, "init must return arrays by name"),
        (Wider, "model gives"),
        (Remembering, "does not say so in `memory_vectors`"),
        (Scaleless, "must be positive or None"),
    ],
)
def test_what_an_algorithm_returns_is_looked_at(kind, words):
    with pytest.raises(ConfigError, match=f"algorithm.name.*{words}"):
        played(config(algorithm__name=f"{__name__}:{kind.__name__}"), text())
    assert (
        played(config(algorithm__name=f"{__name__}:Base"), text())[0] == played(config(), text())[0]
    )


class Moving(Base):
    def step(self, kept, mean, facts):
        return {**kept, "weights": kept["weights"] + 1}


def test_nothing_moves_where_nobody_trains():
    _, simulation = played(config(algorithm__name=f"{__name__}:Moving", training=False), text())
    np.testing.assert_array_equal(simulation.state.weights, simulation.experiment.initial_weights())
    frozen = config(model__name="mlp", model__freeze=["dense1"], training=False)
    _, simulation = played(frozen, images())
    np.testing.assert_array_equal(simulation.state.weights, simulation.experiment.initial_weights())


def test_the_limit_of_memory_is_no_part_of_what_a_run_is():
    assert config(algorithm__memory_limit=5_000_000).identity() == config().identity()
