"""The page of figures that were made: pictures small, verdicts beside them, everything else one
click away.

Reads the JSON files that figures leave; runs nothing.
"""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from fedbandit.core.errors import DataError
from fedbandit.core.files import read_json
from fedbandit.paper.catalogue import OURS, RULES, figure_names
from fedbandit.studies.compare import Curves

VERDICTS = ("agrees", "disagrees", "not clear")
_RULES = ("softmax", "falcon", "epsilon-greedy", "greedy")


@dataclass(frozen=True)
class FigureRecord:
    """A figure that was made earlier: the numbers in its file, and the picture beside it."""

    path: Path
    numbers: dict[str, Any]

    @property
    def name(self) -> str:
        """The figure that it is: `fig2c`."""
        return str(self.numbers["figure"])

    @property
    def verdicts(self) -> Counter[str]:
        """Counts of its claims that agree, disagree or are not clear."""
        return Counter(claim["verdict"] for claim in self.numbers.get("claims", []))


def read_figures(places: Iterable[Path]) -> list[FigureRecord]:
    """The figures in these files and folders, in the paper's order; those of one panel in the order
    given.
    """
    found = []
    for place in places:
        for path in (
            [place] if place.is_file() else sorted(place.glob("*.json"), key=lambda path: path.stem)
        ):
            numbers = read_json(path)
            if (
                isinstance(numbers, dict)
                and "figure" in numbers
                and path.with_suffix(".png").exists()
            ):
                found.append(FigureRecord(path, numbers))
    if not found:
        raise DataError(
            f"{', '.join(map(str, places))}: no figure here; `fedbandit figure NAME -o FOLDER` makes one"
        )
    order = [*figure_names(), "drift", *OURS]  # the picture of `fedbandit drift` among them
    return sorted(found, key=lambda kept: order.index(kept.name))


@dataclass(frozen=True)
class Comparison:
    """The rules in one setting: mean final rewards, the best, and by how much it leads the second,
    paired by seeds.
    """

    setting: str
    data: str
    means: dict[str, float]
    winner: str
    second: str
    margin: float
    error: float
    level: tuple[str, ...]  # the rules that the winner cannot be told from

    @property
    def clear(self) -> bool:
        """Whether the winner can be told from the second."""
        return self.second not in self.level

    def cell(self, rule: str) -> str:
        """The rule's reward; the winner's in bold, and so are those that it cannot be told from."""
        if rule not in self.means:
            return "–"
        best = rule == self.winner or rule in self.level
        return f"**{self.means[rule]:.3f}**" if best else f"{self.means[rule]:.3f}"

    def lead(self) -> str:
        """By how much the winner leads, or that there is a tie."""
        if not np.isfinite(self.error):
            return f"one seed: {self.winner} by {self.margin:.3f} over {self.second}"
        told = f"{self.winner} by {self.margin:.3f} ± {self.error:.3f} over {self.second}"
        return told if self.clear else f"a tie: {told}"


def comparisons(figures: Sequence[FigureRecord]) -> list[Comparison]:
    """Every setting in which the four rules were compared, of all the figures, favourable or not."""
    found = []
    for kept in figures:
        numbers = kept.numbers
        curves = {
            rule: _curves(numbers["members"][rule]) for rule in _RULES if numbers.get("setting")
        }
        ended = [rule for rule in curves if len(curves[rule].final)]
        if len(ended) < 2:
            continue
        means = {rule: float(curves[rule].final.mean()) for rule in ended}
        winner, second = sorted(ended, key=lambda rule: -means[rule])[:2]
        behind = {rule: curves[winner].minus(curves[rule]) for rule in ended if rule != winner}
        level = tuple(rule for rule, by in behind.items() if by.mean <= 2 * by.error)
        seeds = len(curves[winner].final)
        data = f"{numbers['data']}, {seeds} seed{'s' if seeds > 1 else ''}"
        if numbers.get("scale", 1) != 1:
            data += f", shortened to {numbers['scale']:g}"
        found.append(
            Comparison(
                numbers["setting"] + tuned(kept),
                data,
                means,
                winner,
                second,
                behind[second].mean,
                behind[second].error,
                level,
            )
        )
    return found


def _curves(member: dict[str, Any]) -> Curves:
    final = np.array(member["final"], float)[:, None]
    return Curves(final, final, tuple(member["seeds"]), tuple(member["diverged"]))


def comparison_table(found: Sequence[Comparison]) -> str:
    """The comparisons as a Markdown table: settings x rules, with the winner and its margin."""
    lines = [f"| setting | data | {' | '.join(_RULES)} | winner and margin |"]
    lines.append(f"| --- | --- | {' | '.join(['---:'] * len(_RULES))} | --- |")
    for one in found:
        cells = " | ".join(one.cell(rule) for rule in _RULES)
        lines.append(f"| {one.setting} | {one.data} | {cells} | {one.lead()} |")
    return "\n".join(lines)


