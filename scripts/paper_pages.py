"""The parts of the documentation that figures write themselves: cards, scoreboard, panels and tables.

    python scripts/paper_pages.py docs/results/* --into docs

fills what stands between the marks `<!-- begin NAME -->` and `<!-- end NAME -->` of the pages below a folder from the
JSON files that `fedbandit figure` has left in the folders, judged by the rules of today.
"""

import argparse
import os
import re
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from fedbandit.core.files import write_text
from fedbandit.paper.catalogue import OURS
from fedbandit.paper.records import (
    VERDICTS,
    FigureRecord,
    chips,
    comparison_table,
    comparisons,
    difference_text,
    read_figures,
)

Figures = Sequence[FigureRecord]
PAGES = {
    "Figure 1": "figure-1.md",
    "Figure 2": "figure-2.md",
    "Figure 3": "figure-3.md",
    "Figure 4": "figure-4.md",
    "Ablations": "ablations.md",
    "Not in the paper": "beyond.md",
}


def cards(figures: Figures, beside: Path, root: Path) -> str:
    """A Markdown grid for each figure: small pictures with their verdicts, each leading to its panel."""
    parts = []
    for heading, panels in groupby(figures, key=lambda kept: _group(kept.name)):
        cards = []
        for kept in panels:
            title, target = kept.numbers["title"], _link(kept, beside, root)
            cards.append(f"- [![{kept.name}: {title}]({_picture(kept, beside)})]({target})\n")
            tally = f"<br>{chips(kept.tally)}" if kept.tally else ""
            cards.append(
                f"    [**{_panel(kept.name)}: {title}**]({target}), {_where(kept)}{tally}\n"
            )
        grid = ['<div class="grid cards gallery" markdown>\n', *cards, "</div>"]
        parts.append("\n".join([f"### {heading}\n", *grid]))
    return "\n\n".join(parts)


def scoreboard(figures: Figures, beside: Path, root: Path) -> str:
    """A Markdown table of the paper's claims, with the panels in which each agrees, disagrees or is not clear."""
    found: dict[str, dict[str, list[str]]] = {}
    for kept in figures:
        claims = [(one.words, one.verdict) for one in kept.verdicts if one.kind == "claim"]
        of_words = Counter(words for words, _ in claims)
        for (words, verdict), count in Counter(claims).items():
            link = f"[{_panel(kept.name)}, {_where(kept)}]({_link(kept, beside, root)})"
            share = "" if count == of_words[words] else f" ({count} of {of_words[words]})"
            found.setdefault(words, {}).setdefault(verdict, []).append(link + share)
    rows = [
        f"| {words} | {' | '.join('<br>'.join(where.get(v, [])) for v in VERDICTS)} |"
        for words, where in found.items()
    ]
    head = f"| the paper says | {' | '.join(VERDICTS)} |"
    return "\n".join([head, "| --- | --- | --- | --- |", *rows])


def tally(figures: Figures) -> str:
    """How many claims agree, disagree or are not clear, at the published rates and tuned."""
    lines = ["| rates | " + " | ".join(VERDICTS) + " |", "| --- | ---: | ---: | ---: |"]
    for words, tuned in (("published", False), ("tuned here", True)):
        count = sum((kept.tally for kept in figures if kept.tuned == tuned), Counter[str]())
        lines.append(f"| {words} | {' | '.join(str(count[verdict]) for verdict in VERDICTS)} |")
    return "\n".join(lines)


def panels(figures: Figures, beside: Path, heading: str) -> str:
    """Every panel of a figure: pictures, final rewards and verdicts, a column for each data set."""
    own = [kept for kept in figures if _group(kept.name) == heading]
    by_panel = groupby(
        own, key=lambda kept: (kept.name, kept.numbers["title"].split(", linear model")[0])
    )
    return "\n\n".join(
        _panel_part(name, title, list(made), beside) for (name, title), made in by_panel
    )


def _panel_part(name: str, title: str, made: list[FigureRecord], beside: Path) -> str:
    pictures = ['<div class="grid cards gallery" markdown>\n']
    for kept in made:
        pictures.append(
            f"- ![{name}: {title}, {_where(kept)}]({_picture(kept, beside)}){{ #{_anchor(kept)} }}\n"
        )
        pictures.append(f"    **{_where(kept)}**. {_sentence(kept.numbers['note'])}\n")
    parts = [f"## {_panel(name)}: {title}", "\n".join([*pictures, "</div>"])]
    heads = [_where(kept) for kept in made]
    labels = list(dict.fromkeys(label for kept in made for label in kept.results))
    if labels:
        rows = [
            f"| {label} | {' | '.join(_reward(kept.numbers['members'].get(label)) for kept in made)} |"
            for label in labels
        ]
        parts.append("\n".join([*_head(["final running average", *heads]), *rows]))
    verdicts = [{(one.words, one.claim): one for one in kept.verdicts} for kept in made]
    said = list(dict.fromkeys(key for found in verdicts for key in found))
    if said:
        rows = []
        for words, claim in said:
            cells = (found.get((words, claim)) for found in verdicts)
            shown = [
                "" if one is None else f"{difference_text(one)}<br>**{one.verdict}**"
                for one in cells
            ]
            quote = f"{words}: " if words else ""
            rows.append(f"| {quote}*{claim}* | {' | '.join(shown)} |")
        parts.append("\n".join([*_head(["the paper says: *measured here*", *heads]), *rows]))
    return "\n\n".join(parts)


