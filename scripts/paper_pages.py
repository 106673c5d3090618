"""The parts of the documentation that figures write themselves: scoreboard, cards, details and tables.

    python scripts/paper_pages.py FOLDER... --into docs/gallery.md --into docs/reproduce-the-paper.md

fills what stands between the marks `<!-- begin NAME -->` and `<!-- end NAME -->` of each page from the JSON files that
`fedbandit figure` has left in the folders.
"""

import argparse
import os
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from fedbandit.core.errors import DataError
from fedbandit.core.files import write_text
from fedbandit.paper.catalogue import OURS
from fedbandit.paper.page import (
    VERDICTS,
    FigureRecord,
    chips,
    comparison_table,
    comparisons,
    difference_text,
    read_figures,
    tuned,
)


def cards(figures: Sequence[FigureRecord], beside: Path, details: str) -> str:
    """A Markdown grid for each figure: small pictures with their verdicts, each leading to its details on that page."""
    parts = []
    for heading, panels in groupby(figures, key=lambda kept: _group(kept.name)):
        cards = []
        for kept in panels:
            title, target = kept.numbers["title"], f"{details}#{_anchor(kept)}"
            verdicts = f"<br>{chips(kept.verdicts)}" if kept.verdicts else ""
            cards.append(f"- [![{kept.name}: {title}]({_picture(kept, beside)})]({target})\n")
            plain = title.removesuffix(f", {kept.numbers.get('model')} model")
            cards.append(
                f"    **{_panel(kept.name)}: {plain}**, on {_where(kept)}. [Details]({target}){verdicts}\n"
            )
        parts.append(
            "\n".join(
                [
                    f"### {heading}\n",
                    '<div class="grid cards gallery" markdown>\n',
                    *cards,
                    "</div>",
                ]
            )
        )
    return "\n\n".join(parts)


def scoreboard(figures: Sequence[FigureRecord], details: str) -> str:
    """A Markdown table of what the paper says, with the panels in which it was found so, not so, or not clearly."""
    found: dict[str, dict[str, list[str]]] = {}
    for kept in figures:
        claims = [(claim["words"], claim["verdict"]) for claim in kept.numbers.get("claims", [])]
        of_words = Counter(words for words, _ in claims)
        for (words, verdict), count in Counter(claims).items():
            link = f"[{_panel(kept.name)}, {_where(kept)}]({details}#{_anchor(kept)})"
            share = "" if count == of_words[words] else f" ({count} of {of_words[words]})"
            found.setdefault(words, {}).setdefault(verdict, []).append(link + share)
    rows = [
        f"| {words} | {' | '.join('<br>'.join(where.get(verdict, [])) for verdict in VERDICTS)} |"
        for words, where in found.items()
    ]
    return "\n".join(
        [f"| the paper says | {' | '.join(VERDICTS)} |", "| --- | --- | --- | --- |", *rows]
    )


def tuned_table(figures: Sequence[FigureRecord]) -> str:
    """A Markdown table of what tuning changed, for figures that were made both ways; the highest tuned is in bold."""
    published = {_same(kept): kept for kept in figures if not kept.numbers.get("tuning")}
    lines = [
        "| figure | | published rates | tuned | tuned values |",
        "| --- | --- | ---: | ---: | --- |",
    ]
    for kept in figures:
        searched, before = kept.numbers.get("tuning"), published.get(_same(kept))
        if not searched or before is None:
            continue
        members = {
            label: member for label, member in kept.numbers["members"].items() if label in searched
        }
        highest = max(member["mean"] or 0.0 for member in members.values())
        title = f"{_panel(kept.name)}, {kept.numbers['data']}"
        for label, member in members.items():
            mark = "**" if member["mean"] == highest and len(members) > 1 else ""
            cells = [
                _with_error(before.numbers["members"][label]),
                f"{mark}{_with_error(member)}{mark}",
            ]
            lines.append(f"| {title} | {label} | {' | '.join(cells)} | {_values(member)} |")
            title = ""
    return "\n".join(lines)


def _same(kept: FigureRecord) -> tuple[str, ...]:
    return kept.name, kept.numbers["data"], str(kept.numbers.get("model"))


def _with_error(member: dict[str, Any]) -> str:
    if member["mean"] is None:
        return "diverged"
    error = f" ± {member['standard_error']:.3f}" if member["standard_error"] is not None else ""
    return f"{member['mean']:.3f}{error}"


def _values(member: dict[str, Any]) -> str:
    chosen = [(key, value) for key, value in member.items() if "." in key]
    return ", ".join(
        f"{key.removesuffix('.learning_rate').rpartition('.')[2]} {value:g}"
        for key, value in chosen
    )


def _panel(name: str) -> str:
    return name.removeprefix("fig").removeprefix("ablation-").replace("-", " ")


