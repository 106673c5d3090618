"""Giving mapped pages back changes nothing but memory."""

import numpy as np
import pytest
from builders import add_example, random_text

from fedbandit.data import FederatedDataset
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
    dataset = random_text()
    before = dataset.contents_digest()
    datasets.give_back(dataset, limit=-1)
    assert dataset.contents_digest() == before


def test_rows_in_one_piece_are_those_that_are_taken(dataset):
    split = dataset.train
    contexts, labels = split.between(3, 9)
    rows = np.arange(3, 9)
    for one, other in ((contexts.shared, split.shared(rows)), (labels, split.labels.take(rows))):
        for name in ("offsets", "ids", "values"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
