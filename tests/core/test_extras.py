"""Extras: what is missing is named in one line, and the list agrees with the project's own."""

import re
import tomllib
from pathlib import Path

import pytest

from fedbandit.core.errors import EXTRA_OF, FedbanditError, MissingExtra, needing

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def packages(requirements: list[str]) -> set[str]:
    names = {re.split(r"[<>=\[;]", requirement)[0].strip() for requirement in requirements}
    modules = {name.replace("-", "_") for name in names} - {"fedbandit"}
    return {"google" if name == "protobuf" else name for name in modules}


@pytest.mark.parametrize("extra", ["simulation", "torch", "ray", "flower", "tensorboard"])
def test_every_package_of_an_extra_is_known(extra):
    wanted = packages(PROJECT["optional-dependencies"][extra])
    assert wanted
    assert {EXTRA_OF[name] for name in wanted} <= {extra, "simulation"}
    assert {name for name, of in EXTRA_OF.items() if of == extra} <= wanted


def test_a_device_needs_three_packages():
    assert packages(PROJECT["dependencies"]) == {"numpy", "safetensors", "pydantic"}
    assert not packages(PROJECT["dependencies"]) & EXTRA_OF.keys()


def test_a_missing_package_names_its_extra():
    with pytest.raises(ImportError) as caught, needing("simulate"):
        raise ModuleNotFoundError("No module named 'numba.core'", name="numba.core")
    assert isinstance(caught.value, MissingExtra)
    assert isinstance(caught.value, FedbanditError)
    assert (
        str(caught.value)
        == "simulate needs fedbandit[simulation]: pip install 'fedbandit[simulation]'"
    )


def test_torch_is_named_with_the_command_for_its_smaller_build():
    with pytest.raises(MissingExtra) as caught, needing("the model cnn"):
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    assert str(caught.value) == (
        "the model cnn needs fedbandit[torch]: pip install 'fedbandit[torch]' (without a GPU, first:"
        " pip install torch --index-url https://download.pytorch.org/whl/cpu)"
    )


@pytest.mark.parametrize(
    "error", [ModuleNotFoundError("mine", name="my_module"), ImportError("no such name")]
)
def test_other_errors_stay_what_they_are(error):
    with pytest.raises(type(error)) as caught, needing("simulate"):
        raise error
    assert caught.value is error
