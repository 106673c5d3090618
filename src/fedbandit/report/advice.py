"""The advice of a tournament: answers with their evidence, as Markdown and as one HTML page.

"Cannot be told apart" is an answer. Reads a `Tournament`; runs nothing.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path

from fedbandit.config import Config
from fedbandit.core.files import write_text
from fedbandit.core.parts import counted
from fedbandit.data.info import describe
from fedbandit.report.report import asset
from fedbandit.results.differences import from_zero, standard_error, with_error
from fedbandit.studies.advice import EXPLORERS, UNTOUCHED, Tournament
from fedbandit.studies.compare import Curves

_WIDTH, _LINE = 640, 26
_OFTEN = 20.0  # visits of an example; beyond it a reward shows memory as much as learning


@dataclass(frozen=True)
class EvidenceTable:
    """A table of the advice: a title, what the columns mean, and the rows."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Advice:
    """Advice to print: warnings to read first, answers to questions, and the tables behind them.

    As a string it is Markdown; `render_advice` makes a page of the same parts.
    """

    title: str
    warnings: tuple[str, ...]
    answers: tuple[tuple[str, str], ...]
    setting: str
    tables: tuple[EvidenceTable, ...]
    data: str

    def __str__(self) -> str:
        """As Markdown."""
        lines = [f"# {self.title}", "", *(f"> **Warning:** {text}\n" for text in self.warnings)]
        lines += [f"- **{question}** {answer}" for question, answer in self.answers]
        lines += ["", "## Evidence", "", self.setting, ""]
        for table in self.tables:
            lines += [f"### {table.title}", ""]
            lines += [_row(table.heads), _row(("---", *["---:"] * (len(table.heads) - 1)))]
            lines += [*map(_row, table.rows), ""]
        return "\n".join([*lines, "```", self.data, "```", ""])


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"


def recommended(held: Tournament) -> Config:
    """The configuration that is recommended, ready to run from anywhere."""
    config = held.configs[held.chosen]
    source = config.data.source
    where = str(Path(source).resolve()) if Path(source).is_dir() else source
    return config.with_values({"data.source": where, "deploy_every": _period(held)[0]})


def advice_of(held: Tournament) -> Advice:
    """Everything that the tournament allows to say.

    An answer names its evidence: differences are paired by seed, with 95% intervals, and what
    cannot be told apart is said to be so.
    """
    config = held.configs[held.chosen]
    exploration = "".join(f"{key} {value:g}, " for key, value in config.policy.parameters.items())
    rates = f"client learning rate {config.client.learning_rate:g}, server learning rate {config.server.learning_rate:g}"
    return Advice(
        title=f"Advice for {held.dataset.header.name}",
        warnings=tuple(_warnings(held)),
        answers=(
            ("Is exploration worth it here?", _worth(held.curves)),
            ("Which rule?", _rule(held)),
            (
                "Which parameters?",
                f"{exploration}{rates}, server optimiser {config.server.optimizer}, objective {config.objective.name}.",
            ),
            ("How often to deploy?", _period(held)[1]),
            ("What does privacy cost?", _privacy(held)),
            ("How sure is this?", _sureness(held)),
        ),
        setting=(
            f"Scenario `{config.scenario}`, {config.rounds} rounds of {config.clients_per_round} clients, deploying"
            f" every {config.deploy_every}; running average reward, mean ± standard error over seeds."
        ),
        tables=(
            _rewards(held),
            _table(
                "Deployment",
                "deploying every",
                {f"{n} rounds": c for n, c in sorted(held.periods.items())},
            ),
            *(
                [_table("Privacy", "epsilon", {f"{e:g}": c for e, c in held.private.items()})]
                if held.private
                else []
            ),
        ),
        data=describe(held.dataset),
    )


def _warnings(held: Tournament) -> list[str]:
    said = []
    name, value = max(held.constants.items(), key=lambda item: item[1])
    over = from_zero(held.curves[held.chosen].final - value)  # the same with every seed
    if not (over.told_apart and over.mean > 0):
        less = "earns less than" if over.told_apart else "cannot be told apart from"
        said.append(
            f"{held.chosen} {less} `{name}`, which needs no model and earns {value:.4f} ({over}). Learning has not paid"
            " here: take the constant, or find better features, more rounds or more data."
        )
    ours, untouched = (held.held_out.get(label) for label in (held.chosen, UNTOUCHED))
    if ours is not None and untouched is not None and ours.mean() < untouched.mean():
        said.append(
            f"on held-out data {held.chosen} is worse than the untouched model: {_held_out_name(held)}"
            f" {ours.mean():.4f} against {untouched.mean():.4f}. Its rewards come from examples that it has seen."
        )
    if held.visits > _OFTEN:
        said.append(
            f"each example is visited about {held.visits:.0f} times. Rewards then show what was memorised; the held-out"
            " column is what new data would see."
        )
    return said


def _worth(curves: Mapping[str, Curves]) -> str:
    explorers = {name: curves[name] for name in EXPLORERS if len(curves[name].final)}
    if not explorers or not len(curves["greedy"].final):
        return "Cannot be said: the runs that would show it diverged."
    best = max(explorers, key=lambda name: explorers[name].final.mean())
    difference = curves[best].minus(curves["greedy"])
    if not difference.told_apart:
        return f"Cannot be told: {best} and greedy cannot be told apart ({difference})."
    return f"{'Yes' if difference.mean > 0 else 'No'}: {best} against greedy {difference}."


