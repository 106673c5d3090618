"""`fedbandit figure | sweep | report | watch | advise`: a thin skin over `fedbandit.experiments`."""

from pathlib import Path
from typing import Annotated

import typer

Settings = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Set any value of every run.")]
Workers = Annotated[int | None, typer.Option(help="Runs at a time; none: one per core.")]
Engine = Annotated[str, typer.Option(help="Where runs are played: threads (this machine), or ray (a cluster).")]
RayAddress = Annotated[str | None, typer.Option(help="A running Ray cluster to join; none: one for this command.")]


def register(app: typer.Typer) -> None:
    """Add the commands to an app."""
    for command in (figure, sweep, report, watch, advise):
        app.command()(command)


def figure(
    name: Annotated[
        str,
        typer.Argument(
            help="fig1a ... fig4d; fig1 ... fig4 for all panels; ablation-server-optimizer;"
            " ablation-importance-weighting; drift (ours); or all."
        ),
    ],
    data: Annotated[
        str | None, typer.Option(help="A data set folder; none: the embedded glyphs or topics, as the figure needs.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="How many seeds: 0, 1, ...")] = 5,
    scale: Annotated[
        float, typer.Option(help="Shorten rounds, deployment period and pre-training to this share; 0.05 for a try.")
    ] = 1.0,
    out: Annotated[Path, typer.Option("--out", "-o", help="Where pictures and runs go.")] = Path("figures"),
    tune: Annotated[
        bool,
        typer.Option("--tune", help="First search the paper's grid of rates and exploration, on seeds of its own."),
    ] = False,
    budget: Annotated[float | None, typer.Option(help="Minutes for --tune; none: 10.")] = None,
    settings: Settings = [],  # noqa: B006 - typer's way to say "repeatable"
    workers: Workers = None,
    engine: Engine = "threads",
    ray_address: RayAddress = None,
) -> None:
    """Make a figure of the paper: run what is missing, draw it, print the numbers beside the paper's.

    Stopped and given again, the same command goes on.
    """
    from fedbandit.config import parse_settings
    from fedbandit.errors import ConfigError
    from fedbandit.experiments.catalogue import matching
    from fedbandit.experiments.figures import Request
    from fedbandit.experiments.gallery import make_gallery
    from fedbandit.experiments.runners import runner_of

    if budget is not None and not tune:
        raise ConfigError("--budget: is for --tune")
    names = matching(name)
    minutes = (10.0 if budget is None else budget) if tune else None
    with runner_of(engine, ray_address, workers) as runner:
        request = Request(data, seeds, scale, parse_settings(settings), minutes, runner)
        made = make_gallery(names, request, out, typer.echo)
    for one in made.figures:
        typer.echo(f"\n{one.text}\n\npicture: {one.png}")
    if made.index is not None:
        typer.echo(f"gallery: {made.index}")


def sweep(
    spec: Annotated[Path, typer.Argument(metavar="SPEC.toml", help="What to vary; see docs/your-own-data.md.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Where runs and tables go; run again to go on.")],
    workers: Workers = None,
    engine: Engine = "threads",
    ray_address: RayAddress = None,
) -> None:
    """Play every combination of the values in a file, rank them, and write the table."""
    from fedbandit.experiments.results import rows_of, summary_text, write_table
    from fedbandit.experiments.runners import runner_of
    from fedbandit.experiments.sweeps import read_sweep
    from fedbandit.experiments.sweeps import sweep as play

    wanted = read_sweep(spec)
    with runner_of(engine, ray_address, workers) as runner:
        results = play(wanted, out, runner=runner, say=typer.echo)
    written = write_table(rows_of(results, wanted.all_seeds, out), out / "results")
    typer.echo(f"\n{summary_text(results)}\n")
    winner = out / "winner.toml"
    typer.echo(f"table: {' and '.join(map(str, written))}")
    typer.echo(f"winner: {winner}" if winner.exists() else "no winner: every member diverged")


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders that hold some.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")] = Path("report.html"),
) -> None:
    """Make one self-contained HTML page of runs: curves, parameters, data, and how to repeat them."""
    from fedbandit.experiments.report import write_report

    typer.echo(f"report: {write_report(runs, out)}")


def watch(
    folder: Annotated[Path, typer.Argument(help="The folder whose runs to follow.")] = Path("."),
    port: Annotated[int, typer.Option(help="The port on 127.0.0.1; 0 takes any free one.")] = 8327,
) -> None:
    """Serve a page on this machine that follows running and finished runs."""
    from fedbandit.experiments.watch import make_server

    server = make_server(folder, port)
    typer.echo(f"following {folder} on http://127.0.0.1:{server.server_address[1]}/ (Ctrl-C ends it)")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        typer.echo("ended")
    finally:
        server.server_close()


def advise(
    data: Annotated[str, typer.Option(help="A data set folder, or an embedded set: glyphs, topics.")],
    budget: Annotated[float, typer.Option(help="About how many minutes to take.")] = 10.0,
    out: Annotated[Path, typer.Option("--out", "-o", help="Where runs and advice go; run again to go on.")] = Path(
        "advice"
    ),
    scenario: Annotated[str, typer.Option(help="scratch, init, init-shift, or another scenario.")] = "init-shift",
    epsilon: Annotated[float, typer.Option(help="The privacy whose price to measure; 0 for none.")] = 8.0,
    workers: Workers = None,
    engine: Engine = "threads",
    ray_address: RayAddress = None,
) -> None:
    """Hold a small tournament on your data and say what to use, with the evidence and how sure it is."""
    from fedbandit.experiments.advice import recommendation
    from fedbandit.experiments.runners import runner_of
    from fedbandit.experiments.tournament import hold
    from fedbandit.files import write_text

    with runner_of(engine, ray_address, workers) as runner:
        held = hold(data, budget, out, scenario=scenario, epsilon=epsilon or None, runner=runner, say=_note)
    text = recommendation(held)
    write_text(out / "advice.md", text)
    typer.echo(f"{text}\nThis text: {out / 'advice.md'}")


def _note(text: str) -> None:
    """Progress goes beside the result, not into it."""
    typer.echo(text, err=True)
