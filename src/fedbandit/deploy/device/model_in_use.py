"""The model that a device acts with: from its file, and from contexts as an app has them.

Linear models need numpy alone.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from fedbandit import policies
from fedbandit.acting import Actor, Predictor, make_predictor
from fedbandit.core.contexts import Contexts, Features
from fedbandit.core.errors import DataError, FedbanditError, MissingExtra, needing
from fedbandit.core.loops import plain_loops
from fedbandit.core.ragged import Ragged
from fedbandit.data.encoder import Encoder
from fedbandit.data.text import tokenise
from fedbandit.deploy.device.model_files import DeviceModel, shapes_of
from fedbandit.models import BUILT_IN, DataSpec, Layout, build_model
from fedbandit.policies import Policy, make_policy


def bag_of_words(words: Sequence[str], index: Mapping[str, int]) -> Ragged:
    """Counts of the known words divided by their L2 norm: what the importers make of a sentence, without numba."""
    known = [index[word] for word in words if word in index]
    ids, counts = np.unique(np.array(known, np.int32), return_counts=True)
    squares = float((counts.astype(np.float64) ** 2).sum())
    return _row(ids, (counts / np.sqrt(max(squares, 1.0))).astype(np.float32))


def text(context: object, index: Mapping[str, int] | None, words: int) -> Ragged:
    """A raw text, a list of its words, or a pair of (word ids, values)."""
    if isinstance(context, tuple) and len(context) == 2 and not isinstance(context[0], str):
        return _sparse_row(context[0], context[1], words)
    if index is None:
        raise ValueError(
            "context: this model carries no vocabulary; give a pair of (word ids, values)"
        )
    if isinstance(context, str):
        return bag_of_words(tokenise(context), index)
    if isinstance(context, Sequence) and all(isinstance(word, str) for word in context):
        return bag_of_words(context, index)
    raise ValueError(
        f"context: expected a text, a list of words or (word ids, values), got {type(context).__name__}"
    )


def columns(
    context: Mapping[str, object], encoder: Encoder, index: Mapping[str, int] | None
) -> Features:
    """What an app knows of one row of a table, by column; what it leaves out is missing."""
    words, cells = encoder.cells(context)
    if encoder.dense:
        return encoder.matrix(cells)
    bags = None if index is None else bag_of_words(tokenise(words), index)
    return encoder.sparse(bags, cells)


def dense(context: object, shape: tuple[int, ...]) -> np.ndarray:
    """Features of the model's shape, or the same number of them in a flat list."""
    values = np.asarray(context, np.float32)
    if values.shape != shape and values.shape != (int(np.prod(shape)),):
        raise ValueError(f"context: expected shape {shape}, got {values.shape}")
    if not np.isfinite(values).all():
        raise ValueError("context: not all features are finite")
    return values.reshape(1, *shape)


def _sparse_row(ids: object, values: object, words: int) -> Ragged:
    id_array, value_array = np.asarray(ids, np.int64), np.asarray(values, np.float32)
    if id_array.ndim != 1 or id_array.shape != value_array.shape:
        raise ValueError(
            f"context: {id_array.shape} word ids do not go with {value_array.shape} values"
        )
    if len(id_array) and (
        id_array[0] < 0 or id_array[-1] >= words or (np.diff(id_array) <= 0).any()
    ):
        raise ValueError(f"context: word ids must ascend, each once, from 0 to {words - 1}")
    if not np.isfinite(value_array).all():
        raise ValueError("context: not all values are finite")
    return _row(id_array.astype(np.int32), value_array)


def _row(ids: np.ndarray, values: np.ndarray) -> Ragged:
    """One decision's sparse context."""
    return Ragged(np.array([0, len(ids)], np.int64), ids, values)


