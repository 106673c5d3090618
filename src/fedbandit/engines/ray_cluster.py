"""Joining a Ray cluster, or starting one for a command alone. Knows nothing of what is sent there."""

import os
from typing import Any

from fedbandit.errors import ConfigError, FedbanditError


def load_ray() -> Any:
    """The Ray package, or a word on how to get it."""
    try:
        import ray
    except ImportError:
        raise ConfigError("engine: ray is not installed; pip install 'fedbandit[ray]'") from None
    return ray


def join(ray: Any, address: str | None, cores: int | None = None) -> bool:
    """Join the cluster at `address` (`auto`: the one on this machine) or start one of `cores` cores here.

    False if this process was part of a cluster already: then somebody else will leave it.
    """
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a run reports to nobody
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        if address is None:
            ray.init(address="local", num_cpus=cores, include_dashboard=False, **quiet)
        else:
            ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"ray-address: cannot join {address or 'a local cluster'}: {str(error).splitlines()[0]}"
        ) from None
    return True


def cores_of(ray: Any) -> int:
    """The cores of all machines that are in the cluster now."""
    return int(ray.cluster_resources().get("CPU", 0))


def original(error: Any) -> Exception:
    """What went wrong in a worker, as if it had gone wrong here."""
    return error.cause if isinstance(error.cause, FedbanditError) else error
