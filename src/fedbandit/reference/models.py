"""Three models for one context at a time: scores, and gradients written out by hand.

`gradient(theta, x, errors)` is the gradient of Σ_a errors[a] · score_a, which is what the chain
rule asks of a model once the loss has said how much each score should move.
"""

from typing import Any, Protocol

import numpy as np

from fedbandit.core.randomness import Purpose, generator
from fedbandit.data.dataset import Header

Weights = dict[str, np.ndarray]


class ReferenceModel(Protocol):
    """Scores of one context, and their gradient, in float64."""

    def init(self, seed: int) -> Weights: ...
    def scores(self, theta: Weights, x: Any) -> np.ndarray: ...
    def gradient(self, theta: Weights, x: Any, errors: np.ndarray) -> Weights: ...


def make_model(name: str, parameters: dict[str, Any], header: Header) -> ReferenceModel:
    """The model that a configuration names."""
    features, actions = int(np.prod(header.shape)), header.num_actions
    if name == "linear":
        return (
            SparseLinear(features, actions)
            if header.kind == "sparse"
            else DenseLinear(features, actions)
        )
    if name == "mlp":
        return Mlp(features, actions, **parameters)
    raise ValueError(f"the reference has no model named {name}")


class DenseLinear:
    """score = b + Wᵀ x / |x|, zero at first."""

    def __init__(self, features: int, actions: int) -> None:
        self.features, self.actions = features, actions

    def init(self, seed: int) -> Weights:
        return {"weight": np.zeros((self.features, self.actions)), "bias": np.zeros(self.actions)}

    def scores(self, theta: Weights, x: np.ndarray) -> np.ndarray:
        return _unit(x) @ theta["weight"] + theta["bias"]

    def gradient(self, theta: Weights, x: np.ndarray, errors: np.ndarray) -> Weights:
        return {"weight": np.outer(_unit(x), errors), "bias": errors}


class SparseLinear:
    """score = b + Σ value · W[word] over the words of a text; a context is a list of (word,
    value).
    """

    def __init__(self, words: int, actions: int) -> None:
        self.words, self.actions = words, actions

    def init(self, seed: int) -> Weights:
        weight = _glorot_uniform(generator(seed, Purpose.MODEL), self.words, self.actions)
        return {"weight": weight, "bias": np.zeros(self.actions)}

    def scores(self, theta: Weights, x: list[tuple[int, float]]) -> np.ndarray:
        scores = theta["bias"].copy()
        for word, value in x:
            scores += value * theta["weight"][word]
        return scores

    def gradient(self, theta: Weights, x: list[tuple[int, float]], errors: np.ndarray) -> Weights:
        weight = np.zeros((self.words, self.actions))
        for word, value in x:
            weight[word] += value * errors
        return {"weight": weight, "bias": errors}


class Mlp:
    """One hidden layer of relu units: score = b₂ + W₂ᵀ relu(b₁ + W₁ᵀ x)."""

    def __init__(self, features: int, actions: int, hidden: int = 128) -> None:
        self.features, self.actions, self.hidden = features, actions, hidden

    def init(self, seed: int) -> Weights:
        return {
            "dense1": _glorot_uniform(
                generator(seed, Purpose.MODEL, 1), self.features, self.hidden
            ),
            "dense1_bias": np.zeros(self.hidden),
            "dense2": _glorot_uniform(generator(seed, Purpose.MODEL, 2), self.hidden, self.actions),
            "dense2_bias": np.zeros(self.actions),
        }

    def scores(self, theta: Weights, x: np.ndarray) -> np.ndarray:
        hidden = np.maximum(x @ theta["dense1"] + theta["dense1_bias"], 0)
        return np.asarray(hidden @ theta["dense2"] + theta["dense2_bias"])

    def gradient(self, theta: Weights, x: np.ndarray, errors: np.ndarray) -> Weights:
        hidden = np.maximum(x @ theta["dense1"] + theta["dense1_bias"], 0)
        hidden_errors = (theta["dense2"] @ errors) * (
            hidden > 0
        )  # relu lets errors through where it let x through
        return {
            "dense1": np.outer(x, hidden_errors),
            "dense1_bias": hidden_errors,
            "dense2": np.outer(hidden, errors),
            "dense2_bias": errors,
        }


def _unit(x: np.ndarray) -> np.ndarray:
    """The context at length 1."""
    return np.asarray(x / max(np.sqrt(np.sum(x * x)), 1e-12))


def _glorot_uniform(rng: np.random.Generator, inputs: int, outputs: int) -> np.ndarray:
    """Uniform weights whose limit depends on inputs and outputs (Glorot and Bengio, 2010)."""
    limit = np.sqrt(6 / (inputs + outputs))
    return rng.uniform(-limit, limit, (inputs, outputs))
