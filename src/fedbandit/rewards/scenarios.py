"""Scenarios: which rewards supervised pre-training sees, and which the bandit phase pays, round by round.

A scenario of your own is a function from a data set's header to a `Scenario`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fedbandit.data.dataset import Header
from fedbandit.rewards import Rewards, RewardTable, exact_match, per_label, relabelled, with_near_miss


@dataclass(frozen=True)
class Stage:
    """What holds from a round on, until the next stage."""

    rewards: Rewards
    available: np.ndarray | None = None  # bool [K]: the actions that exist; None: all
    from_round: int = 1


@dataclass(frozen=True)
class Scenario:
    """`pretraining` None means a random initial model; the stages are in the order of their rounds."""

    stages: tuple[Stage, ...]
    pretraining: RewardTable | None = None

    def stage(self, round_number: int) -> Stage:
        """The stage that a round (counted from 1) belongs to."""
        return [stage for stage in self.stages if stage.from_round <= round_number][-1]


def scratch(header: Header) -> Scenario:
    """A random initial model; 1 for a right label."""
    return Scenario((Stage(exact_match(header.num_actions)),))


def init(header: Header) -> Scenario:
    """Pre-training on a few clients with the rewards that the bandit phase will pay."""
    rewards = exact_match(header.num_actions)
    return Scenario((Stage(rewards),), pretraining=rewards)


def init_shift(header: Header) -> Scenario:
    """Pre-training with other rewards than the bandit phase: the paper's default.

    Where the data has upper and lower case, pre-training pays half for the lower-case version of an upper-case letter.
    Elsewhere it sees only the most frequent fifth of the actions, and then rare actions pay more than frequent ones.
    """
    exact = exact_match(header.num_actions)
    if header.lower_case:
        return Scenario((Stage(exact),), pretraining=with_near_miss(exact, dict(header.lower_case), 0.5))
    return Scenario((Stage(_rarity(header)),), pretraining=_most_frequent(header, 1 / 5))


def init_shift_released(header: Header) -> Scenario:
    """The shift as in the authors' released code, which differs from the paper's text.

    With case: pre-training folds lower case onto upper case; then answering upper case for lower case pays half.
    Elsewhere pre-training sees the most frequent three fifths of the actions.
    """
    k = header.num_actions
    if header.lower_case:
        upper_of = {lower: upper for upper, lower in header.lower_case.items()}
        bandit = with_near_miss(exact_match(k), upper_of, 0.5)
        return Scenario((Stage(bandit),), pretraining=relabelled(k, upper_of))
    return Scenario((Stage(_rarity(header)),), pretraining=_most_frequent(header, 3 / 5))


BUILT_IN: dict[str, Callable[[Header], Scenario]] = {
    "scratch": scratch,
    "init": init,
    "init-shift": init_shift,
    "init-shift-released": init_shift_released,
}


def _rarity(header: Header) -> RewardTable:
    """count(most frequent) / count(action) for a right action; one that never occurs counts as occurring once."""
    counts = np.maximum(header.frequencies, 1)
    return per_label(counts.max() / counts)


def _most_frequent(header: Header, fraction: float) -> RewardTable:
    """1 for a right action among the most frequent ones, 0 for all others."""
    seen = np.argsort(-np.asarray(header.frequencies), kind="stable")
    values = np.zeros(header.num_actions)
    values[seen[: max(1, round(fraction * header.num_actions))]] = 1
    return per_label(values)
