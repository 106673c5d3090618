"""Every code block of the README and the documentation is run, in a folder of its own, in the order of its page.

A block behind `<!-- file: NAME -->` is saved under that name instead; one behind `<!-- not run: REASON -->` is left
out, and counted. Console blocks run the lines that start with `fedbandit` or `python -m`; TOML that is not saved must
be a configuration; `text` is for diagrams and for what a command printed. There are no other blocks.
"""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
from files_of_pages import MAKERS

from fedbandit.config import Config
from fedbandit.deploy.server.deployment import Rules

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("README.md"), *ROOT.glob("CONTRIBUTING.md")])
TESTS = sorted(ROOT.glob("tests/**/test_*.py"))
LANGUAGES = ("python", "console", "toml", "text")
MOST_NOT_RUN = 24  # blocks that take hours or data nobody ships; a page that hides from the tests is no documentation

_BLOCK = re.compile(
    r"(?:<!--(?P<marker>(?:(?!-->).)*)-->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    line: int
    file: str | None = None
    not_run: str | None = None


def blocks_of(text: str) -> list[Block]:
    """The fenced blocks of a page with their markers."""
    found = []
    for match in _BLOCK.finditer(text):
        marker = (match["marker"] or "").strip()
        file = marker.removeprefix("file:").strip() if marker.startswith("file:") else None
        reason = marker.removeprefix("not run:").strip() if marker.startswith("not run:") else None
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(match["language"], match["text"], line, file, reason))
    return found


def commands_of(block: Block) -> list[list[str]]:
    """The commands of a console block, ready to be run; a line that ends in a backslash goes on in the next."""
    joined = block.text.replace("\\\n", " ")
    lines = [line.strip().removeprefix("$ ") for line in joined.splitlines()]
    words = [
        shlex.split(line, comments=True)
        for line in lines
        if line.startswith(("fedbandit ", "python -m "))
    ]
    return [
        [sys.executable, *(["-m", *command] if command[0] == "fedbandit" else command[1:])]
        for command in words
    ]


def _environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "NO_COLOR": "1", "PYTHONPATH": str(folder)}


def _run(command: list[str], folder: Path, where: str) -> None:
    ended = subprocess.run(
        command,
        cwd=folder,
        env=_environment(folder),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, f"{where}: {ended.stdout[-2000:]}\n{ended.stderr[-2000:]}"


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_runs(page, tmp_path):
    if page.name in MAKERS:
        MAKERS[page.name](tmp_path)
    for block in blocks_of(page.read_text(encoding="utf-8")):
        where = f"{page.name}:{block.line}"
        if block.file is not None:
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
        elif block.not_run is not None:
            continue
        elif block.language == "python":
            _run([sys.executable, "-c", block.text], tmp_path, where)
        elif block.language == "console":
            for command in commands_of(block):
                _run(command, tmp_path, where)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_hold_together(page):
    text = page.read_text(encoding="utf-8")
    for block in blocks_of(text):
        where = f"{page.name}:{block.line}"
        assert block.language in LANGUAGES, f"{where}: say what the block is, one of {LANGUAGES}"
        assert block.not_run != "", f"{where}: a block that is not run needs a reason"
        if block.language == "console" and block.not_run is None:
            assert commands_of(block), f"{where}: nothing in it is run"
        if block.language == "toml" and block.file is None:
            values = tomllib.loads(block.text)
            Rules.model_validate({"state": "", "actions": "", **values.pop("deployment", {})})
            Config.build(values, where=f"{where}: ")
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if not target.startswith(("http:", "https:", "mailto:")):
            assert (page.parent / target).exists(), f"{page.name}: {target} is not there"


@pytest.mark.parametrize("name", ["privacy.md", "deployment.md", "reliability.md"])
def test_every_test_that_a_page_names_exists(name):
    """As `folder/test_file.py::test_name`, what follows as `::test_name` being in the same file.

    A name alone may be in any file, and a file's name in any folder.
    """
    files = {str(path.relative_to(ROOT / "tests")): path for path in TESTS}
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    named = re.findall(r"`(?:tests/)?((?:[\w-]+/)*test_\w+\.py)?(::)?(test_\w+)?`", text)
    file = ""
    for path, inside, test in named:
        if path:
            (file, *_) = [one for one in files if f"/{one}".endswith(f"/{path}")] or [path]
            assert file in files, path
        if test:
            within = [files[file]] if inside else TESTS
            defined = [one for one in within if f"def {test}(" in one.read_text(encoding="utf-8")]
            assert defined, f"{file if inside else ''}::{test}"
    assert len([path for path, _, test in named if path or test]) > 20


def test_few_blocks_are_left_out():
    left_out = [
        b
        for page in PAGES
        for b in blocks_of(page.read_text(encoding="utf-8"))
        if b.not_run is not None
    ]
    assert len(left_out) <= MOST_NOT_RUN


def test_blocks_are_found_with_their_markers():
    text = "<!-- a remark -->\na\n<!-- file: x.toml -->\n```toml\na = 1\n```\n\n"
    text += "<!-- not run: hours -->\n```console\n$ fedbandit x\n```\n"
    text += "```console\n$ fedbandit figure fig1a \\\n    --seeds 2\n$ ls\n```\n"
    saved, left, run = blocks_of(text)
    assert (saved.file, saved.text, saved.not_run) == ("x.toml", "a = 1\n", None)
    assert left.not_run == "hours"
    assert commands_of(run) == [
        [sys.executable, "-m", "fedbandit", "figure", "fig1a", "--seeds", "2"]
    ]
