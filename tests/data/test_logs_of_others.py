"""Logs in the layouts of others, in and out: Vowpal Wabbit's DSJSON and the Open Bandit Dataset."""

import json

import numpy as np
import pytest
from messy_tables import write_decisions

from fedbandit.core.errors import DataError
from fedbandit.data.dataset import FederatedDataset
from fedbandit.data.export import export_dsjson, export_open_bandit
from fedbandit.data.importers.contexts import ColumnOptions
from fedbandit.data.importers.logs import DsJson, OpenBandit, dsjson_options, open_bandit_options
from fedbandit.data.importers.tables import import_table, preview_table

OPTIONS = dsjson_options("User.id", ColumnOptions(), test_fraction=0)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dsjson")
    path = write_decisions(folder / "log.dsjson", rows=200)
    return FederatedDataset.open(import_table(DsJson(path), folder / "log", OPTIONS))


def test_decisions_of_vowpal_wabbit(log, tmp_path):
    path = write_decisions(tmp_path / "log.dsjson", rows=200)
    events = [json.loads(line) for line in path.read_text().splitlines()]
    events = [event for event in events if "_label_cost" in event and not event.get("_skipLearn")]
    assert log.train.num_examples == len(events) == 199
    assert log.header.actions == ("food", "music", "news", "sports")
    assert [column.name for column in log.header.encoder.columns] == [
        "User.major",
        "User.age",
        "Context.hour",
        "Timestamp",
    ]
    rewards = sum(-event["_label_cost"] for event in events)
    assert log.train.log.rewards.sum() == pytest.approx(rewards)
    np.testing.assert_allclose(log.train.log.propensities, 1 / 3, rtol=1e-6)
    assert (np.diff(log.train.log.available.offsets) == 3).all()
    one = next(event for event in events if event["c"]["User"]["id"] == log.train.client_id(0))
    chosen = one["c"]["_multi"][one["_label_Action"] - 1]["Action"]["topic"]
    assert log.header.actions[log.train.log.actions[0]] == chosen
    assert "2 lines without a decision to learn from are left out" in preview_table(
        DsJson(path), OPTIONS
    )


def same_log(first, second):
    assert second.header.actions == first.header.actions
    np.testing.assert_array_equal(second.train.client_ids, first.train.client_ids)
    for name in ("actions", "rewards", "propensities"):
        np.testing.assert_array_equal(
            getattr(second.train.log, name), getattr(first.train.log, name)
        )


def test_dsjson_comes_back_as_it_went(log, tmp_path):
    path = export_dsjson(log, tmp_path / "out.dsjson")
    options = dsjson_options("client.id", ColumnOptions(scale="none"), test_fraction=0)
    again = FederatedDataset.open(import_table(DsJson(path), tmp_path / "again", options))
    same_log(log, again)
    np.testing.assert_array_equal(again.train.log.available.ids, log.train.log.available.ids)
    line = json.loads(path.read_text().splitlines()[0])
    assert sum(line["p"]) == pytest.approx(1)
    assert line["a"][0] == line["_label_Action"]
    with pytest.raises(DataError, match="already exists"):
        export_dsjson(log, path)


def test_open_bandit_comes_back_as_it_went(log, tmp_path):
    from dataclasses import replace

    with pytest.raises(DataError, match="has no sets of available actions; use dsjson"):
        export_open_bandit(log, tmp_path / "obd")
    split = replace(log.train, log=replace(log.train.log, available=None))
    folder = export_open_bandit(replace(log, train=split), tmp_path / "obd")
    assert (
        (folder / "train.csv")
        .read_text()
        .startswith(",timestamp,item_id,position,click,propensity_score,user_feature_0")
    )
    options = open_bandit_options(folder, ColumnOptions(scale="none"), test_fraction=0)
    again = FederatedDataset.open(import_table(OpenBandit(folder), tmp_path / "again", options))
    same_log(log, again)


def test_the_published_layout(tmp_path):
    """As the files of the Open Bandit Dataset are: hashed user features, affinities, no user."""
    lines = [
        ",timestamp,item_id,position,click,propensity_score,user_feature_0,user_feature_1,user-item_affinity_0"
    ]
    for row in range(60):
        lines.append(
            f"{row},2019-11-24 00:00:{row:02d}+00:00,{row % 4},{row % 3 + 1},{row % 2},0.25,u{row % 5},v{row % 2},0.0"
        )
    (tmp_path / "all.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "item_context.csv").write_text(",item_id,item_feature_0\n0,0,-0.5\n")
    options = open_bandit_options(tmp_path, ColumnOptions(), test_fraction=0)
    found = FederatedDataset.open(import_table(OpenBandit(tmp_path), tmp_path / "out", options))
    assert found.header.actions == ("0", "1", "2", "3")
    assert [column.name for column in found.header.encoder.columns] == [
        "position",
        "user_feature_0",
        "user_feature_1",
    ]
    assert found.train.num_clients == 10
    (tmp_path / "all.csv").write_text("a,b\n1,2\n")
    with pytest.raises(
        DataError, match="no column 'item_id': not in the layout of the Open Bandit Dataset"
    ):
        open_bandit_options(tmp_path, ColumnOptions())


GOOD = {"_label_cost": -1, "_label_probability": 0.5, "_label_Action": 1, "a": [1, 2], "p": [0.5, 0.5],
        "c": {"User": {"id": "u"}, "_multi": [{"id": "x"}, {"id": "y"}]}}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"_label_probability": 0}, "line 2: _label_probability must be above 0"),
        ({"_label_cost": "1"}, "line 2: _label_cost is missing, or not a finite number"),
        ({"_label_Action": 3}, "line 2: _label_Action is not one of the 2 actions"),
        (
            {"c": {"_multi": [{"id": "x"}, {"id": "x"}]}},
            "line 2: two actions are called 'x'; --action-name says",
        ),
        ({"c": {"_multi": 3}}, "line 2: _multi is not a list of actions"),
        ({"c": None}, "line 2: has no context"),
        ({"_outcomes": []}, "line 2: holds several decisions at once"),
        (
            {"c": {"a": {"b": {"c": {"d": {"e": {"f": 1}}}}}}},
            "line 2: features are nested more than 5 deep",
        ),
        ({"c": {"a": 1e300}}, "line 2: a is not a finite number"),
        ({"c": {"a": 10**400}}, "line 2: a is not a finite number"),
        ({"c": {"a": float("nan")}}, "line 2: a is not a finite number"),
        ({"_label_cost": 10**400}, "line 2: _label_cost is missing, or not a finite number"),
    ],
)
def test_bad_lines_are_refused(tmp_path, changes, match):
    path = tmp_path / "log.dsjson"
    path.write_text(f"{json.dumps(GOOD)}\n{json.dumps({**GOOD, **changes})}\n")
    with pytest.raises(DataError, match=match) as caught:
        import_table(DsJson(path), tmp_path / "out", OPTIONS)
    assert "\n" not in str(caught.value)
    path.write_text("{")
    with pytest.raises(DataError, match="line 1: not JSON"):
        import_table(DsJson(path), tmp_path / "out", OPTIONS)
    path.write_text("{}\n[]\n")
    with pytest.raises(DataError, match="line 2: a list where an event is expected"):
        import_table(DsJson(path), tmp_path / "out", OPTIONS)
