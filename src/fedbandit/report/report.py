"""A report of runs: one HTML file that needs nothing else and asks the network for nothing.

The curves are SVG, drawn by a small script of our own: they print, follow the page's colours, and
can be read by keyboard and by screen readers, which charts on a canvas (uPlot, say, of fifty
kilobytes) cannot.
"""

import base64
import hashlib
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from fedbandit import __version__
from fedbandit.config import Config
from fedbandit.core.errors import DataError, FedbanditError
from fedbandit.core.files import write_text
from fedbandit.core.identity import owners
from fedbandit.core.parts import counted, flatten, in_short
from fedbandit.core.progress import to_stderr
from fedbandit.data import open_dataset
from fedbandit.data.info import describe
from fedbandit.presets import preset
from fedbandit.privacy.reporting import in_one_line
from fedbandit.results.differences import (
    Difference,
    Differences,
    differences,
    standard_error,
    with_error,
)
from fedbandit.results.plots import chart, draw_curves, styles_of_best
from fedbandit.results.reading import Arrays, MetricsFile, readable
from fedbandit.runs.folder import beside_reward
from fedbandit.runs.index import Problem, RunGroup, grouped, read_runs
from fedbandit.runs.local_runner import LocalRunner
from fedbandit.studies.compare import rewards_table, run_members

_CHARTS = {
    "running_reward": "Running average reward",
    "propensity": "Exploration: mean probability of the chosen action",
    "epsilon": "Privacy spent: epsilon so far",
    "worst_decile": "Reward of the worst-off tenth of clients, running average",
    "test_accuracy": "Held-out accuracy of the greedy choice",
    "test_recall_at_5": "Held-out recall of the best five",
}


_NOTES = {
    "running_reward": "Mean over seeds; the band is one standard deviation. Buttons hide curves and show them again.",
    "propensity": "Near 1: the policy takes its best guess; low: it explores.",
    "epsilon": "Covers the released weights only; rewards, clip norms and probabilities shown here are not noised.",
    "worst_decile": "Of each round's clients. An average can hide who loses.",
}


def write_report(
    folders: Sequence[Path], path: Path, labels: Mapping[Path, str] | None = None
) -> Path:
    """Write a report of every run in or below the folders.

    `labels` has names for configurations by the folder that holds their seeds; without one, a
    configuration is called by what sets it apart.
    """
    runs, problems = read_runs(folders)
    columns: dict[Path, Arrays] = {}
    for run in runs:
        metrics = MetricsFile(owners(run.path / "metrics.jsonl"))
        metrics.follow()
        if metrics.problem is None:
            found = metrics.columns
            worst = found.get("client_reward.worst_decile", np.zeros(0))
            columns[run.path] = {**found, "worst_decile": _running_mean(worst)}
        else:
            problems.append(Problem(run.name, metrics.problem))
    sound = [run for run in runs if run.path in columns]
    if not sound:
        where = ", ".join(map(str, folders))
        if problems:
            raise DataError(
                f"{where}: no run can be read ({problems[0].name}: {problems[0].reason})"
            )
        raise DataError(f"{where}: no runs here (a run folder holds a config.toml)")
    groups = [
        replace(group, label=(labels or {}).get(group.runs[0].path.parent, group.label))
        for group in grouped(sound)
    ]
    page = render(groups, columns, problems)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, page)
    return path


def _running_mean(values: np.ndarray) -> np.ndarray:
    """Means of all values so far, [rounds]; rounds without a value are passed over.

    Examples:
        >>> _running_mean(np.array([1.0, np.nan, 3.0]))
        array([1., 1., 2.])
    """
    known = np.isfinite(values)
    averages: np.ndarray = np.cumsum(np.where(known, values, 0)) / np.maximum(np.cumsum(known), 1)
    return averages


