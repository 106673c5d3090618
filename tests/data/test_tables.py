"""Tables and logs from CSV and Parquet."""

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from fedbandit.core.errors import ConfigError, DataError
from fedbandit.data.dataset import FederatedDataset
from fedbandit.data.importers.tables import LoggedOptions, TableOptions, import_table

TEXTS = {
    "user": ["7", "7", "08", "", "9"],
    "title": ["Sort a list", "sort, SORT!\nnew line", "a tree", "orphan", "untagged a"],
    "body": ["x", "y", "", "z", "w"],
    "tags": ["python|sorting", "python", "java | python", "java", ""],
}
OPTIONS = TableOptions(client="user", labels="tags", text=["title"], test_fraction=0.0)


def save(path, columns):
    table = pa.table(columns)
    if path.suffix == ".parquet":
        pa.parquet.write_table(table, path)
    else:
        options = pa.csv.WriteOptions(delimiter="\t" if path.suffix == ".tsv" else ",")
        pa.csv.write_csv(table, path, options)
    return path


@pytest.fixture(params=["t.csv", "t.tsv", "t.parquet"])
def text_file(tmp_path, request):
    return save(tmp_path / request.param, TEXTS)


def labels_of(dataset, split="train"):
    part = getattr(dataset, split)
    names = dataset.header.actions
    return [[names[i] for i in part.labels.slice(r, r + 1).ids] for r in range(part.num_examples)]


def test_text_and_tags(tmp_path, text_file):
    dataset = FederatedDataset.open(import_table(text_file, tmp_path / "out", OPTIONS))
    assert [dataset.train.client_id(c) for c in range(2)] == ["08", "7"]  # ids stay text
    assert dataset.header.actions == ("python", "java", "sorting")
    assert labels_of(dataset) == [["python", "java"], ["python", "sorting"], ["python"]]
    assert dataset.header.multilabel
    assert dataset.vocabulary()[:2] == ["a", "sort"]
    assert dataset.header.source["dropped_rows_without_client"] == 1
    assert dataset.header.source["dropped_rows_without_label"] == 1
    assert dataset.test is None
    kept = TableOptions(
        client="user", labels="tags", text=["title"], test_fraction=0.0, drop_unlabelled=False
    )
    dataset = FederatedDataset.open(import_table(text_file, tmp_path / "kept", kept))
    assert labels_of(dataset)[-1] == []


def test_limits_and_dropping(tmp_path, text_file):
    options = TableOptions(
        client="user", labels="tags", text=["title", "body"], vocabulary=2, actions=2
    )
    dataset = FederatedDataset.open(import_table(text_file, tmp_path / "out", options))
    assert dataset.header.shape == (2,)
    assert dataset.header.actions == ("python", "java")
    assert dataset.header.source["dropped_clients"] == 1
    assert dataset.header.source["dropped_rows_without_label"] == 1
    assert not dataset.test or dataset.train.num_examples + dataset.test.num_examples == 3


def test_text_is_held_out_by_client(tmp_path):
    users = [f"u{i % 100}" for i in range(1000)]
    columns = {"user": users, "title": ["a b"] * 1000, "tags": ["x"] * 1000}
    options = TableOptions(client="user", labels="tags", text=["title"], test_fraction=0.3)
    path = save(tmp_path / "t.csv", columns)
    dataset = FederatedDataset.open(import_table(path, tmp_path / "out", options))
    train = {dataset.train.client_id(c) for c in range(dataset.train.num_clients)}
    test = {dataset.test.client_id(c) for c in range(dataset.test.num_clients)}
    assert not train & test
    assert len(train | test) == 100
    assert 15 < len(test) < 45


@pytest.mark.parametrize("name", ["t.csv", "t.parquet"])
def test_features_labels_and_a_split_column(tmp_path, name):
    columns = {
        "who": [1, 1, 2, 2],
        "x_0": [0.5, 1.0, -2.0, 1e-3],
        "x_1": [1, 2, 3, 4],
        "label": [10, 9, 10, 9],
        "part": ["train", "TEST", "train", "test"],
    }
    options = TableOptions(
        client="who", labels="label", features=["x_*"], split="part", scale="none"
    )
    dataset = FederatedDataset.open(
        import_table(save(tmp_path / name, columns), tmp_path / "out", options)
    )
    assert dataset.header.kind == "dense"
    assert dataset.header.actions == ("10",)  # only training rows decide what is an action
    np.testing.assert_array_equal(dataset.train.features, np.array([[0.5, 1], [-2, 3]], np.float32))
    assert dataset.test is None
    assert dataset.header.source["dropped_rows_of_other_labels"] == 2
    some = TableOptions(client="who", labels="label", features=["x_1,x_0"], test_fraction=0)
    dataset = FederatedDataset.open(import_table(tmp_path / name, tmp_path / "out2", some))
    assert dataset.header.actions == ("9", "10")
    assert not dataset.header.multilabel


