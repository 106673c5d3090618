"""The models as an expert would write them in torch, for the plain loop and the peers that use torch."""

import numpy as np
import torch
from arrays import BATCH, Client, Workload
from torch import Tensor, nn
from torch.nn import functional

Log = tuple[Tensor, Tensor, Tensor]  # contexts, actions, rewards


class Cnn(nn.Module):
    """The FedAvg CNN."""

    def __init__(self, num_actions: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 5, padding=2), nn.Conv2d(32, 64, 5, padding=2)
        self.dense1, self.dense2 = nn.Linear(3136, 512), nn.Linear(512, num_actions)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(torch.relu(self.conv1(x[:, None])), 2)
        x = functional.max_pool2d(torch.relu(self.conv2(x)), 2)
        return self.dense2(torch.relu(self.dense1(x.flatten(1))))


class WordEntries(nn.Module):
    """A linear model on word ids. The loss reads one entry of each word's row; its gradient is as sparse as that."""

    def __init__(self, words: int, num_actions: int, value: float) -> None:
        super().__init__()
        self.entries = nn.Parameter(
            torch.randn(words * num_actions, 1) * (2 / (words + num_actions)) ** 0.5
        )
        self.bias = nn.Parameter(torch.zeros(num_actions))
        self._shape, self._value = (words, num_actions), value

    def forward(self, ids: Tensor) -> Tensor:
        return (
            self._value * functional.embedding_bag(ids, self.entries.view(self._shape), mode="sum")
            + self.bias
        )

    def chosen(self, ids: Tensor, actions: Tensor) -> Tensor:
        places = ids * self._shape[1] + actions[:, None]
        summed = functional.embedding_bag(places, self.entries, mode="sum", sparse=True)[:, 0]
        return self._value * summed + self.bias[actions]


def model_for(work: Workload) -> nn.Module:
    if work.is_images:
        return Cnn(work.num_actions)
    if work.sparse:
        return WordEntries(work.words, work.num_actions, work.value)
    return nn.Linear(work.words, work.num_actions)


def chosen_loss(model: nn.Module, x: Tensor, actions: Tensor, rewards: Tensor) -> Tensor:
    """Mean squared error of the chosen action's score."""
    scores = (
        model.chosen(x, actions)
        if isinstance(model, WordEntries)
        else model(x).gather(1, actions[:, None])[:, 0]
    )
    return ((scores - rewards) ** 2).mean()


def log_of(client: Client, acting: nn.Module | None, rng: np.random.Generator) -> Log:
    """What a client trains on: the log that it has, or the one that it makes by acting with a model."""
    x = torch.tensor(client.x, dtype=torch.float32 if client.x.dtype.kind == "f" else torch.int64)
    if acting is not None:
        with torch.no_grad():
            client = client.acted(acting(x).numpy(), rng)
    return x, torch.from_numpy(client.actions), torch.from_numpy(client.rewards)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, log: Log) -> None:
    """One epoch of mini-batches."""
    x, actions, rewards = log
    for begin in range(0, len(x), BATCH):
        batch = slice(begin, begin + BATCH)
        optimizer.zero_grad()
        chosen_loss(model, x[batch], actions[batch], rewards[batch]).backward()
        optimizer.step()
