"""From a model file to actions: contexts as an app has them, scores, probabilities.

Linear models need numpy alone.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedbandit import policies
from fedbandit.core.errors import DataError, FedbanditError, needing
from fedbandit.core.prediction import Prediction
from fedbandit.core.ragged import Ragged
from fedbandit.data.encoder import Encoder
from fedbandit.data.text import tokenise
from fedbandit.deploy.device.model_files import DeviceModel, shapes_of
from fedbandit.policies import Policy, check_probabilities, make_policy


@dataclass(frozen=True)
class Context:
    """One row: float32 [*shape] where dense; for text the values [n] of the words `ids` int32 [n], ascending."""

    values: np.ndarray
    ids: np.ndarray | None = None


def bag_of_words(words: Sequence[str], index: Mapping[str, int]) -> Context:
    """Counts of the known words divided by their L2 norm: what the importers make of a sentence, without numba."""
    known = [index[word] for word in words if word in index]
    ids, counts = np.unique(np.array(known, np.int32), return_counts=True)
    squares = float((counts.astype(np.float64) ** 2).sum())
    return Context((counts / np.sqrt(max(squares, 1.0))).astype(np.float32), ids)


def text(context: object, index: Mapping[str, int] | None, words: int) -> Context:
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
) -> Context:
    """What an app knows of one row of a table, by column; what it leaves out is missing."""
    words, cells = encoder.cells(context)
    if encoder.dense:
        return Context(encoder.matrix(cells)[0])
    bags = None
    if index is not None:
        bag = bag_of_words(tokenise(words), index)
        assert bag.ids is not None
        bags = Ragged(np.array([0, len(bag.ids)], np.int64), bag.ids, bag.values)
    row = encoder.sparse(bags, cells)
    assert row.values is not None
    return Context(row.values, row.ids)


def dense(context: object, shape: tuple[int, ...]) -> Context:
    """Features of the model's shape, or the same number of them in a flat list."""
    values = np.asarray(context, np.float32)
    if values.shape != shape and values.shape != (int(np.prod(shape)),):
        raise ValueError(f"context: expected shape {shape}, got {values.shape}")
    if not np.isfinite(values).all():
        raise ValueError("context: not all features are finite")
    return Context(values.reshape(shape))


def _sparse_row(ids: object, values: object, words: int) -> Context:
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
    return Context(value_array, id_array.astype(np.int32))


Predictor = Callable[[Context], Prediction]
"""What a model says about one context: the mean of its prediction is [K]."""
_SMALLEST_NORM = 1e-12  # what torch's normalize divides by at least


def unit_rows(x: np.ndarray) -> np.ndarray:
    """Each row of `x` [n, features] divided by its L2 norm; a row of zeros stays one."""
    return np.asarray(
        x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), x.dtype.type(_SMALLEST_NORM))
    )


