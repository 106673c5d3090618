"""Files as people have them: indexes, ids, embeddings, structs, no header, bombs."""

import subprocess
import sys

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedbandit.core.errors import ConfigError, DataError
from fedbandit.data.dataset import FederatedDataset
from fedbandit.data.importers import HoldOut
from fedbandit.data.importers.tables import (
    LoggedOptions,
    TableOptions,
    import_table,
    preview_table,
)
from fedbandit.data.info import outcome

OPTIONS = TableOptions(client="user", labels="label", test_fraction=0)


def frame(rows=60):
    return pd.DataFrame(
        {
            "user": [f"u{i % 7}" for i in range(rows)],
            "label": [f"l{i % 3}" for i in range(rows)],
            "age": [20.5 + i % 9 for i in range(rows)],
        }
    )


def columns_of(path, options=OPTIONS):
    return [
        column.name
        for column in FederatedDataset.open(
            import_table(path, path.parent / "out", options)
        ).header.encoder.columns
    ]


def test_an_index_of_pandas_is_left_out_and_said(tmp_path):
    data = frame()
    data.index = np.random.default_rng(0).permutation(60) * 3
    data.to_parquet(tmp_path / "a.parquet")
    data.rename_axis("visit").to_parquet(tmp_path / "b.parquet")
    for name in ("a", "b"):
        said = preview_table(tmp_path / f"{name}.parquet", OPTIONS)
        assert "left out: the index of a pandas frame" in said
    assert columns_of(tmp_path / "a.parquet") == ["age"]
    by_index = data.assign(user=data.user).set_index("user")
    by_index.to_parquet(tmp_path / "c.parquet")  # a named index can have a role
    import_table(tmp_path / "c.parquet", tmp_path / "c", OPTIONS)


def test_ids_are_left_out_and_said(tmp_path):
    rng = np.random.default_rng(0)
    data = frame().assign(question_id=rng.permutation(60) * 17, amount=rng.permutation(60) / 7)
    said = preview_table(data, OPTIONS)
    assert "question_id  left out: a number of its own in each row" in said
    assert "amount       number" in said
    kept = TableOptions(
        client="user", labels="label", test_fraction=0, treat=["question_id=number"]
    )
    assert "question_id  number" in preview_table(data, kept)


def test_embeddings_and_structs_become_columns(tmp_path):
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(60, 3)).round(3)
    table = pa.table(
        {
            **{name: pa.array(column) for name, column in frame().items()},
            "emb": pa.array(vectors.tolist(), pa.list_(pa.float64())),
            "fixed": pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), 3),
            "where": pa.array(
                [{"city": f"c{i % 4}", "at": {"lat": i / 9}} for i in range(60)],
                pa.struct([("city", pa.string()), ("at", pa.struct([("lat", pa.float64())]))]),
            ),
        }
    )
    pq.write_table(table, tmp_path / "t.parquet")
    raw = TableOptions(client="user", labels="label", test_fraction=0, scale="none")
    data = FederatedDataset.open(import_table(tmp_path / "t.parquet", tmp_path / "out", raw))
    assert [column.name for column in data.header.encoder.columns] == [
        "age", "emb[0]", "emb[1]", "emb[2]", "fixed[0]", "fixed[1]", "fixed[2]",
        "where.city", "where.at.lat",
    ]  # fmt: skip
    first = data.train.shared(np.array([0]))
    np.testing.assert_allclose(first.values[1:4], vectors[0], rtol=1e-6)


def test_a_first_row_that_looks_like_data_is_asked_about(tmp_path):
    (tmp_path / "orders.csv").write_text("".join(f"u{i % 5},{i},l{i % 2}\n" for i in range(40)))
    options = {"client": "column 1", "labels": "column 3", "test_fraction": 0}
    with pytest.raises(ConfigError, match=r"the first row of .* looks like data .*--header no"):
        import_table(tmp_path / "orders.csv", tmp_path / "a", TableOptions(**options))
    told = TableOptions(**options, header=False, treat=["column 2=number"])
    data = FederatedDataset.open(import_table(tmp_path / "orders.csv", tmp_path / "a", told))
    assert data.train.num_examples == 40
    named = TableOptions(client="u0", labels="l0", test_fraction=0, header=True, treat=["0=number"])
    data = FederatedDataset.open(import_table(tmp_path / "orders.csv", tmp_path / "b", named))
    assert data.train.num_examples == 39


