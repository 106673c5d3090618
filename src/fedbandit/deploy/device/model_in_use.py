"""The model that a device acts with: from its file, and from contexts as an app has them.

Linear models need numpy alone.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from fedbandit.acting import Actor, make_predictor
from fedbandit.core.contexts import Candidates, Contexts, Features, rows_at
from fedbandit.core.errors import DataError, FedbanditError
from fedbandit.core.parts import require_trust
from fedbandit.core.prediction import Progress
from fedbandit.core.ragged import Ragged
from fedbandit.data.encoder import Encoder
from fedbandit.data.text import BagOfWords, tokenise
from fedbandit.deploy.device.model_files import DeviceModel, ItemCatalogue
from fedbandit.models import DataSpec
from fedbandit.policies import Policy, make_policy, rule_at

_TRUSTED = "it to the app's `trusted`:"


def text(context: object, bags: BagOfWords[str] | None, words: int) -> Ragged:
    """A raw text, a list of its words, or a pair of (word ids, values)."""
    if isinstance(context, tuple) and len(context) == 2 and not isinstance(context[0], str):
        return sparse(np.asarray(context[0], np.int64), np.asarray(context[1], np.float32), words)
    if bags is None:
        raise ValueError("this model carries no vocabulary; give a pair of (word ids, values)")
    if isinstance(context, str):
        return bags.encode([tokenise(context)])
    if isinstance(context, Sequence) and all(isinstance(word, str) for word in context):
        return bags.encode([context])
    raise ValueError(
        f"expected a text, a list of words or (word ids, values), got {type(context).__name__}"
    )


def encoded(
    value: object,
    kind: str,
    shape: tuple[int, ...],
    encoder: Encoder | None,
    bags: BagOfWords[str] | None,
) -> Features:
    """One row of features from what an app knows: columns by name, text, words, or numbers.

    A column that the app leaves out is missing. What does not fit raises `ValueError`.
    """
    if encoder is not None and isinstance(value, Mapping):
        words, cells = encoder.cells(value)
        if encoder.dense:
            return encoder.matrix(cells)
        return encoder.sparse(None if bags is None else bags.encode([tokenise(words)]), cells)
    if encoder is not None and not isinstance(value, tuple) and kind == "sparse":
        raise ValueError(f"context: expected its columns by name, got {type(value).__name__}")
    try:
        if kind == "sparse":
            return text(value, bags, shape[0])
        return dense(np.asarray(value, np.float32), shape)
    except (TypeError, ValueError) as error:
        raise ValueError(f"context: {error}") from None


def dense(values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """One row [1, *shape], from features of that shape or the same number of them in a flat
    list.
    """
    if values.shape not in (shape, (prod(shape),)):
        raise ValueError(f"values: expected shape {shape}, got {values.shape}")
    if not np.isfinite(values).all():
        raise ValueError("values are not all finite")
    return values.astype(np.float32).reshape(1, *shape)


def sparse(ids: np.ndarray, values: np.ndarray, words: int) -> Ragged:
    """One row of word ids below `words` and their values, each [n]."""
    if not np.isfinite(values).all():
        raise ValueError("values are not all finite")
    outside = ids.ndim != 1 or (len(ids) and (ids[0] < 0 or ids[-1] >= words))
    if outside or (np.diff(ids) <= 0).any() or len(ids) < values.size:
        raise ValueError(f"word ids must ascend from 0 to {words - 1}, one for each value")
    if values.shape != ids.shape:
        raise ValueError(f"values are missing: {len(ids)} word ids, {values.size} values")
    bounds = np.array([0, len(ids)], np.int64)
    return Ragged(bounds, ids.astype(np.int32), values.astype(np.float32))


@dataclass(frozen=True)
class Shown:
    """The candidates of one decision: their names, and where their features come from."""

    names: tuple[str, ...]
    numbers: np.ndarray  # int64 [k]: items of the catalogue; -1 - j is the j-th item outside it
    own: Features | None  # features of the items outside

    def features(self, catalogue: ItemCatalogue | None) -> Features:
        """The features of all of them, in their order."""
        inside = self.numbers >= 0
        known = self.numbers[inside]
        parts: list[Features] = [] if catalogue is None else [rows_at(catalogue.features, known)]
        if self.own is not None:
            parts.append(self.own)
        order = np.where(inside, np.cumsum(inside) - 1, len(known) - 1 - self.numbers)
        return rows_at(stacked(parts), order)


def stacked(parts: Sequence[Features]) -> Features:
    """Rows of several features of one kind, one after the other."""
    sparse = [part for part in parts if isinstance(part, Ragged)]
    if not sparse:
        return np.concatenate([np.asarray(part) for part in parts])
    lengths = np.concatenate([np.diff(part.offsets) for part in sparse])
    ids, values = (
        np.concatenate([np.asarray(getattr(part, name)) for part in sparse])
        for name in ("ids", "values")
    )
    return Ragged(np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]), ids, values)


@dataclass(frozen=True)
class ModelInUse:
    """One version of the model in memory, with what turns an app's words into its contexts."""

    model: DeviceModel
    actor: Actor

    def encode(self, context: object, shown: Shown | None = None) -> Contexts:
        """One decision as the model's contexts; what does not fit raises `ValueError`."""
        model = self.model
        shared = encoded(context, model.kind, model.shape, model.encoder, model.bags)
        if shown is None:
            return Contexts(shared)
        bounds, features = np.array([0, len(shown.names)]), shown.features(model.catalogue)
        return Contexts(shared, Candidates(bounds, shown.numbers, features))

    def shown(self, candidates: Sequence[Any] | None) -> Shown | None:
        """An app's candidates: names or numbers of the catalogue, features, or (name, features)."""
        items = self.model.items
        if items is None:
            if candidates is not None:
                raise ValueError("candidates: this model has fixed actions; use available")
            return None
        if candidates is None or len(candidates) < 1:
            raise ValueError("candidates: this model chooses among candidates; give at least one")
        names, numbers, own = [], [], []
        for place, one in enumerate(candidates):
            number, name = self._number_of(one), str(place)
            if number is not None:
                assert self.model.catalogue is not None
                name = self.model.catalogue.names[number]
            else:
                if isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], str):
                    name, one = one
                encoder, bags = self.model.item_encoder, self.model.item_bags
                own.append(encoded(one, items.kind, items.shape, encoder, bags))
                number = -len(own)
            names.append(name)
            numbers.append(number)
        made = stacked(own) if own else None
        return Shown(tuple(names), np.array(numbers, np.int64), made)

    def _number_of(self, one: object) -> int | None:
        """The number of an item that an app named; None where it gave features."""
        carried = self.model.catalogue
        if isinstance(one, str):
            number = None if carried is None else carried.number(one)
            if number is None:
                raise ValueError(f"candidates: no item {one[:50]!r} here; give (name, features)")
            return number
        if not isinstance(one, int | np.integer):
            return None
        if carried is None or not 0 <= one < len(carried):
            raise ValueError(f"candidates: no item {one} in the catalogue; give its features")
        return int(one)

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
    require_trust([model.model["name"]], f"model {model.version}", trusted, _TRUSTED)
    network, layout = model.build()
    weights = dict(model.weights)
    flat = layout.flatten(weights, next(iter(weights.values())).dtype)
    actor = Actor(make_predictor(network, layout, light=True), flat, policy, compiles=False)
    shape = (1, model.num_actions) if model.items is None else (2,)
    try:
        for contexts in _probes(model.data):
            prediction, _ = actor.distribution(contexts)
            if (found := prediction.mean.shape) != shape:
                raise ValueError(f"scores of shape {found[1:]} for {model.num_actions} actions")
    except Exception as error:  # whatever a model or a rule of the user's does
        raise DataError(
            f"model {model.version}: cannot act: {type(error).__name__}: {error}"[:300]
        ) from None
    return ModelInUse(model, actor)


