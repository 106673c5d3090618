"""Every help page can be read without rich: no escapes, no summary that is cut off, nothing wider than a terminal."""

import errno
import os
import re
import subprocess
from pathlib import Path

import click
import pytest
import typer
from command_line import COMMAND, fails_with_one_line, fedbandit, in_this_process

from fedbandit.cli.app import program
from fedbandit.presets import load, preset

ROOT = typer.main.get_command(program())


def commands(command=ROOT, path=("fedbandit",)):
    """Every command and group, with the words a user types to reach it."""
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*path, name))


EVERY = dict(commands())


def help_of(path):
    context = None
    for depth, _ in enumerate(path, start=1):
        command = EVERY[path[:depth]]
        context = click.Context(command, parent=context, info_name=path[depth - 1])
    return EVERY[path].get_help(context)


@pytest.mark.parametrize("path", EVERY, ids=" ".join)
def test_a_help_page_has_no_markup_and_fits_a_terminal(path):
    text = help_of(path)
    assert "\\" not in text
    assert "..." not in re.sub(
        r"\[ARGS\]\.\.\.|(RUNS|FOLDERS|NAME_OR_TOML)\.\.\.|fig1a \.\.\. fig4d", "", text
    )
    assert max(map(len, text.splitlines())) <= 78


@pytest.mark.parametrize("path", [path for path in EVERY if len(path) > 1], ids=" ".join)
def test_a_command_says_in_one_line_what_it_does(path):
    whole = " ".join(EVERY[path].help.split("\n\n")[0].split()).removesuffix(".")
    lines = [line.split(None, 1) for line in help_of(path[:-1]).splitlines()]
    assert [path[-1], whole] in lines


@pytest.mark.parametrize("path", EVERY, ids=" ".join)
def test_every_option_and_argument_has_a_help_text_that_is_a_phrase(path):
    for parameter in EVERY[path].params:
        text = parameter.help
        assert text, f"{' '.join(path)} {parameter.name}"
        assert text.endswith("."), f"{' '.join(path)} {parameter.name}: {text}"
        assert not text[0].islower(), f"{' '.join(path)} {parameter.name}: {text}"


def test_what_is_required_and_what_is_the_default_stand_in_brackets():
    page = " ".join(help_of(("fedbandit", "run")).split())
    assert "[required]" in page
    assert "[default: 20]" in page


def test_commands_stand_in_sections_by_what_they_are_for():
    page = help_of(("fedbandit",))
    headings = [
        line
        for line in page.splitlines()
        if line and not line.startswith(" ") and line.endswith(":")
    ]
    assert headings == [
        "Options:",
        "Simulate:",
        "Compare and choose:",
        "Data:",
        "Logs and theory:",
        "Privacy and devices:",
    ]
    assert all(f"\n  {path[1]} " in page for path in EVERY if len(path) == 2)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [(["rn"], "run"), (["data", "imprt"], "import or export"), (["import"], "data import")],
)
def test_a_mistyped_command_is_suggested_once(typed, meant):
    with pytest.raises(click.UsageError) as refused:
        ROOT.main(typed, prog_name="fedbandit", standalone_mode=False)
    assert refused.value.format_message() == f"no such command {typed[-1]!r}; did you mean {meant}?"


@pytest.mark.parametrize("words", [(), ("--help",), ("data",), ("presets",)], ids=" ".join)
def test_who_stops_reading_gets_no_traceback(words):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        done = subprocess.run(
            [*COMMAND, *words], stdout=closed, stderr=subprocess.PIPE, text=True, timeout=300
        )
    assert done.stderr == ""
    assert done.returncode == 1


def test_a_broken_connection_is_no_reader_that_stopped(monkeypatch):
    def broken(*asked):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("fedbandit.cli.app.program", broken)
    fails_with_one_line(in_this_process("deploy", "status"), "Broken pipe")


def test_the_page_of_the_command_line_is_the_help(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    scripts = Path(__file__).parents[2] / "scripts"
    monkeypatch.syspath_prepend(str(scripts))
    from command_line_page import PAGE, page

    assert PAGE.read_text(encoding="utf-8") == page(), "run python scripts/command_line_page.py"


def test_a_shell_completes_commands_and_options():
    def completed(words, number):
        return fedbandit(_FEDBANDIT_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=number)

    assert completed("fedbandit ba", "1").stdout.split() == ["bakeoff"]
    assert completed("fedbandit compare --aga", "2").stdout.split() == ["--against"]


def test_a_preset_is_printed_as_a_file_that_can_be_run(tmp_path):
    made = in_this_process("presets", "so-init-shift-softmax")
    (tmp_path / "mine.toml").write_text(made.stdout)
    assert load(str(tmp_path / "mine.toml")) == preset("so-init-shift-softmax")
    fails_with_one_line(in_this_process("presets", "so-init-shif-softmax"), "did you mean")
