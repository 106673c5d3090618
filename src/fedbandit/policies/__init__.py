"""Exploration: a prediction in, a probability for every action out. Your own is one small class.

Rules are made here from a name and plain parameters, and written down as such for devices.

Examples:
    >>> import numpy as np
    >>> Softmax(beta=0.5).probabilities(Prediction(np.array([[0.0, 1.0]]))).round(2)
    array([[0.12, 0.88]])
"""

import inspect
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

import numpy as np

from fedbandit.core.parts import construct, resolve
from fedbandit.core.prediction import Prediction, Progress
from fedbandit.policies.rules import (
    Around,
    Constant,
    DecayingEpsilon,
    EpsilonGreedy,
    Falcon,
    FalconSchedule,
    Floored,
    Greedy,
    Policy,
    Softmax,
    SquareCB,
    Uniform,
    ask,
    fused_form,
    importance_scale,
    rule_at,
    takes_contexts,
)
from fedbandit.policies.uncertain import Bagging, Optimistic, Thompson, Ucb

__all__ = [
    "BUILT_IN",
    "Bagging",
    "Constant",
    "DecayingEpsilon",
    "EpsilonGreedy",
    "Falcon",
    "FalconSchedule",
    "Floored",
    "Greedy",
    "Optimistic",
    "Policy",
    "Prediction",
    "Progress",
    "Softmax",
    "SquareCB",
    "Thompson",
    "Ucb",
    "Uniform",
    "ask",
    "check_probabilities",
    "describe",
    "described_at",
    "fused_form",
    "importance_scale",
    "is_built_in",
    "make_policy",
    "rule_at",
    "takes_contexts",
]

BUILT_IN: dict[str, Any] = {
    "greedy": Greedy,
    "epsilon-greedy": EpsilonGreedy,
    "softmax": Softmax,
    "falcon": Falcon,
    "falcon-schedule": FalconSchedule,
    "uniform": Uniform,
    "constant": Constant,
    "squarecb": SquareCB,
    "ucb": Ucb,
    "thompson": Thompson,
    "bagging": Bagging,
    "decaying-epsilon": DecayingEpsilon,
}
_AROUND: dict[str, Any] = {"alpha": Optimistic, "floor": Floored}  # any rule takes these, too
_ROUNDING = 1e-4  # what a sum of float32 probabilities may be off


def make_policy(name: str, parameters: Mapping[str, Any], path: str = "policy") -> Policy:
    """The policy of that name, built in or an import path.

    A rule without these parameters of its own also takes `alpha` (a bonus of that many widths) and
    `floor` (the share of uniform exploration under it).
    """
    make, given = resolve(f"{path}.name", name, BUILT_IN), dict(parameters)
    own = inspect.signature(make).parameters if callable(make) else _AROUND
    around = {key: given.pop(key) for key in _AROUND if key in given and key not in own}
    policy: Policy = construct(path, make, given)
    for key, value in around.items():
        policy = construct(path, _AROUND[key], {key: value}, policy)
    return policy


def describe(policy: Policy) -> dict[str, Any]:
    """A rule as a name and plain parameters, as `make_policy` takes them; what a model file holds."""
    for key, kind in _AROUND.items():
        if isinstance(policy, kind):
            return {**describe(policy.rule), key: getattr(policy, key)}
    made = type(policy)
    names = [name for name, built_in in BUILT_IN.items() if built_in is made]
    parameters = asdict(policy) if is_dataclass(policy) else dict(vars(policy))
    return {"name": names[0] if names else f"{made.__module__}:{made.__qualname__}", **parameters}


def described_at(
    described: Mapping[str, Any], policy: Policy, progress: Progress
) -> dict[str, Any]:
    """The rule of a version deployed at this point, as a model file states it.

    A built-in schedule is written down as the rule it gives. A schedule of the user's own keeps its
    name, by which devices trust it, with the progress that it is asked for.
    """
    rule = rule_at(policy, progress)
    if is_built_in(rule) and is_built_in(policy):
        return describe(rule)
    return dict(described) if rule is policy else {**described, "progress": asdict(progress)}


def is_built_in(policy: Policy) -> bool:
    """Whether the rule is one of ours, whose probabilities need no checking."""
    while isinstance(policy, Around):
        policy = policy.rule
    return type(policy) in BUILT_IN.values()


def check_probabilities(
    probabilities: np.ndarray, prediction: Prediction, available: np.ndarray | None = None
) -> None:
    """Raise `ValueError` unless these are probabilities [n, K] for the rows of the prediction."""
    like = prediction.mean
    if np.shape(probabilities) != like.shape:
        raise ValueError(
            f"probabilities of shape {np.shape(probabilities)} for scores of shape {like.shape}"
        )
    if not (np.isfinite(probabilities).all() and np.min(probabilities, initial=0) >= 0):
        raise ValueError("probabilities that are negative or not numbers")
    sums = np.sum(probabilities, axis=-1)
    if len(sums) and np.abs(sums - 1).max() > _ROUNDING:
        raise ValueError(f"probabilities that sum to {sums[np.abs(sums - 1).argmax()]:.6g}")
    if available is not None and np.any(probabilities[~np.broadcast_to(available, like.shape)]):
        raise ValueError("probabilities of actions that are not available")
