"""fedbandit: whole bandit rounds (act, train, clip, aggregate, step), or training on a given log alone."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from arrays import BATCH, CLIENT_RATE, SERVER_RATE
from protocol import serve

from fedbandit import Config
from fedbandit.assembly.experiment import Experiment, build_experiment
from fedbandit.core.process import Stopwatch
from fedbandit.core.ragged import Ragged
from fedbandit.data import FederatedDataset
from fedbandit.data.dataset import Header, Split
from fedbandit.engines import ThreadEngine
from fedbandit.events import Events
from fedbandit.federated.algorithm import RoundFacts
from fedbandit.federated.clients import Broadcast, ChunkResult
from fedbandit.federated.pipeline import Contribution
from fedbandit.federated.round import run_round


def dataset(folder: Path) -> FederatedDataset:
    """A workload folder as a data set, its arrays mapped where they lie."""
    arrays = {path.stem: np.load(path, mmap_mode="r") for path in folder.glob("*.npy")}
    n, k = len(arrays["labels"]), int(arrays["num_actions"])
    if "images" in arrays:
        features, shape = arrays["images"], (28, 28)
    else:
        ids = arrays["ids"]
        shape = (int(folder.name.split("-")[3]),)
        values = np.full(ids.size, arrays["value"], np.float32)
        features = Ragged(np.arange(0, ids.size + 1, ids.shape[1]), ids.reshape(-1), values)
    clients = len(arrays["offsets"]) - 1
    header = Header(
        name=folder.name,
        kind="dense" if "images" in arrays else "sparse",
        shape=shape,
        actions=tuple(map(str, range(k))),
        action_counts=(1,) * k,
        fingerprint=folder.name,
    )
    names = np.array([f"c{i:07d}" for i in range(clients)], dtype=bytes)
    labels = Ragged(np.arange(n + 1), arrays["labels"])
    return FederatedDataset(header, Split(names, np.asarray(arrays["offsets"]), features, labels))


def experiment(
    data: FederatedDataset, clients: int | None = None, **settings: object
) -> Experiment:
    """A bandit run on the workload: softmax exploration, regression, adaptive clipping, Adam."""
    config = {
        "scenario": "scratch",
        "rounds": 10**6,
        "deploy_every": 200,
        "clients_per_round": clients or min(64, data.train.num_clients),
        "model": {"name": "cnn" if data.header.kind == "dense" else "linear"},
        "policy": {"name": "softmax", "beta": 0.05},
        "client": {"learning_rate": CLIENT_RATE, "batch_size": BATCH},
        "server": {"learning_rate": SERVER_RATE},
        **settings,
    }
    return build_experiment(Config.build(config), data)


class BanditRounds:
    """Whole rounds of the simulation loop."""

    def __init__(self, built: Experiment, threads: int) -> None:
        self._phase, self._engine = built.bandit, ThreadEngine(threads)
        self._state, self.watch = self._phase.start(built.initial_weights()), Stopwatch()

    def __call__(self) -> None:
        self._state, _ = run_round(self._phase, self._state, self._engine, self.watch)


class TrainingRounds:
    """Training alone: every client has its log already, as it has in the other contestants."""

    def __init__(self, built: Experiment, folder: Path, threads: int) -> None:
        self._phase, self._engine = built.bandit, ThreadEngine(threads)
        self._split, self._learner = built.dataset.train, built.bandit.work.learner
        self._actions, self._rewards = (
            np.load(folder / "actions.npy"),
            np.load(folder / "rewards.npy"),
        )
        self._state = self._phase.start(built.initial_weights())
        self.event_counts = built.bandit.work.event_counts  # what the engine asks of any work

    def __call__(self) -> None:
        phase, state = self._phase, self._state
        broadcast = phase.work.broadcast(state)
        total = np.zeros_like(state.weights)
        chunks = phase.work.chunks(phase.cohorts.draw(1))
        accepted = 0
        for result in self._engine.run(self._train, chunks, broadcast):  # type: ignore[arg-type]
            result.sent.sums["weights"].add_to(total)
            accepted += len(result.norms)
        update = phase.aggregation.mean(total, accepted, 1, state.clip_norm)
        kept = phase.work.algorithm.step(
            state.server_state, {"weights": update}, RoundFacts(1, accepted, accepted)
        )
        self._state = replace(state, weights=kept["weights"], kept=kept)

    @property
    def _train(self) -> "TrainingWork":
        return TrainingWork(self)

    def train(self, clients: np.ndarray, broadcast: Broadcast) -> ChunkResult:
        sizes = self.event_counts(clients)
        starts = self._split.offsets[clients]
        rows = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, sizes, strict=True)])
        events = Events(
            bounds=np.concatenate([[0], np.cumsum(sizes)]),
            contexts=self._split.contexts(rows),
            actions=self._actions[rows],
            rewards=self._rewards[rows],
            propensities=np.ones(len(rows), np.float32),
            versions=np.zeros(len(rows), np.int32),
            fresh=np.ones(len(rows), bool),
        )
        update, norms = self._learner.train(
            broadcast.received["weights"], events, broadcast.clip_norm
        )
        return ChunkResult(Contribution({"weights": update}, norms), sizes, norms, norms)


class TrainingWork:
    """What the engine calls for a chunk."""

    def __init__(self, rounds: TrainingRounds) -> None:
        self._rounds, self.event_counts = rounds, rounds.event_counts

    def __call__(
        self, clients: np.ndarray, broadcast: Broadcast, memory: object = None
    ) -> ChunkResult:
        return self._rounds.train(clients, broadcast)


if __name__ == "__main__":
    path, kind, thread_count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    run = experiment(dataset(path))
    serve(
        BanditRounds(run, thread_count)
        if kind == "bandit"
        else TrainingRounds(run, path, thread_count)
    )