def _rule(held: Tournament) -> str:
    chosen = held.curves[held.chosen]
    mean = f"{chosen.final.mean():.4f}"
    parts = [f"**{held.chosen}**, {with_error(mean, standard_error(chosen.final))}."]
    if held.tie:
        parts.append(f"{held.tie[0].upper()}{held.tie[1:]}.")
    others = {n: c for n, c in held.curves.items() if n != held.chosen and len(c.final)}
    said = []
    for name, curves in sorted(others.items(), key=lambda item: -item[1].final.mean()):
        difference = curves.minus(chosen)
        said.append(
            f"{name} {difference}" + ("" if difference.told_apart else " (cannot be told apart)")
        )
    if said:
        parts.append(f"The others, against it: {'; '.join(said)}.")
    return " ".join(parts)


def _period(held: Tournament) -> tuple[int, str]:
    """The usual period, unless another is shown to be better; nothing is said to be enough for want
    of evidence.
    """
    usual = held.configs[held.chosen].deploy_every
    ended = {every: curves for every, curves in sorted(held.periods.items()) if len(curves.final)}
    differences = {
        every: curves.minus(ended[usual]) for every, curves in ended.items() if every != usual
    }
    better = {every: d for every, d in differences.items() if d.told_apart and d.mean > 0}
    best = max(better, key=lambda every: better[every].mean) if better else usual
    parts = []
    for every, difference in differences.items():
        verdict = (
            ("better" if difference.mean > 0 else "worse")
            if difference.told_apart
            else "cannot be told apart"
        )
        parts.append(f"every {every}: {difference} ({verdict})")
    head = (
        f"Every {best} rounds."
        if better
        else f"Every {usual} rounds, as tried; nothing else is shown to be better."
    )
    return best, f"{head} Against every {usual}: {'; '.join(parts)}." if parts else head


def _privacy(held: Tournament) -> str:
    if not held.private:
        return held.private_note or "Not asked for."
    parts = []
    for epsilon, curves in held.private.items():
        if not len(curves.final):
            parts.append(f"epsilon {epsilon:g}: every run diverged")
            continue
        difference = curves.minus(held.curves[held.chosen])
        share = 100 * difference.mean / held.curves[held.chosen].final.mean()
        unclear = "" if difference.told_apart else "; cannot be told apart"
        parts.append(f"epsilon {epsilon:g}: {difference} ({share:+.1f}%{unclear})")
    return (
        f"{'; '.join(parts)} of reward ({held.private_note}). With few clients noise weighs heavily; with ten times the"
        " clients a round it would weigh a tenth. Looking at the data for this advice has itself spent privacy that no"
        " epsilon counts."
    )


def _sureness(held: Tournament) -> str:
    seeds = len(held.curves[held.chosen].seeds)
    shortened = (
        f"The runs are shortened to {held.plan.scale:.2g} of the paper's length, which favours little exploration and"
        " high rates; a longer budget brings the truth nearer. "
        if held.plan.scale < 1
        else ""
    )
    return (
        f"{counted(seeds, 'seed')} each; differences are paired by seed, with 95% intervals by Student's t. Every"
        f" policy chose among {held.plan.tries} pairs of learning rates, on a seed of its own, over the same rounds."
        f" Exploration parameters are the paper's, not tuned here. {shortened}"
        f"Took {held.minutes:.1f} minutes; everything is in {held.folder}."
    )


def _rewards(held: Tournament) -> EvidenceTable:
    tested = bool(held.held_out)
    heads = (
        "policy",
        "reward",
        "± s.e.",
        *([_held_out_name(held)] if tested else []),
        "seeds",
        "diverged",
    )
    rows = []
    for name, member in held.curves.items():
        found = held.held_out.get(name)
        shown = (
            [f"{found.mean():.4f}" if found is not None and len(found) else "–"] if tested else []
        )
        rows.append(
            (name, *_numbers(member), *shown, str(len(member.seeds)), str(len(member.diverged)))
        )
    for name, value in held.constants.items():
        rows.append((name, f"{value:.4f}", "–", *(["–"] if tested else []), "–", "–"))
    return EvidenceTable("Policies", heads, tuple(rows))


def _held_out_name(held: Tournament) -> str:
    return {"test_accuracy": "held-out accuracy", "test_recall_at_5": "held-out recall at 5"}.get(
        held.held_out_name, "held out"
    )


def _table(title: str, first: str, curves: Mapping[str, Curves]) -> EvidenceTable:
    rows = [
        (label, *_numbers(m), str(len(m.seeds)), str(len(m.diverged)))
        for label, m in curves.items()
    ]
    return EvidenceTable(title, (first, "reward", "± s.e.", "seeds", "diverged"), tuple(rows))


def _numbers(member: Curves) -> tuple[str, str]:
    final = member.final
    if not len(final):
        return "–", "–"
    return f"{final.mean():.4f}", f"{standard_error(final):.4f}" if len(final) > 1 else "–"


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
        f"<section><h2>{escape(table.title)}</h2>{_html_table(table)}</section>"
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


def _html_table(table: EvidenceTable) -> str:
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
