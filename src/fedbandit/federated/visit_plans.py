"""Which examples a client meets, when, and which deployed model answers: the plan of a chunk before
anyone acts.

Simple mode rebuilds a client's log every time it is drawn. Population mode gives every client a
capped cache that lasts; since all draws are addressed, the cache is a function of (client, period)
and need not be stored anywhere.
"""

from dataclasses import dataclass

import numpy as np

from fedbandit.core import loops
from fedbandit.core.randomness import Purpose, uniforms
from fedbandit.data.dataset import Split


@dataclass(frozen=True)
class Visits:
    """One row an event, grouped by client in the order of the chunk, oldest first."""

    bounds: np.ndarray  # int64 [clients + 1]
    rows: np.ndarray  # int64 [n]: the example of the split
    clients: np.ndarray  # int64 [n]: the client's index in the split
    times: (
        np.ndarray
    )  # int64 [n]: the round (simple mode) or period (population mode) that addresses the draw
    positions: np.ndarray  # int64 [n]: the place within the client's draw of that time
    versions: np.ndarray  # int32 [n]: the deployed model that chooses
    rounds: np.ndarray  # int64 [n]: the round it happens in; of a period, its first
    now: int  # the time that is current

    @property
    def fresh(self) -> np.ndarray:
        """Which events happen now: bool [n]."""
        return np.asarray(self.times == self.now)


@dataclass(frozen=True)
class SimpleVisits:
    """Algorithm 4: a fresh log from the newest deployed model each time a client is drawn."""

    seed: int
    deploy_every: int
    max_examples: int | None = None

    def visits(self, split: Split, clients: np.ndarray, round_number: int) -> Visits:
        times = np.full(len(clients), round_number)
        version = period_of(round_number, self.deploy_every)
        owner, positions, rows = loops.random_examples(
            self.seed, times, clients, split.offsets, self.max_examples
        )
        return Visits(
            bounds=np.searchsorted(owner, np.arange(len(clients) + 1)),
            rows=rows,
            clients=clients[owner],
            times=times[owner],
            positions=positions,
            versions=np.full(len(rows), version, np.int32),
            rounds=times[owner],
            now=round_number,
        )

    def event_counts(self, split: Split, clients: np.ndarray) -> np.ndarray:
        """The most events that each client will have: int64 [clients]."""
        sizes: np.ndarray = split.offsets[clients + 1] - split.offsets[clients]
        return sizes if self.max_examples is None else np.minimum(sizes, self.max_examples)

    def oldest_version(self, round_number: int) -> int:
        """The oldest deployed model that may still be asked for in this round or later."""
        return period_of(round_number, self.deploy_every)

    def remembered(self) -> int:
        """The number of periods whose events a client may still hold."""
        return 1


@dataclass(frozen=True)
class PopulationVisits:
    """Algorithm 1 and section 3.2: every client acts in every period and keeps its newest
    `cache_size` events.

    No cache reaches further back than a client needs that fills it at the full rate, so that old
    models can go.

    At the start of a period a client fetches the newest model with probability `pull_probability`,
    otherwise it keeps the one it has, so models of several ages are in use at once.
    """

    seed: int
    deploy_every: int
    events_per_period: int = 64
    cache_size: int = 256
    pull_probability: float = 1.0
    # periods after which every client has fetched a model, so that old ones can be thrown away
    longest_lag: int = 8

    def visits(self, split: Split, clients: np.ndarray, round_number: int) -> Visits:
        period = period_of(round_number, self.deploy_every)
        periods = np.arange(max(0, period - self.remembered() + 1), period + 1)
        pair_client = np.repeat(np.arange(len(clients)), len(periods))
        pair_time = np.tile(periods, len(clients))
        owner, positions, rows = loops.random_examples(
            self.seed, pair_time, clients[pair_client], split.offsets, self.events_per_period
        )
        client, times = pair_client[owner], pair_time[owner]
        # The newest events of each client: count from its end.
        ends = np.searchsorted(client, np.arange(1, len(clients) + 1))
        keep = ends[client] - np.arange(len(client)) <= self.cache_size
        client, times, positions, rows = client[keep], times[keep], positions[keep], rows[keep]
        versions = self._versions(clients[pair_client], pair_time)[owner][keep]
        return Visits(
            bounds=np.searchsorted(client, np.arange(len(clients) + 1)),
            rows=rows,
            clients=clients[client],
            times=times,
            positions=positions,
            versions=versions.astype(np.int32),
            rounds=times * self.deploy_every + 1,
            now=period,
        )

    def event_counts(self, split: Split, clients: np.ndarray) -> np.ndarray:
        sizes: np.ndarray = split.offsets[clients + 1] - split.offsets[clients]
        return np.asarray(
            np.minimum(
                np.minimum(sizes, self.events_per_period) * self.remembered(), self.cache_size
            )
        )

    def oldest_version(self, round_number: int) -> int:
        period = period_of(round_number, self.deploy_every)
        return max(0, period - self.remembered() + 1 - self.longest_lag)

    def remembered(self) -> int:
        """Periods that a cache reaches back; a client may have a single example in each."""
        return -(-self.cache_size // self.events_per_period)

    def _versions(self, clients: np.ndarray, periods: np.ndarray) -> np.ndarray:
        """The model each client holds in each period: that of the last period in which it fetched
        one.
        """
        held: np.ndarray = np.maximum(periods - self.longest_lag, 0)
        for lag in range(self.longest_lag - 1, -1, -1):
            asked = periods - lag
            fetched = (
                uniforms(self.seed, Purpose.PULLS, np.maximum(asked, 0), clients)
                < self.pull_probability
            )
            held = np.where(fetched & (asked >= 0), asked, held)
        return held


VisitPlan = SimpleVisits | PopulationVisits
"""The ways in which clients come by their events."""


def period_of(round_number: int, deploy_every: int) -> int:
    """The deployment period of a round (counted from 1), which is also the version of the newest
    deployed model.
    """
    return (round_number - 1) // deploy_every
