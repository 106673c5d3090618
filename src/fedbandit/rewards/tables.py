"""Rewards: what an action earns, given the labels of the example. Knows nothing of policies or models.

Every scenario of the paper is one small table: what answering a label itself earns, and at most one near miss.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fedbandit.core.loops import loops
from fedbandit.core.ragged import Ragged
from fedbandit.core.randomness import Purpose, uniforms


class Rewards(Protocol):
    """What a stage of a scenario pays; `clients` [n] says whose the examples are, for rewards that differ by client."""

    @property
    def num_actions(self) -> int: ...

    @property
    def highest(self) -> float: ...

    def of(
        self, labels: Ragged, actions: np.ndarray, clients: np.ndarray | None = None
    ) -> np.ndarray: ...

    def matrix(self, labels: Ragged, clients: np.ndarray | None = None) -> np.ndarray: ...


@dataclass(frozen=True)
class RewardTable:
    """For each label l: action l earns `exact[l]`, action `near[l]` (if not -1) earns `near_value[l]`, others 0.

    An example with several labels earns the best of what its labels give.
    """

    exact: np.ndarray  # float32 [K]
    near: np.ndarray  # int32 [K], -1 for none
    near_value: np.ndarray  # float32 [K]

    @property
    def num_actions(self) -> int:
        return len(self.exact)

    @property
    def highest(self) -> float:
        """The largest reward that can be earned."""
        return float(max(self.exact.max(), self.near_value.max()))

    def of(
        self, labels: Ragged, actions: np.ndarray, clients: np.ndarray | None = None
    ) -> np.ndarray:
        """The reward of one action per example: float32 [n]."""

        earned: np.ndarray = loops.best_rewards(
            labels.offsets, labels.ids, actions, self.exact, self.near, self.near_value
        )
        return earned

    def matrix(self, labels: Ragged, clients: np.ndarray | None = None) -> np.ndarray:
        """The reward of every action: float32 [n, K]. What full-information training sees."""
        rows = labels.row_of_entry()
        rewards = np.zeros((len(labels), self.num_actions), np.float32)
        np.maximum.at(rewards, (rows, labels.ids), self.exact[labels.ids])
        has_near = self.near[labels.ids] >= 0
        near_labels = labels.ids[has_near]
        np.maximum.at(
            rewards, (rows[has_near], self.near[near_labels]), self.near_value[near_labels]
        )
        return rewards


@dataclass(frozen=True)
class GroupedRewards:
    """Rewards that depend on who is asked: every group of clients has a table of its own.

    Half of the clients belong to the first group, half of the others to the second, and so on; the last two are alike.
    """

    tables: tuple[RewardTable, ...]
    seed: int = 0

    @property
    def num_actions(self) -> int:
        return self.tables[0].num_actions

    @property
    def highest(self) -> float:
        """The largest reward that anyone can earn."""
        return max(table.highest for table in self.tables)

    def groups(self, clients: np.ndarray) -> np.ndarray:
        """The group of each client: int64 [n]."""
        smaller = 0.5 ** np.arange(1, len(self.tables))
        groups: np.ndarray = (uniforms(self.seed, Purpose.GROUPS, clients)[:, None] < smaller).sum(
            axis=1
        )
        return groups

    def of(
        self, labels: Ragged, actions: np.ndarray, clients: np.ndarray | None = None
    ) -> np.ndarray:
        """The reward of one action per example: float32 [n]."""
        assert clients is not None
        rewards = np.zeros(len(labels), np.float32)
        groups = self.groups(clients)
        for group in np.unique(groups):
            rows = np.flatnonzero(groups == group)
            rewards[rows] = self.tables[group].of(labels.take(rows), actions[rows])
        return rewards

    def matrix(self, labels: Ragged, clients: np.ndarray | None = None) -> np.ndarray:
        """The reward of every action: float32 [n, K]."""
        assert clients is not None
        rewards = np.zeros((len(labels), self.num_actions), np.float32)
        groups = self.groups(clients)
        for group in np.unique(groups):
            rows = np.flatnonzero(groups == group)
            rewards[rows] = self.tables[group].matrix(labels.take(rows))
        return rewards


def exact_match(num_actions: int) -> RewardTable:
    """1 for a right label, 0 otherwise."""
    return per_label(np.ones(num_actions))


def per_label(values: np.ndarray) -> RewardTable:
    """`values[l]` for the right label l, 0 otherwise."""
    k = len(values)
    return RewardTable(
        np.asarray(values, np.float32), np.full(k, -1, np.int32), np.zeros(k, np.float32)
    )


def with_near_miss(table: RewardTable, near: dict[int, int], value: float) -> RewardTable:
    """The same table, and `value` for answering `near[l]` where the label is l."""
    targets, values = table.near.copy(), table.near_value.copy()
    for label, action in near.items():
        targets[label], values[label] = action, value
    return RewardTable(table.exact, targets, values)


def relabelled(num_actions: int, target: dict[int, int]) -> RewardTable:
    """1 for answering `target[l]` in place of l (and not l itself); exact match for the other labels."""
    exact = np.ones(num_actions, np.float32)
    exact[list(target)] = 0
    return with_near_miss(per_label(exact), target, 1.0)
