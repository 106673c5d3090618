"""Tables, pictures and the page of a bake-off, written again after each situation.

Runs nothing: it reads a `Bakeoff`. What it writes depends on the runs alone, except `cost.csv`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedbandit.core.files import write_json, write_text
from fedbandit.core.parts import counted
from fedbandit.results.differences import (
    Difference,
    Ranks,
    differences,
    markdown_table,
    standard_error,
    with_error,
)
from fedbandit.results.plots import draw_points, empty_figure, save_picture, styles_of
from fedbandit.results.reading import write_table
from fedbandit.studies.bakeoff import Bakeoff, Cell
from fedbandit.studies.search import point_in_words

_MEASURES = (
    "reward",
    "last_reward",
    "regret",
    "client_p10",
    "client_p50",
    "client_p90",
    "client_worst_decile",
    "test_accuracy",
    "test_recall_at_5",
    "epsilon",
)


@dataclass(frozen=True)
class CellOutcome:
    """One contender in one situation over its seeds, and its difference from the reference."""

    cell: Cell
    rewards: Mapping[int, float]
    means: Mapping[str, float]
    diverged: int
    difference: Difference | None

    @property
    def mean(self) -> float:
        """The mean reward over seeds; NaN where all diverged."""
        return float(np.mean(list(self.rewards.values()))) if self.rewards else float("nan")

    @property
    def error(self) -> float:
        """The standard error of the mean; NaN for a single seed."""
        return standard_error(list(self.rewards.values()))

    @property
    def ends(self) -> tuple[float, float, float]:
        """The mean between two standard errors either way."""
        reach = 2 * self.error if len(self.rewards) > 1 else 0.0
        return self.mean - reach, self.mean, self.mean + reach


def write_bakeoff(found: Bakeoff, out: Path) -> Path:
    """Write `results`, `summary`, `ranks` and `cost` tables, pictures and `bakeoff.md` into `out`."""
    outcomes = outcomes_of(found)
    write_table(found.rows, out / "results")
    summary = [_summary(found, one) for group in outcomes.values() for one in group]
    write_table(summary, out / "summary")
    ranks = ranks_of(outcomes)
    write_json(
        out / "summary.json",
        {"title": found.spec.title, "cells": summary, "ranks": ranks and _told(ranks)},
    )
    write_table([_cost(found, cell) for cell in found.cells], out / "cost")
    _draw_rewards(outcomes, out / "rewards.png", found.spec.title)
    if ranks is not None:
        write_table(
            [{"contender": k, "mean_rank": v} for k, v in ranks.means.items()], out / "ranks"
        )
        _draw_ranks(ranks, out / "ranks.png")
    if found.spec.along is not None:
        _draw_along(found, outcomes, out / "along.png")
    write_text(out / "bakeoff.md", _page(found, outcomes, ranks))
    return out / "bakeoff.md"


def outcomes_of(found: Bakeoff) -> dict[str, list[CellOutcome]]:
    """The outcomes of each situation that was run, best first; differences are paired by seed.

    With a reference (`against`) Holm's intervals hold together for its comparisons, without one for
    all pairs.
    """
    by_cell: dict[str, list[Mapping[str, Any]]] = {}
    for row in found.rows:
        by_cell.setdefault(_key(found, row), []).append(row)
    groups: dict[str, list[CellOutcome]] = {}
    for where in dict.fromkeys(cell.where for cell in found.cells):
        here = [c for c in found.cells if c.where == where and _key(found, c) in by_cell]
        rewards = {
            c.who: {
                r["seed"]: r["reward"] for r in by_cell[_key(found, c)] if r["reward"] is not None
            }
            for c in here
        }
        if not here:
            continue
        against = found.spec.against if rewards.get(found.spec.against or "") else None
        beside = differences(rewards, against)
        gaps = {one.configuration: one.difference for one in beside.outcomes}
        said = [
            CellOutcome(
                c,
                rewards[c.who],
                _means(by_cell[_key(found, c)]),
                found.spec.seeds - len(rewards[c.who]),
                gaps.get(c.who),
            )
            for c in here
        ]
        groups[where] = sorted(said, key=lambda one: -np.nan_to_num(one.mean, nan=-np.inf))
    return groups


def _key(found: Bakeoff, one: Cell | Mapping[str, Any]) -> str:
    """The values of all axes of a cell or of a row of results, as one text: what joins the two."""
    values = {**one.situation, **one.contender} if isinstance(one, Cell) else one
    return "|".join(str(values[axis]) for axis in (*found.spec.situations, *found.spec.contenders))


def _means(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The mean of every measure over the rows of one cell, over the seeds that have it.

    A measure that no row has, such as regret where the world does not know it, has no entry.
    """
    found = {}
    for name in (*_MEASURES, "bytes_sent", "bytes_received"):
        values = [row[name] for row in rows if row.get(name) is not None]
        if values:
            found[name] = float(np.mean(values))
    return found


