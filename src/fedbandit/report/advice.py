"""The advice of a contest: what to deploy, why, and how sure that is, as Markdown and as one page.

"Cannot be told apart" is an answer. Reads a `Contest`; runs nothing.
"""

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np

from fedbandit.config import Config
from fedbandit.core.files import write_text
from fedbandit.core.parts import counted
from fedbandit.data.info import describe
from fedbandit.report.report import document, html_table, section
from fedbandit.results.differences import differences, markdown_table, standard_error, with_error
from fedbandit.results.plots import draw_curves
from fedbandit.studies.advice import UNTOUCHED, AdviceVerdict, Contest, compared, judge
from fedbandit.studies.compare import Curves
from fedbandit.studies.search import point_in_words

_OFTEN = 20.0  # visits of an example; beyond it a reward shows memory as much as learning


# A table of the advice: its title, heads and rows.
EvidenceTable = tuple[str, Sequence[str], Sequence[Sequence[str]]]


@dataclass(frozen=True)
class Advice:
    """Advice to print: what to deploy, warnings, answers to questions, and the tables behind them.

    As a string it is Markdown; `page` makes HTML of the same parts.
    """

    title: str
    lead: str
    warnings: tuple[str, ...]
    answers: tuple[tuple[str, str], ...]
    tables: tuple[EvidenceTable, ...]
    data: str
    commands: tuple[str, ...]

    def __str__(self) -> str:
        """As Markdown."""
        lines = [f"# {self.title}", "", self.lead, ""]
        lines += [f"> **Warning:** {text}\n" for text in self.warnings]
        lines += ["![Reward of every finalist over rounds](advice.png)", ""]
        lines += [f"- **{question}** {answer}" for question, answer in self.answers]
        for title, heads, rows in self.tables:
            lines += ["", f"## {title}", "", *markdown_table(heads, rows)]
        lines += ["", "## Data", "", "```", self.data, "```", "", "## Next", "", "```console"]
        return "\n".join([*lines, *(f"$ {command}" for command in self.commands), "```", ""])

    def page(self, picture: str) -> str:
        """As one HTML page that needs no other file; `picture` is SVG."""
        parts = [f"<h1>{escape(self.title)}</h1><p>{_inline(self.lead)}</p>"]
        parts += [
            f'<p class="error"><strong>Warning:</strong> {_inline(text)}</p>'
            for text in self.warnings
        ]
        drawn = f"data:image/svg+xml;base64,{base64.b64encode(picture.encode()).decode()}"
        parts += [f'<img class="picture" alt="Reward of every finalist over rounds" src="{drawn}">']
        parts += [section(q, f"<p>{_inline(a)}</p>") for q, a in self.answers]
        for title, heads, rows in self.tables:
            cells = [(f'<th scope="row">{escape(row[0])}</th>', row[1:]) for row in rows]
            parts.append(section(title, html_table(heads, cells)))
        parts += [section("Data", f"<pre>{escape(self.data)}</pre>")]
        parts += [section("Next", f"<pre>{escape(chr(10).join(self.commands))}</pre>")]
        return document(self.title, "\n".join(parts))


def write_advice(held: Contest, out: Path) -> Advice:
    """Write `advice.md`, `advice.html`, the picture and `recommended.toml` into `out`."""
    verdict = judge(held)
    advice = advice_of(held, verdict, out)
    picture = _draw(held, out)
    write_text(out / "recommended.toml", recommended(held, verdict).to_toml())
    write_text(out / "advice.md", str(advice))
    write_text(out / "advice.html", advice.page(picture.read_text(encoding="utf-8")))
    return advice


def recommended(held: Contest, verdict: AdviceVerdict) -> Config:
    """The configuration that is recommended, ready to run from anywhere: a rule with its rates, the
    model as it is, or one action always.
    """
    name = verdict.recommended
    config = held.configs[name if name in held.configs else UNTOUCHED]
    if name == "random":
        config = config.with_values({"policy.name": "uniform"})
    elif name not in held.configs:
        action = held.dataset.header.actions.index(name.removeprefix("always "))
        config = config.with_values({"policy.name": "constant", "policy.action": action})
    source = config.data.source
    where = str(Path(source).resolve()) if Path(source).is_dir() else source
    period = _period(held)[0] if name in held.choices else config.deploy_every
    return config.with_values({"data.source": where, "deploy_every": period})


