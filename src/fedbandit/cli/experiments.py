"""Commands for many runs: figure, sweep, report, watch, advise, drift."""

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
    from fedbandit.core.errors import ConfigError
    from fedbandit.paper.catalogue import matching
    from fedbandit.paper.figures import Request
    from fedbandit.paper.gallery import make_gallery
    from fedbandit.runs.ray_runner import runner_of

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


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders that hold some.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")] = Path("report.html"),
) -> None:
    """Make one self-contained HTML page of runs: curves, parameters, data, and how to repeat them."""
    from fedbandit.report.report import write_report

    typer.echo(f"report: {write_report(runs, out)}")


def watch(
    folder: Annotated[Path, typer.Argument(help="The folder whose runs to follow.")] = Path("."),
    port: Annotated[int, typer.Option(help="The port on 127.0.0.1; 0 takes any free one.")] = 8327,
) -> None:
    """Serve a page on this machine that follows running and finished runs."""
    from fedbandit.report.watch import make_server

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
    from fedbandit.core.files import write_text
    from fedbandit.runs.ray_runner import runner_of
    from fedbandit.studies.advice import hold, recommendation

    with runner_of(engine, ray_address, workers) as runner:
        held = hold(data, budget, out, scenario=scenario, epsilon=epsilon or None, runner=runner, say=_note)
    text = recommendation(held)
    write_text(out / "advice.md", text)
    typer.echo(f"{text}\nThis text: {out / 'advice.md'}")


def _note(text: str) -> None:
    """Progress goes beside the result, not into it."""
    typer.echo(text, err=True)


def drift(
    kind: Annotated[str, typer.Option(help="permute (labels), appear (actions), or rotate (preferences).")] = "permute",
    data: Annotated[str, typer.Option(help="A data set folder, or an embedded set: glyphs, topics.")] = "topics",
    at: Annotated[str, typer.Option(help="The rounds before which the world changes, separated by commas.")] = "200",
    rounds: Annotated[int, typer.Option(help="Rounds of each run.")] = 400,
    deploy_every: Annotated[int, typer.Option(help="Rounds between deployments.")] = 10,
    policies: Annotated[str, typer.Option(help="Which, separated by commas.")] = "greedy,epsilon-greedy,softmax,falcon",
    seeds: Annotated[int, typer.Option(help="Runs of each policy.")] = 3,
    settings: Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Set any value.")] = [],  # noqa: B006
    out: Annotated[Path, typer.Option("--out", "-o", help="The picture to make (.png or .svg).")] = Path("drift.png"),
) -> None:
    """How far each policy falls when the world changes, and how soon it recovers: a table and a picture.

    Stopped and given again, the same command goes on.
    """
    from itertools import pairwise

    from fedbandit.config import parse_settings
    from fedbandit.core.errors import ConfigError
    from fedbandit.data import open_dataset
    from fedbandit.results.plots import require_picture
    from fedbandit.studies.comparison import telling
    from fedbandit.studies.drift import DriftStudy, draw, members, play, table
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
        raise ConfigError("--policies: name one at least")
    edges = [1, *changes, rounds + 1]
    if seeds < 1 or any(later - earlier < study.window for earlier, later in pairwise(edges)):
        raise ConfigError(f"--at, --rounds: leave at least {study.window} rounds before, between and after changes")
    require_picture(out)
    names = {policy: name_of(policy, config) for policy, config in members(study).items()}
    runs = out.with_name(f"{out.stem}-runs")
    outcomes = play(
        study,
        lambda policy, seed: runs / names[policy] / f"seed-{seed}",
        on_end=telling(lambda text: typer.echo(text, err=True)),
    )
    typer.echo(table(study, outcomes))
    title = {"permute": "Labels trade places", "appear": "New actions appear", "rotate": "Preferences rotate"}
    shown = f"{title.get(kind, kind)} ({open_dataset(data).header.name}, {seeds} seeds)"
    typer.echo(f"{draw(study, outcomes, out, shown)}; runs: {runs}")