def linear_scores(context: Context, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """[K], by `weight` [features, K] and `bias` [K]; dense features are L2-normalised, as in training."""
    if context.ids is None:
        return np.asarray(
            unit_rows(context.values.reshape(1, -1).astype(weight.dtype))[0] @ weight + bias
        )
    terms = context.values.astype(weight.dtype)[:, None] * weight[context.ids]
    # A sum over the first axis adds row by row, from the bias on: the order in which the simulator's kernel adds.
    return np.asarray(np.add.reduce(np.concatenate([bias[None], terms]), axis=0))


@dataclass(frozen=True)
class Actor:
    """One version of the model, in memory."""

    model: DeviceModel
    policy: Policy
    predict: Predictor

    def encode(self, context: object) -> Context:
        """The context as the model's features; what does not fit raises `ValueError`."""
        encoder = self.model.encoder
        if encoder is not None and isinstance(context, Mapping):
            return columns(context, encoder, self.model.word_index)
        if encoder is not None and not isinstance(context, tuple) and self.model.kind == "sparse":
            raise ValueError(f"context: expected its columns by name, got {type(context).__name__}")
        if self.model.kind == "sparse":
            return text(context, self.model.word_index, self.model.shape[0])
        return dense(context, self.model.shape)

    def probabilities(self, context: Context, available: np.ndarray | None) -> np.ndarray:
        """The probability of every action: [K]."""
        return self.policy.probabilities(self.predict(context), available)

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


def make_actor(model: DeviceModel, policy: Policy | None, trusted: Collection[str]) -> Actor:
    """Build what the model names; `policy` replaces the model's own."""
    if policy is None:
        policy = make_rule(model.policy, trusted, f"model {model.version}")
    w = model.weights
    if model.model["name"] == "linear":
        return Actor(
            model,
            policy,
            lambda context: Prediction(linear_scores(context, w["weight"], w["bias"])),
        )
    if model.model["name"] == "linear-heads":
        return Actor(model, policy, lambda context: _linear_heads(context, w))
    return Actor(model, policy, _torch_predictor(model, trusted))


def working_actor(model: DeviceModel, policy: Policy | None, trusted: Collection[str]) -> Actor:
    """The actor of a model, after it has acted once: what would break every choice is refused with `DataError`."""
    actor = make_actor(model, policy, trusted)
    if model.kind == "sparse":
        contexts = [Context(np.ones(n, np.float32), np.arange(n, dtype=np.int32)) for n in (0, 1)]
    else:
        contexts = [Context(np.full(model.shape, value, np.float32)) for value in (0, 1)]
    try:
        for context in contexts:
            prediction = actor.predict(context)
            if prediction.mean.shape != (model.num_actions,):
                raise ValueError(
                    f"scores of shape {prediction.mean.shape} for {model.num_actions} actions"
                )
            if not all(
                np.isfinite(found).all()
                for found in (prediction.mean, prediction.heads)
                if found is not None
            ):
                raise ValueError("scores are not finite")
            probabilities = np.asarray(actor.policy.probabilities(prediction, None))
            check_probabilities(probabilities[None], Prediction(prediction.mean[None]))
    except Exception as error:  # whatever a model or a rule of the user's does
        raise DataError(
            f"model {model.version}: cannot act: {type(error).__name__}: {error}"[:300]
        ) from None
    return actor


def make_rule(described: Mapping[str, Any], trusted: Collection[str], where: str) -> Policy:
    """A rule from its name and parameters; what is not built in must be trusted."""
    _refuse_strangers(described["name"], policies.BUILT_IN, trusted, where)
    try:
        return make_policy(
            described["name"], {key: value for key, value in described.items() if key != "name"}
        )
    except FedbanditError as error:
        raise DataError(f"{where}: {error}") from None


def _linear_heads(context: Context, weights: Mapping[str, np.ndarray]) -> Prediction:
    heads = [
        linear_scores(context, weights[f"weight{h}"], weights[f"bias{h}"])
        for h in range(len(weights) // 2)
    ]
    return Prediction(np.mean(heads, axis=0), heads=np.stack(heads))


def _refuse_strangers(
    name: str, built_in: Mapping[str, Any], trusted: Collection[str], where: str
) -> None:
    if name not in built_in and name not in trusted:
        raise DataError(
            f"{where}: names {name!r}, which is not built in and which this app does not trust"
        )


def _torch_predictor(model: DeviceModel, trusted: Collection[str]) -> Predictor:
    """Any other model, by the very functions that trained it."""
    with needing(f"the model {model.model['name']}"):
        import torch

    from fedbandit.models import BUILT_IN, DataSpec, build_model

    name = model.model["name"]
    _refuse_strangers(name, BUILT_IN, trusted, f"model {model.version}")
    parameters = {key: value for key, value in model.model.items() if key != "name"}
    try:
        network = build_model(
            name, DataSpec(model.kind, model.shape, model.num_actions), parameters
        )
        expected = shapes_of(
            model.model, model.shape, model.num_actions
        )  # before anything of that size is made
        if expected is None:
            expected = {name: tuple(array.shape) for name, array in network.init(0).items()}
    except FedbanditError as error:
        raise DataError(f"model {model.version}: {error}") from None
    except (
        Exception
    ) as error:  # a user's model may do anything with the parameters that a file names
        raise DataError(
            f"model {model.version}: {name} cannot be made: {type(error).__name__}: {error}"
        ) from None
    if expected != {name: tuple(array.shape) for name, array in model.weights.items()}:
        raise DataError(f"model {model.version}: the weights do not fit {model.model['name']}")
    params = {name: torch.tensor(array) for name, array in model.weights.items()}
    dtype = next(iter(params.values())).dtype

    def predict(context: Context) -> Prediction:
        x: Any
        if context.ids is None:
            x = torch.from_numpy(context.values)[None].to(dtype)
        else:
            x = Ragged(np.array([0, len(context.ids)], np.int64), context.ids, context.values)
        with torch.no_grad():
            scores = network.scores(params, x)[0].numpy()
        return (
            Prediction(scores.mean(axis=0), heads=scores) if network.heads else Prediction(scores)
        )

    return predict
