"""The two models as anybody would write them in torch, for the plain loop and the peers that use torch."""

import torch
from arrays import Workload
from torch import Tensor, nn
from torch.nn import functional


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


def model_for(work: Workload) -> nn.Module:
    return Cnn(work.num_actions) if work.is_images else nn.Linear(work.words, work.num_actions)


def chosen_loss(scores: Tensor, actions: Tensor, rewards: Tensor) -> Tensor:
    """Mean squared error of the chosen action's score."""
    return ((scores.gather(1, actions[:, None])[:, 0] - rewards) ** 2).mean()
