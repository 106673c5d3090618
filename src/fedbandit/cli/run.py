"""The commands `run`, `presets` and `demo`. A command imports what it needs when it runs."""

from pathlib import Path
from typing import Annotated, Any

import typer


def run(
    what: Annotated[str, typer.Argument(metavar="NAME_OR_TOML", help="A preset or a TOML file.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The run folder; use the same one again to resume.")
    ],
    data: Annotated[
        str | None, typer.Option(help="A data set folder, or the embedded glyphs or topics.")
    ] = None,
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
    ray_address: Annotated[
        str | None, typer.Option(help="A Ray cluster to join.", show_default="start one")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Torch device: cpu, cuda, cuda:1.")] = None,
    settings: Annotated[
        list[str],
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Set any value of the configuration; repeatable."
        ),
    ] = [],  # noqa: B006
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
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Run a simulation into a folder, or resume it.

    Ctrl-C stops after the current round. Run the same command again to resume, or with more --rounds to extend a
    finished run (not a private one).
    """
    from contextlib import closing

    from fedbandit.assembly.parts import make_engine
    from fedbandit.config import parse_settings
    from fedbandit.data import open_dataset
    from fedbandit.presets import load
    from fedbandit.runs.reporting import show_progress
    from fedbandit.runs.run import execute

    named: dict[str, Any] = {"data.source": data, "rounds": rounds, "seed": seed}
    named |= {"threads": threads, "engine": engine, "device": device}
    chosen = {key: value for key, value in named.items() if value is not None}
    config = load(what).with_values({**chosen, **parse_settings(settings)})
    dataset = open_dataset(config.data.source)
    with closing(make_engine(config, ray_address)) as clients_engine:
        outcome = execute(
            config,
            out,
            dataset=dataset,
            engine=clients_engine,
            progress=None if quiet else show_progress,
            checkpoint_seconds=checkpoint_seconds,
            tracker=tracker,
        )
    if outcome.summary is None:
        stopped = f"round {outcome.rounds} of {config.rounds}"
        if outcome.pretraining is not None:
            stopped = f"pre-training round {outcome.pretraining} of {config.pretraining.rounds}"
        print(f"stopped after {stopped}; run the same command again to resume")
        raise typer.Exit(130)
    if outcome.finished_before:
        longer = "" if config.privacy.mechanism != "none" else "more --rounds extend it; "
        print(f"already finished; {longer}for another run use another folder")
    reward = _number(outcome.summary["running_reward"])
    print(f"running average reward {reward} after {outcome.summary['rounds']} rounds")
    for key, value in outcome.summary.items():
        if key.startswith("test_"):
            print(f"{key.replace('_', ' ')} {_number(value)}")
    if config.privacy.mechanism != "none":
        from fedbandit.privacy.reporting import in_one_line

        print(in_one_line(outcome.summary["privacy"]))
        if "chosen" in outcome.summary["privacy"]:
            print(outcome.summary["privacy"]["chosen"])
    print(f"{outcome.summary['seconds_per_round']:.4f} seconds a round; everything is in {out}")
    if profile:
        _print_profile(outcome.profile)


def presets(
    names_only: Annotated[bool, typer.Option("--names", help="Print the names only.")] = False,
) -> None:
    """List the presets: the paper's tables with their parameters."""
    from fedbandit.presets import all_presets, describe

    found = all_presets()
    width = max(map(len, found))
    for name, config in found.items():
        if names_only:
            print(name)
            continue
        print(f"{name:<{width}}  {describe(config)}")


def demo(
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The folder for runs and picture.")
    ] = Path("demo"),
) -> None:
    """Compare four policies on embedded data in two minutes."""
    from fedbandit.report.report import demo as run_demo

    run_demo(out)


def _number(value: float | None) -> str:
    """Four digits; a run whose rounds had no events, or were never evaluated, has none."""
    return "-" if value is None else f"{value:.4f}"


def _print_profile(seconds: dict[str, float]) -> None:
    total = sum(seconds.values())
    for name, value in sorted(seconds.items(), key=lambda item: -item[1]):
        print(f"{name:<12} {value:8.2f} s  {100 * value / total:5.1f}%")
