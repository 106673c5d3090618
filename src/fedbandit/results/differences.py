"""Paired differences between configurations: over the seeds that both have, with an interval.

A seed gives every configuration the same clients and examples, so a difference varies less than
either reward.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fedbandit.results.plots import draw_points, empty_figure, save_picture

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Difference:
    """A mean difference over `seeds` shared seeds, with the ends of its interval.

    One seed gives no interval. `p` is the two-sided p-value of Student's t, before any adjustment;
    `comparisons` is how many comparisons the interval holds for together. As a string:
    `+0.0123, 95% interval +0.0100 to +0.0146`.
    """

    mean: float
    low: float | None
    high: float | None
    seeds: int
    error: float = math.nan  # the standard error of the mean
    p: float = math.nan
    comparisons: int = 1

    @property
    def told_apart(self) -> bool:
        """Whether the interval leaves zero out."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)

    @property
    def exact_tie(self) -> bool:
        """Whether every shared seed gave exactly the same value: nothing was compared."""
        return self.seeds > 0 and self.mean == 0 and not self.error > 0

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

    def __neg__(self) -> "Difference":
        """The same comparison the other way round."""
        low = None if self.high is None else -self.high
        high = None if self.low is None else -self.low
        return replace(self, mean=-self.mean, low=low, high=high)

    def at_level(self, level: float, comparisons: int) -> "Difference":
        """The same difference with the interval of confidence `1 - level`."""
        if self.seeds < 2:
            return replace(self, comparisons=comparisons)
        from scipy.special import stdtrit

        reach = float(stdtrit(self.seeds - 1, 1 - level / 2)) * self.error
        ends = self.mean - reach, self.mean + reach
        return replace(self, low=ends[0], high=ends[1], comparisons=comparisons)


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Difference | None:
    """The difference of ours and theirs, each a value by seed; None where they share no seed.

    The interval is Student's for the mean of the differences. It holds for this one comparison:
    `simultaneous` widens several, so that they hold together.

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
    p = min(1.0, 2 * min(p_above(differences, 0), p_below(differences, 0)))
    found = Difference(mean, None, None, seeds, standard_error(differences), p)
    return found.at_level(1 - CONFIDENCE, 1)


def p_above(values: np.ndarray, bound: float) -> float:
    """The one-sided p-value of Student's test that the mean of values [seeds] lies above a bound."""
    if len(values) < 2 or not math.isfinite(bound):
        return 1.0
    from scipy.special import stdtr

    error = standard_error(values)
    gap = float(values.mean()) - bound
    if error == 0:
        return 0.0 if gap > 0 else 1.0
    return float(stdtr(len(values) - 1, -gap / error))


def p_below(values: np.ndarray, bound: float) -> float:
    """The one-sided p-value of Student's test that the mean of values [seeds] lies below a bound."""
    return p_above(-values, -bound)


