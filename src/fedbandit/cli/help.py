"""Shared by all commands: help as plain text in sections, answers as text, JSON or a file, `--quiet`
and `--trust`, and options that several have.

Knows no command.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from fedbandit.core.errors import ConfigError, FedbanditError, refuse
from fedbandit.core.parts import is_code, nearest, trusting
from fedbandit.core.progress import quietly, to_stderr

if TYPE_CHECKING:
    from fedbandit.config import Config
    from fedbandit.runs.local_runner import Runner

What = Annotated[str, typer.Argument(metavar="NAME_OR_TOML", help="A preset or a TOML file.")]
Settings = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Set any value of the runs; repeatable."),
]
Parameters = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="A parameter of the policy; repeatable."),
]
OwnData = Annotated[
    str | None, typer.Option(help="A data set folder, or the embedded glyphs or topics.")
]
Seeds = Annotated[int, typer.Option(min=1, help="Number of seeds; they are 0, 1, 2 and so on.")]
Folder = Annotated[
    Path,
    typer.Option(
        "--out", "-o", file_okay=False, help="The folder for all results; use it again to resume."
    ),
]
Workers = Annotated[
    int | None, typer.Option(help="Number of parallel runs.", show_default="one per core")
]
Engine = Annotated[
    str, typer.Option(help="Where runs are computed: threads (this machine) or ray (a cluster).")
]
RayAddress = Annotated[
    str | None, typer.Option(help="A Ray cluster to join.", show_default="start one")
]
_TABLES = (".csv", ".json", ".parquet")


@dataclass(frozen=True)
class Answer:
    """The result of a command; a command that is annotated to return one has more options.

    They are `--json`, which prints `value` in place of `text`, `--quiet`, which shows no progress,
    and `--out`, which writes `rows` to a file, unless the command has an `--out` of its own.
    """

    text: str
    rows: Sequence[Mapping[str, Any]]
    value: Any = None  # None: the rows
    code: int = 0  # the exit code


def numbers(option: str, text: str, kind: type[Any] = float) -> list[Any]:
    """Numbers separated by commas, as an option gives them.

    Examples:
        >>> numbers("every", "1,5,20", int)
        [1, 5, 20]
    """
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise ConfigError(
            f"--{option}: expected {what} separated by commas, not {text!r}"
        ) from None


def parsed_settings(settings: Sequence[str]) -> dict[str, Any]:
    """The values of `--set`, by key."""
    from fedbandit.config import parse_settings

    return parse_settings(settings)


def configured(what: "str | Config", settings: Sequence[str], named: Mapping[str, Any]) -> "Config":
    """A preset, TOML file or configuration with the options that were given (not None), then
    those of `--set`.
    """
    from fedbandit.presets import load

    config = load(what) if isinstance(what, str) else what
    given = {key: value for key, value in named.items() if value is not None}
    return config.with_values(given | parsed_settings(settings))


@contextmanager
def runner_of(
    engine: str, ray_address: str | None = None, workers: int | None = None
) -> "Iterator[Runner]":
    """The runner that `--engine`, `--ray-address` and `--workers` ask for, for as long as it is
    needed; it shows the progress of its runs.
    """
    refuse(
        (
            workers is not None and workers < 1,
            f"--workers: should be at least 1, not {workers}",
        ),
        (
            engine not in ("threads", "ray"),
            f"--engine: should be threads or ray, not {engine!r}",
        ),
        (engine == "threads" and ray_address is not None, "--ray-address: needs --engine ray"),
    )
    if engine == "threads":
        from fedbandit.runs.local_runner import LocalRunner

        yield LocalRunner(workers, to_stderr())
        return
    from fedbandit.runs.ray_runner import RayRunner

    with closing(RayRunner(ray_address, workers, to_stderr())) as runner:
        yield runner


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


class _PlainHelp(click.Command):
    """Help as plain text; typer escapes brackets for rich even if it prints none of its markup."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Arguments, options and commands, as typer writes them."""
        write = formatter.write_dl

        def plain(rows: Sequence[tuple[str, str]], *more: int) -> None:
            write([(names, _plain(text)) for names, text in rows], *more)

        formatter.write_dl = plain  # type: ignore[method-assign, assignment]
        super().format_options(ctx, formatter)


