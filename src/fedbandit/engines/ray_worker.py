"""What runs inside a Ray worker: opens the data, builds the work from the configuration, and does chunks of it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedbandit.config import Config
from fedbandit.data import EMBEDDED, FederatedDataset, open_dataset
from fedbandit.errors import DataError
from fedbandit.federated.client import Broadcast, ChunkResult, ClientWork
from fedbandit.simulation.experiment import Experiment, build_experiment


@dataclass(frozen=True)
class RoundWeights:
    """A broadcast whose weights lie in Ray's object store, each reference in a list so that Ray leaves it alone."""

    key: int  # another one for every round
    training: list[Any]
    deployed: Mapping[int, list[Any]]
    rest: Broadcast  # everything else, with no weights in it


class Worker:
    """One core's worth of work. It keeps the weights of the round and of the versions in use, and nothing else."""

    def open(self, config: dict[str, Any], path: str, fingerprint: str) -> None:
        """Open the data set on this machine and build the work."""
        dataset = open_same_data(config["data"]["source"], path, fingerprint)
        self._experiment = build_experiment(Config.build(config), dataset)
        self._key = 0
        self._broadcast: Broadcast | None = None
        self._versions: dict[int, tuple[Any, np.ndarray]] = {}

    def work(self, phase: str, chunks: list[np.ndarray], weights: RoundWeights) -> list[ChunkResult]:
        """The results of some chunks, each on its own."""
        work = phase_work(self._experiment, phase)
        broadcast = self._received(weights)
        return [work(chunk.copy(), broadcast) for chunk in chunks]

    def _received(self, weights: RoundWeights) -> Broadcast:
        if self._broadcast is None or weights.key != self._key:
            held = {}
            for version, (reference,) in weights.deployed.items():
                before = self._versions.get(version)
                held[version] = before if before and before[0] == reference else (reference, _fetched(reference))
            self._versions, self._key = held, weights.key
            self._broadcast = replace(
                weights.rest,
                training=_fetched(weights.training[0]),
                deployed={version: array for version, (_, array) in held.items()},
            )
        return self._broadcast


def open_same_data(source: str, path: str, fingerprint: str) -> FederatedDataset:
    """The data set of the driver as it lies on this machine; an embedded one is made where it is missing."""
    made_here = source in EMBEDDED and not Path(path).exists()
    dataset = open_dataset(source) if made_here else FederatedDataset.open(path)
    if dataset.header.fingerprint != fingerprint:
        raise DataError(f"{dataset.path}: holds other data on this machine than where the run was started")
    return dataset


def phase_work(experiment: Experiment, phase: str) -> ClientWork:
    """The work of the phase of that name."""
    found = experiment.bandit if phase == "bandit" else experiment.pretraining
    assert found is not None
    return found.work


def phase_name(experiment: Experiment, work: ClientWork) -> str:
    """The phase of the experiment that this is the work of; work made in another way cannot be rebuilt elsewhere."""
    name = "pretraining" if work.supervised else "bandit"
    if name == "bandit" or experiment.pretraining is not None:
        ours = phase_work(experiment, name)
        if all(getattr(ours, part) == getattr(work, part) for part in ("plan", "policy", "seed")):
            return name
    raise ValueError("the Ray engine was made for another configuration than the one that is to be run")


def _fetched(reference: Any) -> np.ndarray:
    """An array of our own: what lies in the object store is read-only, which torch and compiled loops do not like."""
    import ray

    return np.array(ray.get(reference))
