"""Scenarios: which environment pays from which round on, and what supervised pre-training sees.

A scenario of your own is a function from a data set's header to a `Scenario`. A drift is a scenario
whose world changes at given rounds.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedbandit.core.errors import ConfigError
from fedbandit.core.prediction import best_action, entries_of
from fedbandit.core.randomness import Purpose, generator
from fedbandit.data.dataset import Header
from fedbandit.environments.builtin import (
    Liked,
    NewTastes,
    Renamed,
    RewardTable,
    exact_match,
    per_label,
    relabelled,
    ring_order,
    with_near_miss,
)
from fedbandit.environments.met import Environment, Met, observed


@dataclass(frozen=True)
class Stage:
    """The world from a round on, until the next stage."""

    environment: Environment
    available: np.ndarray | None = None  # bool [K]: the actions that exist; None: all
    from_round: int = 1


@dataclass(frozen=True)
class Scenario:
    """The world of a run: stages in the order of their rounds.

    Every event is paid by the stage of its own time, also when it is trained on much later. In
    population mode events of a period belong to its first round.
    """

    stages: tuple[Stage, ...]
    pretraining: Environment | None = None  # None: a random initial model
    missing: float = 0.0  # share of events whose reward never arrives
    delay: int = 0  # periods until a reward arrives, in population mode

    def __post_init__(self) -> None:
        starts = [stage.from_round for stage in self.stages]
        if not starts or starts[0] > 1 or starts != sorted(set(starts)):
            raise ValueError(f"stages: must begin with round 1 and ascend, not {starts}")

    def stage(self, round_number: int) -> Stage:
        """The stage that a round (counted from 1) belongs to."""
        return [stage for stage in self.stages if stage.from_round <= round_number][-1]

    def rewards(self, met: Met, actions: np.ndarray) -> np.ndarray:
        """The rewards of one action per decision: float32 [n]."""
        paid = np.zeros(len(met), np.float32)
        for stage, part, rows in self._parts(met):
            found = np.asarray(stage.environment.rewards(part, actions[rows]))
            _check(stage.environment, "rewards", found, (len(part),))
            paid[rows] = found
        return paid

    def expected(self, met: Met) -> np.ndarray | None:
        """The mean reward of every action: float32 [n, K]; None where it is not known."""
        means = np.zeros(met.shape, np.float32)
        for stage, part, rows in self._parts(met):
            found = stage.environment.expected(part)
            if found is None:
                return None
            _check(stage.environment, "expected", found, part.shape)
            if met.bounds is not None and not isinstance(rows, slice):
                rows = entries_of(met.bounds, rows)
            means[rows] = found
        return means

    def regret(self, met: Met, actions: np.ndarray) -> np.ndarray | None:
        """The mean reward that each action loses against the best one: float64 [n], or None."""
        means, exist = self.expected(met), self.available(met.times)
        if means is None:
            return None
        means = means.astype(np.float64)
        best = best_action(means if exist is None else np.where(exist, means, -np.inf), met.bounds)
        return np.asarray(best - met.chosen(means, actions))

    def observed(self, met: Met, actions: np.ndarray) -> np.ndarray | None:
        """Whose reward ever arrives: bool [n]; None: everyone's."""
        seen = None
        if self.missing:
            seen = met.uniforms("missing", met.items(actions)) >= self.missing
        for stage, part, rows in self._parts(met):
            found = observed(stage.environment, part, actions[rows])
            if found is not None:
                seen = np.ones(len(met), bool) if seen is None else seen
                _check(stage.environment, "observed", found, (len(part),))
                seen[rows] &= found.astype(bool)
        return seen

    def available(self, times: np.ndarray) -> np.ndarray | None:
        """The actions that exist at events of these times: bool [K] or [n, K]; None: all."""
        stages, present = self._stages_at(times)
        masks = [self.stages[number].available for number in present]
        if len(masks) <= 1 or all(mask is None for mask in masks):
            return masks[0] if masks else None
        known = next(mask for mask in masks if mask is not None)
        everything = np.ones_like(known)
        rows = [everything if s.available is None else s.available for s in self.stages]
        return np.asarray(np.stack(rows)[stages])

    def _stages_at(self, times: np.ndarray) -> tuple[np.ndarray, list[int]]:
        """The place of each time's stage, and the places that occur."""
        if len(self.stages) == 1:
            return np.zeros(len(times), np.int64), [0]
        starts = [stage.from_round for stage in self.stages]
        stages = np.searchsorted(starts, times, side="right") - 1
        return stages, np.unique(stages).tolist()

    def _parts(self, met: Met) -> Iterator[tuple[Stage, Met, np.ndarray | slice]]:
        """The decisions of each stage, and where they stand."""
        stages, present = self._stages_at(met.times)
        for number in present:
            if len(present) == 1:
                yield self.stages[number], met, slice(None)
            else:
                rows = np.flatnonzero(stages == number)
                yield self.stages[number], met.take(rows), rows


