"""Paired differences between configurations: over the seeds that both have, with an interval.

A seed gives every configuration the same clients and examples, so a difference varies less than
either reward.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Difference:
    """The mean difference over `seeds` shared seeds, with the ends of its 95% interval.

    One seed gives no interval. As a string: `+0.0123, 95% interval +0.0100 to +0.0146`.
    """

    mean: float
    low: float | None
    high: float | None
    seeds: int
    error: float = math.nan  # the standard error of the mean

    @property
    def told_apart(self) -> bool:
        """Whether the interval leaves zero out."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.mean:+.4f}, from a single seed"
        return f"{self.mean:+.4f}, 95% interval {self.low:+.4f} to {self.high:+.4f}"

    @property
    def interval(self) -> str:
        """The ends in brackets, or a dash."""
        return (
            "-" if self.low is None or self.high is None else f"[{self.low:.4f}, {self.high:.4f}]"
        )


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Difference | None:
    """The difference of ours and theirs, each a value by seed; None where they share no seed.

    The interval is Student's for the mean of the differences. It holds for this one comparison: of
    twenty, one is expected to leave zero out by chance.

    Examples:
        >>> paired({0: 1.0, 1: 1.2, 2: 1.1}, {0: 0.9, 1: 1.0, 2: 1.0, 3: 5.0}).interval
        '[-0.0101, 0.2768]'
    """
    shared = [seed for seed in ours if seed in theirs]
    if not shared:
        return None
    return from_zero(np.array([ours[seed] - theirs[seed] for seed in shared]))


def from_zero(differences: np.ndarray) -> Difference:
    """The mean of some differences, float [seeds], and where the true one lies by Student's t."""
    mean, seeds = float(differences.mean()) if len(differences) else math.nan, len(differences)
    if seeds < 2:
        return Difference(mean, None, None, seeds)
    from scipy.special import stdtrit

    error = standard_error(differences)
    reach = float(stdtrit(seeds - 1, 0.5 + CONFIDENCE / 2)) * error
    return Difference(mean, mean - reach, mean + reach, seeds, error)


def standard_error(values: Sequence[float] | np.ndarray) -> float:
    """The standard error of the mean over seeds, values [seeds]; NaN for a single one."""
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def with_error(text: str, error: float | None) -> str:
    """`text ± error`; the text alone where a single seed gives no error."""
    return text if error is None or not math.isfinite(error) else f"{text} ± {error:.4f}"


def text_table(lines: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Lines of cells as a text in columns; those named `left` stand on the left, the others on the
    right.

    Examples:
        >>> print(text_table([["rule", "reward"], ["greedy", "0.5"]]))
        rule    reward
        greedy     0.5
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


@dataclass(frozen=True)
class ConfigurationOutcome:
    """A configuration's mean reward, and its difference from the reference (None for that itself)."""

    configuration: str
    reward: float
    seeds: int
    difference: Difference | None


@dataclass(frozen=True, repr=False)
class Differences:
    """All configurations beside a reference, best first; printed, it is a table with
    a verdict.
    """

    reference: str
    outcomes: Sequence[ConfigurationOutcome]
    lead: Difference | None = None  # of the first over the second

    def __repr__(self) -> str:
        heads = ["configuration", "seeds", "reward", f"minus {self.reference}", "95% interval", ""]
        lines = [
            [one.configuration, str(one.seeds), f"{one.reward:.4f}", *self._said(one)]
            for one in self.outcomes
        ]
        return text_table([heads, *lines], left=(0, 5))

    def rows(self) -> list[dict[str, str | int | float | None]]:
        """The table as plain dictionaries."""
        return [
            {
                "configuration": one.configuration,
                "seeds": one.seeds,
                "reward": one.reward,
                "reference": self.reference,
                "difference": None if one.difference is None else one.difference.mean,
                "low": None if one.difference is None else one.difference.low,
                "high": None if one.difference is None else one.difference.high,
            }
            for one in self.outcomes
        ]

    def in_words(self) -> str:
        """Who came first, and whether the second can be told apart from it."""
        if len(self.outcomes) < 2:
            return (
                f"{self.outcomes[0].configuration} alone: nothing to compare it with"
                if self.outcomes
                else "no runs"
            )
        first, second = self.outcomes[:2]
        gap = self.lead
        over = (
            "one seed"
            if gap is not None and gap.seeds == 1
            else f"{gap.seeds if gap else 0} shared seeds"
        )
        if gap is None or gap.low is None:
            return f"{first.configuration} is ahead of {second.configuration}; {over} cannot tell whether that is chance"
        if gap.told_apart:
            return (
                f"{first.configuration} is ahead of {second.configuration} beyond chance ({over})"
            )
        return f"{first.configuration} and {second.configuration} cannot be told apart with {over}"

    def _said(self, one: ConfigurationOutcome) -> list[str]:
        if one.difference is None:
            return [
                "-",
                "-",
                "the reference" if one.configuration == self.reference else "no shared seed",
            ]
        found = one.difference
        verdict = (
            ""
            if found.low is None
            else "told apart"
            if found.told_apart
            else "cannot be told apart"
        )
        return [f"{found.mean:+.4f}", found.interval, verdict]


def differences(
    rewards: Mapping[str, Mapping[int, float]], reference: str | None = None
) -> Differences:
    """Every configuration beside a reference, by default the one with the highest mean; rewards are
    by seed.
    """
    known = {label: values for label, values in rewards.items() if values}
    means = {label: float(np.mean(list(values.values()))) for label, values in known.items()}
    ranked = sorted(known, key=lambda label: -means[label])
    beside = ranked[0] if reference is None and ranked else reference or ""
    outcomes = [
        ConfigurationOutcome(
            label,
            means[label],
            len(known[label]),
            None if label == beside else paired(known[label], known.get(beside, {})),
        )
        for label in ranked
    ]
    lead = paired(known[ranked[0]], known[ranked[1]]) if len(ranked) > 1 else None
    return Differences(beside, outcomes, lead)