def advice_of(held: Contest, verdict: AdviceVerdict, out: Path) -> Advice:
    """Everything that stage 2 allows to say.

    Differences are paired by seed, with 95% intervals that hold together; what cannot be told apart
    is said to be so.
    """
    config = recommended(held, verdict)
    plan = held.plan
    runner_up = next(
        (o.configuration for o in verdict.found.outcomes if o.configuration in held.choices
         and o.configuration != verdict.recommended), "greedy",
    )  # fmt: skip
    other = held.configs[runner_up].policy.name
    file = out / "recommended.toml"
    return Advice(
        title=f"Advice for {held.dataset.header.name}",
        lead=_lead(held, verdict),
        warnings=tuple(_warnings(held, verdict)),
        answers=(
            ("Is exploration worth it here?", _worth(held)),
            ("Which parameters?", _parameters(held, verdict, config)),
            ("How often to deploy?", _period(held)[1]),
            ("What does privacy cost?", _privacy(held, verdict)),
            (
                "How sure is this?",
                f"Verdicts come from stage 2 alone: {counted(plan.seeds, 'fresh seed')},"
                f" {plan.longer * plan.rounds} rounds of {config.clients_per_round} clients, deploying"
                f" every {plan.deploy_every}, scenario `{config.scenario}`. Rates were tuned before, on"
                f" a seed of its own, {plan.tries} pairs a contender over {plan.rounds} rounds.",
            ),
        ),
        tables=(_stage_2(held, verdict), _stage_1(held), *_further(held)),
        data=describe(held.dataset),
        commands=(
            f"fedbandit run {file} -o runs/recommended",
            f"fedbandit compare {file} '{file} policy.name={other}' -o comparison",
            "fedbandit report runs/recommended -o report.html",
        ),
    )


def _lead(held: Contest, verdict: AdviceVerdict) -> str:
    """The first paragraph: what to deploy, than what it is better, and where that is not said, why.

    A constant, the untouched model and greedy are recommended in words of their own, since they
    mean that no model, no training or no exploration is worth its cost here.
    """
    name = verdict.recommended
    mean = next(o.reward for o in verdict.found.outcomes if o.configuration == name)
    what = {
        UNTOUCHED: "Deploy the model as it is, without training",
        "random": "Nothing learns here",
    }
    said = what.get(name, f"Deploy **{name}**")
    if name in held.constants and name != "random":
        said = f"Take one action, **{name}**: no model earns more here"
    elif name.startswith("greedy"):
        said += ", that is, do not explore"
    parts = [f"{said}; reward {mean:.4f} in stage 2."]
    if verdict.tie:
        parts.append(
            f"{verdict.tie} has the highest mean, but is within 1% and not told apart; the simpler"
            " one is recommended."
        )
    if verdict.better_than:
        parts.append(f"It is better than {', '.join(verdict.better_than)}.")
    if verdict.doubts:
        doubts = "; ".join(f"{other}: {reason}" for other, reason in verdict.doubts.items())
        parts.append(f"It is not called better than {doubts}.")
    return " ".join(parts)


def _warnings(held: Contest, verdict: AdviceVerdict) -> list[str]:
    """Reasons not to believe rewards: held-out metrics that fell, examples seen too often."""
    said, ours = [], held.held_out.get(verdict.recommended)
    untouched = held.held_out.get(UNTOUCHED)
    if ours and untouched and _mean(ours) < _mean(untouched):
        said.append(
            f"on held-out data {verdict.recommended} is worse than the untouched model:"
            f" {_held_out_name(held)} {_mean(ours):.4f} against {_mean(untouched):.4f}. Its rewards"
            " come from examples that it has seen."
        )
    if held.visits > _OFTEN:
        said.append(
            f"each example is visited about {held.visits:.0f} times. Rewards then show what was"
            " memorised; the held-out column is what new data would see."
        )
    return said