def refused(path, out, match, **changes):
    options = TableOptions(**{"client": "user", "labels": "tags", "text": ["title"], **changes})
    with pytest.raises(DataError, match=match) as caught:
        import_table(path, out, options)
    assert "\n" not in str(caught.value)
    assert not out.exists()


def test_mistakes_are_named(tmp_path, text_file):
    out = tmp_path / "out"
    refused(text_file, out, "no column 'titel'; did you mean title", text=["titel"])
    refused(text_file, out, "no column 'zzz'; known: user, title", client="zzz")
    refused(text_file, out, r"no column 'x_\*'", text=[], features=["x_*"])
    refused(text_file, out, "0 of 4 cells are numbers", text=[], features=["body"])
    first = 1 if text_file.suffix == ".parquet" else 2  # behind the header
    refused(text_file, out, f"row {first}: expected train or test, found 'x'", split="body")
    refused(tmp_path / "none.csv", out, "no such file")
    (tmp_path / "table.abc").write_text("")
    refused(tmp_path / "table.abc", out, "expected a name ending in .csv")


def test_damaged_tables(tmp_path):
    out = tmp_path / "out"
    (tmp_path / "a.csv").write_text("user,title,tags\n1,x\n")
    refused(tmp_path / "a.csv", out, r"a\.csv: cannot be read: .*Expected 3 columns")
    (tmp_path / "b.csv").write_text("")
    refused(tmp_path / "b.csv", out, r"b\.csv: cannot be read")
    (tmp_path / "c.csv").write_bytes(b"user,title,tags\n1,\xff\xfe,x\n")
    refused(tmp_path / "c.csv", out, r"c\.csv: not utf-8 near byte 0", encoding="utf-8")
    with pytest.raises(ConfigError, match="encoding: unknown encoding 'klingon'"):
        import_table(
            tmp_path / "c.csv", out, TableOptions(client="user", labels="tags", encoding="klingon")
        )
    (tmp_path / "c3.csv").write_text('user,title,"a\nb"\n1,x,y\n')
    refused(tmp_path / "c3.csv", out, r"c3\.csv: no column 'tags'; known: user, title, a b$")
    parquet = save(
        tmp_path / "c4.parquet", {**TEXTS, "title": ["a title that is wrong"] * 5}
    ).read_bytes()
    (tmp_path / "c4.parquet").write_bytes(
        parquet.replace(b"a title that is wrong", b"a title that is \xffrong")
    )
    refused(tmp_path / "c4.parquet", out, r"c4\.parquet: column")
    (tmp_path / "d.csv").write_text("user,title,tags,title\n1,x,y,z\n")
    refused(tmp_path / "d.csv", out, "more than one column is called 'title': columns 2 and 4")
    whole = save(tmp_path / "e.parquet", TEXTS).read_bytes()
    (tmp_path / "e.parquet").write_bytes(whole[: len(whole) // 2])
    refused(tmp_path / "e.parquet", out, r"e\.parquet: cannot be read")
    (tmp_path / "f.csv").write_text("user,title,tags\n")
    refused(tmp_path / "f.csv", out, "has no labels")
    save(tmp_path / "g.csv", {**TEXTS, "user": [""] * 5})
    refused(tmp_path / "g.csv", out, "no client has a training example")
    (tmp_path / "h.csv").write_text("user,x,tags\n1,big,a\n1,small,a\n1,0.5,a\n")
    refused(
        tmp_path / "h.csv",
        out,
        r"h\.csv: column x \(2 of 3\): 1 of 3 cells are numbers",
        text=[],
        features=["x"],
    )


def test_rows_are_counted_as_the_reader_of_the_file_counts_them(tmp_path):
    """A mistake that the CSV reader finds and one that we find in the same place are in the same row."""
    for cell, found in (("train,x", r"Row #3:"), ("trian", r"column part \(4 of 4\), row 3:")):
        (tmp_path / "a.csv").write_text(f'user,x,tags,part\n"1\n2",0.5,a,train\n\n1,2,a,{cell}\n')
        refused(tmp_path / "a.csv", tmp_path / "out", found, text=[], features=["x"], split="part")


def test_parquet_columns_of_other_kinds_are_named(tmp_path):
    out, path = tmp_path / "out", tmp_path / "t.parquet"
    save(path, {"user": ["1"] * 2, "tags": ["a"] * 2, "x": [[1], [2]]})
    refused(path, out, r"t\.parquet: column x \(3 of 3\): holds lists", text=[], features=["x"])
    refused(path, out, r"t\.parquet: no column is left to decide from \(x: holds lists\)", text=[])
    save(path, {"user": ["1"] * 2, "tags": ["a"] * 2, "title": [b"\xff", b"fine"]})
    refused(path, out, r"column title \(3 of 3\), rows 1 to 2: Invalid UTF8")
    save(path, {"user": ["1"] * 2, "tags": ["a"] * 2, "title": [["list"], ["s"]]})
    refused(path, out, r"t\.parquet: column title \(3 of 3\): expected text")
    save(path, {"user": [0.5, 1.0], "tags": ["a"] * 2, "title": ["x"] * 2})
    refused(
        path, out, r"column user \(1 of 3\), rows 1 to 2: holds 0.5, where text or whole numbers"
    )


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"dense": True}, "dense: words are never dense"),
        ({"scale": "minmax"}, "scale: must be standard or none"),
        ({"categories": 1}, "categories: must be from 2"),
        ({"treat": ["x"]}, "as: expected COLUMN=KIND"),
        ({"treat": ["x=colour"]}, "as: 'colour' is not a kind of column"),
        ({"treat": ["x=date:today"]}, "as: 'date:today': possible are"),
        ({"labels": []}, "labels: name the column"),
        ({"like": "there", "features": ["x"]}, "like: the other data set decides"),
        ({"vocabulary": 0}, "vocabulary: must be at least 1"),
        ({"actions": 1}, "actions: must be at least 2"),
        ({"label_separator": ""}, "label-separator"),
        ({"test_fraction": 1.5}, "test-fraction"),
    ],
)
def test_options_are_checked_at_the_door(changes, match):
    with pytest.raises(ConfigError, match=match):
        TableOptions(**{"client": "user", "labels": "tags", "text": ["title"], **changes})


