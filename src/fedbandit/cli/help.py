"""How every group of commands shows its help and refuses a command it does not have: plain text, in sections.

Knows no command.
"""

import re
from collections.abc import Callable, Collection
from enum import StrEnum
from typing import Any

import click
import typer
from typer.core import TyperCommand, TyperGroup

from fedbandit.core.errors import FedbanditError
from fedbandit.core.parts import nearest


class Section(StrEnum):
    """The sections of the program's help, in their order."""

    SIMULATE = "Simulate"
    STUDY = "Compare and choose"
    DATA = "Data"
    LOGS = "Logs and theory"
    PROTECT = "Privacy and devices"
    COMMANDS = "Commands"


class _Interrupted(FedbanditError):
    """Ctrl-C in a command that does not handle it."""

    exit_code = 130


def _write_parameters(
    command: click.Command, context: click.Context, formatter: click.HelpFormatter
) -> None:
    """Arguments, then options. Typer escapes brackets for rich even if it prints plain text."""
    for kind in ("argument", "option"):
        chosen = [
            parameter
            for parameter in command.get_params(context)
            if parameter.param_type_name == kind
        ]
        records = [
            record
            for parameter in chosen
            if (record := parameter.get_help_record(context)) is not None
        ]
        if records:
            with formatter.section(f"{kind.title()}s"):
                formatter.write_dl([(names, _plain(text)) for names, text in records])


def _plain(text: str) -> str:
    return re.sub(r"\[default: \((.*)\)\]$", r"[default: \1]", text.replace("\\[", "["))


class _Command(TyperCommand):
    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        _write_parameters(self, ctx, formatter)


def _commands_of(command: click.Command) -> Collection[str]:
    return command.commands if isinstance(command, click.Group) else ()


class _Group(TyperGroup):
    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        _write_parameters(self, ctx, formatter)
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The first paragraph of every command's help, whole, in the section that the command was added to."""
        sections: dict[Section, list[tuple[str, str]]] = {section: [] for section in Section}
        for name, command in self.commands.items():
            summary = " ".join((command.help or "").split("\n\n")[0].split()).removesuffix(".")
            section = getattr(command, "rich_help_panel", None)
            sections[section if isinstance(section, Section) else Section.COMMANDS].append(
                (name, summary)
            )
        widest = max(len(name) for name in self.commands)
        for section, rows in sections.items():
            if rows:
                with formatter.section(section):
                    formatter.write_dl([(name.ljust(widest), summary) for name, summary in rows])

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[Any, Any, list[str]]:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            inner = [
                f"{name} {args[0]}"
                for name, group in self.commands.items()
                if args[0] in _commands_of(group)
            ]
            hint = (
                f"; did you mean {' or '.join(inner)}?"
                if inner
                else nearest(args[0], self.commands)
            )
            raise click.UsageError(f"no such command {args[0]!r}{hint}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """The parser exits silently on an interrupt; here it becomes an error with a line."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise _Interrupted("interrupted") from None


class Commands(typer.Typer):
    """A group of commands; without a command it shows its help."""

    def __init__(self, help: str) -> None:
        super().__init__(
            cls=_Group,
            help=help,
            no_args_is_help=True,
            add_completion=False,
            pretty_exceptions_enable=False,
            rich_markup_mode=None,
        )

    def command(
        self, name: str | None = None, section: Section = Section.COMMANDS, **options: Any
    ) -> Callable[..., Any]:
        """Add a command to a section of the help."""
        return super().command(name, cls=_Command, rich_help_panel=section, **options)
