"""The advice of a tournament as one HTML file, with its evidence: answers, tables, and a picture of the rewards."""

import re
from html import escape
from pathlib import Path

from fedbandit.core.files import write_text
from fedbandit.report.report import asset
from fedbandit.studies.advice import Tournament
from fedbandit.studies.advice_words import Advice, Table, advice_of
from fedbandit.studies.curves import standard_error

_WIDTH, _LINE = 640, 26


def write_advice(held: Tournament, path: Path) -> Path:
    """Write the page; it needs no other file."""
    write_text(path, render_advice(held, advice_of(held)))
    return path


def render_advice(held: Tournament, advice: Advice) -> str:
    """The whole page."""
    parts = [f"<h1>{escape(advice.title)}</h1>"]
    parts += [
        f'<p class="failure"><strong>Warning:</strong> {_inline(text)}</p>'
        for text in advice.warnings
    ]
    parts += [
        f"<section><h2>{escape(q)}</h2><p>{_inline(a)}</p></section>" for q, a in advice.answers
    ]
    parts += [
        f"<section><h2>Evidence</h2><p>{_inline(advice.setting)}</p>{_picture(held)}</section>"
    ]
    parts += [
        f"<section><h2>{escape(table.title)}</h2>{_table(table)}</section>"
        for table in advice.tables
    ]
    parts += [f"<section><h2>Data</h2><pre>{escape(advice.data)}</pre></section>"]
    body = "\n".join(parts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(advice.title)}</title>
<link rel="icon" href="data:,">
<style>{asset("style.css")}
.evidence {{ max-width: 100%; height: auto; }} .evidence text {{ font: 13px sans-serif; fill: currentColor; }}
.scroll {{ overflow-x: auto; }}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def _inline(text: str) -> str:
    """The little Markdown that advice has: bold and code."""
    shown = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", escape(text))
    return re.sub(r"`(.+?)`", r"<code>\1</code>", shown)


def _table(table: Table) -> str:
    heads = "".join(f"<th>{escape(head)}</th>" for head in table.heads)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows
    )
    return f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'


def _picture(held: Tournament) -> str:
    """A dot and two standard errors for every policy; what needs no model is a dot alone."""
    bars = [
        (name, float(c.final.mean()), 2 * standard_error(c.final) if len(c.final) > 1 else 0.0)
        for name, c in held.curves.items()
        if len(c.final)
    ]
    bars += [(name, value, 0.0) for name, value in held.constants.items()]
    low, high = min(v - e for _, v, e in bars), max(v + e for _, v, e in bars)
    span = (high - low) or 1.0

    def x(value: float) -> float:
        return round(170 + (_WIDTH - 250) * (value - low) / span, 1)

    shapes = []
    for number, (name, value, error) in enumerate(sorted(bars, key=lambda bar: -bar[1])):
        y = 20 + _LINE * number
        shapes.append(f'<text x="160" y="{y + 4}" text-anchor="end">{escape(name)}</text>')
        if error:
            ends = f'x1="{x(value - error)}" x2="{x(value + error)}" y1="{y}" y2="{y}"'
            shapes.append(f'<line {ends} stroke="currentColor" stroke-width="2"/>')
        shapes.append(f'<circle cx="{x(value)}" cy="{y}" r="5" fill="currentColor"/>')
        shapes.append(f'<text x="{x(value + error) + 10}" y="{y + 4}">{value:.4f}</text>')
    height = 20 + _LINE * len(bars)
    label = "Rewards of all policies, with two standard errors"
    inside = "".join(shapes)
    return f'<svg class="evidence" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{label}">{inside}</svg>'
