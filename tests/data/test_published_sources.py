"""EMNIST and Stack Overflow from files in their published layout."""

import json
import sqlite3

import numpy as np
import pytest
from builders import with_checksums
from published import emnist_rows, encode, image, pack, sentence, write_counts, write_sqlite

from fedbandit.core.errors import DataError
from fedbandit.data.dataset import FederatedDataset
from fedbandit.data.importers.images import import_emnist
from fedbandit.data.importers.stackexchange import StackOverflowOptions, import_stackoverflow

WORDS = {"the": 90, "how": 50, "sort": 20, "list": 10, "rare": 1}
TAGS = {"rarely": 2, "python": 40, "java": 60}
SENTENCES = [
    ("train", "u2", sentence("sort the list the unknown", "how sort", "python|other")),
    ("train", "u1", sentence("", "list", "java|python")),
    ("heldout", "u1", sentence("the", "the", "java")),
    ("train", "u2", sentence("nothing known", "here", "other")),
    ("test", "u3", sentence("sort list", "how", "java")),
]


@pytest.fixture(params=["plain", "packed"])
def emnist_file(tmp_path, request):
    path = write_sqlite(tmp_path / "emnist_all.sqlite", emnist_rows())
    return path if request.param == "plain" else pack(path)


def test_emnist_keeps_pixels_labels_writers_and_split(tmp_path, emnist_file):
    dataset = FederatedDataset.open(import_emnist(emnist_file, tmp_path / "out"))
    assert dataset.header.shape == (28, 28)
    assert dataset.header.num_actions == 62
    assert dataset.header.actions[10] == "A"
    assert dataset.header.lower_case[10] == 36
    assert dataset.train.features.dtype == np.uint8
    assert (dataset.train.num_clients, dataset.train.num_examples) == (3, 9)
    assert (dataset.test.num_clients, dataset.test.num_examples) == (3, 3)
    assert [dataset.train.client_id(c) for c in range(3)] == ["f0000_00", "f0001_01", "f0002_02"]
    expected = [image(client, number) for client in range(3) for number in range(3)]
    contexts = dataset.train.shared(np.arange(9)).reshape(9, 784)
    np.testing.assert_allclose(contexts, np.array(expected, np.float32), atol=1e-6)
    assert dataset.train.labels.ids.tolist() == [
        (c * 4 + n * 7) % 62 for c in range(3) for n in range(3)
    ]
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []


def test_emnist_digits(tmp_path, emnist_file):
    dataset = FederatedDataset.open(import_emnist(emnist_file, tmp_path / "out", digits_only=True))
    assert dataset.header.actions == tuple("0123456789")
    assert dataset.header.lower_case == {}
    assert dataset.train.num_examples == 9


def test_pixels_that_are_no_bytes_are_kept_as_floats(tmp_path):
    odd = image(0, 0)
    odd[5] = 0.12345
    rows = emnist_rows()
    rows[-2] = (
        "all_train",
        "f0002_02",
        encode(pixels=odd, label=[3]),
    )  # late: the first part looked like bytes
    path = write_sqlite(
        tmp_path / "e.sqlite", [*rows, ("all_test", "x", encode(pixels=odd, label=[1]))]
    )
    dataset = FederatedDataset.open(import_emnist(path, tmp_path / "out"))
    assert dataset.train.features.dtype == np.float32
    assert dataset.header.scale == 1.0
    np.testing.assert_array_equal(dataset.train.features[-1].reshape(-1), np.array(odd, np.float32))


def test_clients_without_examples_are_dropped_and_counted(tmp_path):
    rows = emnist_rows(clients=2)
    counted = [(c, s, sum(r[:2] == (s, c) for r in rows)) for s, c in {row[:2] for row in rows}]
    path = write_sqlite(tmp_path / "e.sqlite", rows, [*counted, ("nobody", "all_train", 0)])
    dataset = FederatedDataset.open(import_emnist(path, tmp_path / "out"))
    assert dataset.train.num_clients == 2
    assert dataset.header.source["dropped_clients"] == 1