LOG = {
    "user": ["b", "a", "a"],
    "x": [1.0, 2.0, 3.0],
    "what": ["stop", "go", "wait"],
    "r": [0.0, -1.5, 2.0],
    "p": [0.25, 1.0, 1e-3],
    "could": ["stop|go", "", "wait|go"],
}
LOGGED = {"client": "user", "action": "what", "reward": "r", "propensity": "p", "features": ["x"], "scale": "none",
          "test_fraction": 0.0}  # fmt: skip


@pytest.mark.parametrize("name", ["t.csv", "t.parquet"])
def test_logged_feedback(tmp_path, name):
    path = save(tmp_path / name, LOG)
    options = LoggedOptions(**LOGGED, available="could")
    dataset = FederatedDataset.open(import_table(path, tmp_path / "out", options))
    assert dataset.header.logged
    assert dataset.header.actions == ("go", "stop", "wait")
    log = dataset.train.log
    assert log.actions.tolist() == [0, 2, 1]
    np.testing.assert_allclose(log.rewards, [-1.5, 2.0, 0.0])
    np.testing.assert_allclose(log.propensities, [1.0, 1e-3, 0.25], rtol=1e-6)
    assert [log.available.slice(i, i + 1).ids.tolist() for i in range(3)] == [
        [0, 1, 2],
        [0, 2],
        [0, 1],
    ]
    assert dataset.train.shared(np.arange(3)).ravel().tolist() == [2.0, 3.0, 1.0]
    without = FederatedDataset.open(import_table(path, tmp_path / "out2", LoggedOptions(**LOGGED)))
    assert without.train.log.available is None


def test_logged_text_and_numbered_actions(tmp_path):
    path = save(
        tmp_path / "t.csv", {**LOG, "what": ["0", "4", "2"], "said": ["hi there", "hi", "bye"]}
    )
    options = LoggedOptions(**{**LOGGED, "features": [], "text": ["said"], "actions": 6})
    dataset = FederatedDataset.open(import_table(path, tmp_path / "out", options))
    assert dataset.header.actions == tuple("012345")
    assert dataset.vocabulary()[0] == "hi"
    assert dataset.header.action_counts == (1, 0, 1, 0, 1, 0)


@pytest.mark.parametrize(
    ("column", "values", "match"),
    [
        ("p", [0.5, 0.0, 0.5], r"column p \(\d of 6\), row 2: a propensity must be above 0"),
        ("p", [0.5, 0.5, 1.5], r"column p \(\d of 6\), row 3: a propensity must be above 0"),
        ("p", [1e-60, 0.5, 0.5], r"column p \(\d of 6\), row 1: a propensity must be above 0"),
        ("p", [0.5, None, 0.5], r"column p \(\d of 6\), row 2: missing, or not a finite number"),
        (
            "r",
            [0.5, float("inf"), 0.5],
            r"column r \(\d of 6\), row 2: missing, or not a finite number",
        ),
        ("what", ["go", "", "go"], r"column what \(\d of 6\), row 2: the action is missing"),
        (
            "could",
            ["go", "go", "wait"],
            r"column could \(\d of 6\), row 1: the action that was taken is not among",
        ),
    ],
)
def test_bad_logs_are_refused(tmp_path, column, values, match):
    path = save(tmp_path / "t.parquet", {**LOG, column: values})
    with pytest.raises(DataError, match=match):
        import_table(path, tmp_path / "out", LoggedOptions(**LOGGED, available="could"))
    assert [p.name for p in tmp_path.iterdir()] == ["t.parquet"]


def test_a_numbered_action_outside_the_range_is_refused(tmp_path):
    path = save(tmp_path / "t.csv", {**LOG, "what": ["0", "6", "2"]})
    with pytest.raises(DataError, match="row 3: no action called '6'"):
        import_table(path, tmp_path / "out", LoggedOptions(**LOGGED, actions=6))
