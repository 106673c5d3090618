"""The data set folder: what goes in comes out grouped by client, or nothing is there at all."""

import json

import numpy as np
import pytest
from builders import add_example
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbandit.core.errors import DataError
from fedbandit.core.ragged import Ragged
from fedbandit.data import split_writer
from fedbandit.data.dataset import FederatedDataset, Log
from fedbandit.data.writer import DatasetWriter

EXAMPLE = st.tuples(
    st.sampled_from(["b", "a", "ü", "c10", "c9"]),
    st.lists(st.tuples(st.integers(0, 9), st.floats(-5, 5, width=32)), max_size=4),
    st.lists(st.integers(0, 3), max_size=3, unique=True),
    st.sampled_from(["train", "test"]),
)


def sparse_writer(out, **more):
    return DatasetWriter(out, name="d", kind="sparse", shape=(10,), actions="wxyz", **more)


@settings(max_examples=40, deadline=None)
@given(st.lists(EXAMPLE, min_size=1, max_size=40), st.integers(1, 64))
def test_examples_come_back_by_client_in_their_order(tmp_path_factory, examples, block):
    out = tmp_path_factory.mktemp("w") / "d"
    if not any(split == "train" for *_, split in examples):
        return
    before, split_writer._BLOCK_BYTES = (
        split_writer._BLOCK_BYTES,
        block,
    )  # tiny blocks: every boundary is crossed
    try:
        with sparse_writer(out) as writer:
            for client, words, labels, split in examples:
                ids, values = [w for w, _ in words], [v for _, v in words]
                add_example(
                    writer,
                    client,
                    (np.array(ids, np.int32), np.array(values, np.float32)),
                    labels,
                    split=split,
                )
            writer.finish()
    finally:
        split_writer._BLOCK_BYTES = before
    dataset = FederatedDataset.open(out)
    for name, split in (("train", dataset.train), ("test", dataset.test)):
        mine = [example for example in examples if example[3] == name]
        if split is None:
            assert not mine
            continue
        ids = [split.client_id(c) for c in range(split.num_clients)]
        assert ids == sorted({example[0] for example in mine}, key=str.encode)
        expected = [example for client in ids for example in mine if example[0] == client]
        assert split.sizes().tolist() == [sum(e[0] == client for e in mine) for client in ids]
        for row, (_, words, labels, _) in enumerate(expected):
            context = split.features.slice(row, row + 1)
            assert context.ids.tolist() == [w for w, _ in words]
            assert context.values.tolist() == [v for _, v in words]
            assert split.labels.slice(row, row + 1).ids.tolist() == labels
    train = [label for _, _, labels, split in examples if split == "train" for label in labels]
    assert dataset.header.action_counts == tuple(train.count(i) for i in range(4))


def test_many_batches_of_dense_features_come_back(tmp_path):
    rng = np.random.default_rng(0)
    clients = np.array([f"c{i}" for i in rng.integers(0, 7, 500)])
    pixels, labels = rng.integers(0, 256, (500, 3, 3), np.uint8), rng.integers(0, 4, 500)
    with DatasetWriter(
        tmp_path / "d",
        name="d",
        kind="dense",
        shape=(3, 3),
        actions="wxyz",
        dtype=np.uint8,
        scale=1 / 255,
    ) as writer:
        for start in range(0, 500, 33):
            part = slice(start, start + 33)
            rows = Ragged.from_rows([[int(label)] for label in labels[part]])
            writer.add_many(clients[part], pixels[part], rows)
        writer.finish()
    train = FederatedDataset.open(tmp_path / "d").train
    order = np.argsort(clients, kind="stable")
    np.testing.assert_array_equal(train.features, pixels[order])
    np.testing.assert_array_equal(train.labels.ids, labels[order])
    np.testing.assert_allclose(train.shared(np.arange(5)), pixels[order][:5] / 255, atol=1e-7)


def test_logged_feedback_comes_back_with_availability_that_appears_late(tmp_path):
    with DatasetWriter(
        tmp_path / "d", name="d", kind="dense", shape=(1,), actions="wxyz", logged=True
    ) as writer:
        add_example(writer, "b", np.array([1.0]), action=2, reward=0.5, propensity=0.25)
        log = Log(
            np.array([1, 3]),
            np.array([1.0, -1.0]),
            np.array([0.5, 1.0]),
            Ragged.from_rows([[1, 2], [3]]),
        )
        writer.add_many(["b", "a"], np.array([[2.0], [3.0]]), Ragged.from_rows([[], []]), log=log)
        writer.finish()
    dataset = FederatedDataset.open(tmp_path / "d")
    log = dataset.train.log
    assert log.actions.tolist() == [3, 2, 1]
    assert log.rewards.tolist() == [-1.0, 0.5, 1.0]
    assert log.propensities.tolist() == [1.0, 0.25, 0.5]
    assert [log.available.slice(i, i + 1).ids.tolist() for i in range(3)] == [
        [3],
        [0, 1, 2, 3],
        [1, 2],
    ]
    assert dataset.header.action_counts == (0, 1, 1, 1)


