"""The engine that a configuration asks for."""

from fedbandit.config import Config
from fedbandit.data import FederatedDataset
from fedbandit.engines.base import Engine
from fedbandit.engines.threads import ThreadEngine


def make_engine(config: Config, dataset: FederatedDataset, ray_address: str | None = None) -> Engine:
    """Threads of this process, or the workers of a Ray cluster: a running one by its address, or one of its own."""
    if config.engine == "ray":
        from fedbandit.engines.ray import RayEngine

        return RayEngine(config, dataset, address=ray_address)
    return ThreadEngine(None if config.threads == "auto" else config.threads)