def holm(p: Sequence[float]) -> list[float]:
    """P-values adjusted by Holm's step-down procedure (1979), in their own order.

    Examples:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    adjusted, largest = [1.0] * len(p), 0.0
    for rank, i in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        largest = max(largest, min(1.0, (len(p) - rank) * p[i]))
        adjusted[i] = largest
    return adjusted


Pair = TypeVar("Pair")


def simultaneous(found: Mapping[Pair, Difference]) -> dict[Pair, Difference]:
    """The same differences with Holm's intervals, which hold together with 95% confidence.

    By p-value, the smallest first, the i-th of m has the level 0.05 / (m - i + 1); from the first
    that is above its level all keep that one. So an interval leaves zero out where Holm's test
    rejects, and nowhere else. Differences from one seed are not counted.
    """
    known = sorted((k for k, d in found.items() if d.seeds > 1), key=lambda k: found[k].p)
    levels, open_, level = {}, True, 1 - CONFIDENCE
    for place, key in enumerate(known):
        level = (1 - CONFIDENCE) / (len(known) - place) if open_ else level
        open_ = open_ and found[key].p <= level
        levels[key] = level
    return {k: d.at_level(levels[k], len(known)) if k in levels else d for k, d in found.items()}


@dataclass(frozen=True)
class Ranks:
    """Mean ranks of contenders over situations (1 is best), with Friedman's test and Nemenyi's
    critical difference.

    With k contenders in N situations and mean ranks R: Friedman's
    chi2 = 12 N / (k (k + 1)) * (sum R^2 - k (k + 1)^2 / 4), in the form of Iman and Davenport
    F = (N - 1) chi2 / (N (k - 1) - chi2) with k - 1 and (k - 1)(N - 1) degrees of freedom. Where
    all situations agree F is infinite, and the p-value is that of chi2 itself. Two contenders
    differ where their mean ranks do by CD = q sqrt(k (k + 1) / (6 N)) or more, where q is the 0.95
    quantile of the studentised range of k over the square root of 2.
    """

    means: Mapping[str, float]
    situations: int
    p: float
    critical_difference: float

    @classmethod
    def of(cls, values: Mapping[str, Sequence[float]]) -> "Ranks":
        """From the value of each contender in each situation, larger is better; NaN is worst."""
        from scipy.special import chdtrc, fdtrc
        from scipy.stats import rankdata, studentized_range

        table = np.nan_to_num(np.array(list(values.values()), float), nan=-np.inf)
        k, n = table.shape
        means = rankdata(-table, axis=0).mean(axis=1)
        chi = 12 * n / (k * (k + 1)) * float((means**2).sum() - k * (k + 1) ** 2 / 4)
        rest = n * (k - 1) - chi
        p = float(chdtrc(k - 1, chi))
        if n > 1 and rest > 1e-9:
            p = float(fdtrc(k - 1, (k - 1) * (n - 1), (n - 1) * chi / rest))
        q = float(studentized_range.ppf(CONFIDENCE, k, np.inf)) / math.sqrt(2)
        order = np.argsort(means, kind="stable")
        ranked = {list(values)[i]: float(means[i]) for i in order}
        return cls(ranked, n, p, q * math.sqrt(k * (k + 1) / (6 * n)))


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


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table; every column but the first stands on the right.

    Examples:
        >>> markdown_table(["rule", "reward"], [["greedy", "0.5"]])
        ['| rule | reward |', '| --- | ---: |', '| greedy | 0.5 |']
    """
    rule = ["---", *["---:"] * (len(heads) - 1)]
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(cells)} |" for cells in (heads, rule, *escaped)]


@dataclass(frozen=True)
class ConfigurationOutcome:
    """A configuration's mean reward, and its difference from the reference (None for that itself)."""

    configuration: str
    reward: float
    seeds: int
    difference: Difference | None