def _probes(data: DataSpec) -> list[Contexts]:
    """Decisions to try a model on before it is in use: of zeros, and of ones."""

    def rows(kind: str, shape: tuple[int, ...], value: int) -> Features:
        if kind == "dense":
            return np.full((1, *shape), value, np.float32)
        return sparse(np.arange(value), np.ones(value), value)

    shared = [rows(data.kind, data.shape, value) for value in (0, 1)]
    if data.items is None:
        return [Contexts(one) for one in shared]
    both = stacked([rows(data.items.kind, data.items.shape, value) for value in (0, 1)])
    return [Contexts(one, Candidates(np.array([0, 2]), np.arange(2), both)) for one in shared]


def make_rule(described: Mapping[str, Any], trusted: Collection[str], where: str) -> Policy:
    """A rule from its name and parameters; what is not built in must be trusted.

    A schedule is made by its own name, and asked for the rule of the progress beside it.
    """
    require_trust([described["name"]], where, trusted, _TRUSTED)
    parameters = {key: value for key, value in described.items() if key not in ("name", "progress")}
    try:
        policy = make_policy(described["name"], parameters)
        if "progress" not in described:
            return policy
        return rule_at(policy, Progress(**described["progress"]))
    except (TypeError, AttributeError) as error:
        raise DataError(f"{where}: {described['name']} gives no rule: {error}") from None
    except FedbanditError as error:
        raise DataError(f"{where}: {error}") from None
