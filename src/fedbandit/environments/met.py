"""Decisions as their world meets them, and the protocol of an environment that pays for actions.

Environments know nothing of policies, models or training.
"""

from dataclasses import dataclass
from typing import Protocol
from zlib import crc32

import numpy as np

from fedbandit.core.contexts import Contexts
from fedbandit.core.prediction import at_actions
from fedbandit.core.ragged import Ragged
from fedbandit.core.randomness import Purpose, normals, uniforms
from fedbandit.data.dataset import Split


@dataclass(frozen=True)
class Met:
    """n decisions: who met what, when. Random draws are addressed by the decision and an item.

    An action is a place in the decision's list of actions, and the item is what stands there. For
    fixed actions the two are the same number. Values of all actions are [n, K], and over
    candidates flat [m], one per candidate.

    Draws depend on (seed, time, client, position, item, purpose) and on nothing else. Policies
    that run with the same seed therefore meet the same world: had two of them chosen the same
    action at an event, both would have been paid the same.

    Examples:
        >>> import numpy as np
        >>> labels, zeros = Ragged.from_rows([[0], [1]]), np.zeros(2, np.int64)
        >>> contexts = Contexts(np.zeros((2, 3)))
        >>> met = Met(0, contexts, labels, zeros, zeros + 1, np.arange(2), num_actions=4)
        >>> every = met.uniforms("click", met.items())
        >>> every.shape
        (2, 4)
        >>> some = met.uniforms("click", met.items(np.array([3, 0])))
        >>> bool((some == every[[0, 1], [3, 0]]).all())
        True
    """

    seed: int
    contexts: Contexts
    labels: Ragged
    clients: np.ndarray  # int64 [n]: indices in the split
    times: np.ndarray  # int64 [n]: the round of the event; in population mode its period's first
    positions: np.ndarray  # int64 [n]: the place among the client's events of that time
    num_actions: int

    def __len__(self) -> int:
        return len(self.clients)

    @property
    def bounds(self) -> np.ndarray | None:
        """Where each decision's candidates begin: int64 [n + 1]; None for fixed actions."""
        shown = self.contexts.candidates
        return None if shown is None else shown.bounds

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a value for every action: (n, K), over candidates (m,)."""
        shown = self.contexts.candidates
        return (len(self), self.num_actions) if shown is None else (len(shown.items),)

    def spread(self, values: np.ndarray) -> np.ndarray:
        """Values [n] of the decisions, to go with a value for every action: [n, 1] or [m]."""
        bounds = self.bounds
        return values[:, None] if bounds is None else np.repeat(values, np.diff(bounds))

    def items(self, actions: np.ndarray | None = None) -> np.ndarray:
        """The items behind chosen actions: int64 [n]; without actions those of all: [n, K] or
        [m].
        """
        shown = self.contexts.candidates
        if shown is not None:
            items = shown.items
            return items if actions is None else at_actions(items, actions, shown.bounds)
        if actions is not None:
            return actions
        return np.broadcast_to(np.arange(self.num_actions), (len(self), self.num_actions))

    def chosen(self, values: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """The entries [n] of values of all actions that belong to the chosen ones [n]."""
        return at_actions(values, actions, self.bounds)

    def uniforms(self, purpose: str, items: np.ndarray) -> np.ndarray:
        """Draws from [0, 1) for items of one action per decision, or of all: float64."""
        return uniforms(self.seed, Purpose.WORLD, *self._address(purpose, items))

    def normals(self, purpose: str, items: np.ndarray) -> np.ndarray:
        """Standard normal draws for items of one action per decision, or of all: float64."""
        return normals(self.seed, Purpose.WORLD, *self._address(purpose, items))

    def take(self, rows: np.ndarray) -> "Met":
        """Some of the decisions; each keeps its draws."""
        return Met(
            self.seed,
            self.contexts.take(rows),
            self.labels.take(rows),
            self.clients[rows],
            self.times[rows],
            self.positions[rows],
            self.num_actions,
        )

    @classmethod
    def at_rows(cls, split: Split, rows: np.ndarray, num_actions: int, time: int = 1) -> "Met":
        """Examples of a split as decisions at one time, to ask what is expected there."""
        clients = np.searchsorted(split.offsets, rows, side="right") - 1
        return cls(
            0,
            split.contexts(rows),
            split.labels.take(rows),
            clients,
            np.full(len(rows), time),
            rows - split.offsets[clients],
            num_actions,
        )

    def _address(self, purpose: str, items: np.ndarray) -> tuple[np.ndarray | int, ...]:
        """The address of draws for items of one action per decision, or of all."""
        parts = (self.times, self.clients, self.positions)
        if items.shape == self.shape:  # m > n: every decision has two candidates or more
            parts = tuple(map(self.spread, parts))  # type: ignore[assignment]
        return crc32(purpose.encode()), *parts, items


class Environment(Protocol):
    """The world of a stage: what an action pays where it was chosen.

    Two more members are optional. `observed(met, actions) -> bool [n]` says whose reward ever
    arrives (default: all), and `highest: float` is the largest reward it pays (default: 1).
    """

    def rewards(self, met: Met, actions: np.ndarray) -> np.ndarray:
        """The rewards of one action per decision: float32 [n]."""
        ...

    def expected(self, met: Met) -> np.ndarray | None:
        """The mean reward of every action: float32 [n, K] or [m]; None where it is not known.

        Exact regret, full-information training and the best constant action come from it.
        """
        ...


def observed(environment: Environment, met: Met, actions: np.ndarray) -> np.ndarray | None:
    """Whose reward ever arrives in an environment: bool [n]; None: everyone's."""
    ask = getattr(environment, "observed", None)
    return None if ask is None else ask(met, actions)


def highest(environment: Environment) -> float:
    """The largest reward that an environment pays."""
    return float(getattr(environment, "highest", 1.0))
