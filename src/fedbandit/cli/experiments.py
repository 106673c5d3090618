"""Commands about many runs: compare, sweep, advise, figure, drift, report, watch."""

from pathlib import Path
from typing import Annotated

import typer

Settings = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Set any value of every run; repeatable."),
]
Workers = Annotated[
    int | None, typer.Option(help="Number of parallel runs.", show_default="one per core")
]
Engine = Annotated[
    str, typer.Option(help="Where runs are computed: threads (this machine) or ray (a cluster).")
]
RayAddress = Annotated[
    str | None, typer.Option(help="A Ray cluster to join.", show_default="start one")
]


def figure(
    name: Annotated[
        str,
        typer.Argument(
            help="One panel (fig1a to fig4d), one figure (fig1 to fig4), ablation-server-optimizer,"
            " ablation-importance-weighting, all of these, or one not in the paper: weights, extrapolation,"
            " cohorts, population."
        ),
    ],
    data: Annotated[
        str | None,
        typer.Option(help="A data set folder.", show_default="embedded glyphs or topics"),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds; they are 0, 1, 2 and so on.")] = 5,
    scale: Annotated[
        float, typer.Option(help="Shorten rounds and deployment period to this share; try 0.05.")
    ] = 1.0,
    out: Annotated[
        Path, typer.Option("--out", "-o", file_okay=False, help="The folder for pictures and runs.")
    ] = Path("figures"),
    tune: Annotated[
        bool,
        typer.Option(
            "--tune",
            help="First tune rates and exploration on the paper's grid, with separate seeds.",
        ),
    ] = False,
    budget: Annotated[
        float | None, typer.Option(help="Minutes for --tune.", show_default="10")
    ] = None,
    settings: Settings = [],  # noqa: B006 - typer's way to say "repeatable"
    workers: Workers = None,
    engine: Engine = "threads",
    ray_address: RayAddress = None,
) -> None:
    """Reproduce a figure of the paper and compare the numbers.

    Run the same command again to resume after an interruption; finished runs are reused.
    """
    from fedbandit.config import parse_settings
    from fedbandit.core.errors import ConfigError
    from fedbandit.paper.catalogue import matching
    from fedbandit.paper.figures import FigureRequest, make_figures
    from fedbandit.runs.ray_runner import runner_of

    if budget is not None and not tune:
        raise ConfigError("--budget: needs --tune")
    names = matching(name)
    minutes = (10.0 if budget is None else budget) if tune else None
    with runner_of(engine, ray_address, workers) as runner:
        request = FigureRequest(data, seeds, scale, parse_settings(settings), minutes, runner)
        made, index = make_figures(names, request, out, typer.echo)
    for one in made:
        typer.echo(f"\n{one.text}\n\npicture: {one.png}")
    if index is not None:
        typer.echo(f"gallery: {index}")


def gallery(
    folders: Annotated[
        list[Path], typer.Argument(help="Folders with figures that `fedbandit figure` has made.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The HTML file to write.")] = Path(
        "gallery.html"
    ),
) -> None:
    """Put figures that were made on one page, with their verdicts.

    Prints a table of settings and rules with the winner and its margin.
    """
    from fedbandit.core.files import write_text
    from fedbandit.paper.page import comparison_table, comparisons, page, read_figures

    figures = read_figures(folders)
    write_text(out, page(figures, out.parent))
    typer.echo(comparison_table(comparisons(figures)))
    typer.echo(f"gallery: {out}")


def sweep(
    spec: Annotated[
        Path,
        typer.Argument(metavar="SPEC.toml", help="The values to vary; see docs/your-own-data.md."),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            file_okay=False,
            help="The folder for runs and tables; use it again to resume.",
        ),
    ],
    workers: Workers = None,
    engine: Engine = "threads",
    ray_address: RayAddress = None,
) -> None:
    """Run every combination of the values in a file and rank them."""
    from fedbandit.runs.ray_runner import runner_of
    from fedbandit.studies.sweeps import read_sweep, rows_of, run_sweep, summary_text, write_table

    wanted = read_sweep(spec)
    with runner_of(engine, ray_address, workers) as runner:
        results = run_sweep(wanted, out, runner=runner, say=typer.echo)
    written = write_table(rows_of(results, wanted.all_seeds, out), out / "results")
    typer.echo(f"\n{summary_text(results)}\n")
    winner = out / "winner.toml"
    typer.echo(f"table: {' and '.join(map(str, written))}")
    typer.echo(f"winner: {winner}" if winner.exists() else "no winner: every member diverged")


