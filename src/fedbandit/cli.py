"""The command line: a thin skin over the library. Imports what a command needs only when it runs."""

import errno
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fedbandit import cli_data, cli_deploy, cli_drift, cli_evaluate, cli_experiments, cli_privacy, cli_theory
from fedbandit.errors import FedbanditError

app = typer.Typer(
    name="fedbandit",
    help="Federated contextual bandits: simulate, evaluate and deploy.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_DISK_TROUBLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_WRONG_PLACE = (errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS)


def main() -> None:
    """Run the command line; whatever a user can mend ends as one line and an exit code."""
    try:
        code = app(standalone_mode=False)
    except FedbanditError as error:
        _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
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

    from fedbandit.config import parse_settings
    from fedbandit.data import open_dataset
    from fedbandit.engines.choose import make_engine
    from fedbandit.experiments.progress import show_progress
    from fedbandit.experiments.run import run as play
    from fedbandit.experiments.trackers import tracker_named

    named: dict[str, Any] = {"data.source": data, "rounds": rounds, "seed": seed}
    named |= {"threads": threads, "engine": engine, "device": device}
    chosen = {key: value for key, value in named.items() if value is not None}
    config = _load(what).with_values({**chosen, **parse_settings(settings)})
    dataset = open_dataset(config.data.source)
    with closing(make_engine(config, dataset, ray_address)) as clients_engine:
        outcome = play(
            config,
            out,
            dataset=dataset,
            engine=clients_engine,
            progress=None if quiet else show_progress,
            checkpoint_seconds=checkpoint_seconds,
            tracker=tracker_named(tracker) if tracker else None,
        )
    if outcome.summary is None:
        print(f"stopped after round {outcome.rounds} of {config.rounds}; the same command goes on from there")
        raise typer.Exit(130)
    print(f"running average reward {outcome.summary['running_reward']:.4f} after {outcome.summary['rounds']} rounds")
    for key, value in outcome.summary.items():
        if key.startswith("test_"):
            print(f"{key.replace('_', ' ')} {value:.4f}")
    if config.privacy.mechanism != "none":
        from fedbandit.privacy.reporting import in_one_line

        print(in_one_line(outcome.summary["privacy"]))
    print(f"{outcome.summary['seconds_per_round']:.4f} seconds a round; everything is in {out}")
    if profile:
        _print_profile(outcome.profile)


@app.command()
def presets(names_only: Annotated[bool, typer.Option("--names", help="Only the names.")] = False) -> None:
    """List the named configurations: the paper's tables, with their parameters."""
    from fedbandit.experiments.presets import all_presets

    found = all_presets()
    width = max(map(len, found))
    for name, config in found.items():
        if names_only:
            print(name)
            continue
        parameters = " ".join(f"{key}={value:g}" for key, value in config.policy.parameters.items())
        rates = f"server {config.server.learning_rate:g}  client {config.client.learning_rate:g}"
        what = f"{rates}  {parameters}" if config.training else "the initial model, untouched"
        print(f"{name:<{width}}  {config.rounds} rounds, deploying every {config.deploy_every}  {what}")


@app.command()
def demo(out: Annotated[Path, typer.Option("--out", "-o", help="Where runs and picture go.")] = Path("demo")) -> None:
    """Compare four policies on embedded data in about two minutes."""
    from fedbandit.experiments.demo import demo as play

    play(out)


def _load(what: str) -> Any:
    from fedbandit.config import Config, read_toml
    from fedbandit.experiments.presets import preset

    if what.endswith(".toml") or Path(what).is_file():
        return Config.build(read_toml(Path(what)), where=f"{what}: ")
    return preset(what)


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
