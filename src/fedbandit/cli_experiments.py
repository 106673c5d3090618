"""`fedbandit figure | sweep | report | watch | advise`: a thin skin over `fedbandit.experiments`."""

from pathlib import Path
from typing import Annotated, Any

import typer

Settings = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Set any value of every run.")]
Workers = Annotated[int | None, typer.Option(help="Runs at a time [one per core].")]


def register(app: typer.Typer) -> None:
    """Add the commands to an app."""
    for command in (figure, sweep, report, watch, advise):
        app.command()(command)


def figure(
    name: Annotated[str, typer.Argument(help="fig1a ... fig4d, fig1 ... fig4, an ablation, or all.")],
    data: Annotated[str | None, typer.Option(help="A data set folder [the embedded glyphs or topics].")] = None,
    seeds: Annotated[int, typer.Option(help="How many seeds.")] = 5,
    scale: Annotated[float, typer.Option(help="Shorten rounds, deployment period and pre-training to this.")] = 1.0,
    out: Annotated[Path, typer.Option("--out", "-o", help="Where pictures and runs go.")] = Path("figures"),
    tune: Annotated[bool, typer.Option("--tune", help="Search the appendix's grid first, on seeds apart.")] = False,
    budget: Annotated[float, typer.Option(help="Minutes for --tune.")] = 10.0,
    settings: Settings = [],  # noqa: B006 - typer's way to say "repeatable"
    workers: Workers = None,
) -> None:
    """Make a figure of the paper: run what is missing, draw it, print the numbers beside the paper's."""
    from fedbandit.config import parse_settings
    from fedbandit.experiments.catalogue import matching
    from fedbandit.experiments.figures import Request
    from fedbandit.experiments.gallery import make_gallery

    request = Request(data, seeds, scale, parse_settings(settings), budget if tune else None, workers)
    made = make_gallery(matching(name), request, out, typer.echo, drift=name == "all")
    for one in made.figures:
        typer.echo(f"\n{one.text}\n\npicture: {one.png}")
    if made.index is not None:
        typer.echo(f"gallery: {made.index}")


def sweep(
    spec: Annotated[Path, typer.Argument(metavar="SPEC.toml", help="What to vary; see docs/your-own-data.md.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Where runs and tables go; run again to go on.")],
    workers: Workers = None,
    engine: Annotated[str, typer.Option(help="threads, or ray: each run in turn over a Ray cluster.")] = "threads",
    address: Annotated[str | None, typer.Option(help="The Ray cluster to join [one is started here].")] = None,
) -> None:
    """Play every combination of the values in a file, rank them, and write the table."""
    from fedbandit.experiments.results import rows_of, summary_text, write_table
    from fedbandit.experiments.sweeps import read_sweep
    from fedbandit.experiments.sweeps import sweep as play

    wanted = read_sweep(spec)
    results = play(wanted, out, workers=workers, engine=_engine(engine, address), say=typer.echo)
    written = write_table(rows_of(results, wanted.all_seeds, out), out / "results")
    typer.echo(f"\n{summary_text(results)}\n")
    typer.echo(f"table: {' and '.join(map(str, written))}\nwinner: {out / 'winner.toml'}")


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
) -> None:
    """Hold a small tournament on your data and say what to use, with the evidence and how sure it is."""
    from fedbandit.experiments.advice import recommendation
    from fedbandit.experiments.tournament import hold

    held = hold(data, budget, out, scenario=scenario, epsilon=epsilon or None, workers=workers, say=_note)
    text = recommendation(held)
    (out / "advice.md").write_text(text, encoding="utf-8")
    typer.echo(f"{text}\nThis text: {out / 'advice.md'}")


def _engine(name: str, address: str | None) -> Any:
    """What makes the engine of a run; None for threads."""
    from functools import partial

    from fedbandit.errors import ConfigError

    if name == "threads":
        return None
    if name != "ray":
        raise ConfigError(f"--engine: should be threads or ray, not {name!r}")
    from fedbandit.engines.ray import RayEngine

    return partial(RayEngine, address=address)


def _note(text: str) -> None:
    """Progress goes beside the result, not into it."""
    typer.echo(text, err=True)