@dataclass(frozen=True)
class ModelInUse:
    """One version of the model in memory, with what turns an app's words into its contexts."""

    model: DeviceModel
    actor: Actor

    def encode(self, context: object) -> Contexts:
        """One decision as the model's contexts; what does not fit raises `ValueError`."""
        return Contexts(self._features(context))

    def _features(self, context: object) -> Features:
        model, encoder = self.model, self.model.encoder
        if encoder is not None and isinstance(context, Mapping):
            return columns(context, encoder, model.word_index)
        if encoder is not None and not isinstance(context, tuple) and model.kind == "sparse":
            raise ValueError(f"context: expected its columns by name, got {type(context).__name__}")
        if model.kind == "sparse":
            return text(context, model.word_index, model.shape[0])
        return dense(context, model.shape)

    def available(self, chosen: Any) -> np.ndarray | None:
        """Actions by number or by name, or True and False for each, as a mask bool [K]."""
        if chosen is None:
            return None
        given = np.asarray(chosen)
        k = self.model.num_actions
        if given.dtype == bool:
            if given.shape != (k,):
                raise ValueError(
                    f"available: expected {k} times True or False, got shape {given.shape}"
                )
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


def open_model(model: DeviceModel, policy: Policy | None, trusted: Collection[str]) -> ModelInUse:
    """Build what the model names and let it act once; what would break a choice is a `DataError`.

    `policy` replaces the model's own.
    """
    if policy is None:
        policy = make_rule(model.policy, trusted, f"model {model.version}")
    predictor, layout = _predictor(model, trusted)
    weights = dict(model.weights)
    flat = layout.flatten(weights, next(iter(weights.values())).dtype)
    actor = Actor(predictor, flat, policy, plain_loops)
    blank: list[Features]
    if model.kind == "sparse":
        blank = [_row(np.arange(n, dtype=np.int32), np.ones(n, np.float32)) for n in (0, 1)]
    else:
        blank = [np.full((1, *model.shape), value, np.float32) for value in (0, 1)]
    try:
        for features in blank:
            prediction, _ = actor.distribution(Contexts(features))
            if prediction.mean.shape != (1, model.num_actions):
                raise ValueError(
                    f"scores of shape {prediction.mean.shape[1:]} for {model.num_actions} actions"
                )
    except Exception as error:  # whatever a model or a rule of the user's does
        raise DataError(
            f"model {model.version}: cannot act: {type(error).__name__}: {error}"[:300]
        ) from None
    return ModelInUse(model, actor)


def make_rule(described: Mapping[str, Any], trusted: Collection[str], where: str) -> Policy:
    """A rule from its name and parameters; what is not built in must be trusted."""
    _refuse_strangers(described["name"], policies.BUILT_IN, trusted, where)
    try:
        return make_policy(
            described["name"], {key: value for key, value in described.items() if key != "name"}
        )
    except FedbanditError as error:
        raise DataError(f"{where}: {error}") from None


def _refuse_strangers(
    name: str, built_in: Mapping[str, Any], trusted: Collection[str], where: str
) -> None:
    if name not in built_in and name not in trusted:
        raise DataError(
            f"{where}: names {name!r}, which is not built in and which this app does not trust"
        )


def _predictor(model: DeviceModel, trusted: Collection[str]) -> tuple[Predictor, Layout]:
    """Scores with the model that the file names, and how its weights lie one after the other."""
    name = model.model["name"]
    _refuse_strangers(name, BUILT_IN, trusted, f"model {model.version}")
    parameters = {key: value for key, value in model.model.items() if key != "name"}
    # Shapes of built-in models are known before anything of that size is made.
    expected = shapes_of(model.model, model.shape, model.num_actions)
    try:
        network = build_model(
            name, DataSpec(model.kind, model.shape, model.num_actions), parameters
        )
        if network.kernel not in ("sparse-linear", "dense-linear") and network.predict is None:
            with needing(f"the model {name}"):
                import_module("torch")
        if expected is None:
            expected = {key: tuple(array.shape) for key, array in network.init(0).items()}
    except MissingExtra:
        raise
    except FedbanditError as error:
        raise DataError(f"model {model.version}: {error}") from None
    except Exception as error:  # a user's model may do anything with what a file names
        raise DataError(
            f"model {model.version}: {name} cannot be made: {type(error).__name__}: {error}"
        ) from None
    if expected != {key: tuple(array.shape) for key, array in model.weights.items()}:
        raise DataError(f"model {model.version}: the weights do not fit {name}")
    layout = Layout(tuple(expected.items()))
    return make_predictor(network, layout, light=True), layout
