"""Figures that were made: read from their files, judged, and shown in words, in a table, on a page.

A file holds numbers and no verdict, so that a better rule needs no new run. Nothing is run here.
"""

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from fedbandit.core.errors import DataError, refuse
from fedbandit.core.files import read_json
from fedbandit.paper.catalogue import (
    LEVEL,
    OURS,
    Figure,
    FigureVerdict,
    MemberResult,
    figure,
    figure_names,
    judge,
)
from fedbandit.results.differences import p_above
from fedbandit.studies.compare import rewards_table

RULES = ("softmax", "falcon", "epsilon-greedy", "greedy")
VERDICTS = ("agrees", "disagrees", "not clear")
_ORDER = [*figure_names(), "drift", *OURS]  # the picture of `fedbandit drift` among them


@dataclass(frozen=True)
class FigureRecord:
    """A figure that was made earlier: the numbers in its file, and the picture beside it."""

    path: Path
    numbers: dict[str, Any]
    beside: Mapping[str, MemberResult] = field(default_factory=dict)  # of other figures, by label

    @property
    def name(self) -> str:
        """The figure that it is: `fig2c`."""
        return str(self.numbers["figure"])

    @property
    def png(self) -> Path:
        """Its picture; an SVG may lie beside it."""
        return self.path.with_suffix(".png")

    @property
    def tuned(self) -> bool:
        """Whether rates were searched for, in place of the published ones."""
        return bool(self.numbers.get("tuning"))

    @property
    def regime(self) -> tuple[Any, ...]:
        """Data, model, scale and tuning: figures with equal ones may be set beside each other."""
        return *(self.numbers.get(key) for key in ("data", "model", "scale")), self.tuned

    @property
    def wanted(self) -> Figure | None:
        """The figure of the catalogue; None for the picture of a drift."""
        if self.name not in _ORDER or self.name == "drift":
            return None
        emnist = str(self.numbers["title"]).startswith("EMNIST")
        return figure(self.name, "emnist" if emnist else "so")

    @cached_property
    def results(self) -> dict[str, MemberResult]:
        """The results of each member, by label."""
        return {
            label: _result(member, self.tuned)
            for label, member in self.numbers["members"].items()
            if "final" in member
        }

    @cached_property
    def verdicts(self) -> list[FigureVerdict]:
        """Every sentence about it that can be tested with what was made."""
        wanted, known = self.wanted, {**self.beside, **self.results}
        said = () if wanted is None else wanted.sentences
        said = tuple(one for one in said if self.tuned or not one.about_tuning)
        return judge([one for one in said if known.keys() >= {*one.members}], known)

    @property
    def missing(self) -> list[str]:
        """The figures that it is to be set beside and that were not made."""
        wanted = {} if self.wanted is None else self.wanted.beside
        return sorted({name for label, (name, _) in wanted.items() if label not in self.beside})

    @property
    def tally(self) -> Counter[str]:
        """Counts of claims that agree, disagree or are not clear."""
        return Counter(one.verdict for one in self.verdicts if one.kind == "claim")


def _result(member: Mapping[str, Any], tuned: bool) -> MemberResult:
    """A member of a figure's file as the tests of sentences see it."""
    seeds = member["seeds"]
    periods = zip(seeds, member.get("propensity_by_period") or (), strict=False)
    rate = member.get("server.learning_rate") if tuned else None
    return MemberResult(
        dict(zip(seeds, member["final"], strict=True)),
        tuple(member["diverged"]),
        dict(periods),
        np.nan if rate is None else float(rate),
    )


def read_figures(places: Iterable[Path]) -> list[FigureRecord]:
    """The figures in these files and folders, in the paper's order; those of one panel as given."""
    found = []
    for place in places:
        within = [place] if place.is_file() else sorted(place.glob("*.json"), key=lambda p: p.stem)
        for path in within:
            kept = FigureRecord(path, read_json(path) or {})
            found += [kept] if "figure" in kept.numbers and kept.png.exists() else []
    refuse(
        (
            not found,
            f"{', '.join(map(str, places))}: no figure here;"
            " `fedbandit figure NAME -o FOLDER` makes one",
        ),
        error=DataError,
    )
    made = {(kept.name, kept.regime): kept for kept in found}
    ordered = sorted(found, key=lambda kept: _ORDER.index(kept.name))
    return [_with_others(kept, made) for kept in ordered]


