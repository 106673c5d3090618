"""The commands about runs: run, compare, sweep, advise, figure, drift, report, watch.

A command imports what it needs when it runs.
"""

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import fedbandit
from fedbandit.cli.help import (
    Answer,
    Engine,
    Folder,
    OwnData,
    RayAddress,
    Seeds,
    Settings,
    What,
    Workers,
    configured,
    numbers,
    parsed_settings,
    runner_of,
)
from fedbandit.core.errors import refuse
from fedbandit.core.progress import to_stderr

if TYPE_CHECKING:
    from fedbandit.results import Results


def run(
    what: What,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The run folder; use the same one again to resume.")
    ],
    data: OwnData = None,
    rounds: Annotated[
        int | None, typer.Option(help="Number of bandit rounds; more extend a finished run.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed of the bandit phase.")] = None,
    threads: Annotated[
        int | None, typer.Option(help="Worker threads; results do not depend on their number.")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="Where clients are computed: threads or ray.")
    ] = None,
    ray_address: RayAddress = None,
    device: Annotated[str | None, typer.Option(help="Torch device: cpu, cuda, cuda:1.")] = None,
    settings: Settings = [],  # noqa: B006 - typer's way to say "repeatable"
    checkpoint_seconds: Annotated[
        float, typer.Option(help="Seconds between checkpoints; 0 for every round.")
    ] = 20,
    tracker: Annotated[
        str | None,
        typer.Option(
            help="Also send metrics to tensorboard, mlflow, wandb or my_module:MyTracker."
        ),
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Print the time spent in each step.")
    ] = False,
) -> Answer:
    """Run a simulation into a folder, or resume it.

    Ctrl-C stops after the current round. Run the same command again to resume, or with more
    --rounds to extend a finished run (not a private one).
    """
    from fedbandit.assembly.parts import make_engine
    from fedbandit.runs.reporting import no_model_acts, show_progress
    from fedbandit.runs.run import execute

    named: dict[str, Any] = {"data.source": data, "rounds": rounds, "seed": seed}
    named |= {"threads": threads, "engine": engine, "device": device}
    config = configured(what, settings, named)
    dataset = fedbandit.open_dataset(config.data.source)
    with closing(make_engine(config, ray_address)) as clients_engine:
        outcome = execute(
            config,
            out,
            dataset=dataset,
            engine=clients_engine,
            progress=show_progress,
            checkpoint_seconds=checkpoint_seconds,
            tracker=tracker,
        )
    if outcome.summary is None:
        stopped = f"round {outcome.rounds} of {config.rounds}"
        if outcome.pretraining is not None:
            stopped = f"pre-training round {outcome.pretraining} of {config.pretraining.rounds}"
        print(f"stopped after {stopped}; run the same command again to resume")
        raise typer.Exit(130)
    told, summary = [], outcome.summary
    if outcome.finished_before:
        longer = "" if config.privacy.mechanism != "none" else "more --rounds extend it; "
        told.append(f"already finished; {longer}for another run use another folder")
    reward = _number(summary["running_reward"])
    told.append(f"running average reward {reward} after {summary['rounds']} rounds")
    held_out = {key: value for key, value in summary.items() if key.startswith("test_")}
    told += [f"{key.replace('_', ' ')} {_number(value)}" for key, value in held_out.items()]
    if config.privacy.mechanism != "none":
        from fedbandit.privacy.reporting import in_one_line

        told.append(in_one_line(summary["privacy"]))
        told += [summary["privacy"]["chosen"]] if "chosen" in summary["privacy"] else []
    told.append(f"{summary['seconds_per_round']:.4f} seconds a round; everything is in {out}")
    told += [hint] if (hint := no_model_acts({"this run": config})) else []
    if profile:
        total = sum(outcome.profile.values())
        for name, spent in sorted(outcome.profile.items(), key=lambda item: -item[1]):
            told.append(f"{name:<12} {spent:8.2f} s  {100 * spent / total:5.1f}%")
    value = {**summary, "folder": str(out)}
    return Answer("\n".join(told), [value], value)


def _number(value: float | None) -> str:
    """Four digits; a run whose rounds had no events, or were never evaluated, has none."""
    return "-" if value is None else f"{value:.4f}"


