"""The page of the command line, from the commands' own help: `python scripts/command_line_page.py`.

Writes docs/command-line.md; a test fails where the page is not what this would write.
"""

import re
from pathlib import Path

import click
import typer

from fedbandit.cli.app import program
from fedbandit.cli.help import Section

PAGE = Path(__file__).parents[1] / "docs" / "command-line.md"
_BEGINNING = """# The command line

Every command with its options, as `fedbandit COMMAND --help` prints them. Shell completion for
commands and options: `fedbandit --install-completion`. Progress and hints go to standard error,
results to standard output; `--quiet` shows no progress, `--json` prints results for programs. A
mistake in what was asked is one line and exit code 2; an interrupt is 130, and the same command
resumes.

<!-- made by `python scripts/command_line_page.py` -->
"""


def page() -> str:
    """The whole page as Markdown, command by command in the order of the help."""
    root = typer.main.get_command(program())
    assert isinstance(root, click.Group)
    parts, top = [_BEGINNING], click.Context(root, info_name="fedbandit")
    for section in Section:
        inside = {
            name: command
            for name, command in root.commands.items()
            if getattr(command, "rich_help_panel", None) == section
        }
        if inside:
            parts.append(f"## {section}\n")
        for name, command in inside.items():
            parts += _described(name, command, top, 3)
    return "\n".join(parts)


def _described(name: str, command: click.Command, above: click.Context, depth: int) -> list[str]:
    context = click.Context(command, parent=above, info_name=name)
    path = re.sub(r"\s+", " ", context.command_path)
    lines = [f"{'#' * depth} {path}\n", f"```text\n{command.get_help(context).rstrip()}\n```\n"]
    for inner, one in getattr(command, "commands", {}).items():
        lines += _described(inner, one, context, depth + 1)
    return lines


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
