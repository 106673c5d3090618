"""A report of runs: one HTML file that needs nothing else and asks the network for nothing.

The curves are SVG, drawn by a small script of our own: they print, follow the page's colours, and
can be read by keyboard and by screen readers, which charts on a canvas (uPlot, say, of fifty
kilobytes) cannot.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedbandit import __version__
from fedbandit.config import Config
from fedbandit.core.errors import DataError
from fedbandit.core.files import write_text
from fedbandit.core.progress import to_stderr
from fedbandit.presets import preset
from fedbandit.report import tables
from fedbandit.report.tables import Columns, MetricsFile, chart
from fedbandit.results.plots import draw_curves
from fedbandit.runs.index import Problem, RunGroup, RunReader, grouped
from fedbandit.runs.local_runner import LocalRunner
from fedbandit.studies.compare import run_members, table

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


def write_report(folders: Sequence[Path], path: Path) -> Path:
    """Write a report of every run in or below the folders."""
    runs, problems = RunReader().read(folders)
    columns: dict[Path, Columns] = {}
    for run in runs:
        metrics = MetricsFile(run.path / "metrics.jsonl")
        metrics.follow()
        if metrics.problem is None:
            columns[run.path] = metrics.columns
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
    page = render(grouped(sound), columns, problems)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, page)
    return path


def render(
    groups: Sequence[RunGroup], columns: Mapping[Path, Columns], problems: Sequence[Problem] = ()
) -> str:
    """The whole page as one HTML text; `columns` has the metrics of each run by its folder.

    Style and script stand in the page, and its policy allows nothing else: it can be mailed,
    archived and opened without a network.
    """
    groups = tables.ranked(groups)
    charts = _charts(groups, columns)
    unfinished = tables.apart(groups)
    sections = [
        f"<h1>{escape(_title(groups))}</h1>",
        f'<p class="soft">{escape(_subtitle(groups))}; fedbandit {__version__}</p>',
        tables.headline(groups),
        _section("Results", tables.outcomes(groups) + tables.privacy(groups)),
        *([_section("Not in these averages", unfinished)] if unfinished else []),
        tables.failures(groups),
        tables.left_out(problems),
        *(
            _section(
                data["title"], f'<p class="soft">{_NOTES.get(name, "")}</p><div id="{name}"></div>'
            )
            for name, data in charts.items()
        ),
        _section("Parameters", tables.parameters(groups)),
        _section("Data", tables.data_facts(groups)),
        _section("Environment", tables.environments(groups)),
        _section("To reproduce", tables.commands(groups)),
    ]
    data = json.dumps({"charts": charts}, allow_nan=False).replace(
        "<", "\\u003c"
    )  # no tag can end early
    return _page("\n".join(sections), _title(groups), data)


def asset(name: str) -> str:
    """A script, style or page that lies in this package."""
    return files("fedbandit.report").joinpath("page", name).read_text(encoding="utf-8")


def _page(body: str, title: str, data: str) -> str:
    style, script = (
        asset("style.css"),
        asset("chart.js") + asset("report.js").replace('"use strict";\n', ""),
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
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _charts(groups: Sequence[RunGroup], columns: Mapping[Path, Columns]) -> dict[str, Any]:
    members: dict[str, list[Columns]] = {}
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
    scenarios = sorted({group.config.scenario for group in groups})
    data = sorted({str(run.environment.get("data", "?")) for group in groups for run in group.runs})
    return f"{', '.join(scenarios)} on {', '.join(data)}"


def _subtitle(groups: Sequence[RunGroup]) -> str:
    runs = [run for group in groups for run in group.runs]
    states = [run.status for run in runs]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    return f"{len(groups)} configuration{'s' * (len(groups) > 1)}, {len(runs)} run{'s' * (len(runs) > 1)}: {counts}"


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


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
        lambda label, seed: out / "runs" / label / f"seed-{seed}",
        runner=LocalRunner(progress=to_stderr()),
        on_end=lambda label, seed, ended: say(f"  {label}, seed {seed}"),
    )
    picture = draw_curves(
        {label: member.running_reward for label, member in curves.items()},
        out / "curves.png",
        title="init-shift on topics (shortened)",
        deploy_every=DEPLOY_EVERY,
        note=f"{ROUNDS} rounds, deploying every {DEPLOY_EVERY}; mean ± std over {len(SEEDS)} seeds",
    )
    say(f"\nFinal running average reward:\n\n{table(curves)}\n")
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
