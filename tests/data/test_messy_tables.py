"""Tables as they are: what is found in them, what can be said otherwise, and what becomes of it."""

import json

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from messy_tables import write_clicks, write_tickets

from fedbandit.core.errors import ConfigError, DataError
from fedbandit.data.dataset import FederatedDataset
from fedbandit.data.importers.columns import find_dialect
from fedbandit.data.importers.tables import (
    LoggedOptions,
    TableOptions,
    import_table,
    preview_table,
)

CLICKS = TableOptions(client="visitor", labels="clicked")
TICKETS = TableOptions(client="Kunde", labels=["Queue", "Queue 2"])


@pytest.fixture(scope="module")
def clicks(tmp_path_factory):
    return write_clicks(tmp_path_factory.mktemp("clicks") / "clicks.csv")


@pytest.fixture(scope="module")
def tickets(tmp_path_factory):
    return write_tickets(tmp_path_factory.mktemp("tickets") / "tickets.csv")


def imported(source, out, options):
    return FederatedDataset.open(import_table(source, out, options))


def columns_of(dataset):
    return {column.name: column for column in dataset.header.encoder.columns}


def test_a_shops_clicks(tmp_path, clicks):
    said = []
    dataset = FederatedDataset.open(import_table(clicks, tmp_path / "out", CLICKS, say=said.append))
    found, header = columns_of(dataset), dataset.header
    assert header.encoder.text == ("search",)
    assert list(found) == ["price", "device", "member", "seen_at"]
    assert (found["price"].kind, found["price"].log, found["price"].missing) == (
        "number",
        True,
        True,
    )
    assert found["device"].values == ("laptop", "phone", "tablet")
    assert (found["member"].kind, found["seen_at"].parts) == ("flag", ("weekday", "hour"))
    assert sorted(header.actions) == ["Büro", "Gärten", "Küche", "玩具"]
    assert header.source["dropped_rows_without_client"] == 1
    assert header.source["dropped_rows_without_label"] > 5
    assert "球" in dataset.vocabulary()
    summary = said[0].splitlines()
    assert summary[0].endswith("10 columns; utf-8, separated by commas")
    for column, words in {
        "column 1": "left out: counts the rows", "shop": "left out: always the same", "price": "1 not a number",
        "session": "left out: a different value in nearly every row", "visitor": "the client: 60 of them",
    }.items():  # fmt: skip
        assert any(line.strip().startswith(column) and words in line for line in summary), (
            column,
            said[0],
        )
    assert preview_table(clicks, CLICKS) == said[0]


def test_a_support_desks_tickets(tmp_path, tickets):
    dataset = imported(tickets, tmp_path / "out", TICKETS)
    found = columns_of(dataset)
    assert (found["Minuten"].kind, found["Minuten"].log, found["Minuten"].missing) == (
        "number",
        False,
        True,
    )
    assert 40 < found["Minuten"].mean < 50  # 45,3 is not 453
    assert found["erstellt"].parts == ("weekday", "hour", "year")
    assert found["Filiale"].values == ("00", "01", "02", "03")  # codes, not numbers
    assert (set(dataset.header.actions), dataset.header.multilabel) == (
        {"billing", "login", "shipping"},
        True,
    )
    assert "für" in dataset.vocabulary()


def test_text_and_columns_weigh_the_same_and_a_context_has_a_norm_of_about_one(tmp_path, tickets):
    dataset = imported(tickets, tmp_path / "out", TICKETS)
    contexts, words = (
        dataset.train.shared(np.arange(dataset.train.num_examples)),
        dataset.header.encoder.words,
    )
    squares = contexts.values.astype(np.float64) ** 2
    n = len(contexts)
    assert squares[contexts.ids < words].sum() / n == pytest.approx(0.5, abs=1e-6)
    assert squares[contexts.ids >= words].sum() / n == pytest.approx(0.5, abs=0.1)
    lengths = np.diff(contexts.offsets)
    assert (np.concatenate([np.diff(contexts.slice(i, i + 1).ids) for i in range(20)]) > 0).all()
    assert lengths.min() > 0


