"""The architecture page is true: every file that a run or a device's event calls stands on it."""

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import architecture  # noqa: E402

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize(
    ("title", "trace"),
    [
        ("A run, file by file", architecture.run_trace),
        ("A device's event, file by file", architecture.device_trace),
    ],
)
def test_every_called_file_is_named(title, trace):
    named = set(re.findall(r"`([\w/]+\.py)`", section(title)))
    called = [str(file) for file in trace()]
    assert len(called) >= 10
    missing = [file for file in called if not named & {file, file.rpartition("/")[2]}]
    assert missing == []


def test_every_named_file_exists():
    there = {
        str(path.relative_to(architecture.SOURCE)) for path in architecture.SOURCE.rglob("*.py")
    }
    ends = {name.rpartition("/")[2] for name in there}
    named = set(re.findall(r"`((?:\w+/)*\w+\.py)`", PAGE))
    wrong = [
        name
        for name in named
        if name not in ends
        and not (ROOT / name).exists()
        and not (ROOT / "tests" / name).exists()
        and not any(one == name or one.endswith(f"/{name}") for one in there)
    ]
    assert wrong == []


@pytest.mark.parametrize("row", section("Where to find it").strip().splitlines()[2:])
def test_what_a_newcomer_looks_for_is_where_the_table_says(row):
    _, _, where, _ = [cell.strip() for cell in row.split("|")]
    file, *names = re.findall(r"`([^`]+)`", where)
    for name in names:
        if name.endswith(".py"):
            file = name
        else:
            text = (architecture.SOURCE / file).read_text(encoding="utf-8")
            assert re.search(rf"^(class|def) {name}\b", text, re.MULTILINE), (file, name)
    assert (architecture.SOURCE / file).exists()


def test_the_picture_knows_every_package():
    listed = {name for row in architecture.layers() for name in row}
    assert set(architecture.imports()) - listed <= {"__init__", "__main__", "reference"}


def test_the_picture_shows_the_packages_in_the_order_in_which_they_are_called():
    file = ROOT / "docs" / "images" / "architecture.json"
    drawn = json.loads(file.read_text(encoding="utf-8"))
    said = "run python scripts/architecture.py docs/images/architecture.png"
    assert drawn == architecture.traces(), said
