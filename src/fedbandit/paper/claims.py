"""The paper's sentences, each with the test that judges it: numbers in, verdicts out.

Knows rewards by seed and nothing of runs or pictures, so a figure made long ago is judged by today's rules.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from fedbandit.results.differences import holm, p_above, p_below, standard_error

Kind = Literal["claim", "scope", "ours"]
Verdict = Literal["agrees", "disagrees", "not clear", "measured"]

LEVEL = 0.05
ALIKE = 0.05
"""The gap that "nearly identical", "close to" and "never hurts" allow, relative to the larger reward."""
NEGLIGIBLE = 0.02
"""The largest negligible standard deviation over trials, relative to the mean."""
MAGNITUDE = 0.5
"""The distance allowed between a loss and the one that the paper states, relative to it."""


@dataclass(frozen=True)
class MemberResult:
    """Final rewards of one member of a figure, by seed.

    `propensity` holds, by seed, the mean probability of the chosen action in each deployment
    period; the first period acts with the initial model. Seeds that diverged have no reward.
    """

    final: Mapping[int, float]
    diverged: tuple[int, ...] = ()
    propensity: Mapping[int, Sequence[float]] = field(default_factory=dict)
    server_rate: float = math.nan  # where it was tuned

    @property
    def mean(self) -> float:
        """The mean final reward over seeds; NaN where all diverged."""
        return float(np.mean(list(self.final.values()))) if self.final else math.nan

    def minus(self, other: "MemberResult") -> np.ndarray:
        """Differences of final rewards, float [seeds], over the seeds that both have."""
        return np.array([self.final[s] - other.final[s] for s in self.final if s in other.final])


@dataclass(frozen=True)
class Evidence:
    """A number with what speaks for and against a sentence: one-sided p-values, 1 for nothing."""

    text: str
    difference: float
    error: float
    speaks_for: float
    speaks_against: float


@dataclass(frozen=True)
class Sentence:
    """Something the paper says, or something of ours that stands beside it, and its test.

    A `claim` gets a verdict. `scope` is what the paper leaves out, `ours` what it does not speak
    of: both are measured and never judged. In `words`, what stands in brackets is ours.
    """

    words: str
    members: tuple[str, ...]  # the members of figures that it is about
    test: Callable[..., Evidence]  # of their results, in this order
    kind: Kind = "claim"
    about_tuning: bool = False  # published rates say nothing about it


@dataclass(frozen=True)
class FigureVerdict:
    """A sentence and what came out here: a difference with its standard error, and a verdict."""

    claim: str
    words: str
    kind: Kind
    difference: float
    error: float
    p: float  # adjusted for the other claims of the figure; 1 where nothing is judged
    verdict: Verdict


def judge(
    sentences: Sequence[Sentence], results: Mapping[str, MemberResult]
) -> list[FigureVerdict]:
    """The verdicts of one figure: at most one in twenty figures has any wrong one by chance.

    Every claim has a two-sided p-value; Holm's procedure keeps the chance of one false verdict
    among all claims of the figure below 5%. A claim about a member with diverged seeds is not
    clear: what survived is not a sample of what was tried.
    """
    found = [one.test(*(results[member] for member in one.members)) for one in sentences]
    raw = []
    for sentence, one in zip(sentences, found, strict=True):
        lost = any(results[member].diverged for member in sentence.members)
        raw.append(1.0 if lost else min(1.0, 2 * min(one.speaks_for, one.speaks_against)))
    judged = [i for i, sentence in enumerate(sentences) if sentence.kind == "claim"]
    adjusted = dict(zip(judged, holm([raw[i] for i in judged]), strict=True))
    verdicts = []
    for i, (sentence, one) in enumerate(zip(sentences, found, strict=True)):
        verdict: Verdict = "measured"
        if i in adjusted:
            side: Verdict = "agrees" if one.speaks_for < one.speaks_against else "disagrees"
            verdict = side if adjusted[i] <= LEVEL else "not clear"
        numbers = one.difference, one.error, adjusted.get(i, 1.0)
        verdicts.append(FigureVerdict(one.text, sentence.words, sentence.kind, *numbers, verdict))
    return verdicts


def _finding(text: str, values: np.ndarray, speaks_for: float, speaks_against: float) -> Evidence:
    mean = float(values.mean()) if len(values) else math.nan
    return Evidence(text, mean, standard_error(values), speaks_for, speaks_against)


def _within(text: str, values: np.ndarray, low: float, high: float) -> Evidence:
    """For: the mean lies between two bounds (two one-sided tests); against: beyond either."""
    inside = max(p_above(values, low), p_below(values, high) if high < math.inf else 0.0)
    outside = min(p_below(values, low), p_above(values, high))
    return _finding(text, values, inside, outside)


def _allowed(*members: MemberResult) -> float:
    return ALIKE * max((m.mean for m in members if m.final), default=math.nan)


def above(higher: str, lower: str, words: str, kind: Kind = "claim") -> Sentence:
    """One member ends higher than another."""

    def test(one: MemberResult, other: MemberResult) -> Evidence:
        by = one.minus(other)
        return _finding(f"{higher} above {lower}", by, p_above(by, 0), p_below(by, 0))

    return Sentence(words, (higher, lower), test, kind)


def never_hurts(member: str, other: str, words: str) -> Sentence:
    """A member does not end below another: clearly below disagrees, less than 5% below agrees."""

    def test(one: MemberResult, than: MemberResult) -> Evidence:
        by = one.minus(than)
        hurts = p_below(by, 0)
        fine = p_above(by, -_allowed(than)) if hurts > LEVEL / 2 else 1.0
        return _finding(f"{member} not below {other}", by, fine, hurts)

    return Sentence(words, (member, other), test)


def alike(one: str, other: str, words: str, kind: Kind = "claim") -> Sentence:
    """Two members end at about the same reward, within 5% of the larger."""

    def test(first: MemberResult, second: MemberResult) -> Evidence:
        allowed = _allowed(first, second)
        return _within(f"{one} about as {other}", first.minus(second), -allowed, allowed)

    return Sentence(words, (one, other), test, kind)


def differs(one: str, other: str, words: str) -> Sentence:
    """Two members end at different rewards, by more than 5% of the larger."""

    def test(first: MemberResult, second: MemberResult) -> Evidence:
        like = alike(one, other, words).test(first, second)
        text, numbers = f"{one} unlike {other}", (like.difference, like.error)
        return Evidence(text, *numbers, like.speaks_against, like.speaks_for)

    return Sentence(words, (one, other), test)


def near_best(member: str, others: tuple[str, ...], words: str) -> Sentence:
    """A member is the best of these, or within 5% of it."""

    def test(one: MemberResult, *rest: MemberResult) -> Evidence:
        ended = [i for i, other in enumerate(rest) if other.final]
        best = max(ended, key=lambda i: rest[i].mean, default=0)
        text = f"{member} against the best of the others"
        return _within(text, one.minus(rest[best]), -_allowed(rest[best]), math.inf)

    return Sentence(words, (member, *others), test)


def drops(before: str, after: str, stated: tuple[float, float], words: str) -> Sentence:
    """A change costs the share of reward that the paper states, within half of it either way."""
    share = 1 - stated[1] / stated[0]

    def test(first: MemberResult, then: MemberResult) -> Evidence:
        shared = [seed for seed in first.final if seed in then.final]
        lost = np.array([1 - then.final[seed] / first.final[seed] for seed in shared])
        text = f"share of the reward of {before} lost by {after}; the paper {share:.0%}"
        return _within(text, lost, (1 - MAGNITUDE) * share, (1 + MAGNITUDE) * share)

    return Sentence(words, (before, after), test)


def steady(member: str, words: str) -> Sentence:
    """A member's trials hardly differ: their standard deviation is at most 2% of the mean."""
    text = f"{member}: standard deviation over mean, at most {NEGLIGIBLE:g}"

    def test(one: MemberResult) -> Evidence:
        final = np.array(list(one.final.values()))
        if len(final) < 2:
            return Evidence(text, math.nan, math.nan, 1.0, 1.0)
        from scipy.special import chdtr, chdtrc

        spread, degrees = float(final.std(ddof=1) / final.mean()), len(final) - 1
        statistic = degrees * (spread / NEGLIGIBLE) ** 2  # chi-squared where it is just 2%
        below, beyond = float(chdtr(degrees, statistic)), float(chdtrc(degrees, statistic))
        return Evidence(text, spread, math.nan, below, beyond)

    return Sentence(words, (member,), test)