def ranks_of(outcomes: Mapping[str, Sequence[CellOutcome]]) -> Ranks | None:
    """Mean ranks of the contenders that every situation has; None for a single one of either."""
    each = [{one.cell.who: one.mean for one in group} for group in outcomes.values()]
    shared = [who for who in each[0] if all(who in group for group in each)] if each else []
    if len(each) < 2 or len(shared) < 2:
        return None
    return Ranks.of({who: [group[who] for group in each] for who in shared})


def _told(ranks: Ranks) -> dict[str, Any]:
    """The ranks as plain values for `summary.json`."""
    return {
        "mean_ranks": dict(ranks.means),
        "situations": ranks.situations,
        "friedman_p": ranks.p,
        "critical_difference": ranks.critical_difference,
    }


def _summary(found: Bakeoff, one: CellOutcome) -> dict[str, Any]:
    """One row of `summary.csv`: a contender in a situation, over its seeds.

    Rewards with their standard error, the difference from the reference with the interval that
    holds together with the others of the situation, and what tuning chose from how many tries.
    """
    gap, choice = one.difference, found.choices.get(one.cell.name)
    return {
        **one.cell.situation,
        **one.cell.contender,
        "seeds": len(one.rewards),
        "diverged": one.diverged,
        **{name: one.means.get(name) for name in _MEASURES},
        "standard_error": one.error if len(one.rewards) > 1 else None,
        "difference": gap and gap.mean,
        "low": gap and gap.low,
        "high": gap and gap.high,
        "comparisons": gap and gap.comparisons,
        "chosen": point_in_words(choice.point) if choice else "",
        "tried": choice.looked_at if choice else 0,
        "on_edge": ", ".join(choice.on_edge) if choice else "",
        "bytes_sent": one.means.get("bytes_sent"),
        "bytes_received": one.means.get("bytes_received"),
    }


def _cost(found: Bakeoff, cell: Cell) -> dict[str, Any]:
    """CPU as the probe measured it: a figure of this machine, and so not in the other tables."""
    a_round, a_start = found.paces[cell.name]
    return {
        **cell.situation,
        **cell.contender,
        "cpu_seconds_a_round": a_round,
        "cpu_seconds_to_start": a_start,
    }


def _page(
    found: Bakeoff, outcomes: Mapping[str, Sequence[CellOutcome]], ranks: Ranks | None
) -> str:
    """The page as Markdown: pictures first, then a table for each situation, then ranks.

    Tables are sorted by reward. The page says the formulas of its intervals and of the critical
    difference, so that it can be read without this documentation.
    """
    spec = found.spec
    lines = [f"# {spec.title}", "", *([spec.note, ""] if spec.note else [])]
    lines += ["![Rewards of every contender](rewards.png)", ""]
    if spec.along is not None:
        lines += [f"![Rewards along {spec.along}](along.png)", ""]
    lines += [
        f"Running average reward, mean ± standard error over {counted(spec.seeds, 'seed')}; every"
        f" contender was tuned with {counted(spec.tries, 'try').replace('trys', 'tries')} on a seed"
        " of its own. Intervals are paired by seed and hold together within a situation (Holm, 95%).",
        "*edge*: the best value lies on the edge of its grid, and a better one may lie beyond it.",
        "",
    ]
    for where, group in outcomes.items():
        reference = next((one for one in group if one.difference is None), group[0])
        tested = next((n for n in _MEASURES if n.startswith("test_") and n in group[0].means), "")
        heads = [
            "contender",
            "reward",
            f"minus {reference.cell.who}",
            "interval",
            "clients p10, p50, p90",
        ]
        heads += ["regret"] * ("regret" in group[0].means) + [tested.replace("_", " ")] * bool(
            tested
        )
        rows = [_cells(found, one, tested, "regret" in heads) for one in group]
        lines += [f"## {where}", "", *markdown_table([*heads, "chosen", "kB sent"], rows), ""]
    if ranks is not None:
        verdict = "differ" if ranks.p < 0.05 else "cannot be told apart"
        lines += [
            "## Ranks",
            "",
            "![Mean ranks](ranks.png)",
            "",
            f"Mean ranks over {ranks.situations} situations (1 is best). Friedman's test in the form of"
            f" Iman and Davenport: p = {ranks.p:.2g}, the contenders {verdict} by rank. Two of them"
            f" differ where their mean ranks do by CD = q √(k (k + 1) / (6 N)) ="
            f" {ranks.critical_difference:.2f} or more (Nemenyi; k = {len(ranks.means)} contenders, N ="
            f" {ranks.situations} situations, q the 0.95 quantile of the studentised range over √2).",
            "",
            *markdown_table(
                ["contender", "mean rank"], [[k, f"{v:.2f}"] for k, v in ranks.means.items()]
            ),
            "",
        ]
    return "\n".join(lines)


