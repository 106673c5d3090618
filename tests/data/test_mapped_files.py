"""Giving mapped pages back changes nothing but memory; reading clients' rows gives what mapping them does."""

import os

import numpy as np
import pytest
from builders import add_example, random_text

from fedbandit.core.errors import DataError
from fedbandit.data import FederatedDataset, mapped_files
from fedbandit.data import dataset as datasets
from fedbandit.data.writer import DatasetWriter


@pytest.fixture
def dataset(tmp_path):
    with DatasetWriter(
        tmp_path / "d", name="d", kind="sparse", shape=(50,), actions=["a", "b"], multilabel=True
    ) as out:
        rng = np.random.default_rng(0)
        for client in range(20):
            for _ in range(1 + client % 7):
                words = np.sort(rng.choice(50, rng.integers(0, 5), replace=False))
                add_example(
                    out,
                    f"c{client:02d}",
                    (words, rng.random(len(words))),
                    list(range(rng.integers(0, 3))),
                )
        out.finish()
    return FederatedDataset.open(tmp_path / "d")


def test_the_data_is_there_again_when_needed(dataset):
    before = [
        np.array(a)
        for a in (dataset.train.features.ids, dataset.train.features.values, dataset.train.offsets)
    ]
    assert datasets.give_back(dataset, limit=-1)
    after = [dataset.train.features.ids, dataset.train.features.values, dataset.train.offsets]
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)
    assert not datasets.give_back(dataset, limit=2**60)


def test_data_in_memory_is_left_alone():
    assert list(datasets._mappings(random_text())) == []


def some_rows(split, seed):
    """Clients in any order, and for each some of its rows in any order; one of them has none."""
    rng = np.random.default_rng(seed)
    clients = rng.permutation(split.num_clients)[:8]
    rows = [
        rng.permutation(np.arange(*split.offsets[[client, client + 1]]))[: rng.integers(1, 8)]
        for client in clients
    ]
    rows[2] = rows[2][:0]
    return clients, np.cumsum([0, *map(len, rows)]), np.concatenate(rows)


@pytest.mark.parametrize("seed", range(5))
def test_rows_that_are_read_are_those_that_are_mapped(dataset, monkeypatch, seed):
    split = dataset.train
    clients, bounds, rows = some_rows(split, seed)
    mapped = split.examples(clients, bounds, rows)
    read = []
    monkeypatch.setattr(mapped_files, "_LARGE", 0)
    monkeypatch.setattr(
        datasets, "read_rows", lambda *given: read.append(given) or mapped_files.read_rows(*given)
    )
    (x, labels), (mapped_x, mapped_labels) = split.examples(clients, bounds, rows), mapped
    for one, other in ((x.shared, mapped_x.shared), (labels, mapped_labels)):
        for name in ("offsets", "ids", "values"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert len(read) == 2
    split.examples(
        clients, np.r_[0, np.ones(8, int)], split.offsets[clients[:1]]
    )  # too few of all that they have
    assert len(read) == 2


def test_a_file_that_was_cut_is_an_error_and_no_signal(dataset, monkeypatch):
    monkeypatch.setattr(mapped_files, "_LARGE", 0)
    split = dataset.train
    clients = np.arange(split.num_clients)
    os.truncate(dataset.path / "train" / "feature_values.npy", 200)
    with pytest.raises(DataError, match=r"feature_values\.npy: was cut"):
        split.examples(clients, split.offsets, np.arange(split.num_examples))


def test_handles_are_closed_with_the_data(tmp_path):
    file = tmp_path / "f"
    file.write_bytes(b"12345678")
    with open(file, "rb") as opened:
        pages = mapped_files.MappedFile.of(opened.fileno(), 8, file)
    handle = pages.handle
    assert os.pread(handle, 2, 3) == b"45"
    del pages
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handle)


def test_rows_in_one_piece_are_those_that_are_taken(dataset):
    split = dataset.train
    contexts, labels = split.between(3, 9)
    rows = np.arange(3, 9)
    for one, other in ((contexts.shared, split.shared(rows)), (labels, split.labels.take(rows))):
        for name in ("offsets", "ids", "values"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def test_a_mapped_file_that_changes_is_seen_by_its_handle(dataset):
    dataset.check_mapped()
    os.truncate(dataset.path / "train" / "label_ids.npy", 200)
    with pytest.raises(DataError, match=r"label_ids\.npy: was cut from"):
        dataset.check_mapped()
