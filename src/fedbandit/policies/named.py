"""Policies by name: made from a name and plain parameters, and written down as such for devices."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

import numpy as np

from fedbandit.core.parts import construct, resolve
from fedbandit.core.prediction import Prediction, Progress
from fedbandit.policies.floor import Floored
from fedbandit.policies.rules import Drawn, EpsilonGreedy, Falcon, Greedy, Policy, Softmax, Uniform
from fedbandit.policies.schedules import FalconSchedule

BUILT_IN: dict[str, Any] = {
    "greedy": Greedy,
    "epsilon-greedy": EpsilonGreedy,
    "softmax": Softmax,
    "falcon": Falcon,
    "falcon-schedule": FalconSchedule,
    "uniform": Uniform,
}
_ROUNDING = 1e-3  # what the sum of a thousand float32 probabilities may be off


def make_policy(name: str, parameters: Mapping[str, Any], path: str = "policy") -> Policy:
    """The policy of that name, built in or an import path, with a `floor` under it if the parameters have one."""
    make, given = resolve(f"{path}.name", name, BUILT_IN), dict(parameters)
    takes_floor = "floor" in inspect.signature(make).parameters if callable(make) else True
    floor = None if takes_floor else given.pop("floor", None)
    policy: Policy = construct(path, make, given)
    return policy if floor is None else construct(path, Floored, {"floor": floor}, policy)


def describe(policy: Policy) -> dict[str, Any]:
    """A rule as a name and plain parameters, as `make_policy` takes them; what a model file holds."""
    if isinstance(policy, Floored):
        return {**describe(policy.rule), "floor": policy.floor}
    kind = type(policy)
    names = [name for name, built_in in BUILT_IN.items() if built_in is kind]
    parameters = asdict(policy) if is_dataclass(policy) else dict(vars(policy))
    return {"name": names[0] if names else f"{kind.__module__}:{kind.__qualname__}", **parameters}


def rule_at(policy: Policy, progress: Progress) -> Policy:
    """The rule that ships with a version deployed at this point; the policy itself where it has no schedule."""
    at = getattr(policy, "at", None)
    return policy if at is None else at(progress)


def is_built_in(policy: Policy) -> bool:
    """Whether the rule is one of ours, whose probabilities need no checking."""
    return (
        is_built_in(policy.rule)
        if isinstance(policy, Floored)
        else type(policy) in BUILT_IN.values()
    )


def fused_form(policy: Policy) -> Callable[[Prediction, np.ndarray], Drawn] | None:
    """The policy's `sample_fused`; None without one, or where a subclass changed `probabilities` alone."""
    for kind in type(policy).__mro__:
        if "sample_fused" in vars(kind):
            found: Callable[[Prediction, np.ndarray], Drawn] = policy.sample_fused  # type: ignore[attr-defined]
            return found
        if "probabilities" in vars(kind):
            return None
    return None


def importance_scale(policy: Policy, num_actions: int) -> float:
    """What importance weights 1/ρ are multiplied with for this policy; 1 unless the policy says otherwise."""
    scale = getattr(policy, "importance_scale", None)
    return 1.0 if scale is None else float(scale(num_actions))


def check_probabilities(
    probabilities: np.ndarray, prediction: Prediction, available: np.ndarray | None = None
) -> None:
    """Raise `ValueError` unless these are probabilities [n, K], one row for each row of the prediction."""
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
