"""Exploration: a prediction in, a probability for every action out. Your own policy is one small class.

Examples:
    >>> import numpy as np
    >>> Softmax(beta=0.5).probabilities(Prediction(np.array([[0.0, 1.0]]))).round(2)
    array([[0.12, 0.88]])
"""

from fedbandit.core.prediction import Prediction, Progress
from fedbandit.policies.floor import Floored
from fedbandit.policies.named import (
    BUILT_IN,
    check_probabilities,
    describe,
    fused_form,
    importance_scale,
    is_built_in,
    make_policy,
    rule_at,
)
from fedbandit.policies.rules import EpsilonGreedy, Falcon, Greedy, Policy, Softmax, Uniform, ask
from fedbandit.policies.schedules import FalconSchedule

__all__ = [
    "BUILT_IN",
    "EpsilonGreedy",
    "Falcon",
    "FalconSchedule",
    "Floored",
    "Greedy",
    "Policy",
    "Prediction",
    "Progress",
    "Softmax",
    "Uniform",
    "ask",
    "check_probabilities",
    "describe",
    "fused_form",
    "importance_scale",
    "is_built_in",
    "make_policy",
    "rule_at",
]
