"""The importers on real data, where somebody has it; what is in it was counted independently."""

import numpy as np
import pytest

from fedbandit.data.dataset import FederatedDataset
from fedbandit.data.importers.arrays import ArrayOptions, import_arrays
from fedbandit.data.importers.contexts import ColumnOptions
from fedbandit.data.importers.items import ItemOptions
from fedbandit.data.importers.logs import OpenBandit, open_bandit_options
from fedbandit.data.importers.stackexchange import import_stackexchange
from fedbandit.data.importers.tables import TableOptions, import_table
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


@pytest.mark.slow
def test_online_retail_is_a_catalogue_with_candidates(real_data_folder, tmp_path):
    """The recipe of docs/your-own-data.md."""
    path = real_data_folder / "online_retail.parquet"
    others = ["InvoiceNo", "Quantity", "InvoiceDate", "CustomerID", "Country"]
    left_out = [f"{name}=ignore" for name in ("InvoiceNo", "Description", "UnitPrice")]
    items = ItemOptions(
        table=path,
        column="StockCode",
        negatives=9,
        time="InvoiceDate",
        columns=ColumnOptions(treat=[f"{name}=ignore" for name in others]),
    )
    options = TableOptions(
        client="CustomerID",
        labels="StockCode",
        items=items,
        missing=["0"],
        where="Quantity>0",
        treat=left_out,
    )
    dataset = FederatedDataset.open(import_table(path, tmp_path / "out", options))
    assert len(dataset.train.catalogue) == 4_070
    examples, clients = totals(dataset)
    assert clients == 4_339  # 4,372 customers, 33 of whom only returned things
    assert examples == 397_924
    assert (np.diff(dataset.train.candidates.offsets) == 10).all()
    assert 0.09 < np.mean(dataset.train.labels.ids == 0) < 0.11


def test_open_bandit_with_features_of_items(real_data_folder, tmp_path):
    folder = real_data_folder / "open-bandit" / "random" / "men"
    options = open_bandit_options(folder, ColumnOptions(), None, 0.1, item_features=True)
    source = OpenBandit(folder, item_features=True)
    dataset = FederatedDataset.open(import_table(source, tmp_path / "out", options))
    assert len(dataset.train.catalogue) == 34
    assert totals(dataset)[0] == 10_000
    assert 900 < dataset.test.num_examples < 1100
    clicks = [int(split.log.rewards.sum()) for split in (dataset.train, dataset.test)]
    assert clicks[1] >= 0.07 * sum(clicks)
