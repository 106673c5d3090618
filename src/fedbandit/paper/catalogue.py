"""The paper's figures as data, what the paper says about them in words, and the tests that judge it.

Figures and sentences stand in `figures.toml`. The tests know rewards by seed and nothing of runs or
pictures, so a figure made long ago is judged by today's rules. Nothing is run or drawn here.
"""

import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import numpy as np

from fedbandit.config import Config
from fedbandit.core.errors import refuse
from fedbandit.results.differences import holm, p_above, p_below, standard_error
from fedbandit.studies.compare import described

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

    test: str  # one of TESTS
    members: tuple[str, ...]  # the members of figures that it is about
    words: str
    kind: Kind = "claim"
    about_tuning: bool = False  # published rates say nothing about it
    stated: Sequence[float] = ()  # rewards before and after, of what drops
    early: bool = False  # of what matters more: in the first half, not in the second


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
    found = [TESTS[one.test](one, *(results[m] for m in one.members)) for one in sentences]
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
    """The mean of differences [seeds] with its error, and what speaks for and against."""
    mean = float(values.mean()) if len(values) else math.nan
    return Evidence(text, mean, standard_error(values), speaks_for, speaks_against)


def _within(text: str, values: np.ndarray, low: float, high: float) -> Evidence:
    """For: the mean lies between two bounds (two one-sided tests); against: beyond either."""
    inside = max(p_above(values, low), p_below(values, high) if high < math.inf else 0.0)
    outside = min(p_below(values, low), p_above(values, high))
    return _finding(text, values, inside, outside)


def _allowed(*members: MemberResult) -> float:
    """The gap that counts as none: a share of the largest reward among these."""
    return ALIKE * max((m.mean for m in members if m.final), default=math.nan)


def _above(said: Sentence, one: MemberResult, other: MemberResult) -> Evidence:
    """One member ends higher than another."""
    by = one.minus(other)
    return _finding(" above ".join(said.members), by, p_above(by, 0), p_below(by, 0))


def _never_hurts(said: Sentence, one: MemberResult, other: MemberResult) -> Evidence:
    """A member does not end below another: clearly below disagrees, less than 5% below agrees."""
    by = one.minus(other)
    hurts = p_below(by, 0)
    fine = p_above(by, -_allowed(other)) if hurts > LEVEL / 2 else 1.0
    return _finding(" not below ".join(said.members), by, fine, hurts)


def _alike(said: Sentence, one: MemberResult, other: MemberResult) -> Evidence:
    """Two members end at about the same reward, within 5% of the larger."""
    allowed = _allowed(one, other)
    return _within(" about as ".join(said.members), one.minus(other), -allowed, allowed)


def _differs(said: Sentence, one: MemberResult, other: MemberResult) -> Evidence:
    """Two members end at different rewards, by more than 5% of the larger."""
    like = _alike(said, one, other)
    text, numbers = " unlike ".join(said.members), (like.difference, like.error)
    return Evidence(text, *numbers, like.speaks_against, like.speaks_for)


def _near_best(said: Sentence, one: MemberResult, *rest: MemberResult) -> Evidence:
    """A member is the best of these, or within 5% of it."""
    best = max((other for other in rest if other.final), key=lambda m: m.mean, default=rest[0])
    text = f"{said.members[0]} against the best of the others"
    return _within(text, one.minus(best), -_allowed(best), math.inf)


def _drops(said: Sentence, one: MemberResult, then: MemberResult) -> Evidence:
    """A change costs the share of reward that the paper states, within half of it either way."""
    share = 1 - said.stated[1] / said.stated[0]
    shared = [seed for seed in one.final if seed in then.final]
    lost = np.array([1 - then.final[seed] / one.final[seed] for seed in shared])
    before, after = said.members
    text = f"share of the reward of {before} lost by {after}; the paper {share:.0%}"
    return _within(text, lost, (1 - MAGNITUDE) * share, (1 + MAGNITUDE) * share)


def _steady(said: Sentence, one: MemberResult) -> Evidence:
    """A member's trials hardly differ: their standard deviation is at most 2% of the mean."""
    text = f"{said.members[0]}: standard deviation over mean, at most {NEGLIGIBLE:g}"
    final = np.array(list(one.final.values()))
    if len(final) < 2:
        return Evidence(text, math.nan, math.nan, 1.0, 1.0)
    from scipy.special import chdtr, chdtrc

    spread, degrees = float(final.std(ddof=1) / final.mean()), len(final) - 1
    statistic = degrees * (spread / NEGLIGIBLE) ** 2  # chi-squared where it is just 2%
    below, beyond = float(chdtr(degrees, statistic)), float(chdtrc(degrees, statistic))
    return Evidence(text, spread, math.nan, below, beyond)


def _grows_surer(said: Sentence, one: MemberResult) -> Evidence:
    """The probability of a member's chosen action rises, from the first deployment on."""
    text = f"{said.members[0]}: probability in the last period above the first after a deployment"
    rise = np.array([row[-1] - row[1] for row in one.propensity.values() if len(row) > 2])
    return _finding(text, rise, p_above(rise, 0), p_below(rise, 0))


def _matters_more(said: Sentence, noisy: MemberResult, plain: MemberResult) -> Evidence:
    """Noise moves the probability of the chosen action more in one half of the deployed periods."""
    by = []
    for seed, row in noisy.propensity.items():
        if seed in plain.propensity and len(row) > 2:
            moved = np.abs(np.subtract(row, plain.propensity[seed]))[1:]
            middle = len(moved) // 2
            by.append(moved[:middle].mean() - moved[-middle:].mean())
    half, more = ("first", np.array(by)) if said.early else ("second", -np.array(by))
    pair = " against ".join(said.members)
    text = f"{pair}: probability moved more in the {half} half"
    return _finding(text, more, p_above(more, 0), p_below(more, 0))