def _plain(text: str) -> str:
    """A help text without the brackets that typer escapes for rich.

    Examples:
        >>> _plain("Number of runs.  \\\\[default: (one per core)]")
        'Number of runs.  [default: one per core]'
    """
    return re.sub(r"\[default: \((.*)\)\]$", r"[default: \1]", text.replace("\\[", "["))


class _Command(_PlainHelp, TyperCommand):
    """A command with plain help, and with the options of an `Answer` where it returns one."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        own, returned = {param.name for param in self.params}, self.callback.__annotations__
        self._answers, self._table = returned.get("return") is Answer, "out" not in own
        if self._answers and self._table:
            ends = f"Write the table to a file, too: {', '.join(_TABLES)}."
            self._add(["--out", "-o", "out"], ends, type=click.Path(dir_okay=False, path_type=Path))
        if self._answers:
            self._add(["--quiet", "-q", "quiet"], "Show no progress.", is_flag=True)
            self._add(["--json", "as_json"], "Print the result as JSON.", is_flag=True)

    def _add(self, names: list[str], text: str, **more: Any) -> None:
        """Add an option that the command's function does not see."""
        self.params.append(TyperOption(param_decls=names, help=text, **more))

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; of an `Answer`, print and write what was asked for."""
        if not self._answers:
            return super().invoke(ctx)
        from fedbandit.core.files import to_json, write_text

        out = ctx.params.pop("out") if self._table else None
        quiet, as_json = ctx.params.pop("quiet"), ctx.params.pop("as_json")
        refuse(
            (
                out is not None and out.suffix not in _TABLES,
                f"--out: {out} must end in {' or '.join(_TABLES)}",
            )
        )
        with quietly(quiet):
            answer: Answer = super().invoke(ctx)
        value = answer.rows if answer.value is None else answer.value
        if out is not None and out.suffix == ".json":
            write_text(out, to_json(value, indent=1) + "\n")
        elif out is not None:
            from fedbandit.results.reading import write_table

            write_table(answer.rows, out, [out.suffix])
        typer.echo(to_json(value, indent=1) if as_json else answer.text)
        if answer.code:
            raise typer.Exit(answer.code)
        return None


class _TrustingCommand(_Command):
    """A command that may open files from elsewhere, with `--trust` for the code that they name.

    A module that the command line itself names, as in `--set policy.name=my_module:Rule`, is
    trusted without.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        text = "Code that a file from elsewhere may name; repeatable."
        self._add(["--trust"], text, type=str, multiple=True, metavar="MODULE:NAME")

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, trusting what was named and what stands on the command line."""
        given = ctx.params.pop("trust", None) or ()
        values = [v for value in ctx.params.values() for v in _texts(value)]
        words = [word for value in values for word in re.split(r"[\s=\"']+", value)]
        own = [word.partition(":")[0] for word in words if is_code(word)]
        with trusting(*given, *own):
            return super().invoke(ctx)


def _texts(value: Any) -> list[str]:
    """The texts among the values of an option.

    Examples:
        >>> _texts("one"), _texts(["one", 2]), _texts(None)
        (['one'], ['one'], [])
    """
    several = value if isinstance(value, list | tuple) else [value]
    return [one for one in several if isinstance(one, str)]


def _commands_of(command: click.Command) -> Collection[str]:
    """The names of the commands in a group; none of a single command."""
    return command.commands if isinstance(command, click.Group) else ()


class _Group(_PlainHelp, TyperGroup):
    """A group of commands whose help is plain text in sections."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The first paragraph of every command's help, whole, in the section that the command was
        added to.
        """
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
        """Find a command; one that is not there is refused with the nearest name."""
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

    def __init__(self, help: str, completion: bool = False) -> None:
        super().__init__(
            cls=_Group,
            help=help,
            no_args_is_help=True,
            add_completion=completion,
            pretty_exceptions_enable=False,
            rich_markup_mode=None,
        )

    def command(
        self,
        name: str | None = None,
        section: Section = Section.COMMANDS,
        trusts: bool = False,
        **options: Any,
    ) -> Callable[..., Any]:
        """Add a command to a section of the help; `trusts`: it has an option `--trust`."""
        kind = _TrustingCommand if trusts else _Command
        return super().command(name, cls=kind, rich_help_panel=section, **options)