def _group(name: str) -> str:
    if name.startswith("fig"):
        return f"Figure {name[3]}"
    return "Not in the paper" if name in ("drift", *OURS) else "Ablations"


def _where(kept: FigureRecord) -> str:
    """On which data, with which model, tuned or as published, and that there was one seed only."""
    numbers = kept.numbers
    model = f", {numbers['model']} model" if numbers.get("model") else ""
    seeds = max(
        (len(member["final"]) for member in numbers["members"].values() if "final" in member),
        default=0,
    )
    return f"{numbers['data']}{model}{tuned(kept)}{', one seed' if seeds == 1 else ''}"


def details(figures: Sequence[FigureRecord], beside: Path) -> str:
    """Every figure in Markdown: picture, regime, final rewards, and each claim with its words, number and verdict."""
    return "\n\n".join(_details(kept, beside) for kept in figures)


def _details(kept: FigureRecord, beside: Path) -> str:
    numbers = kept.numbers
    title = f"{kept.name}: {numbers['title']}"
    parts = [
        f"### {title}, on {numbers['data']}{tuned(kept)} {{ #{_anchor(kept)} }}",
        f"![{title}]({_picture(kept, beside)})",
    ]
    parts.append(f"{numbers['note'][:1].upper()}{numbers['note'][1:]}.")
    if numbers.get("claims"):
        rows = [
            f"| {claim['words']} | {claim['claim']} | {difference_text(claim)} | **{claim['verdict']}** |"
            for claim in numbers["claims"]
        ]
        head = [
            "| the paper says | measured here | difference | verdict |",
            "| --- | --- | ---: | --- |",
        ]
        parts.append("\n".join([*head, *rows]))
        rows = [_reward_row(label, member) for label, member in numbers["members"].items()]
        head = ["| | final running average | ± s.e. | paper |", "| --- | ---: | ---: | ---: |"]
        if tuning := numbers.get("tuning"):
            head = [f"{head[0]} tuned values | grid points tried |", f"{head[1]} --- | --- |"]
            searched = (
                _search(tuning.get(label), member) for label, member in numbers["members"].items()
            )
            rows = [row + cells for row, cells in zip(rows, searched, strict=True)]
        parts.append("\n".join([*head, *rows]))
    return "\n\n".join(parts)


def _search(effort: dict[str, int] | None, member: dict[str, Any]) -> str:
    """Two cells more: the values that a search chose, and how much of the grid it has tried."""
    if effort is None:  # nothing to tune: it does not learn
        return " – | – |"
    return f" {_values(member)} | {effort['looked_at']} of {effort['grid_points']} |"


def _reward_row(label: str, member: dict[str, Any]) -> str:
    tried = len(member["seeds"]) + len(member["diverged"])
    lost = f" ({len(member['diverged'])} of {tried} seeds diverged)" if member["diverged"] else ""
    mean, error, paper = (member[key] for key in ("mean", "standard_error", "paper"))
    cells = [f"{value:.3f}" if value is not None else "–" for value in (mean, error)]
    return (
        f"| {label} | {cells[0]}{lost} | {cells[1]} | {'–' if paper is None else f'{paper:.2f}'} |"
    )


def spliced(text: str, name: str, content: str) -> str:
    """A page with what stands between `<!-- begin NAME -->` and `<!-- end NAME -->` replaced, if it has them."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    return f"{before}{begin}\n\n{content}\n\n{end}{after}" if found and closed else text


def fill(markdown: Path, figures: Sequence[FigureRecord]) -> None:
    """Write cards, details and the table of rules into a Markdown page, where it has marks for them."""
    try:
        text = markdown.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{markdown}: {error.strerror}") from None
    text = spliced(text, "scoreboard", scoreboard(figures, "reproduce-the-paper.md"))
    text = spliced(text, "cards", cards(figures, markdown.parent, "reproduce-the-paper.md"))
    text = spliced(text, "details", details(figures, markdown.parent))
    text = spliced(text, "tuned", tuned_table(figures))
    write_text(markdown, spliced(text, "table", comparison_table(comparisons(figures))))


def _anchor(kept: FigureRecord) -> str:
    model, tuned = kept.numbers.get("model"), "tuned" if kept.numbers.get("tuning") else None
    return "-".join(part for part in (kept.name, kept.numbers["data"], model, tuned) if part)


def _picture(kept: FigureRecord, beside: Path) -> str:
    return os.path.relpath(kept.path.with_suffix(".png"), beside)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+", help="folders with figures")
    parser.add_argument("--into", type=Path, action="append", required=True, help="a page to fill")
    given = parser.parse_args()
    made = read_figures(given.folders)
    for page in given.into:
        fill(page, made)
