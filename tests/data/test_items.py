"""Tables and logs over a catalogue: items with features, candidates of each event, and versions."""

import json

import numpy as np
import pandas as pd
import pytest

from fedbandit.core.errors import ConfigError, DataError
from fedbandit.data.dataset import FederatedDataset
from fedbandit.data.export import export_dsjson
from fedbandit.data.importers.contexts import ColumnOptions
from fedbandit.data.importers.items import ItemOptions, append_items
from fedbandit.data.importers.logs import DsJson, OpenBandit, dsjson_options, open_bandit_options
from fedbandit.data.importers.tables import LoggedOptions, TableOptions, import_table
from fedbandit.data.info import describe, outcome

ITEMS = pd.DataFrame(
    {
        "film": [f"m{i}" for i in range(30)],
        "title": [f"the {['wolf', 'king', 'river', 'star'][i % 4]} returns" for i in range(30)],
        "price": np.linspace(1, 9, 30).round(2),
        "genre": [["drama", "war", "comedy"][i % 3] for i in range(30)],
    }
)


def events(rows=200, seed=0):
    rng = np.random.default_rng(seed)
    picked = rng.choice(30, rows, p=np.arange(30, 0, -1) / 465)
    return pd.DataFrame(
        {
            "user": [f"u{i % 25}" for i in range(rows)],
            "film": [f"m{i}" for i in picked],
            "hour": rng.integers(0, 24, rows),
            "day": pd.date_range("2024-01-01", periods=rows, freq="D").astype(str),
            "rating": rng.integers(1, 6, rows),
            "shown": [
                "|".join(dict.fromkeys([f"m{i}", *(f"m{j}" for j in rng.choice(30, 4))]))
                for i in picked
            ],
        }
    )


def options(kind=TableOptions, *, catalogue=ITEMS, events_as=(), **given):
    fields = {"client": "user", "test_fraction": 0.0, "treat": ["rating=ignore", *events_as]}
    columns = ColumnOptions(like=given.pop("like", None))
    items = {
        name: given.pop(name)
        for name in ("candidates", "negatives", "time", "item_time")
        if name in given
    }
    if kind is TableOptions:
        fields["labels"] = "film"
    return kind(
        **fields,
        **given,
        items=ItemOptions(table=catalogue, column="film", columns=columns, **items),
    )


GIVEN = {"candidates": "shown", "events_as": ["day=ignore"]}
SAMPLED = {"events_as": ["shown=ignore", "day=ignore"]}


def made(folder, frame, chosen):
    return FederatedDataset.open(import_table(frame, folder, chosen))


def picked_items(data):
    split = data.train
    lists = [split.candidates.slice(i, i + 1).ids for i in range(split.num_examples)]
    return [int(row[label]) for row, label in zip(lists, split.labels.ids, strict=True)], lists


def test_given_candidates_keep_the_label_and_lose_its_place(tmp_path):
    frame = events()
    data = made(tmp_path / "a", frame, options(**GIVEN))
    assert data.header.actions == ()
    assert len(data.train.catalogue) == 30
    picked, lists = picked_items(data)
    by_user = frame.sort_values("user", kind="stable", key=lambda c: c.map(str.encode))
    assert [f"m{item}" for item in picked] == by_user.film.tolist()
    for row, shown in zip(lists, by_user.shown, strict=True):
        assert {f"m{item}" for item in row} == set(shown.split("|"))
    # The label stands first in every cell; in the data its place is anywhere, about evenly.
    share = np.mean(data.train.labels.ids == 0)
    assert 0.1 < share < 0.4
    turned = frame.assign(shown=["|".join(s.split("|")[::-1]) for s in frame.shown])
    again = made(tmp_path / "b", turned, options(**GIVEN))
    np.testing.assert_array_equal(again.train.candidates.ids, data.train.candidates.ids)
    np.testing.assert_array_equal(again.train.labels.ids, data.train.labels.ids)


def test_what_cannot_be_used_is_counted_in_one_line_each(tmp_path):
    frame = events()
    frame.loc[0, "film"] = "nobody knows it"
    frame.loc[1, "film"] = ""
    frame.loc[2, "shown"] = ""
    frame.loc[3, "shown"] = frame.film[3]
    frame.loc[4, "shown"] = "m0|m1" if frame.film[4] not in ("m0", "m1") else "m2|m3"
    frame.loc[5, "shown"] += "|no such item"
    data = made(tmp_path / "a", frame, options(**GIVEN))
    source = data.header.source
    assert data.train.num_examples == 195
    for reason in (
        "dropped_rows_of_unknown_items",
        "dropped_rows_without_label",
        "dropped_rows_without_candidates",
        "dropped_rows_with_one_candidate",
        "dropped_rows_whose_label_is_no_candidate",
        "unknown_candidates",
    ):
        assert source[reason] == 1, reason
    said = outcome(tmp_path / "a")
    assert "30 items to choose from" in said
    assert "1 rows with one candidate" in said
    with pytest.raises(DataError, match="names no item of"):
        import_table(frame.assign(film="x"), tmp_path / "b", options(**GIVEN))