def presets(
    name: Annotated[str | None, typer.Argument(help="The preset to print as TOML.")] = None,
    names_only: Annotated[bool, typer.Option("--names", help="Print the names only.")] = False,
) -> None:
    """List the presets, or print one as TOML."""
    from fedbandit.presets import all_presets, describe, preset

    if name is not None:
        typer.echo(preset(name).to_toml(), nl=False)
        return
    found = all_presets()
    width = max(map(len, found))
    for each, config in found.items():
        typer.echo(each if names_only else f"{each:<{width}}  {describe(config)}")


def demo(
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The folder for runs and picture.")
    ] = Path("demo"),
) -> None:
    """Compare four policies on embedded data in two minutes."""
    from fedbandit.report.report import demo as run_demo

    run_demo(out)


def figure(
    name: Annotated[
        str,
        typer.Argument(
            help="One panel (fig1a to fig4d), one figure (fig1 to fig4), ablation-server-optimizer,"
            " ablation-importance-weighting, all of these, or one not in the paper: weights,"
            " extrapolation,"
            " cohorts, population."
        ),
    ],
    data: Annotated[
        str | None,
        typer.Option(help="A data set folder.", show_default="embedded glyphs or topics"),
    ] = None,
    seeds: Seeds = 5,
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
    settings: Settings = [],  # noqa: B006
    workers: Workers = None,
    engine: Engine = "threads",
    ray_address: RayAddress = None,
) -> None:
    """Reproduce a figure of the paper and compare the numbers.

    Run the same command again to resume after an interruption; finished runs are reused.
    """
    from fedbandit.paper.catalogue import matching
    from fedbandit.paper.figures import FigureRequest, make_figures
    from fedbandit.paper.records import text_of

    refuse((budget is not None and not tune, "--budget: needs --tune"))
    names = matching(name)
    minutes = (10.0 if budget is None else budget) if tune else None
    with runner_of(engine, ray_address, workers) as runner:
        request = FigureRequest(data, seeds, scale, parsed_settings(settings), minutes, runner)
        made, index = make_figures(names, request, out, typer.echo)
    for one in made:
        typer.echo(f"\n{text_of(one)}\n\npicture: {one.png}")
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
    from fedbandit.paper.records import comparison_table, comparisons, page, read_figures

    figures = read_figures(folders)
    write_text(out, page(figures, out.parent))
    typer.echo(comparison_table(comparisons(figures)))
    typer.echo(f"gallery: {out}")


def sweep(
    spec: Annotated[
        Path,
        typer.Argument(metavar="SPEC.toml", help="The values to vary; see docs/your-own-data.md."),
    ],
    out: Folder,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep checkpoints of finished runs, to extend them.")
    ] = False,
    workers: Workers = None,
    engine: Engine = "threads",
    ray_address: RayAddress = None,
) -> Answer:
    """Run every combination of the values in a file and rank them.

    Writes a table of all runs, and of the best a picture, differences and a report.
    """
    from fedbandit.results.reading import write_table
    from fedbandit.studies.sweeps import best_results, read_sweep, rows_of, run_sweep, summary_text

    wanted = read_sweep(spec)
    with runner_of(engine, ray_address, workers) as runner:
        ranked = run_sweep(wanted, out, runner=runner, say=to_stderr().say, keep=keep)
    rows = rows_of(ranked, wanted.all_seeds, out)
    written = write_table(rows, out / "results")
    winner = out / "winner.toml"
    end = f"winner: {winner}" if winner.exists() else f"no winner: {ranked[0].why_no_winner}"
    said = f"{summary_text(ranked)}\n\ntable: {' and '.join(map(str, written))}\n{end}"
    return comparison(best_results(ranked, wanted.all_seeds, out), out, said=said, rows=rows)


def comparison(
    results: "Results | None",
    out: Path,
    *,
    against: str | None = None,
    said: str = "",
    rows: list[dict[str, Any]] | None = None,
) -> Answer:
    """Write curves, differences and report of a comparison to `out`, and say what they show.

    `said` stands first; `rows` are the answer's in place of the differences.
    """
    from fedbandit.report.report import write_report
    from fedbandit.results.reading import write_table

    if results is None:
        return Answer(said, rows or [])
    found = results.differences(against=against)
    results.plot(path=out / "comparison.png")
    found.plot(out / "differences.png")
    tables = write_table(found.rows(), out / "comparison")
    folders = {run.folder.parent: run.label or "" for run in results.runs if run.folder is not None}
    page = write_report(list(folders), out / "report.html", folders)
    told = [*([said, ""] if said else []), f"{found}\n\n{found.in_words()}\n"]
    told += [f"note: {problem}" for problem in results.problems]
    pictures = f"{out / 'comparison.png'} and {out / 'differences.png'}"
    told.append(f"pictures: {pictures}; table: {' and '.join(map(str, tables))}; report: {page}")
    return Answer("\n".join(told), found.rows() if rows is None else rows)