def test_the_fingerprint_tells_contents_apart(tmp_path):
    prints = set()
    for number, (value, order) in enumerate([(1.0, "ab"), (1.0, "ba"), (2.0, "ab")]):
        with DatasetWriter(
            tmp_path / str(number), name="d", kind="dense", shape=(1,), actions="xy"
        ) as writer:
            for client in order:
                add_example(writer, client, np.array([value]), [0])
            prints.add(json.loads((writer.finish() / "header.json").read_text())["fingerprint"])
    assert len(prints) == 2  # the order in which clients came makes no difference


@pytest.mark.parametrize(
    ("client", "features", "labels", "message"),
    [
        ("a", [np.nan], [0], "client a, row 0: a feature is not finite"),
        ("a", [1.0], [2], "client a, row 0: a label is outside 0..1"),
        ("a", [1.0], [-1], "client a, row 0: a label is outside 0..1"),
        ("", [1.0], [0], "a client id is empty"),
        ("x" * 300, [1.0], [0], "longer than 256"),
        ("a\0", [1.0], [0], "ends in a zero byte"),
    ],
)
def test_bad_examples_are_refused_and_nothing_is_left(tmp_path, client, features, labels, message):
    with (
        DatasetWriter(
            tmp_path / "deep" / "d", name="d", kind="dense", shape=(1,), actions="xy"
        ) as writer,
        pytest.raises(DataError, match=message),
    ):
        add_example(writer, client, np.array(features), labels)
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten_and_an_empty_folder_is_used(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("precious")
    with pytest.raises(DataError, match="already exists"):
        sparse_writer(tmp_path / "full")
    assert (tmp_path / "full" / "mine.txt").read_text() == "precious"
    (tmp_path / "empty").mkdir()
    with sparse_writer(tmp_path / "empty") as writer:
        add_example(writer, "a", (np.array([1]), np.array([1.0])), [0])
        writer.finish()
    assert FederatedDataset.open(tmp_path / "empty").train.num_examples == 1


def test_no_training_example_is_an_error(tmp_path):
    with sparse_writer(tmp_path / "d") as writer:
        add_example(writer, "a", (np.array([1]), np.array([1.0])), [0], split="test")
        with pytest.raises(DataError, match="no client has a training example"):
            writer.finish()
    assert not list(tmp_path.iterdir())


def test_what_a_killed_import_left_is_cleared(tmp_path):
    (tmp_path / ".d.partial").mkdir()
    (tmp_path / ".d.partial" / "junk").write_text("x")
    with sparse_writer(tmp_path / "d") as writer:
        add_example(writer, "a", (np.array([], np.int32), np.array([], np.float32)), [])
        writer.finish()
    assert [entry.name for entry in tmp_path.iterdir()] == ["d"]
    assert FederatedDataset.open(tmp_path / "d").train.features.take(np.array([0])).ids.size == 0


def test_two_imports_of_one_target_at_once(tmp_path):
    """The second is refused and takes nothing from the first."""
    example = (np.array([1], np.int32), np.array([1.0], np.float32))
    with sparse_writer(tmp_path / "d") as first:
        add_example(first, "a", example, [0])
        with pytest.raises(DataError, match="another import is writing it"):
            sparse_writer(tmp_path / "d")
        with sparse_writer(tmp_path / "e") as other:
            add_example(other, "a", example, [0])
            other.finish()
        first.finish()
    assert FederatedDataset.open(tmp_path / "d").train.num_examples == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "e"]


def test_a_target_that_appears_meanwhile_is_not_overwritten(tmp_path):
    with sparse_writer(tmp_path / "d") as writer:
        add_example(writer, "a", (np.array([1], np.int32), np.array([1.0], np.float32)), [0])
        (tmp_path / "d").mkdir()
        (tmp_path / "d" / "theirs").write_text("x", encoding="utf-8")
        with pytest.raises(DataError, match="already exists"):
            writer.finish()
    assert [path.name for path in tmp_path.rglob("*")] == ["d", "theirs"]


def test_a_damaged_folder_says_so(tmp_path):
    with sparse_writer(tmp_path / "d") as writer:
        for client in "abc":
            add_example(writer, client, (np.array([1]), np.array([1.0])), [0])
        writer.finish()
    array = tmp_path / "d" / "train" / "feature_ids.npy"
    whole = array.read_bytes()
    array.write_bytes(whole[:-4])
    with pytest.raises(DataError, match=r"feature_ids.npy|truncated"):
        FederatedDataset.open(tmp_path / "d")
    array.unlink()
    with pytest.raises(DataError, match=r"feature_ids.npy is missing"):
        FederatedDataset.open(tmp_path / "d")
    (tmp_path / "d" / "header.json").write_text("{")
    with pytest.raises(DataError, match=r"header.json"):
        FederatedDataset.open(tmp_path / "d")