def test_negatives_are_sampled_by_popularity_and_addressed_by_the_event(tmp_path):
    frame = events(600)
    data = made(tmp_path / "a", frame, options(negatives=5, **SAMPLED))
    picked, lists = picked_items(data)
    assert all(len(set(row)) == 6 for row in lists)
    counts = np.bincount(np.concatenate(lists), minlength=30) - np.bincount(picked, minlength=30)
    assert counts[:5].sum() > 2 * counts[-5:].sum() > 0
    assert 0.08 < np.mean(data.train.labels.ids == 0) < 0.28
    assert data.header.source["candidates"].endswith("5 sampled by popularity")
    again = made(tmp_path / "b", frame, options(negatives=5, **SAMPLED))
    assert again.header.fingerprint == data.header.fingerprint
    everything = made(tmp_path / "c", frame, options(negatives="all", **SAMPLED))
    assert (np.diff(everything.train.candidates.offsets) == 30).all()
    many = pd.concat([ITEMS.assign(film=ITEMS.film + f"-{i}") for i in range(40)])
    with pytest.raises(ConfigError, match="there are 1,200 items; give --candidates, or"):
        import_table(frame, tmp_path / "d", options(catalogue=many, **SAMPLED))


def test_the_newest_features_before_an_event_count(tmp_path):
    first = ITEMS.assign(since="2024-01-01")
    later = ITEMS[:1].assign(since="2024-03-01", price=100.0)
    new = ITEMS[:1].assign(film="new", since="2024-05-01")
    chosen = options(
        catalogue=pd.concat([first, later, new]), time="day", item_time="since", negatives="all",
        events_as=["shown=ignore"],
    )  # fmt: skip
    data = made(tmp_path / "a", events(), chosen)
    catalogue, split = data.train.catalogue, data.train
    assert (len(catalogue), len(catalogue.features)) == (31, 32)
    rows = split.candidates
    when = split.times[rows.row_of_entry()]
    march, may = (pd.Timestamp(day).timestamp() for day in ("2024-03-01", "2024-05-01"))
    versions = np.flatnonzero(catalogue.items == 0)
    assert (when[rows.ids == versions[0]] < march).all()
    assert (when[rows.ids == versions[1]] >= march).all()
    is_new = catalogue.item_of(rows.ids) == 30
    assert is_new.any()
    assert (when[is_new] >= may).all()
    assert set(np.unique(split.contexts(np.arange(5)).candidates.items)) == set(range(30))
    text = describe(data)
    assert "31 items (1 changes of features)" in text
    assert "items first shown in each tenth of the time: 30 0" in text


def test_ratings_and_items(tmp_path):
    """As MovieLens has them: a rating says whether the pair counts; nothing is known of users."""
    ratings = events()[["user", "film", "rating"]]
    chosen = TableOptions(
        client="user", labels="film", where="rating>=4", test_fraction=0.0,
        items=ItemOptions(table=ITEMS, column="film", negatives=3),
    )  # fmt: skip
    data = made(tmp_path / "a", ratings, chosen)
    assert data.train.num_examples == (ratings.rating >= 4).sum()
    assert data.header.source["dropped_rows_that_do_not_fit"] == (ratings.rating < 4).sum()
    assert data.header.shape == (1,)
    np.testing.assert_array_equal(data.train.shared(np.arange(3)), np.ones((3, 1)))


def test_logs_keep_propensities_and_candidates(tmp_path):
    frame = events().assign(p=0.25, click=[0, 1] * 100)
    chosen = options(
        LoggedOptions, action="film", reward="click", propensity="p",
        candidates="shown", events_as=["day=ignore"],
    )  # fmt: skip
    data = made(tmp_path / "a", frame, chosen)
    assert data.header.logged
    assert (data.train.log.actions == 0).all()  # as the file lists them
    np.testing.assert_array_equal(data.train.log.propensities, np.float32(0.25))
    with pytest.raises(DataError, match="no action called 'zzz'"):
        import_table(frame.assign(shown="m1|zzz"), tmp_path / "b", chosen)
    with pytest.raises(DataError, match="not among the candidates"):
        import_table(frame.assign(shown="m1|m2", film="m3"), tmp_path / "b", chosen)


