"""Environments of coba as data sets: the same interactions, dealt out to clients.

An interaction of coba holds a context, actions, and what each action pays. coba itself is not
needed: whatever has its `read()` will do.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from fedbandit.core.contexts import ItemSpec
from fedbandit.core.errors import DataError
from fedbandit.core.ragged import Ragged
from fedbandit.data.dataset import Catalogue, FederatedDataset, Header, Split

_FLATTEN = 'numbers are needed; let coba flatten it: `.repr("onehot", "onehot")`'


class CobaEnvironment(Protocol):
    """An environment of coba."""

    def read(self) -> Iterable[Mapping[str, Any]]:
        """Interactions with `context`, `actions` and `rewards`."""
        ...


def from_coba(environment: CobaEnvironment, clients: int | str = 100) -> FederatedDataset:
    """A data set in memory with the interactions of one of coba's environments, in their order.

    `clients` is a number of clients that take turns, or the key of an interaction that names its
    client. Where every interaction has the same actions they become fixed actions. Elsewhere each
    action is a candidate with its features. `environment.name = "stated"` pays what each
    interaction says.

    Examples:
        >>> class Tiny:
        ...     def read(self):
        ...         yield {"context": (0.1, 0.9), "actions": ["a", "b"], "rewards": [0, 1]}
        ...         yield {"context": (0.8, 0.2), "actions": ["a", "b"], "rewards": [1, 0]}
        >>> tiny = from_coba(Tiny(), clients=2)
        >>> tiny.header.actions, tiny.train.num_clients, tiny.train.labels.values.tolist()
        (('a', 'b'), 2, [0.0, 1.0, 1.0, 0.0])
    """
    found = list(environment.read())
    if not found:
        raise DataError("coba: the environment has no interactions")
    if any(not one.get("actions") or "rewards" not in one for one in found):
        raise DataError("coba: every interaction needs actions to choose from, and their rewards")
    owners = [
        f"client{place % clients:06d}" if isinstance(clients, int) else str(one[clients])
        for place, one in enumerate(found)
    ]
    order = sorted(range(len(found)), key=lambda place: owners[place].encode())  # stable
    found = [found[place] for place in order]
    ids, sizes = np.unique([owners[place].encode() for place in order], return_counts=True)
    lists = [list(one["actions"]) for one in found]
    offsets = np.cumsum([0, *map(len, lists)])
    paid = np.array([pay for one in found for pay in _rewards(one)], np.float32)
    if len(paid) != offsets[-1] or not np.isfinite(paid).all():
        raise DataError("coba: every action needs one finite reward")
    places = (np.arange(offsets[-1]) - np.repeat(offsets[:-1], np.diff(offsets))).astype(np.int32)
    contexts = _matrix("context", [one.get("context") for one in found])
    same = all(actions == lists[0] for actions in lists)
    items, candidates, catalogue = None, None, None
    if not same:
        rows: dict[Any, int] = {}
        listed = [rows.setdefault(_key(one), len(rows)) for actions in lists for one in actions]
        catalogue = Catalogue(_matrix("action", list(rows)))
        candidates = Ragged(offsets, np.array(listed, np.int32))
        counts = np.diff(offsets)
        shape = catalogue.features.shape[1:]  # type: ignore[union-attr]
        items = ItemSpec("dense", shape, float(counts.mean()), int(counts.max()))
    header = Header(
        name=type(environment).__name__,
        kind="dense",
        shape=contexts.shape[1:],
        actions=tuple(str(action) for action in lists[0]) if same else (),
        action_counts=(len(found),) * len(lists[0]) if same else (),
        multilabel=True,
        source={"coba": {key: str(value) for key, value in _params(environment).items()}},
        items=items,
    )
    labels = Ragged(offsets, places, paid)
    client_offsets = np.concatenate([[0], np.cumsum(sizes)])
    split = Split(ids, client_offsets, contexts, labels, candidates=candidates, catalogue=catalogue)
    return FederatedDataset(header, split)


def _rewards(interaction: Mapping[str, Any]) -> Sequence[float]:
    """The reward of each action; coba says it by a list, or by a function of the action."""
    rewards = interaction["rewards"]
    if callable(rewards):
        return [rewards(action) for action in interaction["actions"]]
    return list(rewards)


def _params(environment: object) -> Mapping[str, Any]:
    return getattr(environment, "params", None) or {}


def _key(action: Any) -> Any:
    """An action as something that a dictionary can hold."""
    return tuple(action) if isinstance(action, list) else action


def _matrix(what: str, values: list[Any]) -> np.ndarray:
    """Numbers, or lists of as many numbers each, as float32 [n, features]; None is a constant."""
    try:
        found = np.array([1.0 if value is None else value for value in values], np.float32)
    except (TypeError, ValueError):
        raise DataError(f"coba: {what} {values[0]!r}: {_FLATTEN}") from None
    found = found.reshape(len(values), -1)
    if not np.isfinite(found).all():
        raise DataError(f"coba: a number of a {what} is not finite")
    return found
