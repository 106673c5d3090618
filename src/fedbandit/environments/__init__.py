"""Environments: what an action pays where it was chosen. Your own is one small class.

The paper's reward tables are one environment. A `Scenario` says which one holds from which round
on.

Examples:
    >>> import numpy as np
    >>> from fedbandit.core.contexts import Contexts
    >>> from fedbandit.core.ragged import Ragged
    >>> n, labels = 3, Ragged.from_rows([[0], [1], [1]])
    >>> contexts, zeros = Contexts(np.zeros((n, 2))), np.zeros(n, int)
    >>> met = Met(0, contexts, labels, np.arange(n), zeros + 1, zeros, num_actions=2)
    >>> exact_match(2).rewards(met, np.array([0, 0, 1]))
    array([1., 0., 1.], dtype=float32)
    >>> Bernoulli(exact_match(2), least=0.2, most=0.9).expected(met)
    array([[0.9, 0.2],
           [0.2, 0.9],
           [0.2, 0.9]], dtype=float32)
"""

from fedbandit.environments.builtin import (
    BUILT_IN,
    Bernoulli,
    Liked,
    Linear,
    Logistic,
    Preferences,
    Renamed,
    RewardTable,
    Stated,
    changed_like,
    exact_match,
    per_label,
    relabelled,
    with_near_miss,
)
from fedbandit.environments.coba import from_coba
from fedbandit.environments.met import Environment, Met, highest
from fedbandit.environments.scenarios import Scenario, Stage

__all__ = [
    "BUILT_IN",
    "Bernoulli",
    "Environment",
    "Liked",
    "Linear",
    "Logistic",
    "Met",
    "Preferences",
    "Renamed",
    "RewardTable",
    "Scenario",
    "Stage",
    "Stated",
    "changed_like",
    "exact_match",
    "from_coba",
    "highest",
    "per_label",
    "relabelled",
    "with_near_miss",
]
