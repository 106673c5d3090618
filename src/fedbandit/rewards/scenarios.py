"""Scenarios: which rewards supervised pre-training sees, and which the bandit phase pays, round by round.

A scenario of your own is a function from a data set's header to a `Scenario`. A drift is a scenario whose world changes
at given rounds, so that the value of exploring on and on can be measured.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedbandit.core.randomness import Purpose, generator
from fedbandit.data.dataset import Header
from fedbandit.rewards import (
    GroupedRewards,
    Rewards,
    RewardTable,
    exact_match,
    per_label,
    relabelled,
    with_near_miss,
)


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
        return Scenario(
            (Stage(exact),), pretraining=with_near_miss(exact, dict(header.lower_case), 0.5)
        )
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


def drift(
    header: Header,
    kind: Literal["permute", "appear", "rotate"] = "permute",
    at: tuple[int, ...] = (),
    start: Literal["scratch", "init"] = "scratch",
    fraction: float = 0.5,
    groups: int = 4,
    disliked: float = 0.25,
    seed: int = 0,
) -> Scenario:
    """Stages that change before each of the rounds `at`.

    permute: some of the labels trade places, so that another action is the right answer to them.
    appear: some of the actions do not exist at first and come in as the rounds go by.
    rotate: users in groups of unequal size like different actions, and take over each other's likings.
    """
    if not at:
        raise ValueError(
            "at: name the rounds before which the world changes, for example [200, 400]"
        )
    if list(at) != sorted(set(at)) or at[0] < 2:
        raise ValueError(f"at: rounds must ascend and be at least 2, not {list(at)}")
    k, rounds = header.num_actions, (1, *at)
    if k < 2:
        raise ValueError("kind: nothing can drift with a single action")
    if kind == "permute":
        rewards: list[Rewards] = [
            _permuted(_permutation(k, change, fraction, seed)) for change in range(len(rounds))
        ]
        stages = [
            Stage(table, from_round=first) for table, first in zip(rewards, rounds, strict=True)
        ]
    elif kind == "appear":
        masks = _appearing(k, len(at), fraction, seed)
        stages = [
            Stage(exact_match(k), mask, first) for mask, first in zip(masks, rounds, strict=True)
        ]
    else:
        if groups > k:
            raise ValueError(f"groups: {groups} groups need as many actions, not {k}")
        stages = [
            Stage(_preferences(k, change, groups, disliked, seed), from_round=first)
            for change, first in enumerate(rounds)
        ]
    return Scenario(tuple(stages), _before(stages[0], k) if start == "init" else None)


def _before(first: Stage, num_actions: int) -> RewardTable:
    """What pre-training sees: right answers among the actions that there are."""
    return (
        exact_match(num_actions)
        if first.available is None
        else per_label(first.available.astype(float))
    )


def _permutation(num_actions: int, changes: int, fraction: float, seed: int) -> np.ndarray:
    """The right answer to each label after so many changes; each moves its labels round in a ring, so none stays."""
    answers = np.arange(num_actions)
    moved = max(2, round(fraction * num_actions))
    for change in range(1, changes + 1):
        ring = generator(seed, Purpose.DRIFT, change).permutation(num_actions)[:moved]
        answers[ring] = answers[np.roll(ring, 1)]
    return answers


def _permuted(answers: np.ndarray) -> RewardTable:
    moved = {int(label): int(answer) for label, answer in enumerate(answers) if label != answer}
    return relabelled(len(answers), moved)


def _appearing(num_actions: int, changes: int, fraction: float, seed: int) -> list[np.ndarray]:
    """Which actions exist before and after each change; at least one from the beginning."""
    missing = min(num_actions - 1, max(1, round(fraction * num_actions)))
    order = generator(seed, Purpose.DRIFT).permutation(num_actions)
    masks = []
    for change in range(changes + 1):
        mask = np.ones(num_actions, bool)
        mask[order[: missing - round(missing * change / changes)]] = False
        masks.append(mask)
    return masks


def _preferences(
    num_actions: int, change: int, groups: int, disliked: float, seed: int
) -> GroupedRewards:
    """Each group cares for its own part of the actions; with every change it takes over the next group's part."""
    order = generator(seed, Purpose.DRIFT).permutation(num_actions)
    tables = []
    for group in range(groups):
        values = np.full(num_actions, disliked)
        values[order[(group + change) % groups :: groups]] = 1.0
        tables.append(per_label(values))
    return GroupedRewards(tuple(tables), seed)
