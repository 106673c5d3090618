"""Giving mapped pages back changes nothing but memory."""

import numpy as np
from builders import random_text

from fedbandit.data import FederatedDataset
from fedbandit.data import dataset as paging
from fedbandit.data.writer import DatasetWriter


def test_the_data_is_there_again_when_needed(tmp_path):
    with DatasetWriter(
        tmp_path / "d", name="d", kind="sparse", shape=(50,), actions=["a", "b"], multilabel=True
    ) as out:
        rng = np.random.default_rng(0)
        for client in range(20):
            for _ in range(5):
                out.add(f"c{client:02d}", (np.sort(rng.choice(50, 4, replace=False)), rng.random(4)), [client % 2])
        out.finish()
    dataset = FederatedDataset.open(tmp_path / "d")
    before = [np.array(a) for a in (dataset.train.features.ids, dataset.train.features.values, dataset.train.offsets)]
    assert paging.give_back(dataset, limit=-1)
    after = [dataset.train.features.ids, dataset.train.features.values, dataset.train.offsets]
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)
    assert not paging.give_back(dataset, limit=2**60)


def test_data_in_memory_is_left_alone():
    assert list(paging._mappings(random_text())) == []