def test_every_decision_can_be_overridden(tmp_path, clicks):
    options = TableOptions(
        client="visitor", labels="clicked", categories=2, vocabulary=5, missing=["ask us"], test_fraction=0,
        treat=["price=raw", "dev*=hashed:8", "seen_at=ignore", "shop=category", "member=category"],
    )  # fmt: skip
    dataset = imported(clicks, tmp_path / "out", options)
    found = columns_of(dataset)
    assert (found["price"].scaled, found["device"].buckets) == (False, 8)
    assert found["member"].values == ("no", "yes")
    assert found["shop"].values == ("main",)
    assert "seen_at" not in found
    assert len(dataset.vocabulary()) == 5
    assert "not a number" not in preview_table(clicks, options)
    contexts = dataset.train.shared(np.arange(dataset.train.num_examples))
    assert contexts.values.max() > 100  # a price as it is


def test_numbers_alone_are_dense_and_scaled(tmp_path):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "who": np.arange(200) % 10,
            "x": rng.normal(1e6, 5, 200),
            "y": rng.random(200),
            "z": ["a", "b"] * 100,
        }
    )
    dataset = imported(
        frame,
        tmp_path / "dense",
        TableOptions(client="who", labels="z", features=["x,y"], test_fraction=0),
    )
    assert dataset.header.kind == "dense"
    np.testing.assert_allclose(dataset.train.features.mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(dataset.train.features.std(axis=0), 1, atol=1e-5)
    sparse = imported(
        frame, tmp_path / "sparse", TableOptions(client="who", labels="z", test_fraction=0)
    )
    assert (sparse.header.kind, sparse.header.shape) == ("sparse", (2,))
    matrix = np.zeros((200, 2))
    rows = sparse.train.shared(np.arange(200))
    matrix[rows.row_of_entry(), rows.ids] = rows.values
    np.testing.assert_allclose(matrix * np.sqrt(2), dataset.train.features, rtol=1e-5)


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [
        ("utf-8", "utf-8"),
        ("utf-8-sig", "utf-8-sig"),
        ("utf-16", "utf-16"),
        ("utf-16-le", "utf-16-le"),
        ("latin-1", "cp1252"),
        ("utf-32", "utf-32"),
    ],
)
@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_encodings_and_delimiters_are_found(tmp_path, encoding, expected, delimiter):
    rows = [
        ["who", "was", "wert"],
        ["ä", '"Größe, groß; 3|4"', "1"],
        ["b", '"zwei\nZeilen"', "2"],
        ["c", "x", "1"],
    ]
    path = tmp_path / "t.csv"
    path.write_bytes("".join(delimiter.join(row) + "\r\n" for row in rows).encode(encoding))
    found = find_dialect(path)
    assert (found.encoding, found.delimiter) == (expected, delimiter)
    options = TableOptions(client="who", labels="wert", text=["was"], test_fraction=0)
    dataset = imported(path, tmp_path / "out", options)
    assert dataset.train.client_id(2) == "ä"
    assert {"größe", "groß", "zeilen"} <= set(dataset.vocabulary())


class HuggingFace:
    """A stand-in with the part of the interface of `datasets.Dataset` that an import uses."""

    def __init__(self, table, formatted=False):
        self._table, self._formatted, self.column_names = table, formatted, table.column_names

    def __len__(self):
        return len(self._table)

    def with_format(self, kind):
        assert kind == "arrow"
        return HuggingFace(self._table, formatted=True)

    def iter(self, batch_size):
        assert self._formatted
        for start in range(0, len(self._table), batch_size):
            yield self._table.slice(start, batch_size)


def test_frames_give_what_the_file_gives(tmp_path):
    columns = {
        "user": [1, 1, 2, None, 3] * 8,
        "said": ["hello there you", "good bye my friend", "x y z", "a b c d", "q r s"] * 8,
        "age": [30.5, None, 20, 10, 5] * 8,
        "sex": ["f", None, "m", "m", "f"] * 8,
        "tags": [["a", "b"], ["a"], [], ["b"], ["b"]] * 8,
    }
    arrow = pa.table(columns)
    options = TableOptions(client="user", labels="tags", test_fraction=0)
    expected = imported(arrow, tmp_path / "arrow", options)
    assert expected.header.multilabel
    assert expected.train.client_id(0) == "1"
    frame = pd.DataFrame(columns).astype(
        {"sex": "category"}
    )  # whose users are floats, for the sake of the gap
    for name, source in {
        "pandas": frame,
        "polars": pl.DataFrame(columns),
        "hugging": HuggingFace(arrow),
    }.items():
        found = imported(source, tmp_path / name, options)
        assert (found.header.encoder, found.header.actions) == (
            expected.header.encoder,
            expected.header.actions,
        ), name
        np.testing.assert_array_equal(found.train.features.values, expected.train.features.values)
    shuffled = frame.iloc[::-1]  # with an index that is no column
    assert imported(shuffled, tmp_path / "shuffled", options).header.shape == expected.header.shape
    with pytest.raises(ConfigError, match=r"the frame: holds several \(train, test\)"):
        imported({"train": arrow, "test": arrow}, tmp_path / "no", options)
    with pytest.raises(ConfigError, match="the frame: a list is neither a file's name nor a frame"):
        imported([1], tmp_path / "no", options)


