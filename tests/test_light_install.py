"""A plain installation: a device acts, logs and trains with three packages; what is missing is named in one line."""

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest

from fedbandit.core.errors import CPU_TORCH, EXTRA_OF

ROOT = Path(__file__).parents[1]
SCRIPT = Path(__file__).with_name("light_device.py")
HINT = "simulate needs fedbandit[simulation]: pip install 'fedbandit[simulation]'"
NEEDED = {"annotated_types", "fedbandit", "numpy", "pydantic", "pydantic_core", "safetensors"}
NEEDED |= {"typing_extensions", "typing_inspection"}  # of pydantic


def run(*command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    found = {**os.environ, **environment}
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, env=found, timeout=600
    )


def lived(python: Path | str, folder: Path, *blocked: str, **environment: str) -> dict:
    done = run(python, "-W", "error", SCRIPT, folder, *blocked, **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check(said: dict) -> None:
    cnn = f"the model cnn needs fedbandit[torch]: pip install 'fedbandit[torch]' (without a GPU, first: {CPU_TORCH})"
    assert said["hints"] == {"simulate": HINT, "cnn": cnn}
    for found in said["answers"].values():
        update = np.array(found["update"])
        assert 0 < np.linalg.norm(update) <= 0.5 + 1e-6
        np.testing.assert_allclose(found["vector"][: len(update)], update / 0.5, atol=1e-6)
        assert np.isfinite(found["gain"])
        assert "does not trust" in found["refused"]
    started_with = {name for name in said["packages"] if name.startswith(("_", "site", "pywin32"))}
    assert set(said["packages"]) - started_with <= NEEDED


def test_a_device_needs_no_extra_and_no_fcntl(tmp_path):
    check(lived(sys.executable, tmp_path, *EXTRA_OF, "fcntl"))


def test_with_all_extras_a_device_does_the_same_and_loads_nothing_more(tmp_path):
    light, full = (
        lived(sys.executable, tmp_path / "light", *EXTRA_OF),
        lived(sys.executable, tmp_path / "full"),
    )
    for said in (light, full):
        for found in said["answers"].values():
            vector = found.pop("vector")  # rounded to the grid by chance
            np.testing.assert_allclose(
                vector[: len(found["update"])], np.array(found["update"]) / 0.5, atol=1e-6
            )
    assert full["answers"] == light["answers"]
    assert full["packages"] == light["packages"]
    assert full["hints"] == {"cnn": "model 1: the weights do not fit cnn"}


BLOCKED = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from light_device import block
block(set(sys.argv.pop(1).split(",")))
import runpy
runpy.run_module("fedbandit", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("missing", "command", "said"),
    [
        (
            ",".join(EXTRA_OF),
            ("run", "so-scratch-softmax", "--out", "nowhere"),
            "error: the command line needs ",
        ),
        (
            "numba",
            ("run", "so-scratch-softmax", "--out", "nowhere"),
            "error: this command needs ",
        ),
        (
            "ray",
            ("run", "so-scratch-softmax", "--out", "nowhere", "--set", "engine=ray"),
            "error: engine: ray needs ",
        ),
    ],
)
def test_a_command_that_lacks_an_extra_says_so_in_one_line(tmp_path, missing, command, said):
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, str(SCRIPT.parent), missing, *command],
        capture_output=True, text=True, cwd=tmp_path, timeout=120,
    )  # fmt: skip
    extra = "ray" if missing == "ray" else "simulation"
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"{said}fedbandit[{extra}]: pip install 'fedbandit[{extra}]'")


@pytest.fixture(scope="module")
def light(tmp_path_factory) -> tuple[Path, Path]:
    """The wheel, and an environment with what a device needs, far from the source tree."""
    folder = tmp_path_factory.mktemp("light")
    venv.create(folder / "env", with_pip=True)
    pip = [folder / "env" / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "--quiet"]
    got = run(
        *pip,
        "install",
        "--constraint",
        ROOT / "constraints.txt",
        "numpy",
        "safetensors",
        "pydantic",
    )
    if got.returncode:
        pytest.skip(
            f"pip cannot install numpy, safetensors and pydantic: {got.stderr.strip().splitlines()[-1]}"
        )
    source = folder / "source"  # a copy: building leaves files behind
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(
        ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__")
    )
    built = run(*pip, "wheel", "--no-deps", "--wheel-dir", folder, source)
    assert built.returncode == 0, built.stderr
    shutil.rmtree(source)
    (wheel,) = folder.glob("fedbandit-*.whl")
    installed = run(
        *pip, "install", "--no-index", wheel
    )  # whatever else it asked for would not be found
    assert installed.returncode == 0, installed.stderr
    return wheel, folder / "env" / "bin"


