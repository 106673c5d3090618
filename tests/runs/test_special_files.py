"""Pipes and devices in the place of a run's files, and checkpoints that lie: one line, no wait and no traceback."""

import contextlib
import json
import os

import pytest
from builders import random_text
from small_runs import small_config

from fedbandit.core.errors import DataError, FedbanditError
from fedbandit.core.files import pack, unpack
from fedbandit.report.watch import Watcher
from fedbandit.results import Results
from fedbandit.results.plots import empty_figure, save_picture
from fedbandit.results.reading import write_table
from fedbandit.runs.folder import checkpoints
from fedbandit.runs.index import read_runs
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


pytestmark = pytest.mark.usefixtures("no_wait")


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
    read_runs([stopped])
    Results.open(stopped)
    try:
        run(small_config(**SCAFFOLD), stopped, dataset=random_text())
    except (FedbanditError, OSError) as error:
        said = str(error)
    else:
        said = name if name == "error.json" else ""
    assert name.rpartition("/")[2] in said


@pytest.mark.parametrize("kind", ["loop", "terabyte"])
@pytest.mark.parametrize("name", NAMES)
def test_links_to_themselves_and_terabytes_of_nothing_are_neither_followed_nor_read(
    stopped, name, kind
):
    path = stopped / name
    path.unlink(missing_ok=True)
    if kind == "loop":
        path.symlink_to(path.name)
    else:
        path.touch()
        os.truncate(path, 1 << 40)
    Watcher(stopped).now()
    read_runs([stopped])
    Results.open(stopped)
    for until in (5, None):
        with contextlib.suppress(FedbanditError, OSError):
            run(small_config(**SCAFFOLD), stopped, dataset=random_text(), until=until)


def test_pictures_and_tables_are_written_beside_a_pipe_and_take_its_place(tmp_path):
    names = ("picture.png", "picture.svg", "table.parquet", "table.csv")
    for name in names:
        os.mkfifo(tmp_path / name)
    for name in names[:2]:
        save_picture(empty_figure(1, 1), tmp_path / name)
    write_table([{"a": 1}], tmp_path / "table")
    assert all((tmp_path / name).is_file() for name in names)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


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
        if self.calls > 5:
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
        FedbanditError,
        match=rf"round \d+, client .+: policy {module}:Failing: {module}\.py, line 11: {name}",
    ) as raised:
        run(config, tmp_path / "run", dataset=random_text())
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run" / "summary.json").exists()


def test_a_checkpoint_of_a_terabyte_of_nothing_is_not_read(stopped):
    newest = checkpoints(stopped)[0]
    header = {"weights": {"dtype": "F32", "shape": [2**38], "data_offsets": [0, 2**40]}}
    text = json.dumps(header).encode()
    with open(newest, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + 2**40)
    config = small_config(**SCAFFOLD)
    with pytest.raises(DataError, match="no checkpoint is left to resume from"):
        run(config, stopped, dataset=random_text())
    assert newest.with_name(f"{newest.name}.damaged").exists()
