"""The program itself: where its commands are, and what becomes of their errors.

Only the module of the command that is asked for is imported: a short command should not wait for the others.
"""

import errno
import importlib
import os
import select
import sys
from typing import Annotated

import typer

from fedbandit.cli.help import Commands, Section
from fedbandit.core.errors import FedbanditError, needing

# Every command or group, in the order of the help: its section, the module of this package, and its name there.
_COMMANDS = {
    "run": (Section.SIMULATE, "run", "run"),
    "presets": (Section.SIMULATE, "run", "presets"),
    "demo": (Section.SIMULATE, "run", "demo"),
    "watch": (Section.SIMULATE, "experiments", "watch"),
    "report": (Section.SIMULATE, "experiments", "report"),
    "compare": (Section.STUDY, "experiments", "compare"),
    "sweep": (Section.STUDY, "experiments", "sweep"),
    "advise": (Section.STUDY, "experiments", "advise"),
    "figure": (Section.STUDY, "experiments", "figure"),
    "gallery": (Section.STUDY, "experiments", "gallery"),
    "drift": (Section.STUDY, "experiments", "drift"),
    "data": (Section.DATA, "data", "app"),
    "evaluate": (Section.LOGS, "evaluate", "evaluate"),
    "train-offline": (Section.LOGS, "evaluate", "train_offline"),
    "tune": (Section.LOGS, "evaluate", "tune"),
    "theory": (Section.LOGS, "evaluate", "theory"),
    "regret": (Section.LOGS, "evaluate", "regret"),
    "privacy": (Section.PROTECT, "privacy", "app"),
    "deploy": (Section.PROTECT, "deploy", "app"),
}
_DISK_TROUBLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main() -> None:
    """Run the command line; an error that a user can fix becomes one line and an exit code."""
    try:
        try:
            _answer()
        finally:
            sys.stdout.flush()
    except BrokenPipeError as error:
        if not _unread():
            _fail(str(error.strerror), 2)  # of a connection
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # Python would try again at its end
        sys.exit(1)


def _unread() -> bool:
    """Whether the reader of the output has stopped."""
    try:
        output = sys.stdout.fileno()
    except OSError:  # not a file
        return False
    states = select.poll()
    states.register(output)
    return any(state & select.POLLERR for _, state in states.poll(0))


def _answer() -> None:
    # Looking for plug-ins among all installed packages takes longer than pydantic itself, and there are none for us.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        with needing("this command"):
            code = program(*sys.argv[1:2])(standalone_mode=False)
    except FedbanditError as error:
        _fail(str(error), error.exit_code)
    except OSError as error:
        if error.errno is None or isinstance(
            error, BrokenPipeError
        ):  # not the system's, or `main` looks at it
            raise
        place = f"{error.filename}: " if error.filename else ""
        if error.errno in _DISK_TROUBLE:
            place = place or "the disk: "
            _fail(
                f"{place}{error.strerror}; nothing is lost: free some space and run the same command again",
                2,
            )
        _fail(f"{place}{error.strerror}", 2)
    except Exception as error:
        message = getattr(error, "format_message", None)  # the parser's own errors
        if message is None:
            raise
        if (
            type(error).__name__ == "NoArgsIsHelpError"
        ):  # a command without a sub-command shows its help
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


def program(asked: str | None = None) -> Commands:
    """The program with all its commands, or with the one that is asked for, if there is such a command."""
    app = Commands("Federated contextual bandits: simulate, evaluate and deploy.")
    app.callback()(_options)
    for name in [asked] if asked in _COMMANDS else _COMMANDS:
        section, module, attribute = _COMMANDS[name]
        part = getattr(importlib.import_module(f"fedbandit.cli.{module}"), attribute)
        if isinstance(part, Commands):
            app.add_typer(part, name=name, rich_help_panel=section)
        else:
            app.command(name, section=section)(part)
    return app


def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    """Options of the program itself."""


if __name__ == "__main__":
    main()