def _with_others(
    kept: FigureRecord, made: Mapping[tuple[str, tuple[Any, ...]], FigureRecord]
) -> FigureRecord:
    beside = {}
    for label, (name, theirs) in (kept.wanted.beside if kept.wanted else {}).items():
        other = made.get((name, kept.regime))
        if other is not None and theirs in other.results:
            beside[label] = other.results[theirs]
    return FigureRecord(kept.path, kept.numbers, beside)


@dataclass(frozen=True)
class RuleComparison:
    """The rules in one setting: mean final rewards, the best, and its lead, paired by seeds."""

    setting: str
    data: str
    means: dict[str, float]
    winner: str
    second: str
    margin: float
    level: tuple[str, ...]  # the rules that the winner cannot be told from
    seeds: int

    def cell(self, rule: str) -> str:
        """The rule's reward; the winner's in bold, and so are those that it cannot be told from."""
        if rule not in self.means:
            return "–"
        best = rule == self.winner or rule in self.level
        return f"**{self.means[rule]:.3f}**" if best else f"{self.means[rule]:.3f}"

    def lead(self) -> str:
        """By how much the winner leads, or that there is a tie."""
        told = f"{self.winner} by {self.margin:.3f} over {self.second}"
        if self.seeds == 1:
            return f"one seed: {told}"
        return f"a tie: {told}" if self.second in self.level else told


def comparisons(figures: Sequence[FigureRecord]) -> list[RuleComparison]:
    """Every setting in which the four rules were compared, favourable or not.

    A rule is level with the winner unless Student's one-sided test, at 5% divided by the number
    of the other rules, tells them apart.
    """
    found = []
    for kept in figures:
        ended = [r for r in RULES if kept.numbers.get("setting") and kept.results[r].final]
        if len(ended) < 2:
            continue
        means = {rule: kept.results[rule].mean for rule in ended}
        winner, second = sorted(ended, key=lambda rule: -means[rule])[:2]
        behind = {r: kept.results[winner].minus(kept.results[r]) for r in ended if r != winner}
        seeds = len(kept.results[winner].final)
        level = tuple(
            r for r, by in behind.items() if seeds > 1 and p_above(by, 0) > LEVEL / len(behind)
        )
        data = f"{kept.numbers['data']}, {seeds} seed{'s' if seeds > 1 else ''}"
        if kept.numbers.get("scale", 1) != 1:
            data += f", shortened to {kept.numbers['scale']:g}"
        setting = f"{kept.numbers['setting']}{', tuned' if kept.tuned else ''}"
        margin = float(behind[second].mean())
        found.append(RuleComparison(setting, data, means, winner, second, margin, level, seeds))
    return found


def comparison_table(found: Sequence[RuleComparison]) -> str:
    """The comparisons as a Markdown table: settings x rules, with the winner and its margin."""
    lines = [f"| setting | data | {' | '.join(RULES)} | winner and margin |"]
    lines.append(f"| --- | --- | {' | '.join(['---:'] * len(RULES))} | --- |")
    for one in found:
        cells = " | ".join(one.cell(rule) for rule in RULES)
        lines.append(f"| {one.setting} | {one.data} | {cells} | {one.lead()} |")
    return "\n".join(lines)


def difference_text(verdict: FigureVerdict) -> str:
    """The difference with its standard error, or a dash.

    Examples:
        >>> difference_text(FigureVerdict("", "", "claim", 0.012, 0.003, 0.01, "agrees"))
        '+0.012 ± 0.003'
    """
    if not np.isfinite(verdict.difference):
        return "–"
    error = f" ± {verdict.error:.3f}" if np.isfinite(verdict.error) else ""
    return f"{verdict.difference:+.3f}{error}"


