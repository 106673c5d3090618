"""Reading a workload in a contestant's environment: numpy only."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

BATCH, CLIENT_RATE, SERVER_RATE = 16, 0.1, 0.01


@dataclass(frozen=True)
class Client:
    """One client's log: inputs as the model takes them, chosen actions and rewards."""

    x: np.ndarray  # [n, 28, 28] or dense bags of words [n, words]
    actions: np.ndarray
    rewards: np.ndarray


class Workload:
    """The clients of a workload folder."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self.is_images = (self._folder / "images.npy").exists()
        self._offsets = self._load("offsets")
        self._actions, self._rewards = self._load("actions"), self._load("rewards")
        self._rows = self._load("images" if self.is_images else "ids")
        self.num_actions = int(self._load("num_actions"))
        self.num_clients = len(self._offsets) - 1
        self.words = 0 if self.is_images else int(self._folder.name.split("-")[3])

    def client(self, i: int) -> Client:
        first, last = self._offsets[i], self._offsets[i + 1]
        rows = np.asarray(self._rows[first:last])
        if not self.is_images:
            x = np.zeros((len(rows), self.words), np.float32)
            np.add.at(x, (np.arange(len(rows))[:, None], rows), self._load("value"))
            rows = x
        return Client(rows, np.asarray(self._actions[first:last]), np.asarray(self._rewards[first:last]))

    def _load(self, name: str) -> np.ndarray:
        return np.load(self._folder / f"{name}.npy", mmap_mode="r" if name in ("images", "ids") else None)