def compare(
    configurations: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME_OR_TOML...",
            help="Presets or TOML files; changes may stand behind one: 'so-scratch-softmax policy.beta=0.5'.",
        ),
    ],
    out: Folder = Path("comparison"),
    seeds: Seeds = 5,
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
) -> Answer:
    """Run configurations with the same seeds and compare rewards.

    Prints a table with paired differences and their intervals, and writes pictures and a report.
    """
    from fedbandit.studies.compare import check_comparison, run_comparison

    members, labels = check_comparison(configurations, parsed_settings(settings), against)
    say = to_stderr().say
    with runner_of(engine, ray_address, workers) as runner:
        results = run_comparison(members, seeds, out, runner, labels, say)
    return comparison(results, out, against=against)


def bakeoff(
    spec: Annotated[
        Path, typer.Argument(metavar="SPEC.toml", help="What to cross; see docs/bakeoff.md.")
    ],
    out: Folder,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Start it however long it takes.")
    ] = False,
    limit: Annotated[float, typer.Option(help="Core-hours beyond which --yes is asked for.")] = 1.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, measure the cost, and stop.")
    ] = False,
    workers: Workers = None,
    engine: Engine = "threads",
    ray_address: RayAddress = None,
) -> Answer:
    """Cross rules and algorithms with situations and rank them.

    Prints its cost in core-hours first. Tables and pictures are written after each situation; run
    the same command again to resume.
    """
    from fedbandit.report.bakeoff import write_bakeoff
    from fedbandit.studies.bakeoff import read_bakeoff, run_bakeoff

    wanted, answer = read_bakeoff(spec), Answer("", [])
    with runner_of(engine, ray_address, workers) as runner:
        for found in run_bakeoff(
            wanted,
            out,
            runner=runner,
            say=to_stderr().say,
            most_hours=None if yes else limit,
            dry_run=dry_run,
        ):
            page = write_bakeoff(found, out)
            text = f"page: {page}; tables: {out}/results.csv, summary.csv, ranks.csv, cost.csv"
            answer = Answer(text, found.rows)
    return answer


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
    out: Folder = Path("advice"),
    scenario: Annotated[
        str, typer.Option(help="The scenario: scratch, init, init-shift or my_module:MyScenario.")
    ] = "init",
    epsilon: Annotated[
        float, typer.Option(help="The epsilon whose cost to measure; 0 for none.")
    ] = 8.0,
    workers: Workers = None,
    engine: Engine = "threads",
    ray_address: RayAddress = None,
) -> Answer:
    """Find out what to deploy on your data.

    Tunes every contender, runs the finalists longer on fresh seeds, and writes the recommendation
    with its evidence as text, as a page, and as a configuration to run.
    """
    from fedbandit.report.advice import write_advice
    from fedbandit.studies.advice import judge, run_contest

    with runner_of(engine, ray_address, workers) as runner:
        held = run_contest(
            data,
            budget,
            out,
            scenario=scenario,
            epsilon=epsilon or None,
            runner=runner,
            say=to_stderr().say,
        )
    files = f"This text: {out / 'advice.md'}; as a page: {out / 'advice.html'}"
    found = judge(held)
    value = {
        "recommended": found.recommended,
        "better_than": found.better_than,
        "doubts": found.doubts,
        "contenders": found.found.rows(),
    }
    return Answer(f"{write_advice(held, out)}\n{files}", found.found.rows(), value)


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
    settings: Settings = [],  # noqa: B006
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The picture to write (.png or .svg).")
    ] = Path("drift.png"),
    workers: Workers = None,
) -> Answer:
    """Measure how each policy recovers after a sudden change.

    Prints a table and draws a picture. Run the same command again to resume after an interruption.
    """
    from fedbandit.runs.local_runner import LocalRunner
    from fedbandit.studies.drift import DriftStudy, publish

    study = DriftStudy(
        data=data,
        kind=kind,
        rounds=rounds,
        at=tuple(numbers("at", at, int)),
        deploy_every=deploy_every,
        policies=[name.strip() for name in policies.split(",") if name.strip()],
        seeds=seeds,
        settings=tuple(parsed_settings(settings).items()),
    )
    progress = to_stderr()
    text, rows = publish(study, out, runner=LocalRunner(workers, progress), say=progress.say)
    return Answer(text, rows)
