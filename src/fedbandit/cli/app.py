"""The command line: a thin skin over the library. Imports what a command needs only when it runs."""

import errno
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fedbandit.cli import data as cli_data
from fedbandit.cli import deploy as cli_deploy
from fedbandit.cli import evaluate as cli_evaluate
from fedbandit.cli import experiments as cli_drift
from fedbandit.cli import experiments as cli_experiments
from fedbandit.cli import privacy as cli_privacy
from fedbandit.cli import theory as cli_theory
from fedbandit.core.errors import FedbanditError


class _Interrupted(FedbanditError):
    """Ctrl-C in a command that does nothing better with it."""

    exit_code = 130


class _Group(TyperGroup):
    """The parser makes a silent exit of an interrupt; this one lets it be told."""

    def invoke(self, context: Any) -> Any:
        try:
            return super().invoke(context)
        except KeyboardInterrupt:
            raise _Interrupted("interrupted") from None


app = typer.Typer(
    name="fedbandit",
    cls=_Group,
    help="Federated contextual bandits: simulate, evaluate and deploy.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_DISK_TROUBLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_WRONG_PLACE = (
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENAMETOOLONG,
    errno.ENOENT,
)


def main() -> None:
    """Run the command line; whatever a user can mend ends as one line and an exit code."""
    try:
        code = app(standalone_mode=False)
    except FedbanditError as error:
        _fail(str(error), error.exit_code)
    except OSError as error:
        if error.errno in _WRONG_PLACE and error.filename:
            _fail(f"{error.filename}: {error.strerror}", 2)
        if error.errno not in _DISK_TROUBLE:
            raise
        _fail(f"{error.filename or 'the disk'}: {error.strerror}; nothing is lost: free some space and run it again", 2)
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
    """Options of no command in particular."""


@app.command()
def run(
    what: Annotated[str, typer.Argument(metavar="NAME_OR_TOML", help="A preset, or a TOML file.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The run folder; run again with the same to resume.")],
    data: Annotated[str | None, typer.Option(help="A data set folder, or an embedded set: glyphs, topics.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Bandit rounds.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random in the run.")] = None,
    threads: Annotated[int | None, typer.Option(help="Worker threads; the results do not depend on it.")] = None,
    engine: Annotated[str | None, typer.Option(help="Where clients are computed: threads, or ray.")] = None,
    ray_address: Annotated[str | None, typer.Option(help="A running Ray cluster; none: one for this run.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, or a torch device such as cuda.")] = None,
    settings: Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Set any value.")] = [],  # noqa: B006
    checkpoint_seconds: Annotated[float, typer.Option(help="How often the state is kept; 0: every round.")] = 20,
    tracker: Annotated[str | None, typer.Option(help="Also send metrics to: tensorboard, or module:Name.")] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Print where the time went.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Run a simulation into a folder, or go on where it stopped."""
    from contextlib import closing

    from fedbandit.building.parts import make_engine
    from fedbandit.config import parse_settings
    from fedbandit.data import open_dataset
    from fedbandit.presets import load
    from fedbandit.runs.progress import show_progress
    from fedbandit.runs.run import execute
    from fedbandit.runs.trackers import tracker_named

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
            tracker=tracker_named(tracker) if tracker else None,
        )
    if outcome.summary is None:
        stopped = f"round {outcome.rounds} of {config.rounds}"
        if outcome.pretraining is not None:
            stopped = f"pre-training round {outcome.pretraining} of {config.pretraining.rounds}"
        print(f"stopped after {stopped}; the same command goes on from there")
        raise typer.Exit(130)
    reward = _number(outcome.summary["running_reward"])
    print(f"running average reward {reward} after {outcome.summary['rounds']} rounds")
    for key, value in outcome.summary.items():
        if key.startswith("test_"):
            print(f"{key.replace('_', ' ')} {_number(value)}")
    if config.privacy.mechanism != "none":
        from fedbandit.privacy.reporting import in_one_line

        print(in_one_line(outcome.summary["privacy"]))
    print(f"{outcome.summary['seconds_per_round']:.4f} seconds a round; everything is in {out}")
    if profile:
        _print_profile(outcome.profile)


@app.command()
def presets(names_only: Annotated[bool, typer.Option("--names", help="Only the names.")] = False) -> None:
    """List the named configurations: the paper's tables, with their parameters."""
    from fedbandit.presets import all_presets, describe

    found = all_presets()
    width = max(map(len, found))
    for name, config in found.items():
        if names_only:
            print(name)
            continue
        print(f"{name:<{width}}  {describe(config)}")


@app.command()
def demo(out: Annotated[Path, typer.Option("--out", "-o", help="Where runs and picture go.")] = Path("demo")) -> None:
    """Compare four policies on embedded data in about two minutes."""
    from fedbandit.report.demo import demo as play

    play(out)


def _number(value: float | None) -> str:
    """Four digits; a run whose rounds had no events, or were never evaluated, has none."""
    return "-" if value is None else f"{value:.4f}"


def _print_profile(seconds: dict[str, float]) -> None:
    total = sum(seconds.values())
    for name, value in sorted(seconds.items(), key=lambda item: -item[1]):
        print(f"{name:<12} {value:8.2f} s  {100 * value / total:5.1f}%")


app.add_typer(cli_data.app, name="data")


app.add_typer(cli_privacy.app, name="privacy")


app.add_typer(cli_deploy.app, name="deploy")


cli_experiments.register(app)


for command in (
    cli_evaluate.evaluate,
    cli_evaluate.train_offline,
    cli_evaluate.tune,
    cli_drift.drift,
    cli_theory.theory,
    cli_theory.regret,
):
    app.command(command.__name__.replace("_", "-"))(command)


if __name__ == "__main__":
    main()