def render(
    groups: Sequence[RunGroup], columns: Mapping[Path, Arrays], problems: Sequence[Problem] = ()
) -> str:
    """The whole page as one HTML text; `columns` has the metrics of each run by its folder.

    Style and script stand in the page, and its policy allows nothing else: it can be mailed,
    archived and opened without a network.
    """
    groups = ranked(groups)
    charts = _charts(groups, columns)
    unfinished, gained = apart(groups), personal(groups)
    runs = [run for group in groups for run in group.runs]
    failed = [(run.name, run.error) for run in runs if run.error and run.summary is None]
    sections = [
        f"<h1>{escape(_title(groups))}</h1>",
        f'<p class="soft">{escape(_subtitle(groups))}; fedbandit {__version__}</p>',
        headline(groups),
        section("Results", outcomes(groups) + privacy(groups)),
        *([section("Who gained by a model of their own", gained)] if gained else []),
        *([section("Not in these averages", unfinished)] if unfinished else []),
        errors("What went wrong", failed),
        errors("Could not be read", [(one.name, one.reason) for one in problems]),
        *(
            section(
                data["title"], f'<p class="soft">{_NOTES.get(name, "")}</p><div id="{name}"></div>'
            )
            for name, data in charts.items()
        ),
        section("Parameters", parameters(groups)),
        section("Data", data_facts(groups)),
        section("Environment", environments(groups)),
        section("To reproduce", commands(groups)),
    ]
    data = json.dumps({"charts": charts}, allow_nan=False).replace(
        "<", "\\u003c"
    )  # no tag can end early
    return document(_title(groups), "\n".join(sections), data)


def asset(name: str) -> str:
    """A script, style or page that lies in this package."""
    return files("fedbandit.report").joinpath("page", name).read_text(encoding="utf-8")


def document(title: str, body: str, data: str = "") -> str:
    """An HTML page that needs no other file; its policy allows this style and this script alone.

    `data` is JSON for the charts; without it the page has no script.
    """
    style, script = asset("style.css"), ""
    if data:
        script = asset("chart.js") + asset("report.js").replace('"use strict";\n', "")
        data = (
            f'<script type="application/json" id="data">{data}</script>\n<script>{script}</script>'
        )
    policy = f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; img-src data:"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="color-scheme" content="light dark">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
{data}
</body>
</html>
"""


def _digest(text: str) -> str:
    """A digest as a Content-Security-Policy names it."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _charts(groups: Sequence[RunGroup], columns: Mapping[Path, Arrays]) -> dict[str, Any]:
    """The data of every chart that says something, by the name of its metric."""
    members: dict[str, list[Arrays]] = {}
    for group in groups:
        if ended := group.finished:
            members[group.label] = [columns[run.path] for run in ended]
        else:  # each on its own: a mean over different lengths would be cut to the shortest
            members |= {
                f"{group.label}, {run.name}": [columns[run.path]]
                for run in group.apart
                if run.rounds
            }
    periods = {group.config.deploy_every for group in groups}
    marks = periods.pop() if len(periods) == 1 else None
    drawn = {name: chart(title, name, members, marks) for name, title in _CHARTS.items()}
    return {
        name: data
        for name, data in drawn.items()
        if data is not None and _says_something(name, data)
    }


def _says_something(name: str, data: dict[str, Any]) -> bool:
    """Where many clients have an example or two, a tenth of them always goes without reward; a flat
    zero is no news.
    """
    return name != "worst_decile" or any(
        value > 0.01 for series in data["series"] for value in series["mean"]
    )


def _title(groups: Sequence[RunGroup]) -> str:
    """Scenarios and data sets in a few words."""
    scenarios = sorted({group.config.scenario for group in groups})
    data = sorted({str(run.environment.get("data", "?")) for group in groups for run in group.runs})
    return f"{', '.join(scenarios)} on {', '.join(data)}"


def _subtitle(groups: Sequence[RunGroup]) -> str:
    """Counts of configurations and of runs by status."""
    runs = [run for group in groups for run in group.runs]
    states = [run.status for run in runs]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    return f"{len(groups)} configuration{'s' * (len(groups) > 1)}, {len(runs)} run{'s' * (len(runs) > 1)}: {counts}"