def page(figures: Sequence[FigureRecord], beside: Path) -> str:
    """The page, for a file in the folder `beside`; needs nothing but the pictures."""
    tally = sum((kept.verdicts for kept in figures), Counter[str]())
    cards = "\n".join(_card(kept, beside) for kept in figures)
    found = comparisons(figures)
    table = _html_table(found) if found else ""
    return _PAGE.replace("TALLY", chips(tally)).replace("CARDS", cards).replace("TABLE", table)


def _card(kept: FigureRecord, beside: Path) -> str:
    numbers, title = kept.numbers, escape(str(kept.numbers["title"]))
    large = kept.path.with_suffix(".svg")
    png, svg = (
        escape(os.path.relpath(path, beside))
        for path in (
            kept.path.with_suffix(".png"),
            large if large.exists() else large.with_suffix(".png"),
        )
    )
    claims = "".join(
        f'<tr class="{_css(claim["verdict"])}"><td>{escape(claim["claim"])}<br><q>{escape(claim["words"])}</q></td>'
        f"<td>{difference_text(claim)}</td><td>{claim['verdict']}</td></tr>"
        for claim in numbers.get("claims", [])
    )
    return (
        f'<article><a href="{svg}"><img src="{png}" alt="{escape(kept.name)}: {title}; numbers below"></a>'
        f"<h2>{escape(kept.name)} <small>{title}</small></h2>"
        f'<p class="data">{escape(str(numbers.get("data", "")))}</p><p>{chips(kept.verdicts)}</p>'
        f"<details><summary>Claims and numbers</summary><p>{escape(str(numbers['note']))}</p>"
        f"<table>{claims}</table><pre>{escape(str(numbers.get('text', '')))}</pre></details></article>"
    )


def tuned(kept: FigureRecord) -> str:
    """`, tuned` behind the name of a figure whose rates were searched for; nothing for published
    rates.
    """
    return ", tuned" if kept.numbers.get("tuning") else ""


def difference_text(claim: dict[str, Any]) -> str:
    """The difference that a claim is about with its standard error: `+0.012 ± 0.003`, or a dash."""
    if claim["difference"] is None:
        return "–"
    error = (
        f" ± {claim['error']:.3f}"
        if claim["error"] is not None and np.isfinite(claim["error"])
        else ""
    )
    return f"{claim['difference']:+.3f}{error}"


def _css(verdict: str) -> str:
    return verdict.replace(" ", "-")


def chips(verdicts: Counter[str]) -> str:
    """Counts of claims that agree, disagree or are not clear."""
    shown = [(verdict, verdicts[verdict]) for verdict in VERDICTS if verdicts[verdict]]
    words = {"agrees": ("agrees", "agree"), "disagrees": ("disagrees", "disagree")}
    return " ".join(
        f'<b class="{_css(verdict)}">{count} {words.get(verdict, (verdict, verdict))[count > 1]}</b>'
        for verdict, count in shown
    )


def _html_table(found: Sequence[Comparison]) -> str:
    heads = "".join(
        f"<th>{escape(head)}</th>" for head in ("setting", "data", *_RULES, "winner and margin")
    )
    rows = ""
    for one in found:
        cells = "".join(f"<td>{_bold(one.cell(rule))}</td>" for rule in _RULES)
        rows += f"<tr><td>{escape(one.setting)}</td><td>{escape(one.data)}</td>{cells}<td>{escape(one.lead())}</td></tr>"
    return f"<h2>Which rule won, where</h2><table><tr>{heads}</tr>{rows}</table>"


def _bold(cell: str) -> str:
    return f"<b>{cell.strip('*')}</b>" if cell.startswith("**") else cell


assert set(_RULES) == RULES
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>fedbandit: the paper's figures</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; margin: 0 auto; max-width: 84rem; padding: 1rem; }
main { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 20rem), 1fr)); gap: 1.5rem; }
article { border: 1px solid #ddd; border-radius: .5rem; padding: .8rem; }
article:has(details[open]) { grid-column: 1 / -1; }
h2 { font-size: 1.05rem; margin: .4rem 0 0; } small { font-weight: normal; } p { margin: .2rem 0 .5rem; }
.data { color: #595959; font-size: .85rem; }
b.agrees, b.disagrees, b.not-clear { border-radius: 1rem; font-size: .8rem; padding: .1rem .6rem; }
b.agrees { background: #d8f0e4; } b.disagrees { background: #f7ddd0; } b.not-clear { background: #e9e9e9; }
img { max-width: 48rem; width: 100%; height: auto; } summary { cursor: pointer; }
table { border-collapse: collapse; font-size: .85rem; } td, th { padding: .25rem .6rem; text-align: left; }
td, th { border-top: 1px solid #e5e5e5; } q { color: #595959; } pre { overflow-x: auto; font-size: .75rem; }
</style></head>
<body><h1>The paper's figures, made again</h1>
<p>What the paper claims in words, against what came out here: TALLY</p>
<main>
CARDS
</main>
TABLE
</body></html>
"""
