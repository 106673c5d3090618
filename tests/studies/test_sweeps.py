"""`fedbandit sweep`: products of values, tables whose columns are the configuration's own keys, winners and edges."""

import csv
import json
import weakref

import pyarrow.parquet as parquet
import pytest
from command_line import in_this_process

from fedbandit.assembly.experiment import build_experiment
from fedbandit.cli.help import runner_of
from fedbandit.core.errors import ConfigError
from fedbandit.results.reading import write_table
from fedbandit.runs.local_runner import LocalRunner
from fedbandit.studies.sweeps import (
    SweepSpec,
    groups_of,
    read_sweep,
    rows_of,
    run_sweep,
    summary_text,
)

SPEC = """
start = ["so-scratch-softmax", "so-scratch-greedy"]
seeds = 2

[set]
rounds = 6
deploy_every = 2
clients_per_round = 8
data.source = "{data}"
server.optimizer = "sgd"

[grid]
"client.learning_rate" = "0.2..1"
server.learning_rate = [2.0]
"""


def _spec(tmp_path, text, data):
    path = tmp_path / "sweep.toml"
    path.write_text(text.format(data=data), encoding="utf-8")
    return read_sweep(path)


def test_sweep_ranks_every_member_and_writes_both_tables(tiny_text, tmp_path):
    spec = _spec(tmp_path, SPEC, tiny_text)
    said = []
    results = run_sweep(spec, tmp_path / "out", runner=LocalRunner(1), say=said.append)
    assert [len(result.standings) for result in results] == [3, 3]
    for result in results:
        scores = [standing.score for standing in result.standings]
        assert scores == sorted(scores, reverse=True)
    rows = rows_of(results, spec.all_seeds, tmp_path / "out")
    assert len(rows) == 12
    parquet_file, csv_file = write_table(rows, tmp_path / "out" / "results")
    table = parquet.read_table(parquet_file)
    assert table.num_rows == 12
    assert set(table["folder"].to_pylist()) == {
        str(path.parent.relative_to(tmp_path / "out")) for path in tmp_path.rglob("summary.json")
    }
    for column in (
        "client.learning_rate",
        "policy.name",
        "policy.beta",
        "running_reward",
        "status",
        "seed",
    ):
        assert column in table.column_names
    assert set(table["client.learning_rate"].to_pylist()) == {0.2, 0.5, 1.0}
    assert table["policy.beta"].to_pylist().count(None) == 6  # greedy has none
    with open(csv_file, encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == 12
    assert "client.learning_rate=" in summary_text(results)
    assert (tmp_path / "out" / "winner.toml").exists()


def test_extending_a_grid_keeps_what_was_played(tiny_text, tmp_path):
    run_sweep(
        _spec(tmp_path, SPEC, tiny_text),
        tmp_path / "out",
        runner=LocalRunner(1),
        say=lambda text: None,
    )
    before = {path.parent: path.stat().st_mtime_ns for path in tmp_path.rglob("summary.json")}
    wider = SPEC.replace('"0.2..1"', '"0.2..2"')
    run_sweep(
        _spec(tmp_path, wider, tiny_text),
        tmp_path / "out",
        runner=LocalRunner(1),
        say=lambda text: None,
    )
    after = {path.parent: path.stat().st_mtime_ns for path in tmp_path.rglob("summary.json")}
    assert len(after) == len(before) + 4
    assert all(after[folder] == written for folder, written in before.items())


def test_a_winner_on_the_edge_is_warned_of(tiny_text, tmp_path):
    text = SPEC.replace('"0.2..1"', "[1e-9, 2e-9, 0.5]").replace("rounds = 6", "rounds = 30")
    text = text.replace(', "so-scratch-greedy"', "")
    results = run_sweep(
        _spec(tmp_path, text, tiny_text),
        tmp_path / "out",
        runner=LocalRunner(1),
        say=lambda text: None,
    )
    assert results[0].winner.candidate.point["client.learning_rate"] == 0.5
    assert "edge of the grid (client.learning_rate)" in summary_text(results)


def test_halving_stops_the_hopeless_early(tiny_text, tmp_path):
    text = SPEC + "\n[halving]\nfactor = 3\nshortest = 2\n"
    spec = _spec(tmp_path, text, tiny_text)
    results = run_sweep(spec, tmp_path / "out", runner=LocalRunner(1), say=lambda text: None)
    rows = rows_of(results, spec.all_seeds, tmp_path / "out")
    assert sorted({row["rounds_run"] for row in rows}) == [2, 6]
    assert (
        sum(row["status"] == "finished" for row in rows) == 4
    )  # the best of each start, with two seeds
    assert {row["status"] for row in rows} == {"finished", "stopped early"}


def test_diverged_members_are_recorded_as_losers(tiny_text, tmp_path):
    text = SPEC.replace('"0.2..1"', "[0.2, 1e30]").replace(
        "[set]", "[set]\nclipping.enabled = false"
    )
    spec = _spec(tmp_path, text, tiny_text)
    results = run_sweep(spec, tmp_path / "out", runner=LocalRunner(1), say=lambda text: None)
    rows = rows_of(results, spec.all_seeds, tmp_path / "out")
    lost = [row for row in rows if row["client.learning_rate"] == 1e30]
    assert {row["status"] for row in lost} == {"diverged"}
    assert all(row["running_reward"] is None and row["place"] == 2 for row in lost)


def test_where_everybody_diverged_nobody_has_won(tiny_text, tmp_path):
    text = SPEC.replace('"0.2..1"', "[1e29, 2e29, 1e30]").replace(
        "[set]", "[set]\nclipping.enabled = false"
    )
    results = run_sweep(
        _spec(tmp_path, text, tiny_text),
        tmp_path / "out",
        runner=LocalRunner(1),
        say=lambda text: None,
    )
    assert not (tmp_path / "out" / "winner.toml").exists()
    assert not [result for result in results if result.edges]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("seeds = 2", "seeds = 0"), "seeds"),
        (("seeds = 2", "seeds = []"), "seeds"),
        (("seeds = 2", "seeds = [1, 1]"), "seeds: .*twice"),
        (("[grid]", "[grit]"), "grit"),
        (('"0.2..1"', '"1..0.2"'), "0.02..5"),
        (("server.learning_rate = [2.0]", "server.learning_rate = []"), "no values"),
        (("server.learning_rate = [2.0]", "servr.learning_rate = [0.01]"), "servr"),
        (("server.learning_rate = [2.0]", "policy.gamma = [1]"), "policy.gamma"),
    ],
)
def test_wrong_files_are_refused_before_anything_is_played(tiny_text, tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        groups_of(_spec(tmp_path, SPEC.replace(*change), tiny_text))


def test_the_privacy_that_members_spent_is_in_the_table(tiny_text, tmp_path):
    private = "[set]\nprivacy.mechanism = 'dp-fedavg'\nprivacy.noise_multiplier = 1.0\nprivacy.delta = 1e-3"
    private += "\nprivacy.sampling = 'poisson'\nclipping.norm = 0.5"
    text = (
        SPEC.replace("[set]", private)
        .replace('"0.2..1"', "[0.5]")
        .replace(', "so-scratch-greedy"', "")
    )
    spec, said = _spec(tmp_path, text, tiny_text), []
    results = run_sweep(spec, tmp_path / "out", runner=LocalRunner(1), say=said.append)
    assert "tuning spends privacy" in said[0]
    rows = rows_of(results, spec.all_seeds, tmp_path / "out")
    assert all(0 < row["epsilon_pld"] <= row["epsilon_rdp"] for row in rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("rays",), "--engine"),
        (("threads", "auto"), "--ray-address"),
        (("threads", None, 0), "--workers"),
    ],
)
def test_wrong_places_to_play_are_refused(options, message):
    with pytest.raises(ConfigError, match=message), runner_of(*options):
        raise AssertionError("it should not get here")


