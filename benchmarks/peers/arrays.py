"""Reading a workload in a contestant's environment: numpy only."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

BATCH, CLIENT_RATE, SERVER_RATE, BETA = 16, 0.1, 0.01, 0.05


@dataclass(frozen=True)
class Client:
    """One client's contexts as the model takes them, and its log; labels say what acting earns."""

    x: np.ndarray  # [n, 28, 28], bags of words [n, words], or word ids [n, words of a text]
    actions: np.ndarray
    rewards: np.ndarray
    labels: np.ndarray

    def acted(self, scores: np.ndarray, rng: np.random.Generator) -> "Client":
        """The log that softmax exploration makes of scores [n, K]: the action drawn, and whether it was the label."""
        odds = np.exp((scores - scores.max(axis=1, keepdims=True)) / BETA)
        cumulative = np.cumsum(odds, axis=1)
        drawn = (cumulative < rng.random((len(odds), 1)) * cumulative[:, -1:]).sum(axis=1)
        return replace(self, actions=drawn, rewards=(drawn == self.labels).astype(np.float32))


class Workload:
    """The clients of a workload folder; texts as dense bags of words, or `sparse` as the ids of their words."""

    def __init__(self, folder: str, form: str = "dense") -> None:
        self._folder, self.sparse = Path(folder), form == "sparse"
        self.is_images = (self._folder / "images.npy").exists()
        self._offsets = self._load("offsets")
        self._actions, self._rewards, self._labels = (
            self._load(name) for name in ("actions", "rewards", "labels")
        )
        self._rows = self._load("images" if self.is_images else "ids")
        self.num_actions = int(self._load("num_actions"))
        self.num_clients = len(self._offsets) - 1
        self.words = 0 if self.is_images else int(self._folder.name.split("-")[3])
        self.value = 1.0 if self.is_images else float(self._load("value"))  # of each word in a bag

    def client(self, i: int) -> Client:
        own = slice(self._offsets[i], self._offsets[i + 1])
        rows = np.asarray(self._rows[own])
        if not self.is_images and not self.sparse:
            x = np.zeros((len(rows), self.words), np.float32)
            np.add.at(x, (np.arange(len(rows))[:, None], rows), self.value)
            rows = x
        return Client(
            rows,
            *(np.asarray(column[own]) for column in (self._actions, self._rewards, self._labels)),
        )

    def _load(self, name: str) -> np.ndarray:
        return np.load(
            self._folder / f"{name}.npy", mmap_mode="r" if name in ("images", "ids") else None
        )