LABELS = {
    "bars": ({"l": ["a|b", "b", "c"]}, "l", ["a", "b", "c"]),
    "semicolons": ({"l": ["a; b", "b;c", "c;a"]}, "l", ["a", "b", "c"]),
    "commas": ({"l": ["a, b", "b,c", "a,c"]}, "l", ["a", "b", "c"]),
    "names with commas": (
        {"l": ["Doe, Jane", "Roe, Jim", "Poe, Joe"]},
        "l",
        ["Doe, Jane", "Poe, Joe", "Roe, Jim"],
    ),
    "several": ({"l1": ["a", "b", ""], "l2": ["b", "", "c"]}, "l1,l2", ["a", "b", "c"]),
    "marks": ({"red": [1, 0, 1], "blue": ["no", "yes", "yes"]}, ["red", "blue"], ["blue", "red"]),
}


@pytest.mark.parametrize("kind", LABELS)
def test_labels_of_one_column_of_several_and_with_a_separator(tmp_path, kind):
    columns, labels, actions = LABELS[kind]
    frame = pd.DataFrame({"who": ["u", "v", "w"], "x": [1.0, 2.0, 4.0], **columns})
    dataset = imported(
        frame, tmp_path / "out", TableOptions(client="who", labels=labels, test_fraction=0)
    )
    assert list(dataset.header.actions) == actions
    assert dataset.header.multilabel == (kind != "names with commas")
    if kind == "commas":
        whole = TableOptions(client="who", labels=labels, test_fraction=0, label_separator="none")
        assert imported(frame, tmp_path / "whole", whole).header.num_actions == 3


