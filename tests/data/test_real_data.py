"""The importers on real data, where somebody has it; what is in it was counted independently."""

import numpy as np
import pytest

from fedbandit.data.dataset import FederatedDataset
from fedbandit.data.importers.arrays import ArrayOptions, import_arrays
from fedbandit.data.importers.stackexchange import import_stackexchange
from fedbandit.data.importers.table import TableOptions, import_table
from fedbandit.data.info import write_contact_sheet
from fedbandit.data.text import EMNIST_ACTIONS


def totals(dataset):
    """Examples over both splits, and different clients."""
    splits = [split for split in (dataset.train, dataset.test) if split is not None]
    clients = {split.client_id(c) for split in splits for c in range(split.num_clients)}
    return sum(split.num_examples for split in splits), len(clients)


def test_stack_overflow_questions(real_data_folder, tmp_path):
    options = TableOptions(
        client="user_id", text=["title"], labels="tags", actions=50, drop_unlabelled=True
    )
    path = import_table(real_data_folder / "stackoverflow_questions.csv", tmp_path / "out", options)
    dataset = FederatedDataset.open(path)
    assert totals(dataset) == (17_287, 2_291)
    assert dataset.header.shape == (10_000,)
    assert dataset.header.actions[0] == "c#"
    tags = (len(dataset.train.labels.ids) + len(dataset.test.labels.ids)) / 17_287
    assert round(tags, 2) == 1.42
    norms = np.add.reduceat(dataset.train.features.values**2, dataset.train.features.offsets[:-1])
    sizes = np.diff(dataset.train.features.offsets)
    np.testing.assert_allclose(norms[sizes > 0], 1, atol=1e-5)


@pytest.mark.slow
def test_handwriting(real_data_folder, tmp_path):
    options = ArrayOptions(features="images", labels="labels", clients="writers", invert=True)
    dataset = FederatedDataset.open(
        import_arrays(real_data_folder / "handwriting62.npz", tmp_path / "out", options)
    )
    assert totals(dataset) == (105_275, 317)
    assert dataset.header.actions == EMNIST_ACTIONS
    assert dataset.header.lower_case[10] == 36
    contexts = dataset.train.shared(np.arange(0, dataset.train.num_examples, 100))
    assert contexts[:, 0, :].mean() > 0.9  # the border is background, and background is 1
    assert write_contact_sheet(dataset, tmp_path / "sheet.png").stat().st_size > 10_000


def test_a_stack_exchange_site(real_data_folder, tmp_path):
    path = import_stackexchange(real_data_folder / "stackexchange-beer", tmp_path / "out")
    assert totals(FederatedDataset.open(path)) == (659, 325)
