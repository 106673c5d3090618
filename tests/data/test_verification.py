"""Checksums of a data set folder, the stamp of a verified one, and files that change under a run."""

import json
import os
import subprocess
import sys
import time
from contextlib import closing

import numpy as np
import pytest
from builders import add_example
from test_wrong_bytes import make

from fedbandit import Config
from fedbandit.assembly.experiment import build_experiment
from fedbandit.core.errors import DataError
from fedbandit.core.progress import ProgressReporter
from fedbandit.data import cache_folder, open_dataset, validation
from fedbandit.data.dataset import FederatedDataset
from fedbandit.data.validation import FolderReader
from fedbandit.engines import ThreadEngine
from fedbandit.simulation import Pretraining, simulate


@pytest.fixture
def folder(tmp_path):
    return make(tmp_path / "d", "sparse")


@pytest.fixture
def stamps(monkeypatch, tmp_path):
    """Every folder counts as a large one, so that each is stamped; returns the folder of the stamps."""
    monkeypatch.setattr(validation, "_SMALL", 0)
    monkeypatch.setattr(validation, "_CLOCK_TICK", 0)
    monkeypatch.setenv("FEDBANDIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "verified"


@pytest.fixture
def readings(monkeypatch):
    """How often a folder was read in full."""
    done = []
    real = validation.verify
    monkeypatch.setattr(
        validation,
        "verify",
        lambda reader, *more: (done.append(reader.folder), real(reader, *more)),
    )
    return done


def flip(path, bit=0, position=-1):
    """Flip one bit and give the file its old times, as a failing disk would."""
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    with open(path, "r+b") as file:
        file.write(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_flipped_bit_in_any_file_is_noticed(folder):
    for name in names(folder):
        for position in (-1, -3, 70):
            flip(folder / name, position=position)
            with pytest.raises(DataError, match=r"\.npy|\.json"):
                FederatedDataset.open(folder)
            flip(folder / name, position=position)
    FederatedDataset.open(folder)


def test_labels_exchanged_for_other_labels_are_noticed(folder):
    path = folder / "train" / "label_ids.npy"
    np.save(path, (np.load(path) + 1) % 5)
    with pytest.raises(
        DataError, match=r"label_ids\.npy: its checksum is not the one that was written"
    ):
        FederatedDataset.open(folder)


@pytest.mark.parametrize("name", ["checksums.json", "train/label_ids.npy", "test/offsets.npy"])
def test_a_file_that_is_gone_is_missed(tmp_path, name):
    rows = [(f"u{i}", [i % 3], split) for i in range(6) for split in ("train", "test")]
    from fedbandit.data.writer import DatasetWriter

    with DatasetWriter(tmp_path / "d", name="d", kind="dense", shape=(1,), actions="abc") as writer:
        for client, labels, split in rows:
            add_example(writer, client, np.ones(1), labels, split=split)
        folder = writer.finish()
    (folder / name).unlink()
    with pytest.raises(DataError, match=rf"{name.rpartition('/')[2]} is missing"):
        FederatedDataset.open(folder)
    for path in (folder / "test").iterdir():
        path.unlink()
    (folder / "test").rmdir()
    with pytest.raises(DataError, match="is missing"):
        FederatedDataset.open(folder)


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"sha256": 3}', '{"sha256": {"header.json": 3}}', "{", "[" * 100_000]
)
def test_damaged_checksums_are_one_line(folder, content):
    (folder / "checksums.json").write_text(content)
    with pytest.raises(DataError, match=r"checksums\.json: "):
        FederatedDataset.open(folder)


def test_a_large_folder_is_read_once_until_it_changes(folder, stamps, readings):
    for _ in range(3):
        FederatedDataset.open(folder)
    assert len(readings) == len(list(stamps.iterdir())) == 1
    FederatedDataset.open(folder, verify=True)
    assert len(readings) == 2
    flip(folder / "train" / "label_ids.npy")  # the time of its last change cannot be set back
    with pytest.raises(DataError, match="label_ids"):
        FederatedDataset.open(folder)
    flip(folder / "train" / "label_ids.npy")
    FederatedDataset.open(folder)
    assert len(readings) == 4


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"stamp": 1, "files": 7}', '{"stamp": 1, "files": {}}', "\0"]
)
def test_a_damaged_stamp_means_reading_again(folder, stamps, readings, content):
    FederatedDataset.open(folder)
    next(stamps.iterdir()).write_text(content)
    FederatedDataset.open(folder)
    FederatedDataset.open(folder)
    assert len(readings) == 2


def test_a_file_written_this_moment_is_not_stamped(folder, stamps, readings, monkeypatch):
    """Another change in the same tick of the clock would carry the same time."""
    monkeypatch.setattr(validation, "_CLOCK_TICK", 10**12)
    FederatedDataset.open(folder)
    FederatedDataset.open(folder)
    assert len(readings) == 2
    assert not stamps.exists()


def test_without_a_cache_to_write_to_it_is_read_every_time(folder, stamps, readings):
    stamps.parent.write_text("a file where the cache folder should be")
    for _ in range(2):
        assert FederatedDataset.open(folder).train.num_clients == 12
    assert len(readings) == 2


