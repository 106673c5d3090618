"""Pipes and devices in the place of a run's files, and checkpoints that lie: one line, no wait and no traceback."""

import os
import signal

import pytest
from builders import random_text
from small_runs import small_config

from fedbandit.core.errors import DataError, FedbanditError
from fedbandit.core.files import pack, unpack
from fedbandit.results import Results
from fedbandit.runs.folder import checkpoints
from fedbandit.runs.index import RunReader
from fedbandit.runs.run import run

SCAFFOLD = {"algorithm__name": "scaffold"}
NAMES = (
    ".lock",
    "config.toml",
    "environment.json",
    "error.json",
    "summary.json",
    "metrics.jsonl",
    "timings.jsonl",
    "memory.sqlite",
    "checkpoints/round-000004.safetensors",
)


@pytest.fixture(autouse=True)
def _no_wait():
    """Whatever waits for a pipe ends the test."""

    def late(*_):
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def stopped(tmp_path):
    run(small_config(**SCAFFOLD), tmp_path / "run", dataset=random_text(), until=4)
    return tmp_path / "run"


@pytest.mark.parametrize("kind", ["pipe", "endless"])
@pytest.mark.parametrize("name", NAMES)
def test_a_special_file_in_the_place_of_a_runs_file_is_refused_without_a_wait(stopped, name, kind):
    path = stopped / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    RunReader().read([stopped])
    Results.open(stopped)
    try:
        run(small_config(**SCAFFOLD), stopped, dataset=random_text())
    except (FedbanditError, OSError) as error:
        said = str(error)
    else:
        said = name if name == "error.json" else ""
    assert name.rpartition("/")[2] in said


def signed(path, change):
    arrays, texts = unpack(path.read_bytes())
    change(arrays)
    path.write_bytes(pack(arrays, texts))


@pytest.mark.parametrize(
    "change",
    [
        lambda arrays: arrays.pop("kept/control"),
        lambda arrays: arrays.update({"kept/control": arrays["kept/control"][:-1].copy()}),
        lambda arrays: arrays.update({n: a[:-1].copy() for n, a in arrays.items() if a.size > 1}),
    ],
    ids=["missing", "short", "another model"],
)
def test_a_signed_checkpoint_that_does_not_fit_is_refused(stopped, change):
    signed(checkpoints(stopped)[0], change)
    with pytest.raises(DataError, match=r"round-000004\.safetensors: does not fit"):
        run(small_config(**SCAFFOLD), stopped, dataset=random_text())


@pytest.mark.parametrize("header", [True, False])
def test_a_checkpoint_of_a_terabyte_is_refused_before_it_is_read(stopped, header):
    (path,) = checkpoints(stopped)
    if not header:
        path.write_bytes(b"")
    os.truncate(path, 1 << 40)
    with pytest.raises(DataError, match="no checkpoint is left to resume from"):
        run(small_config(**SCAFFOLD), stopped, dataset=random_text())


FAILING = """
import numpy as np

class Failing:
    def __init__(self):
        self.calls = 0

    def probabilities(self, prediction, available=None):
        self.calls += 1
        if self.calls > 3:
            raise {error}
        return np.full(prediction.mean.shape, 1 / prediction.mean.shape[-1])
"""


@pytest.mark.parametrize(
    ("error", "name"),
    [
        ("ValueError('no\\nluck')", "ValueError"),
        ("SystemExit(0)", "SystemExit"),
        ("KeyError('x')", "KeyError"),
    ],
)
def test_a_part_that_fails_in_a_round_is_one_line_that_names_its_file(
    tmp_path, monkeypatch, error, name
):
    module = f"failing_{name.lower()}"
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"{module}.py").write_text(FAILING.format(error=error))
    config = small_config(policy={"name": f"{module}:Failing"})
    with pytest.raises(
        FedbanditError, match=rf"round \d+: {module}\.py, line 11: {name}"
    ) as raised:
        run(config, tmp_path / "run", dataset=random_text())
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run" / "summary.json").exists()