def _mean(values: Mapping[int, float]) -> float:
    """The mean over seeds."""
    return float(np.mean(list(values.values())))


def _worth(held: Contest) -> str:
    """The best finalist that explores against the best that does not, both of stage 2."""
    kinds: dict[bool, list[str]] = {True: [], False: []}
    for name, curves in held.curves.items():
        if name in held.choices and len(curves.final):
            kinds[name.startswith("greedy")].append(name)
    if not kinds[True] or not kinds[False]:
        return "Cannot be said: the runs that would show it diverged."
    best = {
        kind: max(names, key=lambda n: held.curves[n].final.mean()) for kind, names in kinds.items()
    }
    explorer, greedy = best[False], best[True]
    gaps, doubts = compared(held, greedy)
    [gap] = [one.difference for one in gaps.outcomes if one.configuration == explorer]
    if gap is None or not gap.told_apart:
        return f"Cannot be told: {explorer} and {greedy} cannot be told apart ({gap})."
    if explorer in doubts:
        return f"Cannot be said: {explorer} against {greedy} {gap}, but {doubts[explorer]}."
    return f"{'Yes' if gap.mean > 0 else 'No'}: {explorer} against {greedy} {gap}."


def _parameters(held: Contest, verdict: AdviceVerdict, config: Config) -> str:
    """The values to run the recommended contender with, as one sentence."""
    if verdict.recommended not in held.choices:
        return "None: nothing is trained."
    choice = held.choices[verdict.recommended]
    exploration = "".join(f"{key} {value:g}, " for key, value in config.policy.parameters.items())
    point = point_in_words(choice.point) or "its defaults"
    return (
        f"{exploration}{point}, algorithm {config.algorithm.name}, server optimiser"
        f" {config.server.optimizer}, objective {config.objective.name}."
    )


def _period(held: Contest) -> tuple[int, str]:
    """The usual period, unless another is shown to be better; and what to say of it."""
    usual = held.plan.deploy_every
    rewards = {str(every): c.by_seed for every, c in sorted(held.periods.items()) if len(c.final)}
    if len(rewards) < 2:
        return usual, f"Every {usual} rounds, as tried; nothing that is recommended depends on it."
    gaps = {
        int(one.configuration): one.difference
        for one in differences(rewards, str(usual)).outcomes
        if one.difference is not None
    }
    better = {every: gap for every, gap in gaps.items() if gap.told_apart and gap.mean > 0}
    best = max(better, key=lambda every: better[every].mean, default=usual)
    head = f"Every {best} rounds." if better else f"Every {usual} rounds, as tried."
    said = [
        f"every {every}: {gap} ({_verdict_of(gap.told_apart, gap.mean)})"
        for every, gap in sorted(gaps.items())
    ]
    return best, f"{head} Against every {usual}: {'; '.join(said)}."


def _verdict_of(told_apart: bool, mean: float) -> str:
    """A difference in words; what is not told apart has no direction."""
    return ("better" if mean > 0 else "worse") if told_apart else "cannot be told apart"


def _privacy(held: Contest, verdict: AdviceVerdict) -> str:
    """The cost in reward of the epsilon asked for, and what that figure leaves out."""
    if verdict.recommended not in held.choices:
        return "Nothing: what is recommended learns nothing from clients."
    parts = []
    for epsilon, curves in held.private.items():
        if not len(curves.final):
            parts.append(f"epsilon {epsilon:g}: every run diverged")
            continue
        plain = held.curves[verdict.recommended]
        gap = curves.minus(plain)
        share = 100 * gap.mean / plain.final.mean()
        unclear = "" if gap.told_apart else "; cannot be told apart"
        parts.append(f"epsilon {epsilon:g}: {gap} ({share:+.1f}%{unclear})")
    if not parts:
        return held.private_note or "Not asked for."
    return (
        f"{'; '.join(parts)} of reward ({held.private_note}). With few clients noise weighs heavily;"
        " with ten times the clients a round it would weigh a tenth. Looking at the data for this"
        " advice has itself spent privacy that no epsilon counts."
    )