def _check(environment: Environment, method: str, found: np.ndarray, shape: object) -> None:
    """Refuse what an environment gave if its shape is wrong or it is not finite."""
    if found.shape != shape or not np.isfinite(found).all():
        wrong = f"shape {found.shape}, not {shape}" if found.shape != shape else "not finite"
        kind = type(environment).__name__
        raise ConfigError(f"environment.name: {kind}.{method} gave numbers that are {wrong}")


def scratch(header: Header) -> Scenario:
    """A random initial model; 1 for a right label."""
    return Scenario((Stage(exact_match(header.places)),))


def init(header: Header) -> Scenario:
    """Pre-training on a few clients with the rewards that the bandit phase will pay."""
    rewards = exact_match(header.places)
    return Scenario((Stage(rewards),), pretraining=rewards)


def init_shift(header: Header) -> Scenario:
    """Pre-training with other rewards than the bandit phase: the paper's default.

    Where the data has upper and lower case, pre-training pays half for the lower-case version of
    an upper-case letter. Elsewhere it sees only the most frequent fifth of the actions, and then
    rare actions pay more than frequent ones.
    """
    exact = exact_match(header.num_actions)
    if header.lower_case:
        return Scenario(
            (Stage(exact),), pretraining=with_near_miss(exact, dict(header.lower_case), 0.5)
        )
    return Scenario((Stage(_rarity(header)),), pretraining=_most_frequent(header, 1 / 5))


def init_shift_released(header: Header) -> Scenario:
    """The shift as in the authors' released code, which differs from the paper's text.

    With case: pre-training folds lower case onto upper case; then answering upper case for lower
    case pays half. Elsewhere pre-training sees the most frequent three fifths of the actions.
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
    """count(most frequent) / count(action) for a right action; one that never occurs counts as
    occurring once.
    """
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
    appear: some of the actions do not exist at first and come in as the rounds go by. rotate: users
    in groups of unequal size like different actions, and take over each other's likings. Over
    candidates tastes change: permute moves a `fraction` of their axes, rotate all of them.
    """
    if not at:
        raise ValueError(
            "at: name the rounds before which the world changes, for example [200, 400]"
        )
    if list(at) != sorted(set(at)) or at[0] < 2:
        raise ValueError(f"at: rounds must ascend and be at least 2, not {list(at)}")
    k, rounds = header.places, (1, *at)
    if header.items is not None and kind == "appear":
        raise ValueError("kind: appear is for fixed actions; candidates take permute or rotate")
    if k < 2:
        raise ValueError("kind: nothing can drift with a single action")
    if header.items is not None:
        share = fraction if kind == "permute" else 1.0
        stages = [
            Stage(NewTastes(exact_match(k), change, share, seed), from_round=first)
            for change, first in enumerate(rounds)
        ]
    elif kind == "permute":
        stages = [
            Stage(_permuted(k, change, fraction, seed), from_round=first)
            for change, first in enumerate(rounds)
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
            Stage(_rotated(k, change, groups, disliked, seed), from_round=first)
            for change, first in enumerate(rounds)
        ]
    return Scenario(tuple(stages), _before(stages[0], k) if start == "init" else None)


def _before(first: Stage, num_actions: int) -> RewardTable:
    """The rewards of pre-training: right answers among the actions that there are."""
    return (
        exact_match(num_actions)
        if first.available is None
        else per_label(first.available.astype(float))
    )


def _permuted(num_actions: int, changes: int, fraction: float, seed: int) -> Renamed:
    """The world after some changes; each moves its labels' right answers round in a ring."""
    answers = ring_order(num_actions, changes, fraction, seed)
    return Renamed(exact_match(num_actions), np.argsort(answers))


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


def _rotated(num_actions: int, change: int, groups: int, disliked: float, seed: int) -> Liked:
    """Each group likes a part of the actions, and the next group's part after every change."""
    order = generator(seed, Purpose.DRIFT).permutation(num_actions)
    worth = np.full((groups, num_actions), disliked, np.float32)
    for group in range(groups):
        worth[group, order[(group + change) % groups :: groups]] = 1
    return Liked(exact_match(num_actions), worth, seed)
