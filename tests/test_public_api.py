"""The public names: importable from `fedbandit`, light to import, and documented by examples that run."""

import ast
import doctest
import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

import fedbandit

ROOT = Path(__file__).parent.parent
NAMES = [name for name in fedbandit.__all__ if name != "__version__"]
PACKAGES = [name for name in NAMES if name not in fedbandit._HOMES]
MODULES = [
    "core.errors",
    "data.dataset",
    "data.encoder",
    "data.importers.columns",
    "data.importers",
    "data.text",
    "data.writer",
    "deploy.device.device_identity",
    "deploy.device.log",
    "cli.help",
    "deploy.device.model_files",
    "deploy.flower.processes",
    "deploy.masking.masked_sum",
    "deploy.masking.primitives",
    "deploy.messages",
    "deploy.secure_sums",
    "paper.catalogue",
    "paper.records",
    "report.advice",
    "report.report",
    "results.differences",
    "studies.compare",
    "studies.search",
    "studies.trained_models",
    "studies.tuning",
]
MODULE_EXAMPLES = ["environments", "ope", "privacy", "theory"]
EXAMPLES = [*(name for name in NAMES if name not in PACKAGES), *MODULE_EXAMPLES]
REFERENCE = "\n".join(
    page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "reference").glob("*.md")
)
PUBLIC = set(re.findall(r"^::: (fedbandit[\w.]*)$", REFERENCE, re.MULTILINE))


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_of_docstrings_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    thing = getattr(fedbandit, name)
    of_module = inspect.ismodule(thing)
    # An example imports what it uses, apart from what it is an example of.
    names = {one: getattr(thing, one) for one in thing.__all__} if of_module else {name: thing}
    found = doctest.DocTestFinder(recurse=not of_module).find(thing, name, globs=names)
    examples = [test for test in found if test.examples]
    assert examples, f"{name} has no example"
    said: list[str] = []
    for test in examples:
        doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    assert not said, "".join(said)


@pytest.mark.parametrize("name", MODULES)
def test_examples_inside_the_package_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = doctest.testmod(import_module(f"fedbandit.{name}"))
    assert found.attempted, f"{name} has no example"
    assert not found.failed


@pytest.mark.parametrize("name", PACKAGES)
def test_packages_list_what_they_offer_and_explain_it(name):
    package = import_module(f"fedbandit.{name}")
    assert getattr(fedbandit, name) is package
    offered = getattr(package, "__all__", None) or [
        n for n in vars(package) if not n.startswith("_")
    ]
    for one in offered:
        thing = getattr(package, one)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert inspect.getdoc(thing), f"fedbandit.{name}.{one} has no docstring"


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_in_the_reference(name):
    assert f"fedbandit.{name}" in PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_name_in_the_reference_exists(name):
    assert _found(name) is not None


# The two pages that are about packages from the inside name private ones, and say so.
INSIDE = ("architecture.md", "from-0.2-to-0.3.md")
PAGES = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.py")]


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name not in INSIDE],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_pages_and_examples_name_public_modules_alone(page):
    text = page.read_text(encoding="utf-8")
    imported = re.findall(r"^\s*from (fedbandit(?:\.\w+)*) import ", text, re.MULTILINE)
    named = re.findall(r"\bfedbandit\.\w+\.\w+(?:\.\w+)*", text)
    private = [name for name in [*imported, *named] if not _is_public(name)]
    assert private == []


def _is_public(name: str) -> bool:
    """Whether the reference has it, or something in it, or the module that it is a member of."""
    listed = name in PUBLIC or any(one.startswith(f"{name}.") for one in PUBLIC)
    if listed or name == "fedbandit":
        return True
    found = _found(name)
    inside = found is not None and not inspect.ismodule(found)
    return inside and name.rpartition(".")[0] in PUBLIC


def _found(name: str) -> object:
    """The module, or the member of one, of that name; None where there is none.

    Of a module whose extra is not installed, what its source defines.
    """
    module, _, member = name.rpartition(".")
    try:
        return import_module(name)
    except ModuleNotFoundError as missing:
        file = ROOT / "src" / f"{name.replace('.', '/')}.py"
        if missing.name != name and file.exists():
            body = ast.parse(file.read_text(encoding="utf-8")).body
            defined = [node.name for node in body if hasattr(node, "name")]
            return SimpleNamespace(**dict.fromkeys(defined, file))
        return getattr(_found(module), member, None) if module else None


def test_names_that_moved_are_where_the_page_says():
    text = (ROOT / "docs" / "from-0.2-to-0.3.md").read_text(encoding="utf-8")
    new = [row.rpartition(" | ")[2] for row in text.splitlines() if row.startswith("| ")]
    names = [name for cell in new for name in re.findall(r"`(fedbandit\.[\w.]*\w)", cell)]
    assert len(names) >= 40
    assert [name for name in names if _found(name) is None] == []
    moved = [row.split(" | ") for row in text.splitlines() if row.startswith("| `")]
    assert [row for row in moved if row[0].strip("| ") == row[-1].strip("| ")] == []


@pytest.mark.parametrize(
    ("section", "module"),
    [
        ("algorithm", "fedbandit.algorithms"),
        ("policy", "fedbandit.policies"),
        ("environment", "fedbandit.environments"),
    ],
)
def test_the_page_of_changes_names_built_in_parts(section, module):
    text = (ROOT / "docs" / "from-0.2-to-0.3.md").read_text(encoding="utf-8")
    [row] = [row for row in text.splitlines() if row.startswith(f"| `[{section}]`")]
    assert set(re.findall(r'"([\w-]+)"', row)) <= set(import_module(module).BUILT_IN)


def test_unknown_names_are_attribute_errors_and_dir_lists_the_known():
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        _ = fedbandit.simulat
    assert set(NAMES) <= set(dir(fedbandit))


def test_importing_the_package_loads_nothing_heavy():
    heavy = ("torch", "numba", "pandas", "pyarrow", "matplotlib", "pydantic")
    code = f"import sys, fedbandit; print([name for name in {heavy} if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"


def test_results_load_no_pandas_pyarrow_or_matplotlib_before_they_are_used():
    code = (
        "import sys; from fedbandit import Results;"
        " print([name for name in ('torch', 'pandas', 'pyarrow', 'matplotlib') if name in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"