@dataclass(frozen=True, repr=False)
class Differences:
    """All configurations beside a reference, best first; printed, it is a table.

    The intervals hold together (`simultaneous`): for every comparison with the reference where it
    was named beforehand, for all pairs where it is the best one found.
    """

    reference: str
    outcomes: Sequence[ConfigurationOutcome]
    lead: Difference | None = None  # of the second, minus the first, among all pairs

    def __repr__(self) -> str:
        heads = ["configuration", "seeds", "reward", f"minus {self.reference}", "95% interval", ""]
        lines = [
            [one.configuration, str(one.seeds), f"{one.reward:.4f}", *self._said(one)]
            for one in self.outcomes
        ]
        text = text_table([heads, *lines], left=(0, 5))
        known = [one.difference for one in self.outcomes if one.difference is not None]
        if most := max((one.comparisons for one in known), default=0):
            whose = "of all pairs" if most > len(known) else f"with {self.reference}"
            text += (
                f"\nintervals: paired by seed, Student's t, Holm-adjusted to hold together for"
                f" {most} comparison{'s' * (most > 1)} {whose}"
            )
        return text

    def rows(self) -> list[dict[str, str | int | float | None]]:
        """The table as plain dictionaries; `p` is not adjusted, `low` and `high` are."""
        return [
            {
                "configuration": one.configuration,
                "seeds": one.seeds,
                "reward": one.reward,
                "reference": self.reference,
                "difference": None if one.difference is None else one.difference.mean,
                "low": None if one.difference is None else one.difference.low,
                "high": None if one.difference is None else one.difference.high,
                "p": None if one.difference is None else one.difference.p,
                "comparisons": None if one.difference is None else one.difference.comparisons,
            }
            for one in self.outcomes
        ]

    @property
    def tied(self) -> list[str]:
        """The configurations that earned exactly as much as the first, itself included; empty where
        one is ahead.
        """
        if not self.outcomes:
            return []
        alike = [o.configuration for o in self.outcomes if o.reward == self.outcomes[0].reward]
        return alike if len(alike) > 1 else []

    def in_words(self) -> str:
        """Who came first, and whether the second can be told apart from it; no winner on a tie."""
        if len(self.outcomes) < 2:
            return (
                f"{self.outcomes[0].configuration} alone: nothing to compare it with"
                if self.outcomes
                else "no runs"
            )
        if len(self.tied) > 1:
            shown = ", ".join(self.tied[:4]) + (", ..." if len(self.tied) > 4 else "")
            return f"no winner: {shown} earned exactly the same"
        first, second = self.outcomes[:2]
        gap, pair = self.lead, f"{first.configuration} is ahead of {second.configuration}"
        over = "one seed" if gap and gap.seeds == 1 else f"{gap.seeds if gap else 0} shared seeds"
        if gap is None or gap.low is None:
            return f"{pair}; {over} cannot tell whether that is chance"
        if gap.told_apart:
            return f"{pair} beyond chance ({over})"
        return f"{first.configuration} and {second.configuration} cannot be told apart with {over}"

    def plot(self, path: Path | str | None = None) -> Any:
        """A matplotlib figure of the differences from the reference with their intervals, best
        first; with a path (.png or .svg) it is saved there too.
        """
        gaps = {o.configuration: o.difference for o in self.outcomes if o.difference is not None}
        figure = empty_figure(7.2, 0.3 * len(gaps) + 1.4)
        axes = figure.add_subplot()
        points, colours = {}, {}
        for name, gap in gaps.items():
            low, high = (gap.mean if end is None else end for end in (gap.low, gap.high))
            points[name] = low, gap.mean, high
            colours[name] = "#0072B2" if gap.told_apart else "#8C8C8C"
        draw_points(axes, points, colours)
        axes.axvline(0, color="#595959", linewidth=1, linestyle=(0, (4, 2)))
        axes.set_xlabel(f"reward minus {self.reference} (grey: not told apart)", fontsize=9)
        if path is not None:
            save_picture(figure, Path(path))
        return figure

    def _said(self, one: ConfigurationOutcome) -> list[str]:
        if one.difference is None:
            whole = one.configuration == self.reference
            return ["-", "-", "the reference" if whole else "no shared seed"]
        found = one.difference
        verdict = "told apart" if found.told_apart else "cannot be told apart"
        if found.exact_tie:
            verdict = "exactly the same"
        return [f"{found.mean:+.4f}", found.interval, "" if found.low is None else verdict]


_MOST_PAIRS = 2000  # of which p-values are computed; beyond it Bonferroni's level is taken


def differences(
    rewards: Mapping[str, Mapping[int, float]],
    reference: str | None = None,
    *,
    found_afterwards: bool = False,
) -> Differences:
    """Every configuration beside a reference, by default the one with the highest mean; rewards are
    by seed.

    `found_afterwards` says that the reference was chosen by these rewards, as the one with the
    highest mean is: the intervals then hold for all pairs, k (k - 1) / 2 of them.
    """
    known = {label: values for label, values in rewards.items() if values}
    means = {label: float(np.mean(list(values.values()))) for label, values in known.items()}
    ranked = sorted(known, key=lambda label: -means[label])
    beside = ranked[0] if reference is None and ranked else reference or ""
    pairs = [(low, high) for i, high in enumerate(ranked) for low in ranked[i + 1 :]]
    every = own = _paired(known, pairs, beside)
    if reference is not None and not found_afterwards:
        named = [(label, beside) for label in ranked if label != beside and beside in known]
        own = _paired(known, named, beside)
    gaps = own | {(high, low): -gap for (low, high), gap in own.items()}
    outcomes = [
        ConfigurationOutcome(label, means[label], len(known[label]), gaps.get((label, beside)))
        for label in ranked
    ]
    gap = every.get((ranked[1], ranked[0])) if len(ranked) > 1 else None
    return Differences(beside, outcomes, gap)


def _paired(
    known: Mapping[str, Mapping[int, float]], pairs: Sequence[tuple[str, str]], reference: str
) -> dict[tuple[str, str], Difference]:
    """The differences of pairs, the first minus the second, with intervals that hold together.

    Of very many pairs only the first one and those with the reference are kept.
    """
    every = len(pairs) <= _MOST_PAIRS
    kept = pairs if every else [p for p in pairs if reference in p or p == pairs[0]]
    found = {p: gap for p in kept if (gap := paired(known[p[0]], known[p[1]])) is not None}
    if every:
        return simultaneous(found)
    level = (1 - CONFIDENCE) / len(pairs)
    return {p: gap.at_level(level, len(pairs)) for p, gap in found.items()}
