"""Runs that end before others do: shorter by their configuration, or because their privacy budget is spent."""

import numpy as np
import pytest
from small_runs import make_run, small_config

from fedbandit.assembly.experiment import build_experiment
from fedbandit.core.errors import DataError
from fedbandit.data import open_dataset
from fedbandit.runs.local_runner import LocalRunner
from fedbandit.studies.compare import read_curves, run_members
from fedbandit.studies.search import SearchCandidate, race
from fedbandit.studies.sweeps import SweepSpec, rows_of, run_sweep

# Spent before the last of the twelve rounds.
BUDGET = {
    "clipping__norm": 0.5,
    "privacy__mechanism": "dp-fedavg",
    "privacy__noise_multiplier": 1.0,
    "privacy__epsilon": 2.0,
    "privacy__delta": 1e-3,
}


@pytest.mark.parametrize("rounds", [[8, 4], [4, 8]])
@pytest.mark.parametrize("halving", [None, {"factor": 2, "shortest": 4}])
def test_a_sweep_over_rounds_plays_every_member_to_its_end(tiny_text, tmp_path, rounds, halving):
    (tmp_path / "small.toml").write_text(
        small_config(data__source=str(tiny_text)).to_toml(), encoding="utf-8"
    )
    spec = SweepSpec(start=str(tmp_path / "small.toml"), grid={"rounds": rounds}, halving=halving)
    [result] = results = run_sweep(
        spec, tmp_path / "out", runner=LocalRunner(1), say=lambda text: None
    )
    assert result.winner.statuses == ("finished",)
    rows = {row["rounds"]: row for row in rows_of(results, spec.all_seeds, tmp_path / "out")}
    assert rows[4]["rounds_run"] == 4
    assert rows[4]["status"] == "finished"
    if halving is None:
        assert rows[8]["rounds_run"] == 8
        assert result.winner.score == max(row["running_reward"] for row in rows.values())


def test_a_spent_privacy_budget_ends_runs_of_races_and_comparisons(tiny_text, tmp_path):
    config = small_config(data__source=str(tiny_text), **BUDGET)
    last = build_experiment(config, open_dataset(tiny_text)).rounds
    assert last < config.rounds
    candidates = [
        SearchCandidate("private", config, {}),
        SearchCandidate("other", config.with_values({"policy.beta": 0.5}), {}),
    ]
    standings = race(
        candidates, [0], lambda c, seed: tmp_path / c.name, [1, 12], 2, runner=LocalRunner(1)
    )
    assert (standings[0].rounds, standings[0].statuses) == (last, ("finished",))
    curves = run_members(
        {"a": config},
        [0, 1],
        tmp_path.joinpath,
        runner=LocalRunner(1),
    )
    assert curves["a"].running_reward.shape == (2, last)


def test_members_that_all_diverged_have_no_final_reward(tiny_text, tmp_path):
    wild = small_config(
        data__source=str(tiny_text), client__learning_rate=1e30, clipping__enabled=False
    )
    curves = run_members({"wild": wild}, [0], tmp_path.joinpath, runner=LocalRunner(1))
    np.testing.assert_array_equal(curves["wild"].final, [])
    assert curves["wild"].diverged == (0,)


def test_curves_of_seeds_that_differ_in_length_are_refused(tmp_path):
    make_run(tmp_path / "long", rounds=4)
    make_run(tmp_path / "short", rounds=3)
    with pytest.raises(DataError, match=r"short: has 3 rounds and .*long has 4"):
        read_curves([tmp_path / "long", tmp_path / "short"])