@pytest.mark.slow
def test_the_wheel_holds_the_whole_package_and_its_license(light):
    with ZipFile(light[0]) as wheel:
        names = set(wheel.namelist())
    files = [path for path in (ROOT / "src" / "fedbandit").rglob("*") if path.is_file()]
    expected = {
        str(path.relative_to(ROOT / "src"))
        for path in files
        if path.suffix not in (".pyc", ".nbi", ".nbc")
    }
    assert {"fedbandit/py.typed", "fedbandit/__init__.py"} < expected
    assert any(name.startswith("fedbandit/report/page/") for name in expected)
    assert expected <= names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_a_device_works_with_the_wheel_and_three_packages(light, tmp_path):
    said = lived(light[1] / "python", tmp_path, PYTHONPATH="")
    check(said)
    assert Path(said["fedbandit"]).is_relative_to(light[1].parent)


@pytest.mark.slow
def test_the_command_of_a_plain_installation_names_the_extra(light):
    done = run(light[1] / "fedbandit", "demo", PYTHONPATH="")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: the command line needs fedbandit[simulation]: pip install 'fedbandit[simulation]'"
        " (on a device, 'fedbandit[flower]' is enough)\n"
    )


@pytest.mark.slow
def test_the_wheel_runs_text_and_reports_without_torch(light, tmp_path):
    """The first command of a user: the wheel with [simulation], far from the source tree."""
    venv.create(tmp_path / "env", with_pip=True)
    bin_ = tmp_path / "env" / "bin"
    pip = [bin_ / "python", "-m", "pip", "--disable-pip-version-check", "--quiet"]
    got = run(*pip, "install", "--constraint", ROOT / "constraints.txt", f"{light[0]}[simulation]")
    if got.returncode:
        pytest.skip(f"pip cannot install [simulation]: {got.stderr.strip().splitlines()[-1]}")
    said = run(bin_ / "python", "-c", "import torch", PYTHONPATH="")
    assert said.stderr.endswith("No module named 'torch'\n")
    here = {"PYTHONPATH": "", "FEDBANDIT_CACHE": str(tmp_path / "cache")}
    folder, page = tmp_path / "runs" / "softmax", tmp_path / "report.html"
    short = ("--rounds", 4, "--set", "deploy_every=2", "--quiet", "--out", folder)
    for command in (
        ("run", "so-scratch-softmax", *short),
        ("report", folder, "-o", page),
    ):
        done = run(bin_ / "fedbandit", *command, **here)
        assert done.returncode == 0, done.stderr
    assert "torch" not in json.loads((folder / "environment.json").read_text())
    assert page.stat().st_size > 10_000
    refused = run(
        bin_ / "fedbandit", "run", "emnist-scratch-softmax", "--out", tmp_path / "cnn", **here
    )
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: model.name: cnn needs fedbandit[torch]: pip install ")


@pytest.mark.parametrize(
    "preset", ["so-scratch-softmax", pytest.param("so-scratch-falcon", marks=pytest.mark.slow)]
)
def test_a_run_on_text_imports_no_heavy_package(tmp_path, preset):
    heavy = (
        "torch",
        "scipy.linalg",
        "pandas",
        "pyarrow",
        "matplotlib",
        "ray",
        "flwr",
        "sklearn",
        "rich",
    )
    ours = ("results", "deploy", "studies", "paper", "report", "evaluation.ope")
    command = ["run", preset, "--rounds", "1", "--quiet", "--out", str(tmp_path / "run")]
    program = (
        f"import sys; from fedbandit.cli.app import program; program('run')({command!r}, standalone_mode=False);"
        f" heavy = {heavy + tuple(f'fedbandit.{name}' for name in ours)!r};"
        " print('imported:', [name for name in heavy if name in sys.modules])"
    )
    done = run(
        sys.executable, "-c", program, FEDBANDIT_CACHE=str(tmp_path / "cache")
    )  # the data is made, too
    assert done.returncode == 0, done.stderr
    assert "imported: []" in done.stdout
    assert (tmp_path / "run" / "summary.json").exists()


def test_numba_still_finds_a_blas_when_somebody_needs_one():
    program = (
        "import sys, numba, numpy as np, fedbandit.core.kernels;"
        " assert 'scipy.linalg' not in sys.modules;"
        " product = numba.njit(lambda a, b: np.dot(a, b));"
        " print(product(np.full((2, 2), 2.0), np.eye(2)).tolist())"
    )
    pytest.importorskip("scipy")
    done = run(sys.executable, "-c", program)
    assert done.stdout.strip() == "[[2.0, 2.0], [2.0, 2.0]]", done.stderr
