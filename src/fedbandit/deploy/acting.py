"""A device model made ready to act: how it encodes contexts, scores actions and explores.

What a model file names is built in, or named as trusted by the app: a file from a server must not choose code to run.
"""

import importlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedbandit import policies
from fedbandit.deploy import contexts
from fedbandit.deploy.contexts import Context
from fedbandit.deploy.linear import Scorer, linear_scorer
from fedbandit.deploy.model_files import DeviceModel
from fedbandit.errors import DataError
from fedbandit.policies import Policy


@dataclass(frozen=True)
class Actor:
    """One version of the model, in memory."""

    model: DeviceModel
    policy: Policy
    scores: Scorer

    def encode(self, context: object) -> Context:
        """The context as the model's features; what does not fit raises `ValueError`."""
        if self.model.kind == "sparse":
            return contexts.text(context, self.model.word_index, self.model.shape[0])
        return contexts.dense(context, self.model.shape)

    def probabilities(self, context: Context, available: np.ndarray | None) -> np.ndarray:
        """The probability of every action: [K]."""
        return self.policy.probabilities(self.scores(context), available)

    def available(self, chosen: Any) -> np.ndarray | None:
        """Actions by number or by name, or True and False for each, as a mask bool [K]."""
        if chosen is None:
            return None
        given = np.asarray(chosen)
        k = self.model.num_actions
        if given.dtype == bool:
            if given.shape != (k,):
                raise ValueError(f"available: expected {k} times True or False, got shape {given.shape}")
            mask = given
        else:
            mask = np.zeros(k, bool)
            mask[[self._number(action) for action in given.tolist()]] = True
        if not mask.any():
            raise ValueError("available: at least one action must be available")
        return mask

    def _number(self, action: int | str) -> int:
        if isinstance(action, str) and action in self.model.actions:
            return self.model.actions.index(action)
        if isinstance(action, int) and 0 <= action < self.model.num_actions:
            return action
        raise ValueError(f"available: {action!r} is not an action of this model")


def make_actor(model: DeviceModel, policy: Policy | None, trusted: Collection[str]) -> Actor:
    """Build what the model names; `policy` replaces the model's own."""
    if policy is None:
        policy = _made(model, model.policy, policies.BUILT_IN, trusted)
    if model.model["name"] == "linear":
        return Actor(model, policy, linear_scorer(model.weights["weight"], model.weights["bias"]))
    return Actor(model, policy, _torch_scorer(model, trusted))


def _made(
    model: DeviceModel, part: Mapping[str, Any], built_in: Mapping[str, Any], trusted: Collection[str], *leading: Any
) -> Any:
    """The thing of that name, built in or trusted, made with its parameters."""
    name, parameters = part["name"], {key: value for key, value in part.items() if key != "name"}
    if name in built_in:
        found = built_in[name]
    elif name in trusted and ":" in name:
        module, _, attribute = name.partition(":")
        found = getattr(importlib.import_module(module), attribute)
    else:
        raise DataError(
            f"model {model.version}: names {name!r}, which is not built in and which this app does not trust"
        )
    try:
        return found(*leading, **parameters) if callable(found) else found
    except (TypeError, ValueError) as error:
        raise DataError(f"model {model.version}: {name}: {error}") from None


def _torch_scorer(model: DeviceModel, trusted: Collection[str]) -> Scorer:
    """Any other model, by the very functions that trained it."""
    import torch

    from fedbandit.models import BUILT_IN, DataSpec

    spec = DataSpec(model.kind, model.shape, model.num_actions)
    network = _made(model, model.model, BUILT_IN, trusted, spec)
    expected = {name: array.shape for name, array in network.init(0).items()}
    if expected != {name: array.shape for name, array in model.weights.items()}:
        raise DataError(f"model {model.version}: the weights do not fit {model.model['name']}")
    params = {name: torch.tensor(array) for name, array in model.weights.items()}

    def scores(context: Context) -> np.ndarray:
        with torch.no_grad():
            return network.scores(params, torch.from_numpy(context.values)[None])[0].numpy()

    return scores