def outcomes(groups: Sequence[RunGroup]) -> str:
    """The table of results: final running average of each configuration over its finished runs.

    In the order given (`ranked`), with how far each is behind the first and the 95% interval of
    that difference, and what the summaries say beside: held-out metrics, epsilon.
    """
    extra = list(
        dict.fromkeys(
            key for group in groups for run in group.finished for key in beside_reward(run.summary)
        )
    )
    beside = {one.configuration: one.difference for one in standing(groups).outcomes}
    heads = [
        "configuration",
        "running average ± s.e.",
        "behind the best",
        "95% interval",
        "seeds",
        "rounds",
    ]
    rows = []
    names = _names(groups)
    for group in groups:
        ended = group.finished
        final = np.array([_reward(run.last) for run in ended], float)
        mean = _shown(final.mean() if len(final) else np.nan)
        gap = beside.get(group.label)
        behind = ["–", "–"] if gap is None else [f"{-gap.mean:.4f}", _reversed(gap)]
        extras = [_mean([beside_reward(run.summary).get(key) for run in ended]) for key in extra]
        counts = [str(len(ended)), str(ended[0].rounds) if ended else "–"]
        rows.append(
            (
                names[group.label],
                [with_error(mean, standard_error(final)), *behind, *counts, *map(_shown, extras)],
            )
        )
    return html_table([*heads, *(key.replace("_", " ") for key in extra)], rows)


def _reversed(gap: Difference) -> str:
    """The interval of the opposite difference."""
    return "–" if gap.low is None or gap.high is None else f"{-gap.high:.4f} to {-gap.low:.4f}"


def standing(groups: Sequence[RunGroup]) -> Differences:
    """Rewards of all configurations over finished runs, beside the best and paired by seed."""
    rewards = {
        group.label: {
            run.config.seed: value
            for run in group.finished
            if not np.isnan(value := _reward(run.last))
        }
        for group in groups
    }
    return differences(rewards)


def ranked(groups: Sequence[RunGroup]) -> list[RunGroup]:
    """The groups, best first: those with finished runs, then the others by how well they do so far."""

    def rank(group: RunGroup) -> tuple[bool, float]:
        """Whether any run has finished, and the mean reward of those, or of all so far."""
        chosen = group.finished or group.runs
        rewards = [value for run in chosen if not np.isnan(value := _reward(run.last))]
        return bool(group.finished), float(np.mean(rewards)) if rewards else -np.inf

    return sorted(groups, key=rank, reverse=True)


def headline(groups: Sequence[RunGroup]) -> str:
    """Who came first, with how much, and whether that may be chance; nothing where no run has
    finished.
    """
    found = standing(groups)
    if not found.outcomes:
        return ""
    best = next(group for group in groups if group.label == found.outcomes[0].configuration)
    final = np.array([_reward(run.last) for run in best.finished], float)
    reward = with_error(f"{found.outcomes[0].reward:.4f}", standard_error(final))
    over = f"{counted(len(best.finished), 'seed')}, {best.finished[0].rounds} rounds"
    verdict = f"<p>{escape(found.in_words())}.</p>" if len(found.outcomes) > 1 else ""
    return (
        '<div class="headline"><p class="soft">Highest running average reward</p>'
        f'<p class="winner">{escape(best.label)} <b>{reward}</b></p><p class="soft">{over}</p>{verdict}</div>'
    )


def privacy(groups: Sequence[RunGroup]) -> str:
    """The guarantee of each private configuration, in the form that all commands print."""
    lines = []
    for group in groups:
        found = next(
            (
                run.summary["privacy"]
                for run in group.finished
                if run.summary and "privacy" in run.summary
            ),
            None,
        )
        try:
            if found is not None and found["mechanism"] != "none":
                lines.append(f"<p>{escape(group.label)}: {escape(in_one_line(found))}</p>")
        except (KeyError, TypeError, ValueError):
            lines.append(
                f"<p>{escape(group.label)}: its summary does not say what its epsilon assumes</p>"
            )
    return "".join(lines)


_GAINS = {"clients": 0, "adopted": 0, "gained": 0, "lost": 0, "gain": 4}  # and their decimals


def personal(groups: Sequence[RunGroup]) -> str:
    """Clients that act with weights of their own, by the events that judged these: who gained and
    who lost, added up over seeds.
    """
    rows = []
    for group in groups:
        found = [(run.summary or {}).get("personal") or [] for run in group.finished]
        try:
            for same in zip(*found, strict=False):
                sums = {key: sum(float(one[key]) for one in same) for key in _GAINS}
                total = sum(one["gain"] * one["adopted"] for one in same)
                sums["gain"] = total / max(sums["adopted"], 1)
                judged = f"{group.label}, on {same[0]['judged_from']} events or more"
                cells = [f"{sums[key]:.{digits}f}" for key, digits in _GAINS.items()]
                rows.append((f"<th>{escape(judged)}</th>", cells))
        except (KeyError, TypeError, ValueError):
            continue  # an algorithm of the user's own may tell anything else
    if not rows:
        return ""
    note = (
        "Adopted: acts with a part of its own. Gains are estimates per event, made before a part was"
        " trained on the event; simulated clients meet their examples again, which flatters them."
    )
    return html_table(["judged", *_GAINS], rows) + f'<p class="soft">{note}</p>'