def test_the_command_writes_the_report_of_compare_and_keeps_no_checkpoints_unless_asked(
    tiny_text, tmp_path
):
    _spec(tmp_path, SPEC, tiny_text)
    words = ["sweep", tmp_path / "sweep.toml", "--workers", 1, "-q"]
    made = in_this_process(*words, "-o", tmp_path / "out")
    assert not made.stderr
    assert "so-scratch-softmax client.learning_rate=0.2 server.learning_rate=2" in made.stdout
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"report.html", "comparison.png", "differences.png", "comparison.csv"} <= written
    assert not list((tmp_path / "out").rglob("*.safetensors"))
    again = in_this_process(*words, "--json", "-o", tmp_path / "out")
    rows = json.loads(again.stdout)
    assert len(rows) == 12
    in_this_process(*words, "--keep", "-o", tmp_path / "kept")
    assert list((tmp_path / "kept").rglob("*.safetensors"))


def test_members_are_checked_without_being_kept(tiny_text, tmp_path, monkeypatch):
    """Each experiment holds weights: a sweep of thousands must not hold all of them."""
    alive, most = set(), []

    def build(config, dataset):
        built = build_experiment(config, dataset)
        alive.add(id(built))
        weakref.finalize(built, alive.discard, id(built))
        most.append(len(alive))
        return built

    monkeypatch.setattr("fedbandit.studies.sweeps.build_experiment", build)
    groups_of(
        SweepSpec(
            start="so-scratch-softmax", grid={"policy.beta": [0.01 * i for i in range(1, 21)]}
        )
    )
    assert len(most) == 20
    assert max(most) <= 2


def test_runs_taken_in_batches_rank_as_all_together(tiny_text, tmp_path, monkeypatch):
    spec = _spec(tmp_path, SPEC, tiny_text)
    runner, silent = LocalRunner(1), lambda text: None
    whole = run_sweep(spec, tmp_path / "whole", runner=runner, say=silent)
    monkeypatch.setattr("fedbandit.studies.compare._BATCH", 5)
    parts = run_sweep(spec, tmp_path / "parts", runner=runner, say=silent)
    for one, other in zip(whole, parts, strict=True):
        assert one.standings == other.standings