def test_a_second_table_like_the_first(tmp_path, tickets):
    first = imported(tickets, tmp_path / "first", TICKETS)
    other = write_tickets(tmp_path / "more.csv", rows=200, seed=9)
    text = (
        other.read_text(encoding="latin-1")
        .replace("hoch", "dringend")
        .replace("billing", "unheard of")
    )
    other.write_text(text, encoding="utf-8")
    options = TableOptions(client="Kunde", labels=["Queue", "Queue 2"], like=first.path)
    second = imported(other, tmp_path / "second", options)
    assert second.header.encoder == first.header.encoder
    assert (second.header.actions, second.vocabulary()) == (
        first.header.actions,
        first.vocabulary(),
    )
    assert second.header.source["dropped_rows_of_other_labels"] > 10
    other.write_text("Kunde;Queue;Queue 2;Betreff\n1;billing;;x\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"more\.csv: no column 'Priorität'"):
        imported(other, tmp_path / "third", options)
    text_only = imported(
        tickets, tmp_path / "words", TableOptions(client="Kunde", labels="Queue", text=["Betreff"])
    )
    again = imported(
        tickets,
        tmp_path / "again",
        TableOptions(client="Kunde", labels="Queue", like=text_only.path),
    )
    assert again.vocabulary() == text_only.vocabulary()
    np.testing.assert_array_equal(again.train.features.ids, text_only.train.features.ids)


def test_a_second_log_like_the_first(tmp_path):
    rng = np.random.default_rng(0)

    def log(n, shift=0.0, actions=("stop", "go")):
        return pd.DataFrame(
            {
                "user": rng.integers(0, 30, n),
                "speed": rng.normal(50 + shift, 10, n),
                "road": rng.choice(["wet", "dry"], n),
                "did": rng.choice(actions, n),
                "fine": rng.choice(["yes", "no"], n),
                "p": 0.5,
            }
        )

    roles = {"client": "user", "action": "did", "reward": "fine", "propensity": "p"}
    first = FederatedDataset.open(import_table(log(300), tmp_path / "a", LoggedOptions(**roles)))
    like = LoggedOptions(**roles, like=first.path)
    second = FederatedDataset.open(import_table(log(100, 20.0, ["go"]), tmp_path / "b", like))
    assert (second.header.encoder, second.header.actions) == (first.header.encoder, ("go", "stop"))
    assert first.test is not None  # something is always held out
    assert set(np.unique(first.train.log.rewards)) == {0.0, 1.0}
    contexts = second.train.shared(np.arange(second.train.num_examples))
    assert (
        1.0 < contexts.values[contexts.ids == 0].mean() * np.sqrt(2) < 3.0
    )  # scaled by the first log's mean
    with pytest.raises(
        DataError, match=r"column did \(4 of 6\), row \d+: no action called 'wait' among those of a"
    ):
        import_table(log(50, 0.0, ["wait"]), tmp_path / "c", like)
    assert "the action that was taken: 2 of them" in preview_table(log(20), like)


def test_numbers_and_dates_in_the_ways_they_are_written(tmp_path):
    frame = pd.DataFrame(
        {
            "who": ["u"] * 6,
            "label": list("ababab"),
            "us": ["$1,200.50", "3", "12,000", "7.5", "1", "2"],
            "swiss": ["1'200.5", "3", "4", "5", "6", "7"],
            "share": ["12.5 %", "3%", "40 %", "1%", "2%", "9%"],
            "day": ["12/31/2023", "1/2/2024", "2/29/2024", "3/4/2024", "5/6/2024", "7/8/2024"],
            "clock": [
                "2024-01-01T10:00:00Z",
                "2024-01-01 11:30",
                "2024-06-01 1:05 PM",
                "2024-02-30",
                "",
                "2024-07-01",
            ],
        }
    )
    options = TableOptions(client="who", labels="label", test_fraction=0, treat=["clock=date"])
    found = columns_of(imported(frame, tmp_path / "out", options))
    assert found["us"].mean == pytest.approx((1200.5 + 3 + 12000 + 7.5 + 1 + 2) / 6)
    assert found["swiss"].mean == pytest.approx((1200.5 + 3 + 4 + 5 + 6 + 7) / 6)
    assert found["share"].mean == pytest.approx((12.5 + 3 + 40 + 1 + 2 + 9) / 6)
    assert found["day"].parts == ("weekday", "year")
    assert found["clock"].parts == ("weekday", "hour", "year")
    assert found["clock"].missing  # the 30th of February is none


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda encoder: encoder.update(words=1), "does not make contexts of this kind and shape"),
        (lambda encoder: encoder.update(dense=True), "words and text do not belong together"),
        (
            lambda encoder: encoder["columns"].append(
                {"name": "x", "kind": "number", "code": "evil"}
            ),
            "code: unexpected keyword argument",
        ),
        (
            lambda encoder: encoder["columns"][0].update(deviation=1e999),
            "deviation: input should be less than",
        ),
        (lambda encoder: encoder.update(columns="x"), "columns: input should be a valid"),
    ],
)
def test_a_damaged_encoder_does_not_pass_the_door(tmp_path, change, match):
    frame = pd.DataFrame(
        {
            "who": ["u"] * 4,
            "x": [1.0, 2, 3, 4],
            "note": ["a b c d"] * 3 + ["e f g"],
            "y": list("abab"),
        }
    )
    dataset = imported(
        frame, tmp_path / "out", TableOptions(client="who", labels="y", test_fraction=0)
    )
    path = dataset.path / "header.json"
    header = json.loads(path.read_text())
    change(header["encoder"])
    path.write_text(json.dumps(header))
    with pytest.raises(DataError, match=rf"header\.json: encoder.*{match}") as caught:
        FederatedDataset.open(dataset.path)
    assert "\n" not in str(caught.value)


def test_names_alone_are_taken_for_lists_of_one(tmp_path, clicks):
    found = imported(
        clicks, tmp_path / "out", TableOptions(client="visitor", labels="clicked", text="search")
    )
    assert found.header.encoder is None
    assert found.header.source["columns"] == ["search"]