def apart(groups: Sequence[RunGroup]) -> str:
    """Runs that are in no average, by name: not finished, or shorter than the others of their
    configuration.
    """
    rows = [
        (
            f'<th scope="row">{escape(run.name)}</th>',
            [
                group.label,
                run.status,
                f"{run.rounds} of {run.config.rounds}",
                _shown(_reward(run.last)),
            ],
        )
        for group in groups
        for run in group.apart
    ]
    return (
        html_table(["run", "configuration", "state", "rounds", "running average so far"], rows)
        if rows
        else ""
    )


def errors(title: str, said: Sequence[tuple[str, str]]) -> str:
    """A section of errors by the name of a run; empty where there are none."""
    lines = [f'<p class="error">{escape(name)}: {escape(reason)}</p>' for name, reason in said]
    return section(title, "".join(lines)) if lines else ""


def section(title: str, body: str) -> str:
    """A part of the page under its heading.

    Examples:
        >>> section("Data & more", "<p>1</p>")
        '<section><h2>Data &amp; more</h2><p>1</p></section>'
    """
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def html_table(heads: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Rows of a head, which is HTML, and cells, which are texts; each knows its column, for a phone
    shows it beside.
    """
    head = "".join(
        f'<th scope="col"{" class=number" * (i > 0)}>{escape(text)}</th>'
        for i, text in enumerate(heads)
    )
    body = "".join(
        f"<tr>{name}{''.join(_cell(column, cell) for column, cell in zip(heads[1:], cells, strict=True))}</tr>"
        for name, cells in rows
    )
    return f'<div class="scroll"><table class="cards"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(column: str, text: str) -> str:
    """A cell that knows the head of its column, which a phone shows beside it.

    Examples:
        >>> _cell("reward", "0.5")
        '<td class="number" data-head="reward">0.5</td>'
    """
    return f'<td class="number" data-head="{escape(column)}">{escape(text)}</td>'


def parameters(groups: Sequence[RunGroup]) -> str:
    """A table of the values that differ between configurations, and the shared ones below it."""
    flat = [flatten(group.config.identity()) for group in groups]
    keys = [key for key in dict.fromkeys(key for values in flat for key in values) if key != "seed"]
    differing = [key for key in keys if len({json.dumps(values.get(key)) for values in flat}) > 1]
    shared = "\n".join(
        f"{key} = {json.dumps(flat[0].get(key))}" for key in keys if key not in differing
    )
    parts = []
    names = _names(groups)
    if differing:
        rows = [
            (names[group.label], [_value(readable(key, values.get(key))) for key in differing])
            for group, values in zip(groups, flat, strict=True)
        ]
        parts.append(html_table(["configuration", *differing], rows))
    parts.append(
        f"<details><summary>What all of them share</summary><pre>{escape(shared)}</pre></details>"
    )
    return "".join(parts)


def _value(value: Any) -> str:
    """A setting's value in a table."""
    return "not set" if value is None else in_short(value)


def data_facts(groups: Sequence[RunGroup]) -> str:
    """Facts about the data sets, as far as they are still where the runs found them."""
    facts = []
    for source in dict.fromkeys(group.config.data.source for group in groups):
        try:
            text = describe(open_dataset(source))
        except (FedbanditError, OSError, ValueError) as error:
            text = f"{source}: cannot be read any more ({error})"
        facts.append(f"<pre>{escape(text)}</pre>")
    return "".join(facts)


def environments(groups: Sequence[RunGroup]) -> str:
    """The versions that made the runs: what all share, and below it what is a run's own."""
    found = {run.name: dict(run.environment) for group in groups for run in group.runs}
    first = next(iter(found.values()))
    shared = [k for k in first if all(own.get(k) == first[k] for own in found.values())]
    text = "\n".join(f"{key} {first[key]}" for key in shared)
    own = "\n\n".join(
        "\n".join([name, *(f"  {k} {v}" for k, v in values.items() if k not in shared)])
        for name, values in found.items()
    )
    return (
        f"<pre>{escape(text)}</pre>"
        f"<details><summary>What is each run's own</summary><pre>{escape(own)}</pre></details>"
    )


def commands(groups: Sequence[RunGroup]) -> str:
    """The commands that make the runs again, each with the configuration it needs."""
    parts = [
        "<p>Save a configuration under the name given, then run the command; each run is repeated bit for bit.</p>"
    ]
    for position, group in enumerate(groups, start=1):
        file = f"run-{position}.toml"
        lines = "\n".join(
            f"fedbandit run {file} --seed {run.config.seed} --out {shlex.quote(f'again/{run.name}')}"
            for run in group.runs
        )
        parts.append(
            f"<details><summary>{escape(group.label)}</summary><pre>{escape(lines)}</pre>"
            f'<p class="soft">{file}</p><pre>{escape(group.config.to_toml())}</pre></details>'
        )
    return "".join(parts)


def _names(groups: Sequence[RunGroup]) -> dict[str, str]:
    """The head of each configuration's row: its label behind a piece of its line."""
    heads = {}
    for label, style in styles_of_best([group.label for group in groups]).items():
        line = ""
        if style is not None:
            dash = ' stroke-dasharray="5 3"' if style[1] else ""
            line = (
                f'<svg width="22" height="8" aria-hidden="true"><path class="line" data-colour="{style[0]}"'
                f' d="M0 4H22" stroke="{style[0]}" stroke-width="4"{dash}/></svg> '
            )
        heads[label] = f'<th scope="row">{line}{escape(label)}</th>'
    return heads


def _reward(last: Mapping[str, Any]) -> float:
    """The running average of a line of metrics; NaN where it has none."""
    reward = last.get("running_reward")
    return float("nan") if reward is None else float(reward)


def _mean(values: Sequence[Any]) -> float:
    """The mean of the numbers among the values; NaN where there is none."""
    known = [float(value) for value in values if type(value) in (int, float) and abs(value) < 1e300]
    return float(np.mean(known)) if known else float("nan")


def _shown(value: float) -> str:
    """Four digits, or a dash for NaN.

    Examples:
        >>> _shown(0.5), _shown(float("nan"))
        ('0.5000', '–')
    """
    return "–" if np.isnan(value) else f"{value:.4f}"


ROUNDS, DEPLOY_EVERY, SEEDS = 300, 40, (0, 1, 2)


POLICIES = ("greedy", "epsilon-greedy", "softmax", "falcon", "baseline")


def demo(out: Path, say: Callable[[str], None] = print) -> Path:
    """Run the demonstration into a folder and draw its picture; run again, it resumes or shows the
    results.
    """
    say(
        f"Federated contextual bandits on the embedded `topics` data, scenario init-shift, {len(SEEDS)} seeds."
    )
    say(
        f"Shortened: {ROUNDS} rounds, deploying every {DEPLOY_EVERY} (the paper: 1500, every 200 or 40).\n"
    )
    curves = run_members(
        members(),
        SEEDS,
        (out / "runs").joinpath,
        runner=LocalRunner(progress=to_stderr()),
        say=say,
    )
    picture = draw_curves(
        {label: member.running_reward for label, member in curves.items()},
        out / "curves.png",
        title="init-shift on topics (shortened)",
        deploy_every=DEPLOY_EVERY,
        note=f"{ROUNDS} rounds, deploying every {DEPLOY_EVERY}; mean ± std over {len(SEEDS)} seeds",
    )
    final = {label: member.final for label, member in curves.items()}
    lost = {label: member.diverged for label, member in curves.items()}
    say(f"\nFinal running average reward:\n\n{rewards_table(final, lost)}\n")
    say("baseline is the pre-trained model, greedy and never trained again.")
    say(f"Curves: {picture}")
    say(f"Report: {write_report([out / 'runs'], out / 'report.html')}")
    return picture


def members() -> dict[str, Config]:
    """The presets of table 8, shortened."""
    shortened = {"rounds": ROUNDS, "deploy_every": DEPLOY_EVERY, "data.source": "topics"}
    return {
        name: preset(f"so-init-shift-deploy40-{name}").with_values(shortened) for name in POLICIES
    }
