"""The paper's recipe for a clip norm: let it find the median of the update norms without noise, fix it, then try rates.

Everything here looks at clients' data without privacy: do it on public data, or count it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fedbandit.config import Config
from fedbandit.data import FederatedDataset
from fedbandit.errors import Diverged
from fedbandit.simulation.simulate import simulate

_LADDER = (1.0, 2.0, 5.0)  # the paper's grids are of this form, times powers of ten


@dataclass(frozen=True)
class Tried:
    """One point of the grid; a reward of None has diverged."""

    server_learning_rate: float
    client_learning_rate: float
    running_reward: float | None


def estimate_norm(config: Config, dataset: FederatedDataset | None = None, quantile: float = 0.5) -> float:
    """The norm at which adaptive clipping without noise settles: the median of the last quarter of rounds."""
    plain = config.with_values({"privacy": {}, "clipping": {"quantile": quantile, "initial": 0.1}})
    norms = simulate(plain, dataset).collect()["clip_norm"]
    return float(np.median(norms[-max(1, len(norms) // 4) :]))


def rates_around(rate: float) -> tuple[float, ...]:
    """A rate with its lower and upper neighbour in 1, 2, 5, 10, 20, ..."""
    ladder = [step * 10.0**power for power in range(-6, 4) for step in _LADDER]
    nearest = int(np.argmin(np.abs(np.log(np.array(ladder) / rate))))
    return tuple(float(f"{ladder[i]:g}") for i in (nearest - 1, nearest, nearest + 1))


def try_rates(config: Config, norm: float, dataset: FederatedDataset | None = None) -> Iterator[Tried]:
    """Run the configuration with the norm fixed, for every pair of rates around its own."""
    for server in rates_around(config.server.learning_rate):
        for client in rates_around(config.client.learning_rate):
            member = config.with_values(
                {"clipping.norm": norm, "server.learning_rate": server, "client.learning_rate": client}
            )
            try:
                reward = float(simulate(member, dataset).collect()["running_reward"][-1])
            except Diverged:
                reward = None
            yield Tried(server, client, reward)


def rounded(norm: float) -> float:
    """Two digits, as one would write a clip norm down."""
    return float(f"{norm:.2g}")
