"""Exploration: a prediction in, a probability for every action out. Your own policy is one small class."""

from fedbandit.policies.rules import (
    BUILT_IN,
    EpsilonGreedy,
    Falcon,
    Greedy,
    Policy,
    Softmax,
    check_probabilities,
    importance_scale,
)

__all__ = [
    "BUILT_IN",
    "EpsilonGreedy",
    "Falcon",
    "Greedy",
    "Policy",
    "Softmax",
    "check_probabilities",
    "importance_scale",
]