def _cells(found: Bakeoff, one: CellOutcome, tested: str, regret: bool) -> list[str]:
    """The cells of a contender's row on the page: reward, difference, interval, clients, choice."""
    reward = with_error(f"{one.mean:.4f}", one.error) if one.rewards else "diverged"
    if one.rewards and one.diverged:
        reward += f" ({one.diverged} diverged)"
    gap = one.difference
    quantiles = [one.means.get(f"client_{q}") for q in ("p10", "p50", "p90")]
    choice = found.choices.get(one.cell.name)
    edge = " *edge*" if choice and choice.on_edge else ""
    return [
        one.cell.who,
        reward,
        "–" if gap is None else f"{gap.mean:+.4f}",
        "–" if gap is None or gap.low is None else f"{gap.low:+.4f} to {gap.high:+.4f}",
        ", ".join("–" if q is None else f"{q:.2f}" for q in quantiles),
        *([f"{one.means.get('regret', np.nan):.4f}"] if regret else []),
        *([f"{one.means.get(tested, np.nan):.3f}"] if tested else []),
        f"{point_in_words(choice.point) or 'its defaults'}{edge}" if choice else "–",
        f"{one.means.get('bytes_sent', 0) / 1000:,.0f}",
    ]


def _draw_rewards(outcomes: Mapping[str, Sequence[CellOutcome]], path: Path, title: str) -> None:
    """A panel for each situation: contenders by reward, with two standard errors."""
    across = 2 if len(outcomes) > 1 else 1
    down = -(-len(outcomes) // across)
    most = max(len(group) for group in outcomes.values())
    figure = empty_figure(5.2 * across + 1, (0.24 * most + 1.0) * down)
    panels = np.atleast_1d(figure.subplots(down, across)).ravel()
    styles = styles_of(sorted({one.cell.who for group in outcomes.values() for one in group}))
    colours = {name: style[0] for name, style in styles.items()}
    for axes, (where, group) in zip(panels, outcomes.items(), strict=False):
        draw_points(axes, {one.cell.who: one.ends for one in group}, colours)
        axes.set_title(where, fontsize=9, loc="left")
        axes.grid(axis="x", color="#e6e6e6")
    for axes in panels[len(outcomes) :]:
        axes.set_visible(False)
    figure.suptitle(f"{title}: running average reward, ± two standard errors", fontsize=10)
    save_picture(figure, path)


def _draw_ranks(ranks: Ranks, path: Path) -> None:
    """Mean ranks, and how far apart two have to lie."""
    figure = empty_figure(7.2, 0.26 * len(ranks.means) + 1.2)
    axes = figure.add_subplot()
    best = min(ranks.means.values())
    points = {name: (best, value, value) for name, value in ranks.means.items()}
    draw_points(axes, points, dict.fromkeys(points, "#0072B2"))
    axes.axvspan(best, best + ranks.critical_difference, color="#0072B2", alpha=0.1, linewidth=0)
    axes.set(xlabel="mean rank (shaded: not told apart from the best by the critical difference)")
    axes.xaxis.label.set_size(8)
    axes.set_xlim(0.8, max(ranks.means.values()) + 0.3)
    save_picture(figure, path)


def _draw_along(found: Bakeoff, outcomes: Mapping[str, Sequence[CellOutcome]], path: Path) -> None:
    """Rewards along an axis of situations: a panel for each other situation, a line a contender."""
    along = found.spec.along or ""
    places = {value: i for i, value in enumerate(found.spec.situations[along])}
    panels: dict[str, dict[str, list[tuple[int, CellOutcome]]]] = {}
    for group in outcomes.values():
        for one in group:
            rest = ", ".join(v for k, v in one.cell.situation.items() if k != along)
            place = places[one.cell.situation[along]]
            panels.setdefault(rest, {}).setdefault(one.cell.who, []).append((place, one))
    figure = empty_figure(5.2 * len(panels) + 1, 3.8)
    drawn = np.atleast_1d(figure.subplots(1, len(panels)))
    for axes, (rest, lines) in zip(drawn, panels.items(), strict=True):
        styles = styles_of(list(lines))
        for who, own in lines.items():
            known = sorted(((p, o) for p, o in own if o.rewards), key=lambda item: item[0])
            x, y = [p for p, _ in known], [o.mean for _, o in known]
            errors = [2 * o.error for _, o in known]
            colour, dashed = styles[who]
            axes.errorbar(
                x,
                y,
                errors,
                color=colour,
                label=who,
                marker="o",
                ms=3,
                capsize=2,
                linestyle="--" if dashed else "-",
            )
        axes.set_xticks(range(len(places)), list(places), fontsize=8)
        axes.set(title=rest, xlabel=along, ylabel="running average reward")
        axes.legend(frameon=False, fontsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    save_picture(figure, path)
