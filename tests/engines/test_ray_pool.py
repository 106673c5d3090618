"""Who gets work in the Ray engine: machines that join, and copies of parts that are late.

A stand-in for Ray runs every worker in a thread of its own.
"""

import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from types import SimpleNamespace

import numpy as np
import pytest

from fedbandit import engines as engine_module
from fedbandit.engines import RayEngine
from fedbandit.federated.clients import Broadcast


class FakeWorker:
    """Answers with what it was given, and which worker it is; waits where it is told to."""

    made = 0

    def __init__(self):
        FakeWorker.made += 1
        self.name, self.hold = FakeWorker.made, None

    def ready(self):
        pass

    def work(self, recipe, description, chunks, weights, memory):
        held = FakeRay.holds.get(self.name)
        if held is not None:
            FakeRay.stuck.set()
            held.wait(60)
            if self.name in FakeRay.lost:
                raise FakeRay.exceptions.RayError("the machine is gone")
        sent = SimpleNamespace(memory={}, sums={})
        return [SimpleNamespace(sent=sent, chunk=chunk.tolist(), by=self.name) for chunk in chunks]


class RayError(Exception):
    pass


class RayTaskError(RayError):
    pass


class FakeRay:
    """As much of Ray as the engine uses."""

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self, cores):
        self.cores = cores
        FakeRay.holds, FakeRay.lost, FakeRay.stuck = {}, set(), threading.Event()
        FakeWorker.made = 0

    def cluster_resources(self):
        return {"CPU": self.cores}

    def remote(self, **_):
        def make(kind):
            def actor():
                one, pool = kind(), ThreadPoolExecutor(1)
                methods = {
                    name: SimpleNamespace(
                        remote=lambda *a, name=name: pool.submit(getattr(one, name), *a)
                    )
                    for name in ("ready", "work")
                }
                return SimpleNamespace(**methods)

            return SimpleNamespace(remote=actor)

        return make

    def wait(self, calls, num_returns, timeout):
        wait(calls, timeout=timeout, return_when=FIRST_COMPLETED)
        done = [call for call in calls if call.done()][:num_returns]
        return done, [call for call in calls if call not in done]

    def get(self, call):
        return call.result() if isinstance(call, Future) else call

    def put(self, value):
        return value

    def kill(self, worker):
        pass


@pytest.fixture
def cluster(monkeypatch):
    fake = FakeRay(cores=1)
    monkeypatch.setattr(engine_module, "load_ray", lambda: fake)
    monkeypatch.setattr(engine_module, "join", lambda *_: False)
    monkeypatch.setattr(engine_module, "Worker", FakeWorker)
    monkeypatch.setattr(engine_module, "_LEAST_LATE", 0.05)
    yield fake
    for held in FakeRay.holds.values():
        held.set()


def a_round(engine, number, chunks=8):
    cohort = [np.array([i]) for i in range(chunks)]
    work = SimpleNamespace(recipe="r", description="d", event_counts=lambda c: np.ones(len(c)))
    found = list(engine.run(work, cohort, Broadcast(number, {}, {}, 1.0)))
    assert [one.chunk for one in found] == [[i] for i in range(chunks)]
    return {one.by for one in found}


def until_started(engine):
    """Workers start when they like; a round later at most they are ready."""
    for call, what in engine._calls.items():
        if what.part is None:
            call.result(60)


def test_a_machine_that_joins_gets_work_in_the_next_round(cluster):
    engine = RayEngine()
    assert a_round(engine, 1) == {1}
    cluster.cores = 3
    a_round(engine, 2)
    until_started(engine)
    held = FakeRay.holds[1] = threading.Event()  # one worker alone cannot do the round
    assert a_round(engine, 3) >= {2}
    assert engine.workers == 3
    held.set()


def test_a_given_number_of_workers_does_not_grow(cluster):
    engine = RayEngine(workers=1)
    cluster.cores = 3
    assert a_round(engine, 1) == {1}
    assert a_round(engine, 2) == {1}
    assert FakeWorker.made == 1


@pytest.mark.parametrize("lost", [False, True])
def test_a_part_that_is_late_is_given_out_again(cluster, lost):
    cluster.cores = 2
    engine = RayEngine()
    until_started(engine)
    a_round(engine, 1)
    held = FakeRay.holds[1] = threading.Event()
    if lost:
        FakeRay.lost.add(1)
    assert a_round(engine, 2) == {2}
    assert FakeRay.stuck.is_set()  # it had a part, and the round did not wait for it
    assert a_round(engine, 3) == {2}  # and gets no work meanwhile
    held.set()
    del FakeRay.holds[1]
    ends = time.monotonic() + 60
    while not all(call.part is None for call in engine._calls.values()) and time.monotonic() < ends:
        a_round(engine, 4)
    until_started(engine)
    a_round(engine, 5)
    assert len(engine._idle()) == 2
    assert engine.traffic.replaced == int(lost)
