"""Where a chunk runs must not change its bits: the calling thread, one thread, several."""

import pytest
from builders import random_images

from fedbandit.config import Config
from fedbandit.engines import ThreadEngine
from fedbandit.simulation import simulate


class InPlace:
    """The simplest engine there is."""

    def run(self, work, chunks, broadcast, memory=None):
        for chunk in chunks:
            yield work(chunk, broadcast)

    def close(self):
        pass


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_of_a_pool_compute_as_the_main_thread_does(threads):
    """Torch keeps its number of intra-op threads per thread; with another number matrix products round differently."""
    config = Config.build(
        {"scenario": "scratch", "rounds": 3, "clients_per_round": 12, "model": {"name": "mlp"}}
    )
    dataset = random_images(clients=30, shape=(6, 6))
    weights = []
    for engine in (InPlace(), ThreadEngine(threads)):
        simulation = simulate(config, dataset, engine=engine)
        list(simulation)
        weights.append(simulation.state.weights.tobytes())
        engine.close()
    assert weights[0] == weights[1]