def _head(cells: Sequence[str]) -> list[str]:
    rule = ["---", *["---:"] * (len(cells) - 1)]
    return [f"| {' | '.join(row)} |" for row in (cells, rule)]


def _reward(member: dict[str, Any] | None) -> str:
    if member is None:
        return ""
    lost = f" ({len(member['diverged'])} diverged)" if member["diverged"] else ""
    return f"{_with_error(member)}{lost}"


def _sentence(note: str) -> str:
    return f"{note[:1].upper()}{note[1:]}."


def tuned_table(figures: Figures) -> str:
    """A Markdown table of what tuning changed, for figures that were made both ways; the highest tuned is in bold."""
    published = {_same(kept): kept for kept in figures if not kept.tuned}
    lines = [
        "| figure | | published rates | tuned | tuned values | grid points tried |",
        "| --- | --- | ---: | ---: | --- | ---: |",
    ]
    for kept in figures:
        searched, before = kept.numbers.get("tuning"), published.get(_same(kept))
        if not searched or before is None:
            continue
        members = {k: member for k, member in kept.numbers["members"].items() if k in searched}
        highest = max(member["mean"] or 0.0 for member in members.values())
        title = f"{_panel(kept.name)}, {_data(kept)}"
        for label, member in members.items():
            mark = "**" if member["mean"] == highest and len(members) > 1 else ""
            cells = [
                _with_error(before.numbers["members"][label]),
                f"{mark}{_with_error(member)}{mark}",
            ]
            tried = f"{searched[label]['looked_at']} of {searched[label]['grid_points']}"
            lines.append(
                f"| {title} | {label} | {' | '.join(cells)} | {_values(member)} | {tried} |"
            )
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


def _data(kept: FigureRecord) -> str:
    names = {"topics-like-stackoverflow": "so-like", "so-questions": "questions"}
    return names.get(str(kept.numbers["data"]), str(kept.numbers["data"]))


def _where(kept: FigureRecord) -> str:
    """On which data, with which model, tuned or as published, and that there was one seed only."""
    numbers = kept.numbers
    model = f", {numbers['model']} model" if numbers.get("model") else ""
    seeds = max((len(one.final) for one in kept.results.values()), default=0)
    return (
        f"{_data(kept)}{model}{', tuned' if kept.tuned else ''}{', one seed' if seeds == 1 else ''}"
    )


def _anchor(kept: FigureRecord) -> str:
    model, tuned = kept.numbers.get("model"), "tuned" if kept.tuned else None
    return "-".join(part for part in (kept.name, kept.numbers["data"], model, tuned) if part)


def _link(kept: FigureRecord, beside: Path, root: Path) -> str:
    page = os.path.relpath(root / "paper" / PAGES[_group(kept.name)], beside)
    return f"{page}#{_anchor(kept)}"


def _picture(kept: FigureRecord, beside: Path) -> str:
    return os.path.relpath(kept.path.with_suffix(".png"), beside)


def fill(markdown: Path, figures: Figures, root: Path) -> None:
    """Write what a page has marks for: cards, scoreboard, tally, tuned, table, or `panels Figure 2`."""
    beside = markdown.parent
    makers = {
        "cards": lambda: cards(figures, beside, root),
        "scoreboard": lambda: scoreboard(figures, beside, root),
        "tally": lambda: tally(figures),
        "tuned": lambda: tuned_table(figures),
        "table": lambda: comparison_table(comparisons(figures)),
        **{f"panels {h}": lambda h=h: panels(figures, beside, h) for h in PAGES},
    }

    def replaced(found: re.Match[str]) -> str:
        name = found[1]
        return f"<!-- begin {name} -->\n\n{makers[name]()}\n\n<!-- end {name} -->"

    text = markdown.read_text(encoding="utf-8")
    names = "|".join(map(re.escape, makers))
    pattern = rf"<!-- begin ({names}) -->.*?<!-- end \1 -->"
    filled = re.sub(pattern, replaced, text, flags=re.DOTALL)
    if filled != text:
        write_text(markdown, filled)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+", help="folders with figures")
    parser.add_argument("--into", type=Path, required=True, help="the folder of the pages")
    given = parser.parse_args()
    made = read_figures([folder for folder in given.folders if folder.is_dir()])
    for page in sorted(given.into.rglob("*.md")):
        fill(page, made, given.into)