def text_of(kept: FigureRecord) -> str:
    """A figure in words: final rewards, the paper's stated numbers, epsilons, and the verdicts."""
    numbers, wanted = kept.numbers, kept.wanted
    parts = [f"{kept.name}: {numbers['title']}\n{numbers['note']}"]
    if kept.results:
        final = {label: list(member.final.values()) for label, member in kept.results.items()}
        lost = {label: member.diverged for label, member in kept.results.items()}
        parts.append(rewards_table(final, lost, "member"))
    if wanted is not None and wanted.stated:
        lines = ["stated in the paper's text (its data, tuned rates):"]
        for label, value in wanted.stated.items():
            lines.append(f"  {label}: {value:.2f} there, {kept.results[label].mean:.4f} here")
        parts.append("\n".join(lines))
    if kept.verdicts:
        width = max(len(one.claim) for one in kept.verdicts)
        lines = [
            "what the paper says (mean difference ± standard error over paired seeds; verdicts by"
            " Student's t, Holm over the figure):"
        ]
        lines += [
            f"  {one.claim:<{width}}  {difference_text(one):<15}  {one.verdict:<9}  ({one.words})"
            for one in kept.verdicts
        ]
        parts.append("\n".join(lines))
    if kept.missing:
        parts.append(f"the paper sets it beside {' and '.join(kept.missing)}; make that too")
    if any(numbers.get("epsilons", {}).values()):
        parts.append(
            _epsilons_in_words(numbers["epsilons"], wanted.stated_epsilon if wanted else {})
        )
    if kept.tuned:
        parts.append(effort_in_words(numbers["tuning"]))
    return "\n\n".join(parts)


def effort_in_words(efforts: Mapping[str, Mapping[str, int]]) -> str:
    """The search behind a tuned comparison: points of the grid that each member has `looked_at`.

    Members with few tries beside the others are warned of.

    Examples:
        >>> effort_in_words({"falcon": {"looked_at": 72, "grid_points": 384}})
        'grid points evaluated by tuning: falcon 72 of 384 (19%)'
    """
    counts = {label: (one["looked_at"], one["grid_points"]) for label, one in efforts.items()}
    said = [f"{label} {seen} of {of} ({seen / of:.0%})" for label, (seen, of) in counts.items()]
    most = max(seen for seen, _ in counts.values())
    uneven = [label for label, (seen, of) in counts.items() if 2 * seen < min(of, most)]
    text = f"grid points evaluated by tuning: {', '.join(said)}"
    if uneven:
        text += (
            f"\nwarning: {', '.join(uneven)} had less than half the tries of others;"
            " the comparison is not fair to them"
        )
    return text


def _epsilons_in_words(epsilons: Mapping[str, float | None], stated: Mapping[str, float]) -> str:
    """The epsilon of each private member, beside what the paper states for its own population."""
    lines = ["epsilon (RDP) of the released weights, for the clients of this data set:"]
    for label, epsilon in epsilons.items():
        ours = "none" if epsilon is None else f"{epsilon:.4g}"
        there = ""
        if label in stated:
            there = f"; the paper states {stated[label]:g} for its 342,477 users"
        lines.append(f"  {label}: {ours}{there}")
    return "\n".join(lines)


def page(figures: Sequence[FigureRecord], beside: Path) -> str:
    """The page, for a file in the folder `beside`; needs nothing but the pictures."""
    tally = sum((kept.tally for kept in figures), Counter[str]())
    cards = "\n".join(_card(kept, beside) for kept in figures)
    found = comparisons(figures)
    table = _html_table(found) if found else ""
    return _PAGE.replace("TALLY", chips(tally)).replace("CARDS", cards).replace("TABLE", table)


def chips(verdicts: Counter[str]) -> str:
    """Counts of claims that agree, disagree or are not clear, as coloured labels."""
    words = {"agrees": ("agrees", "agree"), "disagrees": ("disagrees", "disagree")}
    return " ".join(
        f'<b class="{_css(verdict)}">{verdicts[verdict]}'
        f" {words.get(verdict, (verdict, verdict))[verdicts[verdict] > 1]}</b>"
        for verdict in VERDICTS
        if verdicts[verdict]
    )


