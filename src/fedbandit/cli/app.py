"""The commands `run`, `presets` and `demo`, and the program itself. A command imports what it needs when it runs."""

import errno
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fedbandit.cli import data as cli_data
from fedbandit.cli import deploy as cli_deploy
from fedbandit.cli import evaluate as cli_evaluate
from fedbandit.cli import evaluate as cli_theory
from fedbandit.cli import experiments as cli_experiments
from fedbandit.cli import privacy as cli_privacy
from fedbandit.cli.help import Commands, Section
from fedbandit.core.errors import FedbanditError, needing

app = Commands("Federated contextual bandits: simulate, evaluate and deploy.")
_DISK_TROUBLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main() -> None:
    """Run the command line; an error that a user can fix becomes one line and an exit code."""
    # Looking for plug-ins among all installed packages takes longer than pydantic itself, and there are none for us.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        with needing("this command"):
            code = app(standalone_mode=False)
    except FedbanditError as error:
        _fail(str(error), error.exit_code)
    except OSError as error:
        if error.errno is None:  # not the system's
            raise
        place = f"{error.filename}: " if error.filename else ""
        if error.errno in _DISK_TROUBLE:
            place = place or "the disk: "
            _fail(f"{place}{error.strerror}; nothing is lost: free some space and run the same command again", 2)
        _fail(f"{place}{error.strerror}", 2)
    except Exception as error:
        message = getattr(error, "format_message", None)  # the parser's own errors
        if message is None:
            raise
        if type(error).__name__ == "NoArgsIsHelpError":  # a command without a sub-command shows its help
            print(message())
            sys.exit(0)
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "fedbandit"
        _fail(f"{message()} (see `{command} --help`)", 2)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> None:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


def _print_version(wanted: bool) -> None:
    if wanted:
        from fedbandit import __version__

        print(f"fedbandit {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Options of the program itself."""


@app.command(section=Section.SIMULATE)
def run(
    what: Annotated[str, typer.Argument(metavar="NAME_OR_TOML", help="A preset or a TOML file.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The run folder; use the same one again to resume.")],
    data: Annotated[str | None, typer.Option(help="A data set folder, or the embedded glyphs or topics.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Number of bandit rounds; more extend a finished run.")] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed of the bandit phase.")] = None,
    threads: Annotated[int | None, typer.Option(help="Worker threads; results do not depend on their number.")] = None,
    engine: Annotated[str | None, typer.Option(help="Where clients are computed: threads or ray.")] = None,
    ray_address: Annotated[str | None, typer.Option(help="A Ray cluster to join.", show_default="start one")] = None,
    device: Annotated[str | None, typer.Option(help="Torch device: cpu, cuda, cuda:1.")] = None,
    settings: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="Set any value of the configuration; repeatable.")
    ] = [],  # noqa: B006
    checkpoint_seconds: Annotated[float, typer.Option(help="Seconds between checkpoints; 0 for every round.")] = 20,
    tracker: Annotated[
        str | None, typer.Option(help="Also send metrics to tensorboard, mlflow, wandb or my_module:MyTracker.")
    ] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Print the time spent in each step.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Run a simulation into a folder, or resume it.

    Ctrl-C stops after the current round. Run the same command again to resume, or with more --rounds to extend a
    finished run (not a private one).
    """
    from contextlib import closing

    from fedbandit.building.parts import make_engine
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


@app.command(section=Section.SIMULATE)
def presets(names_only: Annotated[bool, typer.Option("--names", help="Print the names only.")] = False) -> None:
    """List the presets: the paper's tables with their parameters."""
    from fedbandit.presets import all_presets, describe

    found = all_presets()
    width = max(map(len, found))
    for name, config in found.items():
        if names_only:
            print(name)
            continue
        print(f"{name:<{width}}  {describe(config)}")


@app.command(section=Section.SIMULATE)
def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder for runs and picture.")] = Path("demo"),
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


app.command(section=Section.SIMULATE)(cli_experiments.watch)
app.command(section=Section.SIMULATE)(cli_experiments.report)
app.command(section=Section.STUDY)(cli_experiments.compare)
app.command(section=Section.STUDY)(cli_experiments.sweep)
app.command(section=Section.STUDY)(cli_experiments.advise)
app.command(section=Section.STUDY)(cli_experiments.figure)
app.command(section=Section.STUDY)(cli_experiments.gallery)
app.command(section=Section.STUDY)(cli_experiments.drift)
app.add_typer(cli_data.app, name="data", rich_help_panel=Section.DATA)
app.command(section=Section.LOGS)(cli_evaluate.evaluate)
app.command("train-offline", section=Section.LOGS)(cli_evaluate.train_offline)
app.command(section=Section.LOGS)(cli_evaluate.tune)
app.command(section=Section.LOGS)(cli_theory.theory)
app.command(section=Section.LOGS)(cli_theory.regret)
app.add_typer(cli_privacy.app, name="privacy", rich_help_panel=Section.PROTECT)
app.add_typer(cli_deploy.app, name="deploy", rich_help_panel=Section.PROTECT)


if __name__ == "__main__":
    main()