BAD_ROWS = {
    "not a tf.train.Example": b"\x0a\xffgarbage",
    "'pixels' is missing": encode(label=[1]),
    "'label' is missing": encode(pixels=image(0, 0)),
    "is not 784 floats": encode(pixels=[1.0] * 10, label=[1]),
    "label 62 is outside": encode(pixels=image(0, 0), label=[62]),
    "a pixel is not finite": encode(pixels=[float("nan")] * 784, label=[1]),
}


@pytest.mark.parametrize("message", BAD_ROWS)
def test_a_bad_row_names_its_client_and_row(tmp_path, message):
    rows = [*emnist_rows(), ("all_train", "f0009_99", BAD_ROWS[message])]
    path = write_sqlite(tmp_path / "e.sqlite", rows)
    with pytest.raises(DataError, match=rf"client f0009_99, row {len(rows)}: .*{message}"):
        import_emnist(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_damaged_files_are_told_apart(tmp_path):
    whole = write_sqlite(tmp_path / "e.sqlite", emnist_rows(clients=30)).read_bytes()
    damaged = {
        "not a SQLite database": b"hello" * 100,
        "truncated: ": whole[: len(whole) // 2],
        "damaged: ": whole[:8192] + b"\xff" * (len(whole) - 8192),
    }
    for message, contents in damaged.items():
        path = tmp_path / "bad.sqlite"
        path.write_bytes(contents)
        with pytest.raises(DataError, match=f"bad.sqlite: {message}"):
            import_emnist(path, tmp_path / "out")
    packed = pack(tmp_path / "e.sqlite").read_bytes()
    cases = {
        "truncated": packed[: len(packed) // 2],
        "damaged": packed[:60] + bytes(200) + packed[260:],
        "not a SQLite": _packed_text(tmp_path),
    }
    for message, contents in cases.items():
        path = tmp_path / "bad.sqlite.lzma"
        path.write_bytes(contents)
        with pytest.raises(DataError, match=f"bad.sqlite.lzma: .*{message}"):
            import_emnist(path, tmp_path / "out")
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".") or p.name == "out"]


def _packed_text(tmp_path):
    (tmp_path / "text").write_text("no database")
    return pack(tmp_path / "text").read_bytes()


def test_missing_tables_columns_splits_and_rows_are_named(tmp_path):
    path = tmp_path / "e.sqlite"
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE other (x)")
    database.commit()
    database.close()
    with pytest.raises(DataError, match="no table 'examples'"):
        import_emnist(path, tmp_path / "out")
    stackoverflow = write_sqlite(tmp_path / "so.sqlite", SENTENCES)
    with pytest.raises(DataError, match="no split 'all_train'; it has train"):
        import_emnist(stackoverflow, tmp_path / "out")
    short = write_sqlite(
        tmp_path / "s.sqlite", emnist_rows(), [("a", "all_train", 99), ("a", "all_test", 3)]
    )
    with pytest.raises(
        DataError,
        match=r"incomplete: split all_train holds 9 examples, client_metadata promises 99",
    ):
        import_emnist(short, tmp_path / "out")


@pytest.fixture
def stackoverflow_file(tmp_path):
    return write_sqlite(tmp_path / "stackoverflow.sqlite", SENTENCES)


def test_stackoverflow_bags_tags_and_users(tmp_path, stackoverflow_file):
    words, tags = write_counts(tmp_path, WORDS, TAGS)
    options = StackOverflowOptions(vocabulary=4, actions=2)
    dataset = FederatedDataset.open(
        import_stackoverflow(stackoverflow_file, tmp_path / "out", words, tags, options)
    )
    assert dataset.vocabulary() == ["the", "how", "sort", "list"]
    assert dataset.header.actions == (
        "java",
        "python",
    )  # sorted by count, whatever the order in the file
    assert dataset.header.multilabel
    assert dataset.header.action_counts == (1, 2)
    assert (dataset.train.num_clients, dataset.train.num_examples) == (2, 3)
    assert (dataset.test.num_clients, dataset.test.num_examples) == (1, 1)
    first = dataset.train.features.slice(1, 2)  # u2's first sentence: the 2, how 1, sort 2, list 1
    assert first.ids.tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(first.values, np.array([2, 1, 2, 1]) / np.sqrt(10), rtol=1e-6)
    assert dataset.train.labels.slice(0, 1).ids.tolist() == [0, 1]
    assert dataset.train.labels.slice(2, 3).ids.tolist() == []  # kept without any tag
    assert len(dataset.train.features.slice(2, 3).ids) == 0


def test_published_tag_counts_are_kept_and_part_of_the_fingerprint(tmp_path, stackoverflow_file):
    def imported(name, counts):
        words, tags = write_counts(tmp_path, WORDS, counts)
        options = StackOverflowOptions(actions=2)
        return FederatedDataset.open(
            import_stackoverflow(stackoverflow_file, tmp_path / name, words, tags, options)
        )

    header = imported("out", TAGS).header
    assert header.published_counts == header.frequencies == (60, 40)
    assert imported("other", {**TAGS, "java": 61}).header.fingerprint != header.fingerprint


def test_without_published_counts_the_training_split_is_counted(tmp_path, stackoverflow_file):
    words, tags = write_counts(tmp_path, WORDS, TAGS)
    path = import_stackoverflow(
        stackoverflow_file, tmp_path / "out", words, tags, StackOverflowOptions(actions=2)
    )
    fields = json.loads((path / "header.json").read_text())
    (path / "header.json").write_text(json.dumps({**fields, "published_counts": []}))
    with_checksums(path)
    assert FederatedDataset.open(path).header.frequencies == (1, 2)


def test_stackoverflow_can_drop_the_unlabelled(tmp_path, stackoverflow_file):
    words, tags = write_counts(tmp_path, WORDS, {**TAGS, "rarely": 50})
    options = StackOverflowOptions(actions=2, drop_unlabelled=True)
    path = import_stackoverflow(pack(stackoverflow_file), tmp_path / "out", words, tags, options)
    dataset = FederatedDataset.open(path)
    assert dataset.header.actions == ("java", "rarely")
    assert [dataset.train.client_id(c) for c in range(dataset.train.num_clients)] == ["u1"]
    assert dataset.header.source["dropped_clients"] == 1
    assert dataset.header.source["dropped_rows_without_label"] == 2


def test_stackoverflow_counts_are_checked(tmp_path, stackoverflow_file):
    words, tags = write_counts(tmp_path, WORDS, TAGS)

    def refused(message):
        with pytest.raises(DataError, match=message):
            import_stackoverflow(stackoverflow_file, tmp_path / "out", words, tags)

    words.write_text("the 9\nbroken\n")
    refused("word_count, line 2: expected a word and its count")
    words.write_text("the 9\nthe 8\n")
    refused("a word occurs twice")
    words.write_text("")
    refused("holds no words")
    words.write_text("the 9\n")
    tags.write_text("[1, 2]")
    refused("tag_count: expected a JSON object")
    tags.write_text("{")
    refused("tag_count: cannot be read")
    tags.write_text(json.dumps(TAGS))
    words.unlink()
    refused("word_count: cannot be read")


def test_a_sentence_without_its_features_names_its_user(tmp_path):
    rows = [*SENTENCES, ("train", "u7", encode(tokens=[b"a"], tags=[b"x"]))]
    path = write_sqlite(tmp_path / "so.sqlite", rows)
    words, tags = write_counts(tmp_path, WORDS, TAGS)
    with pytest.raises(DataError, match="client u7, row 6: feature 'title' is missing"):
        import_stackoverflow(path, tmp_path / "out", words, tags)