def compare(
    configurations: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME_OR_TOML...",
            help="Presets or TOML files; changes may stand behind one: 'so-scratch-softmax policy.beta=0.5'.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            file_okay=False,
            help="The folder for runs, picture and tables; use it again to resume.",
        ),
    ] = Path("comparison"),
    seeds: Annotated[int, typer.Option(help="Number of seeds; they are 0, 1, 2 and so on.")] = 5,
    against: Annotated[
        str | None,
        typer.Option(
            help="The configuration to compare with, as the table names it.", show_default="best"
        ),
    ] = None,
    settings: Settings = [],  # noqa: B006
    workers: Workers = None,
    engine: Engine = "threads",
    ray_address: RayAddress = None,
) -> None:
    """Run configurations with the same seeds and compare rewards.

    Prints a table with paired differences and their intervals, and writes a picture and a report.
    """
    from fedbandit.config import parse_settings
    from fedbandit.report.report import write_report
    from fedbandit.runs.ray_runner import runner_of
    from fedbandit.studies.compare import members_of, run_comparison, seeds_of, telling
    from fedbandit.studies.sweeps import write_table

    members, every = members_of(configurations, parse_settings(settings)), seeds_of(seeds)
    with runner_of(engine, ray_address, workers) as runner:
        results = run_comparison(members, every, out, runner, telling(_note))
    found = results.differences(against=against)
    results.plot(path=out / "comparison.png")
    tables = write_table(found.rows(), out / "comparison")
    page = write_report([out / name for name in members], out / "report.html")
    typer.echo(f"{found}\n\n{found.in_words()}\n")
    for problem in results.problems:
        typer.echo(f"note: {problem}")
    typer.echo(
        f"picture: {out / 'comparison.png'}; table: {' and '.join(map(str, tables))}; report: {page}"
    )


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders that contain runs.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The HTML file to write.")] = Path(
        "report.html"
    ),
) -> None:
    """Write one HTML page about runs: curves, parameters, data.

    The page needs no other file, and says how to reproduce every run.
    """
    from fedbandit.report.report import write_report

    typer.echo(f"report: {write_report(runs, out)}")


def watch(
    folder: Annotated[Path, typer.Argument(help="The folder with the runs.")] = Path("."),
    port: Annotated[int, typer.Option(help="The port on 127.0.0.1; 0 for any free port.")] = 8327,
) -> None:
    """Serve a local page that follows running and finished runs."""
    from fedbandit.report.watch import make_server

    server = make_server(folder, port)
    typer.echo(
        f"following {folder} on http://127.0.0.1:{server.server_address[1]}/ (Ctrl-C to stop)"
    )
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        typer.echo("stopped")
    finally:
        server.server_close()


def advise(
    data: Annotated[str, typer.Option(help="A data set folder, or the embedded glyphs or topics.")],
    budget: Annotated[float, typer.Option(help="Approximate time in minutes.")] = 10.0,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            file_okay=False,
            help="The folder for runs and advice; use it again to resume.",
        ),
    ] = Path("advice"),
    scenario: Annotated[
        str, typer.Option(help="The scenario: scratch, init, init-shift or my_module:MyScenario.")
    ] = "init",
    epsilon: Annotated[
        float, typer.Option(help="The epsilon whose cost to measure; 0 for none.")
    ] = 8.0,
    workers: Workers = None,
    engine: Engine = "threads",
    ray_address: RayAddress = None,
) -> None:
    """Run a small tournament on your data and recommend a policy.

    The recommendation comes with its evidence and its uncertainty, as text, as a page, and as a
    configuration to run.
    """
    from fedbandit.core.files import write_text
    from fedbandit.report.advice import advice_of, recommended, write_advice
    from fedbandit.runs.ray_runner import runner_of
    from fedbandit.studies.advice import run_tournament

    with runner_of(engine, ray_address, workers) as runner:
        held = run_tournament(
            data, budget, out, scenario=scenario, epsilon=epsilon or None, runner=runner, say=_note
        )
    text = str(advice_of(held))
    write_text(out / "advice.md", text)
    write_text(out / "recommended.toml", recommended(held).to_toml())
    typer.echo(
        f"{text}\nThis text: {out / 'advice.md'}; as a page: {write_advice(held, out / 'advice.html')}"
    )
    typer.echo(f"Run it: fedbandit run {out / 'recommended.toml'} -o runs/recommended")