def grows_surer(member: str, words: str) -> Sentence:
    """The probability of a member's chosen action rises, from the first deployment on."""
    text = f"{member}: probability in the last period above the first after a deployment"

    def test(one: MemberResult) -> Evidence:
        rise = np.array([row[-1] - row[1] for row in one.propensity.values() if len(row) > 2])
        return _finding(text, rise, p_above(rise, 0), p_below(rise, 0))

    return Sentence(words, (member,), test)


def matters_more(noisy: str, plain: str, early: bool, words: str) -> Sentence:
    """Noise moves the probability of the chosen action more in one half of the deployed periods."""
    half = "first" if early else "second"
    text = f"{noisy} against {plain}: probability moved more in the {half} half"

    def test(one: MemberResult, other: MemberResult) -> Evidence:
        by = []
        for seed, row in one.propensity.items():
            if seed in other.propensity and len(row) > 2:
                moved = np.abs(np.subtract(row, other.propensity[seed]))[1:]
                middle = len(moved) // 2
                by.append(moved[:middle].mean() - moved[-middle:].mean())
        more = np.array(by) if early else -np.array(by)
        return _finding(text, more, p_above(more, 0), p_below(more, 0))

    return Sentence(words, (noisy, plain), test)


def smaller_rates(pairs: Sequence[tuple[str, str]], words: str) -> Sentence:
    """Tuning chose a smaller server rate for the first of each pair: a sign test over pairs."""

    def test(*members: MemberResult) -> Evidence:
        rates = [member.server_rate for member in members]
        first, second = rates[::2], rates[1::2]
        smaller = sum(a < b for a, b in zip(first, second, strict=True))
        larger = sum(a > b for a, b in zip(first, second, strict=True))
        text = f"server rate smaller in {smaller}, larger in {larger} of {len(first)} comparisons"
        tail = _binomial_tail(smaller + larger)
        return Evidence(text, math.nan, math.nan, tail(smaller), tail(larger))

    members = tuple(label for pair in pairs for label in pair)
    return Sentence(words, members, test, about_tuning=True)


def _binomial_tail(n: int) -> Callable[[int], float]:
    """The chance of k or more heads among n fair coins, as a function of k."""
    return lambda k: sum(math.comb(n, i) for i in range(k, n + 1)) / 2**n