def test_any_name_with_a_delimiter_and_spreadsheets_by_name(tmp_path):
    frame().to_csv(tmp_path / "u.data", sep="\t", index=False)
    with pytest.raises(DataError, match="--delimiter reads any name as text"):
        import_table(tmp_path / "u.data", tmp_path / "a", OPTIONS)
    told = TableOptions(client="user", labels="label", test_fraction=0, delimiter="tab")
    assert import_table(tmp_path / "u.data", tmp_path / "a", told)
    (tmp_path / "shop.xlsx").write_bytes(b"PK\x03\x04")
    with pytest.raises(DataError, match=r"a spreadsheet; .*read_excel\('shop.xlsx'\)") as caught:
        import_table(tmp_path / "shop.xlsx", tmp_path / "b", OPTIONS)
    assert "\n" not in str(caught.value)


def test_clients_are_held_out_with_their_share_of_events_and_rewards():
    rng = np.random.default_rng(0)
    for events in (np.full(400, 10.0), rng.pareto(1.2, 400) * 10 + 1):
        clicks = (rng.random(400) < 0.1) * rng.integers(1, 4, 400)
        totals = {f"u{i}": (events[i], clicks[i]) for i in range(400)}
        hold_out = HoldOut.balanced(0.1, totals)
        chosen = hold_out.is_test(list(totals))
        assert 0.05 < events[chosen].sum() / events.sum() < 0.15
        assert 0.05 < clicks[chosen].sum() / clicks.sum() < 0.15
        turned = HoldOut.balanced(0.1, dict(reversed(totals.items())))
        np.testing.assert_array_equal(turned.is_test(list(totals)), chosen)


def test_few_held_out_rewards_and_many_lost_rows_are_warned_about(tmp_path):
    rows = 400
    log = pd.DataFrame(
        {"user": [f"u{i % 40}" for i in range(rows)], "x": np.arange(rows) % 7 / 3,
         "did": [f"a{i % 3}" for i in range(rows)], "click": [int(i % 50 == 0) for i in range(rows)],
         "p": 1 / 3}
    )  # fmt: skip
    options = LoggedOptions(client="user", action="did", reward="click", propensity="p")
    path = import_table(log, tmp_path / "log", options)
    assert "held-out events have a reward, too few to judge" in outcome(path)
    texts = pd.DataFrame(
        {"user": [f"u{i % 9}" for i in range(600)], "title": ["some words here and there"] * 600,
         "tag": [f"t{i}" for i in range(600)]}
    )  # fmt: skip
    path = import_table(
        texts, tmp_path / "t", TableOptions(client="user", labels="tag", text=["title"])
    )
    assert "warning: 550 of 600 rows have labels that are no action; --actions N" in outcome(path)


def test_a_row_that_is_too_long_is_called_so(tmp_path):
    (tmp_path / "t.csv").write_text("user,label,text\nu,a," + "x" * (3 << 20) + "\n")
    with pytest.raises(DataError, match="a row is longer than 1,048,576 bytes; is a quote left"):
        import_table(tmp_path / "t.csv", tmp_path / "out", OPTIONS)


@pytest.mark.parametrize(
    "bomb",
    ["[" * 100_000, "[" * 5_000_000, '{"users": [' + "[" * 100_000,
     '{"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [' + "0," * 18_000_000 + "0]}}}"],
)  # fmt: skip
def test_bombs_of_json_are_refused_in_little_memory(tmp_path, bomb):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "all.json").write_text(bomb)
    program = (
        "import sys; from fedbandit.core.errors import DataError\n"
        "from fedbandit.data.importers.images import import_leaf\n"
        "try:\n    import_leaf(sys.argv[1], sys.argv[2])\n"
        "except DataError as error: print(str(error).splitlines()[0])\n"
        "peak = [line for line in open('/proc/self/status') if line.startswith('VmHWM')][0]\n"
        "print(int(peak.split()[1]) // 1024)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path, tmp_path / "out"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    said, megabytes = done.stdout.splitlines()
    assert "nested deeper than" in said or "one value has more than" in said
    assert int(megabytes) < 300