def test_items_are_appended_and_changed_with_the_same_encoder(tmp_path):
    data = made(tmp_path / "a", events(), options(**GIVEN))
    more = pd.DataFrame(
        {"film": ["m0", "new"], "title": ["the wolf returns", "a star"], "price": [2.0, 3.0],
         "genre": ["war", "opera"]}
    )  # fmt: skip
    out = append_items(data, tmp_path / "b", more, "film")
    again = FederatedDataset.open(out)
    catalogue = again.train.catalogue
    assert (len(catalogue), len(catalogue.features)) == (31, 32)
    assert again.header.item_encoder == data.header.item_encoder
    np.testing.assert_array_equal(again.train.candidates.ids, data.train.candidates.ids)
    np.testing.assert_array_equal(again.train.labels.ids, data.train.labels.ids)
    assert catalogue.name(30) == "new"
    assert catalogue.item_of(np.array([30, 31])).tolist() == [0, 30]
    assert again.header.fingerprint != data.header.fingerprint


def decisions(path, rows=300, named=True):
    """Decisions of 3 to 6 candidates whose features differ from one decision to the next."""
    rng = np.random.default_rng(1)
    lines = []
    for row in range(rows):
        count = int(rng.integers(3, 7))
        several = [
            {
                **({"id": f"a{rng.integers(12)}"} if named else {}),
                "F": {"price": float(rng.integers(1, 6)), "kind": ["x", "y", "z"][rng.integers(3)]},
            }
            for _ in range(count)
        ]
        chosen = int(rng.integers(count))
        lines.append(
            {
                "_label_cost": -float(rng.integers(2)), "_label_probability": 1 / count,
                "_label_Action": chosen + 1, "EventId": str(row),
                "a": list(range(1, count + 1)), "p": [1 / count] * count,
                "c": {"User": {"id": f"u{row % 20}", "age": float(row % 7)}, "_multi": several},
            }
        )  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def import_decisions(path, out, client="User.id", **given):
    source = DsJson(path, **given)
    chosen = dsjson_options(client, ColumnOptions(), 0.0, source)
    return FederatedDataset.open(import_table(source, out, chosen))


@pytest.mark.parametrize("named", [True, False])
def test_dsjson_with_features_of_actions_comes_back_the_same(tmp_path, named):
    path = decisions(tmp_path / "log.dsjson", named=named)
    data = import_decisions(path, tmp_path / "a")
    assert data.header.actions == ()
    assert data.train.num_examples == 300
    counts = np.diff(data.train.candidates.offsets)
    assert counts.min() == 3
    assert counts.max() == 6
    kinds, names = 15, 12 if named else 1  # 5 prices of 3 kinds each
    assert kinds <= len(data.train.catalogue) <= kinds * names
    np.testing.assert_allclose(data.train.log.propensities, 1 / counts, rtol=1e-6)
    first = export_dsjson(data, tmp_path / "first.dsjson")
    again = import_decisions(first, tmp_path / "b", "client.id")
    second = export_dsjson(again, tmp_path / "second.dsjson")
    assert second.read_bytes() == first.read_bytes()
    for name in ("actions", "rewards", "propensities"):
        np.testing.assert_array_equal(getattr(again.train.log, name), getattr(data.train.log, name))


def test_features_of_actions_can_be_left_out(tmp_path):
    path = decisions(tmp_path / "log.dsjson")
    events = [json.loads(line) for line in path.read_text().splitlines()]
    for event in events:
        for place, action in enumerate(event["c"]["_multi"]):
            action["id"] = f"a{place}"
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    data = import_decisions(path, tmp_path / "a", fixed=True)
    assert data.header.items is None
    assert data.header.actions == ("a0", "a1", "a2", "a3", "a4", "a5")


def test_open_bandit_with_features_of_items(tmp_path):
    lines = [",timestamp,item_id,position,click,propensity_score,user_feature_0,user_feature_1"]
    lines += [
        f"{i},2019-11-24,{i % 4},{i % 3 + 1},{i % 2},0.25,u{i % 5},v{i % 2}" for i in range(60)
    ]
    (tmp_path / "all.csv").write_text("\n".join(lines) + "\n")
    items = [",item_id,item_feature_0,item_feature_1"]
    items += [f"{i},{i},{i / 7},{'ab'[i % 2]}" for i in range(4)]
    (tmp_path / "item_context.csv").write_text("\n".join(items) + "\n")
    chosen = open_bandit_options(tmp_path, ColumnOptions(), None, 0.0, True)
    data = made(tmp_path / "out", OpenBandit(tmp_path, True), chosen)
    assert (np.diff(data.train.candidates.offsets) == 4).all()
    assert data.header.item_encoder.features() == [
        "item_feature_0", "item_feature_1=a", "item_feature_1=b",
    ]  # fmt: skip
    assert data.train.log.propensities[0] == np.float32(0.25)
