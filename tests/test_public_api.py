"""The public names: importable from `fedbandit`, light to import, and documented by examples that run."""

import doctest
import inspect
import subprocess
import sys
from importlib import import_module

import pytest

import fedbandit

NAMES = [name for name in fedbandit.__all__ if name != "__version__"]
PACKAGES = ["environments", "models", "objectives", "ope", "policies", "privacy"]
MODULES = ["data.importers.columns", "data.text", "results.differences", "studies.search"]
EXAMPLES = [*(name for name in NAMES if name not in PACKAGES), "environments", "ope", "privacy"]


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
def test_examples_inside_the_package_run(name):
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
