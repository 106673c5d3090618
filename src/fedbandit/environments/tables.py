"""The paper's environment: an action earns what a table says, given the labels of the example.

A table holds what answering a label itself earns, and at most one near miss.
"""

from dataclasses import dataclass

import numpy as np

from fedbandit.core.loops import loops
from fedbandit.environments.met import Met


@dataclass(frozen=True)
class RewardTable:
    """For each label l: action l earns `exact[l]`, action `near[l]` earns `near_value[l]`, others 0.

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

    def rewards(self, met: Met, actions: np.ndarray) -> np.ndarray:
        """The reward of one action per example: float32 [n]."""
        labels = met.labels
        earned: np.ndarray = loops.best_rewards(
            labels.offsets, labels.ids, met.items(actions), self.exact, self.near, self.near_value
        )
        return earned

    def expected(self, met: Met) -> np.ndarray:
        """The reward of every action: float32 [n, K] or [m]."""
        labels = met.labels
        rows = labels.row_of_entry()
        if met.bounds is not None:  # labels are places among the candidates
            rewards = np.zeros(met.shape, np.float32)
            np.maximum.at(rewards, met.bounds[rows] + labels.ids, self.exact[labels.ids])
            return rewards
        rewards = np.zeros(met.shape, np.float32)
        np.maximum.at(rewards, (rows, labels.ids), self.exact[labels.ids])
        has_near = self.near[labels.ids] >= 0
        near_labels = labels.ids[has_near]
        np.maximum.at(
            rewards, (rows[has_near], self.near[near_labels]), self.near_value[near_labels]
        )
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