def _smaller_rates(said: Sentence, *members: MemberResult) -> Evidence:
    """Tuning chose a smaller server rate for the first of each pair: a sign test over pairs."""
    rates = [member.server_rate for member in members]
    pairs = list(zip(rates[::2], rates[1::2], strict=True))
    smaller, larger = sum(a < b for a, b in pairs), sum(a > b for a, b in pairs)
    text = f"server rate smaller in {smaller}, larger in {larger} of {len(pairs)} comparisons"
    tails = (_binomial_tail(smaller + larger, heads) for heads in (smaller, larger))
    return Evidence(text, math.nan, math.nan, *tails)


def _binomial_tail(n: int, k: int) -> float:
    """The chance of k or more heads among n fair coins.

    Examples:
        >>> _binomial_tail(3, 2)
        0.5
    """
    return sum(math.comb(n, i) for i in range(k, n + 1)) / float(2**n)


# The tests by the names that `figures.toml` has for them.
TESTS: dict[str, Callable[..., Evidence]] = {
    "above": _above,
    "never_hurts": _never_hurts,
    "alike": _alike,
    "differs": _differs,
    "near_best": _near_best,
    "drops": _drops,
    "steady": _steady,
    "grows_surer": _grows_surer,
    "matters_more": _matters_more,
    "smaller_rates": _smaller_rates,
}


Family = Literal["emnist", "so"]
EMBEDDED: dict[str, str] = {"emnist": "glyphs", "so": "topics"}


@dataclass(frozen=True)
class Member:
    """One curve: a preset with the changes behind it (`so-init-softmax policy.beta=0.1`).

    Figures that show the same run share its folder.
    """

    what: str
    suffix: str = ""  # sets a changed preset apart

    @property
    def key(self) -> str:
        """The name of its folder: the preset and what sets it apart."""
        return self.what.split()[0] + self.suffix

    def config(self) -> Config:
        """The configuration of the preset with its changes."""
        return described(self.what)


@dataclass(frozen=True)
class Figure:
    """A figure to make: members by label, what it shows of them, and what is said about them.

    `stated` are final rewards that the paper prints in words. `beside` are members of other
    figures that sentences speak of, by label; these are judged once that figure was made too.
    """

    name: str
    title: str
    family: Family
    members: Mapping[str, Member]
    shows: Literal["reward", "trials", "propensity"] = "reward"
    stated: Mapping[str, float] = field(default_factory=dict)
    stated_epsilon: Mapping[str, float] = field(default_factory=dict)  # of the paper's population
    beside: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # figure, its label
    sentences: tuple[Sentence, ...] = ()
    ours: bool = False  # the paper does not have it
    large: bool = False  # needs more clients than the embedded data has

    @property
    def y_axis(self) -> str:
        """The label of the vertical axis."""
        return (
            "mean probability of the chosen action"
            if self.shows == "propensity"
            else "running average reward"
        )


@cache
def _figures() -> list[Figure]:
    """Every figure, in the paper's order, ours behind; an ablation stands there for each family."""
    kept = tomllib.loads(files(__package__).joinpath("figures.toml").read_text(encoding="utf-8"))
    return [_figure(entry, kept["said"]) for entry in kept["figure"]]


def _figure(entry: dict[str, Any], said: list[dict[str, Any]]) -> Figure:
    """A figure of the file, with the sentences that name it."""
    start, rules = entry.pop("of", ""), entry.pop("rules", [])
    given = entry.pop("members", {}) | {rule: f"{start}-{rule}" for rule in rules}
    every = {label: [one] if isinstance(one, str) else one for label, one in given.items()}
    members = {label: Member(*one) for label, one in every.items()}
    own = {entry["name"], f"{entry['name']} {entry['family']}"}
    sentences = tuple(one for each in said if own & {*each["in"]} for one in _sentences(each))
    return Figure(members=members, sentences=sentences, **entry)


def _sentences(said: Mapping[str, Any]) -> Iterator[Sentence]:
    """One sentence for each group of members that the words are tested on."""
    [test] = TESTS.keys() & said.keys()
    more = {key: value for key, value in said.items() if key not in ("in", "words", test)}
    for members in said[test]:
        yield Sentence(test, tuple(members), said["words"], **more)


OURS = tuple(one.name for one in _figures() if one.ours)  # figures that the paper does not have


def figure_names() -> list[str]:
    """Every figure of the paper, in its order."""
    return list(dict.fromkeys(one.name for one in _figures() if not one.ours))


def matching(name: str) -> list[str]:
    """The figures that a name stands for: itself, the panels of `fig1`, or `all`, but for those of
    many clients.

    Examples:
        >>> matching("fig2")
        ['fig2a', 'fig2b', 'fig2c', 'fig2d']
    """
    names = [*figure_names(), *OURS]
    found = [n for n in names if n == name or (n[:-1] == name and n.startswith("fig"))]
    if name == "all":
        found = [n for n in names if not figure(n).large]
    refuse((not found, f"{name}: no such figure; there are {', '.join(names)} and all"))
    return found


def figure(name: str, family: Family | None = None) -> Figure:
    """The figure of that name; an ablation exists for both families, and is Stack Overflow's unless
    asked for.

    Examples:
        >>> shown = figure("fig2c")
        >>> shown.title, list(shown.members)[:2], shown.stated["softmax"]
        ('Stack Overflow, init-shift', ['softmax', 'falcon'], 0.81)
        >>> shown.sentences[0].words
        'the exploration algorithms all reach significantly larger rewards'
    """
    named = [one for one in _figures() if one.name == name]
    return next((one for one in named if one.family == (family or "so")), named[0])