def _card(kept: FigureRecord, beside: Path) -> str:
    """A figure's part of the page: the picture, its tally, and below it claims and numbers."""
    numbers, title = kept.numbers, escape(str(kept.numbers["title"]))
    svg = kept.path.with_suffix(".svg")
    pictures = (kept.png, svg if svg.exists() else kept.png)
    shown, large = (escape(os.path.relpath(path, beside)) for path in pictures)
    claims = "".join(
        f'<tr class="{_css(one.verdict)}"><td>{escape(one.claim)}<br>'
        f"<q>{escape(one.words)}</q></td>"
        f"<td>{difference_text(one)}</td><td>{one.verdict}</td></tr>"
        for one in kept.verdicts
    )
    return (
        f'<article><a href="{large}">'
        f'<img src="{shown}" alt="{escape(kept.name)}: {title}; numbers below"></a>'
        f"<h2>{escape(kept.name)} <small>{title}</small></h2>"
        f'<p class="data">{escape(str(numbers.get("data", "")))}</p><p>{chips(kept.tally)}</p>'
        f"<details><summary>Claims and numbers</summary><p>{escape(str(numbers['note']))}</p>"
        f'<div class="wide"><table>{claims}</table></div>'
        f"<pre>{escape(text_of(kept))}</pre></details></article>"
    )


def _css(verdict: str) -> str:
    """The class that a verdict has on the page."""
    return verdict.replace(" ", "-")


def _html_table(found: Sequence[RuleComparison]) -> str:
    """The comparisons as a table of the page, with its heading."""
    heads = "".join(f"<th>{h}</th>" for h in ("setting", "data", *RULES, "winner and margin"))
    rows = ""
    for one in found:
        cells = "".join(f"<td>{_bold(one.cell(rule))}</td>" for rule in RULES)
        rows += (
            f"<tr><td>{escape(one.setting)}</td><td>{escape(one.data)}</td>{cells}"
            f"<td>{escape(one.lead())}</td></tr>"
        )
    table = f'<div class="wide"><table><tr>{heads}</tr>{rows}</table></div>'
    return f"<h2>Which rule won, where</h2>{table}"


def _bold(cell: str) -> str:
    """A cell of the Markdown table for the page: its stars become bold type."""
    return f"<b>{cell.strip('*')}</b>" if cell.startswith("**") else cell


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>fedbandit: the paper's figures</title>
<style>
:root { color-scheme: light dark; --line: light-dark(#ddd, #444); --soft: light-dark(#595959, #aaa); }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 84rem; padding: 1rem; }
main { display: grid; gap: 1.5rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 20rem), 1fr)); }
article { border: 1px solid var(--line); border-radius: .5rem; padding: .8rem; min-width: 0; }
article:has(details[open]) { grid-column: 1 / -1; }
h2 { font-size: 1.05rem; margin: .4rem 0 0; } small { font-weight: normal; }
p { margin: .2rem 0 .5rem; overflow-wrap: anywhere; }
.data { color: var(--soft); font-size: .85rem; } .wide { overflow-x: auto; }
b.agrees, b.disagrees, b.not-clear { border-radius: 1rem; font-size: .8rem; padding: .1rem .6rem; }
b.agrees { background: light-dark(#d8f0e4, #1d4a35); }
b.disagrees { background: light-dark(#f7ddd0, #5a2f1b); }
b.not-clear { background: light-dark(#e9e9e9, #444); }
img { max-width: 48rem; width: 100%; height: auto; background: white; } summary { cursor: pointer; }
table { border-collapse: collapse; font-size: .85rem; }
td, th { padding: .25rem .6rem; text-align: left; border-top: 1px solid var(--line); }
q { color: var(--soft); } pre { overflow-x: auto; font-size: .75rem; }
</style></head>
<body><h1>The paper's figures, made again</h1>
<p>What the paper claims in words, against what came out here: TALLY</p>
<main>
CARDS
</main>
TABLE
</body></html>
"""
