"""Federated algorithms: values with pure functions. Your own is one small class in a file of your own.

An algorithm is made with the server's optimiser and its own parameters, which `[algorithm]` of a configuration names.
"""

from typing import Any

from fedbandit.algorithms.fedavg import FedAvg
from fedbandit.algorithms.fedprox import FedProx
from fedbandit.algorithms.scaffold import Scaffold
from fedbandit.federated.algorithm import Algorithm, Clients, RoundFacts
from fedbandit.federated.pipeline import Contribution, Pipeline, Vectors

BUILT_IN: dict[str, Any] = {"fedavg": FedAvg, "fedprox": FedProx, "scaffold": Scaffold}

__all__ = [
    "BUILT_IN",
    "Algorithm",
    "Clients",
    "Contribution",
    "FedAvg",
    "FedProx",
    "Pipeline",
    "RoundFacts",
    "Scaffold",
    "Vectors",
]