def test_a_small_folder_leaves_no_stamp(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("FEDBANDIT_CACHE", str(tmp_path / "cache"))
    FederatedDataset.open(folder)
    assert not cache_folder().exists()


def test_a_long_verification_shows_progress(folder, capsys, monkeypatch):
    monkeypatch.setattr(validation, "_LONG", 0)
    FederatedDataset.open(folder)
    assert "Verifying d" in capsys.readouterr().err
    FederatedDataset.open(folder, progress=ProgressReporter(None))
    assert capsys.readouterr().err == ""


def test_small_blocks_find_the_same_places(tmp_path, monkeypatch):
    """Rules that compare neighbours hold across the border of two blocks."""
    folder = make(tmp_path / "d", "sparse")
    monkeypatch.setattr(validation, "_BLOCK", 16)
    FederatedDataset.open(folder)
    for name, entry, value in (
        ("feature_offsets", 2, 0),
        ("clients", 8, b"c07"),
        ("feature_ids", 100, 30),
    ):
        path = folder / "train" / f"{name}.npy"
        whole = path.read_bytes()
        array = np.load(path)
        array[entry] = value
        np.save(path, array)
        with pytest.raises(DataError, match=f"{name}.npy, entry {entry}: "):
            FederatedDataset.open(folder)
        path.write_bytes(whole)


def test_a_file_that_changes_while_it_is_opened_is_refused(folder, monkeypatch):
    real = FolderReader.look_at

    def meanwhile(self, name):
        if name == "vocabulary.txt":
            flip(folder / "train" / "label_ids.npy")
        return real(self, name)

    monkeypatch.setattr(FolderReader, "look_at", meanwhile)
    with pytest.raises(DataError, match=r"label_ids\.npy: was changed while it was being opened"):
        FederatedDataset.open(folder)


def config(rounds=4):
    return Config.build(
        {"scenario": "scratch", "rounds": rounds, "clients_per_round": 8, "deploy_every": 2}
    )


def change_time(path):
    os.utime(path, ns=(0, time.time_ns()))


def another_file(path):
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(0, path.stat().st_mtime_ns))
    other.rename(path)


@pytest.mark.parametrize("edit", [change_time, another_file, os.unlink])
def test_a_run_ends_when_a_file_changes_under_it(folder, edit):
    dataset = FederatedDataset.open(folder)
    with simulate(config(), dataset) as simulation:
        rounds = iter(simulation)
        next(rounds)
        dataset.check_unchanged()
        edit(folder / "train" / "label_ids.npy")
        with pytest.raises(DataError, match=r"label_ids\.npy: .*(in use|when it was opened)"):
            next(rounds)


def test_a_new_link_to_a_file_does_not_end_a_run(folder):
    dataset = FederatedDataset.open(folder)
    os.link(folder / "train" / "label_ids.npy", folder / "copy")
    dataset.check_unchanged()


TRUNCATE = """
import os, sys
from fedbandit import Config
from fedbandit.data.dataset import FederatedDataset
from fedbandit import simulation as module

real = module.run_round
def cut(*arguments):
    os.truncate(sys.argv[1] + "/train/feature_ids.npy", 200)

def run_round(*arguments):
    done = real(*arguments)
    cut()
    return done

between = sys.argv[2] == "between rounds"
if not between:
    module.run_round = run_round
config = Config.build({"scenario": "scratch", "rounds": 3, "clients_per_round": 8, "evaluate_every": 9})
for metrics in module.simulate(config, FederatedDataset.open(sys.argv[1]), callbacks=[cut] if between else []):
    print("a round", metrics["round"])
"""


@pytest.mark.parametrize("when", ["in a round", "between rounds"])
def test_a_run_ends_when_a_file_is_truncated_under_it(folder, when):
    done = subprocess.run(
        [sys.executable, "-c", TRUNCATE, folder, when],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout == (
        "a round 1\n" if when == "between rounds" else ""
    )  # nothing of a damaged round is kept
    assert "DataError: " in done.stderr.splitlines()[-1]
    assert "feature_ids.npy: was cut from" in done.stderr.splitlines()[-1]


def test_pretraining_ends_when_a_file_changes_under_it_and_keeps_nothing(
    folder, monkeypatch, tmp_path
):
    monkeypatch.setenv("FEDBANDIT_CACHE", str(tmp_path / "cache"))
    short = {
        "scenario": "init",
        "pretraining": {"rounds": 3, "clients": 4},
        "clients_per_round": 2,
        "threads": 1,
    }
    experiment = build_experiment(Config.build(short), FederatedDataset.open(folder))
    with closing(ThreadEngine(1)) as engine:
        rounds = iter(Pretraining(experiment, engine, keep_seconds=0.0))
        next(rounds)
        kept = sorted(
            path.stat().st_mtime_ns for path in (tmp_path / "cache" / "pretrained").iterdir()
        )
        change_time(folder / "train" / "label_ids.npy")
        with pytest.raises(DataError, match=r"label_ids\.npy: was changed while it was in use"):
            next(rounds)
    assert (
        sorted(path.stat().st_mtime_ns for path in (tmp_path / "cache" / "pretrained").iterdir())
        == kept
    )


def test_data_in_memory_has_no_files_to_look_at(folder):
    dataset = FederatedDataset.open(folder)
    FederatedDataset(dataset.header, dataset.train).check_unchanged()


def test_embedded_data_carry_checksums():
    assert "checksums.json" in open_dataset("topics", verify=True).files


def test_every_file_has_a_checksum(folder):
    sums = json.loads((folder / "checksums.json").read_text())["sha256"]
    assert sorted([*sums, "checksums.json"]) == names(folder)
