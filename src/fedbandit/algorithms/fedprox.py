"""FedProx (Li et al., 2020): FedAvg whose clients are drawn back to the model they received.

Each local loss gets (mu / 2) · ||w - received||², so each gradient gets mu · (w - received).
"""

from dataclasses import dataclass

import numpy as np

from fedbandit.algorithms.fedavg import FedAvg


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg with a proximal term of weight `mu`; 0 is FedAvg."""

    mu: float = 0.01

    def __post_init__(self) -> None:
        if not 0 <= self.mu < np.inf:
            raise ValueError(f"mu must not be negative, not {self.mu}")

    @property
    def pull(self) -> float:
        return self.mu
