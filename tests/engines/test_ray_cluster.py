"""The Ray engine on a cluster of two nodes (on this machine), joined by its address, and when one node is lost."""

import json

import pytest

from fedbandit.config import Config
from fedbandit.core.errors import ConfigError
from fedbandit.data import FederatedDataset
from fedbandit.data.embedded import topics
from fedbandit.engines import ThreadEngine
from fedbandit.simulation import simulate

ray = pytest.importorskip("ray")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),
]  # the warnings are of Ray's own making

from ray.cluster_utils import Cluster  # noqa: E402 - needs ray

from fedbandit.engines import RayEngine  # noqa: E402 - needs ray

# Enough clients for several chunks a round, so that both nodes have work and the loss of one is noticed.
CONFIG = Config.build(
    {"scenario": "scratch", "rounds": 5, "deploy_every": 2, "clients_per_round": 250}
)


@pytest.fixture
def two_nodes():
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    second = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    yield cluster, second
    ray.shutdown()
    cluster.shutdown()


def test_two_nodes_and_then_one(two_nodes, tmp_path):
    cluster, second = two_nodes
    dataset = FederatedDataset.open(topics.generate(tmp_path / "text", users=300, words=1000))
    threads = ThreadEngine(2)
    expected = [json.dumps(metrics) for metrics in simulate(CONFIG, dataset, engine=threads)]
    threads.close()
    engine = RayEngine(address=cluster.address)
    try:
        assert engine.workers == 2
        ray.get(list(engine._calls))
        node = lambda worker: __import__("ray").get_runtime_context().get_node_id()  # noqa: E731 - sent by value
        places = {ray.get(worker.__ray_call__.remote(node)) for worker in engine._alive}
        assert len(places) == 2
        rounds = iter(simulate(CONFIG, dataset, engine=engine))
        seen = [json.dumps(next(rounds)) for _ in range(2)]
        cluster.remove_node(second, allow_graceful=False)
        seen += [json.dumps(metrics) for metrics in rounds]
        assert seen == expected
        # The other node has its work, whether Ray has noticed the loss by then or not.
        assert engine.traffic.replaced + engine.traffic.given_again >= 1
    finally:
        engine.close()


def test_an_address_where_nobody_answers():
    with pytest.raises(ConfigError, match="ray-address"):
        RayEngine(address="no port at all")
