"""Federated algorithms: values with pure functions. Your own is one small class in a file of your
own.

An algorithm is made with the server's optimiser and its own parameters, which `[algorithm]` of a
configuration names.

Examples:
    >>> import numpy as np
    >>> from fedbandit.federated.server import Sgd
    >>> algorithm = FedProx(Sgd(learning_rate=0.5), mu=0.1)
    >>> facts = RoundFacts(round=1, clients=64, population=1000)
    >>> algorithm.model(algorithm.step(algorithm.init(np.zeros(2)), {"weights": np.ones(2)}, facts))
    array([0.5, 0.5])
"""

from typing import Any

from fedbandit.algorithms.diag_newton import DiagNewton
from fedbandit.algorithms.fedavg import FedAvg, FedProx, Scaffold
from fedbandit.algorithms.personal import PersonalPart
from fedbandit.algorithms.statistics import Statistics
from fedbandit.federated.algorithm import Algorithm, Clients, RoundFacts
from fedbandit.federated.pipeline import Contribution, Pipeline, Sent, Vectors

BUILT_IN: dict[str, Any] = {
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "scaffold": Scaffold,
    "diag-newton": DiagNewton,
    "statistics": Statistics,
    "personal": PersonalPart,
}

__all__ = [
    "BUILT_IN",
    "Algorithm",
    "Clients",
    "Contribution",
    "DiagNewton",
    "FedAvg",
    "FedProx",
    "PersonalPart",
    "Pipeline",
    "RoundFacts",
    "Scaffold",
    "Sent",
    "Statistics",
    "Vectors",
]
