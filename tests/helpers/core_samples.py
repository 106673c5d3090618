"""Data and runs that the tests of the core share."""

from dataclasses import replace

import numpy as np
from builders import dataset_in_memory, random_images, random_text

from fedbandit.config import Config
from fedbandit.core.contexts import Contexts
from fedbandit.core.ragged import Ragged
from fedbandit.data import FederatedDataset
from fedbandit.environments import Met
from fedbandit.simulation import Simulation, simulate

ROUNDS = 5


def text(seed: int = 0) -> FederatedDataset:
    """Sparse text; client 3 has no examples, nor has the last one."""
    return _with_fingerprint(_with_an_empty_client(random_text(seed)), f"text {seed}")


def images(seed: int = 0, cased: bool = True) -> FederatedDataset:
    """Dense contexts of 4x4; the last client has no examples."""
    dataset = _with_fingerprint(
        _with_an_empty_client(random_images(seed, clients=11)), f"images {seed} {cased}"
    )
    return dataset if cased else replace(dataset, header=replace(dataset.header, lower_case={}))


def config(**settings: object) -> Config:
    """A short run in float64 with deployments, several chunks, last smaller batches; dotted keys as `a__b`."""
    base = {
        "scenario": "scratch",
        "rounds": ROUNDS,
        "deploy_every": 2,
        "clients_per_round": 6,
        "seed": 3,
        "dtype": "float64",
        "threads": 2,
        "client": {"learning_rate": 0.5, "batch_size": 4},
        "server": {"learning_rate": 0.05},
        "policy": {"name": "softmax", "beta": 0.2},
        "pretraining": {"rounds": 3, "clients": 6},
    }
    return Config.build(base).with_values(
        {key.replace("__", "."): value for key, value in settings.items()}
    )


def met_with(labels: Ragged, num_actions: int, clients: np.ndarray | None = None) -> Met:
    """Decisions of round 1 with these labels, each of another client, and contexts of one number."""
    n = len(labels)
    clients = np.arange(n) if clients is None else clients
    return Met(
        0, Contexts(np.ones((n, 1))), labels, clients, np.ones(n, int), np.arange(n), num_actions
    )


def weights_of(simulation: Simulation) -> dict[str, np.ndarray]:
    """The training model's weights by name."""
    return simulation.experiment.layout.split(simulation.state.weights)


def played(config: Config, dataset: FederatedDataset, **parts) -> tuple[list[dict], Simulation]:
    """Every round's metrics, and the run after its last round."""
    simulation = simulate(config, dataset, **parts)
    rounds = list(simulation)
    simulation.engine.close()
    return rounds, simulation


def easy(
    clients: int = 30, per_client: int = 20, num_actions: int = 4, noise: float = 0.05
) -> FederatedDataset:
    """Contexts near one corner per action: a linear model can learn them without error."""
    rng = np.random.default_rng(7)
    labels = rng.integers(0, num_actions, clients * per_client)
    features = (
        np.eye(num_actions)[labels] + noise * rng.standard_normal((len(labels), num_actions))
    ).astype(np.float32)
    offsets = np.arange(clients + 1) * per_client
    return _with_fingerprint(
        dataset_in_memory(features, [[int(a)] for a in labels], offsets, num_actions), "easy"
    )


def _with_an_empty_client(dataset: FederatedDataset) -> FederatedDataset:
    split = dataset.train
    ids = np.append(split.client_ids, np.array([b"empty"]))
    return replace(
        dataset,
        train=replace(split, client_ids=ids, offsets=np.append(split.offsets, split.offsets[-1])),
    )


def _with_fingerprint(dataset: FederatedDataset, fingerprint: str) -> FederatedDataset:
    # Pre-trained models are kept by fingerprint: data sets that differ must not share one.
    return replace(dataset, header=replace(dataset.header, fingerprint=fingerprint))