def _note(text: str) -> None:
    """Progress goes to stderr, results to stdout."""
    typer.echo(text, err=True)


def drift(
    kind: Annotated[
        str,
        typer.Option(
            help="The change: permute (labels), appear (actions) or rotate (preferences)."
        ),
    ] = "permute",
    data: Annotated[
        str, typer.Option(help="A data set folder, or the embedded glyphs or topics.")
    ] = "topics",
    at: Annotated[
        str, typer.Option(help="Rounds before which the change happens, separated by commas.")
    ] = "200",
    rounds: Annotated[int, typer.Option(help="Number of rounds of each run.")] = 400,
    deploy_every: Annotated[int, typer.Option(help="Rounds between deployments.")] = 10,
    policies: Annotated[
        str,
        typer.Option(
            help="Policies, separated by commas; parameters behind a name: 'softmax floor=0.05'."
        ),
    ] = "greedy,epsilon-greedy,softmax,falcon",
    seeds: Annotated[int, typer.Option(help="Number of runs of each policy.")] = 3,
    settings: Annotated[
        list[str],
        typer.Option("--set", metavar="KEY=VALUE", help="Set any value of every run; repeatable."),
    ] = [],  # noqa: B006
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The picture to write (.png or .svg).")
    ] = Path("drift.png"),
    workers: Workers = None,
) -> None:
    """Measure how each policy recovers after a sudden change.

    Prints a table and draws a picture. Run the same command again to resume after an interruption.
    """
    from itertools import pairwise

    from fedbandit.config import parse_settings
    from fedbandit.core.errors import ConfigError
    from fedbandit.core.progress import to_stderr
    from fedbandit.data import open_dataset
    from fedbandit.results.plots import require_picture
    from fedbandit.runs.local_runner import LocalRunner
    from fedbandit.studies.compare import telling
    from fedbandit.studies.drift import DriftStudy, draw, members, run_study, table, write_numbers
    from fedbandit.studies.sweeps import name_of

    try:
        changes = tuple(int(part) for part in at.split(","))
    except ValueError:
        raise ConfigError(f"--at: expected whole numbers separated by commas, not {at!r}") from None
    study = DriftStudy(
        data=data,
        kind=kind,
        rounds=rounds,
        at=changes,
        deploy_every=deploy_every,
        policies=[name.strip() for name in policies.split(",") if name.strip()],
        seeds=seeds,
        settings=tuple(parse_settings(settings).items()),
    )
    if not study.policies:
        raise ConfigError("--policies: name at least one")
    edges = [1, *changes, rounds + 1]
    if seeds < 1 or any(later - earlier < study.window for earlier, later in pairwise(edges)):
        raise ConfigError(
            f"--at, --rounds: leave at least {study.window} rounds before, between and after changes"
        )
    require_picture(out)
    names = {policy: name_of(policy, config) for policy, config in members(study).items()}
    runs = out.with_name(f"{out.stem}-runs")
    outcomes = run_study(
        study,
        lambda policy, seed: runs / names[policy] / f"seed-{seed}",
        runner=LocalRunner(workers, to_stderr()),
        on_end=telling(lambda text: typer.echo(text, err=True)),
    )
    typer.echo(table(study, outcomes))
    title = {
        "permute": "Labels trade places",
        "appear": "New actions appear",
        "rotate": "Preferences rotate",
    }
    shown = f"{title.get(kind, kind)} ({open_dataset(data).header.name}, {seeds} seeds)"
    numbers = write_numbers(study, outcomes, out.with_suffix(".json"), shown)
    typer.echo(f"{draw(study, outcomes, out, shown)}; numbers: {numbers}; runs: {runs}")