def _stage_2(held: Contest, verdict: AdviceVerdict) -> EvidenceTable:
    """The table of the finalists: reward, difference from the recommended one, held-out metric."""
    heads = ["contender", "reward", f"minus {verdict.recommended}", "95% interval", "diverged"]
    heads += [_held_out_name(held)] * bool(held.held_out)
    rows = []
    for one in verdict.found.outcomes:
        name, gap = one.configuration, one.difference
        curves, tested = held.curves.get(name), held.held_out.get(name)
        error = standard_error(curves.final) if curves is not None else None
        row = [name, with_error(f"{one.reward:.4f}", error)]
        row += ["–", "–"] if gap is None else [f"{gap.mean:+.4f}", gap.interval]
        row += [str(len(curves.diverged)) if curves is not None else "–"]
        row += [f"{_mean(tested):.4f}" if tested else "–"] * bool(held.held_out)
        rows.append(row)
    return "Stage 2: finalists, fresh seeds", heads, rows


def _stage_1(held: Contest) -> EvidenceTable:
    """The table of tuning: every contender's best point, its tries, and axes it lies on the edge
    of.
    """
    ranked = sorted(held.choices.items(), key=lambda item: -(item[1].reward or -np.inf))
    rows = [
        (
            name,
            "diverged" if choice.reward is None else f"{choice.reward:.4f}",
            point_in_words(choice.point) or "its defaults",
            str(choice.looked_at),
            ", ".join(choice.on_edge) or "–",
        )
        for name, choice in ranked
    ]
    rows += [(text, "left out", "–", "–", "–") for text in held.left_out]
    heads = ("contender", "reward, tuning seed", "chosen", "tried", "on the edge")
    return "Stage 1: tuning", heads, rows


def _further(held: Contest) -> list[EvidenceTable]:
    """Tables of other deployment periods and of privacy, where these were run."""
    tables: list[EvidenceTable] = []
    named: dict[tuple[str, str], dict[str, Curves]] = {
        ("Deployment", "deploying every"): {
            f"{n} rounds": c for n, c in sorted(held.periods.items())
        },
        ("Privacy", "epsilon"): {f"{e:g}": c for e, c in held.private.items()},
    }
    for (title, first), curves in named.items():
        rows = tuple(
            (
                label,
                with_error(f"{c.final.mean():.4f}", standard_error(c.final))
                if len(c.final)
                else "–",
                str(len(c.seeds)),
            )
            for label, c in curves.items()
        )
        if rows:
            tables.append((title, (first, "reward", "seeds"), rows))
    return tables


def _held_out_name(held: Contest) -> str:
    """The held-out metric in words: `held-out recall at 5`."""
    return held.held_out_name.replace("test_", "held-out ").replace("_", " ")


def _draw(held: Contest, out: Path) -> Path:
    """The reward of every finalist over rounds with a band, constants as level lines: PNG and SVG."""
    curves = {name: c.running_reward for name, c in held.curves.items() if len(c.final)}
    rounds = held.plan.longer * held.plan.rounds
    curves |= {name: np.full((1, rounds), value) for name, value in held.constants.items()}
    shown = {
        "title": f"Stage 2 on {held.dataset.header.name}",
        "note": f"{counted(held.plan.seeds, 'seed')}, mean ± one standard deviation",
        "deploy_every": held.plan.deploy_every,
    }
    draw_curves(curves, out / "advice.png", **shown)
    return draw_curves(curves, out / "advice.svg", **shown)


def _inline(text: str) -> str:
    """The little Markdown that advice has: bold and code.

    Examples:
        >>> _inline("Deploy **greedy** in `init`")
        'Deploy <strong>greedy</strong> in <code>init</code>'
    """
    shown = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", escape(text))
    return re.sub(r"`(.+?)`", r"<code>\1</code>", shown)
