"""The program itself: where its commands are, and what becomes of their errors.

Only the module of the command that is asked for is imported: a short command should not wait for
the others.
"""

import errno
import importlib
import os
import select
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from fedbandit.cli.help import Commands, Section
from fedbandit.core.errors import FedbanditError, needing

# Every command or group, in the order of the help: its section, the module of this package, and its
# name there.
_COMMANDS = {
    "run": (Section.SIMULATE, "runs", "run"),
    "presets": (Section.SIMULATE, "runs", "presets"),
    "demo": (Section.SIMULATE, "runs", "demo"),
    "watch": (Section.SIMULATE, "runs", "watch"),
    "report": (Section.SIMULATE, "runs", "report"),
    "compare": (Section.STUDY, "runs", "compare"),
    "sweep": (Section.STUDY, "runs", "sweep"),
    "bakeoff": (Section.STUDY, "runs", "bakeoff"),
    "advise": (Section.STUDY, "runs", "advise"),
    "figure": (Section.STUDY, "runs", "figure"),
    "gallery": (Section.STUDY, "runs", "gallery"),
    "drift": (Section.STUDY, "runs", "drift"),
    "data": (Section.DATA, "data", "app"),
    "evaluate": (Section.LOGS, "evaluate", "evaluate"),
    "train-offline": (Section.LOGS, "evaluate", "train_offline"),
    "tune": (Section.LOGS, "evaluate", "tune"),
    "theory": (Section.LOGS, "evaluate", "theory"),
    "regret": (Section.LOGS, "evaluate", "regret"),
    "privacy": (Section.PROTECT, "privacy", "app"),
    "export": (Section.PROTECT, "evaluate", "export"),
    "deploy": (Section.PROTECT, "deploy", "app"),
}
# Commands that build what a run folder or a model file names.
_TRUSTING = (
    "run", "compare", "sweep", "bakeoff", "evaluate", "train-offline", "tune", "regret", "export",
)  # fmt: skip
_DEBUG = "FEDBANDIT_DEBUG"  # set: the traceback stands before the line of an error
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
    """Run the command that was asked for, and turn what goes wrong into one line."""
    # Looking for plug-ins among all installed packages takes longer than pydantic itself, and there
    # are none for us.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        with needing("this command"):
            code = program(*sys.argv[1:2])(prog_name="fedbandit", standalone_mode=False)
    except FedbanditError as error:
        if os.environ.get(_DEBUG):
            traceback.print_exception(error)
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
                f"{place}{error.strerror}; nothing is lost: free some space and run the same"
                " command again",
                2,
            )
        _fail(f"{place}{error.strerror}{_about_cache(error.filename)}", 2)
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


def _about_cache(file: object) -> str:
    """Advice about a cache folder that cannot be made or written; empty for other files."""
    from fedbandit.data import cache_folder

    try:
        cache, place = cache_folder(), Path(str(file))
    except RuntimeError:  # no home at all
        return "; set FEDBANDIT_CACHE to a folder for embedded data and pre-trained models"
    if file is None or not (place in (cache, *cache.parents) or place.is_relative_to(cache)):
        return ""
    kept = f"embedded data and pre-trained models are kept in {cache}"
    return f"; {kept}: set FEDBANDIT_CACHE to a folder that can be written"


def _fail(message: str, code: int) -> None:
    """Print one line on stderr and end with this exit code."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


def _print_version(wanted: bool) -> None:
    """Print the version and end, where `--version` is given."""
    if wanted:
        from fedbandit import __version__

        print(f"fedbandit {__version__}")
        raise typer.Exit


def program(asked: str | None = None) -> Commands:
    """The program with all its commands, or with the one that is asked for, if there is such a
    command.
    """
    app = Commands("Federated contextual bandits: simulate, evaluate and deploy.", completion=True)
    app.callback()(_options)
    for name in [asked] if asked in _COMMANDS else _COMMANDS:
        section, module, attribute = _COMMANDS[name]
        part = getattr(importlib.import_module(f"fedbandit.cli.{module}"), attribute)
        if isinstance(part, Commands):
            app.add_typer(part, name=name, rich_help_panel=section)
        else:
            app.command(name, section=section, trusts=name in _TRUSTING)(part)
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
