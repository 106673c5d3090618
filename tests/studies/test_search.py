"""One search for figures and tournaments: what it tries, what it keeps, and that a kept choice is used again."""

import json
import time
from types import SimpleNamespace

import pytest
from small_runs import small_config

from fedbandit.presets import all_presets
from fedbandit.runs.folder import read_metrics
from fedbandit.runs.local_runner import LocalRunner
from fedbandit.studies.search import (
    TUNING_SEED,
    Choice,
    Search,
    best_points,
    scaled,
    search_steps,
    tune,
)

GRID = {"client.learning_rate": [1e-9, 0.5], "server.learning_rate": [0.05]}


def _best_point(name, config, grid, folder, said):
    """The point that a search in `folder/name` chooses."""
    search = Search(folder.joinpath, LocalRunner(1), said.append, deadline=time.monotonic() + 600)
    return best_points({name: config}, {name: grid}, search)[name].point


def test_the_best_point_is_kept_with_what_it_was_chosen_from(tiny_text, tmp_path):
    config = small_config(data__source=str(tiny_text), client__learning_rate=1e-8, rounds=30)
    said = []
    point = _best_point("softmax", config, GRID, tmp_path, said)
    assert point == {"client.learning_rate": 0.5, "server.learning_rate": 0.05}
    kept = json.loads((tmp_path / "softmax" / "choice.json").read_text(encoding="utf-8"))
    assert kept["point"] == point
    assert kept["published"] == {"client.learning_rate": 1e-8, "server.learning_rate": 0.05}
    assert (kept["looked_at"], kept["grid_points"], kept["seed"]) == (3, 3, TUNING_SEED)
    assert kept["on_edge"] == ["client.learning_rate"]
    assert "softmax: client=0.5 server=0.05 (3 of 3 points of the grid, 100%)" in said[-2]
    said.clear()
    assert _best_point("softmax", config, GRID, tmp_path, said) == point
    assert not said


def test_candidates_spend_no_time_on_held_out_data_before_their_last_round(tiny_text, tmp_path):
    config = small_config(data__source=str(tiny_text), rounds=4, deploy_every=1, evaluate_every=1)
    _best_point("softmax", config, GRID, tmp_path, [])
    held_out = {
        path.parent.name: [
            line["round"]
            for line in read_metrics(path.parent)
            if any("test_" in key for key in line)
        ]
        for path in tmp_path.glob("softmax/*/metrics.jsonl")
    }
    assert len(held_out) == 2
    assert all(rounds in ([], [4]) for rounds in held_out.values())
    assert [4] in held_out.values()


def test_time_for_tuning_is_shared_by_the_size_of_the_grids(monkeypatch, tmp_path):
    def best(members, grids, search):
        [name] = members
        shares[name] = search.deadline / 60
        return {name: Choice({"client.learning_rate": 0.02})}

    shares = {}
    monkeypatch.setattr("fedbandit.studies.search.best_points", best)
    monkeypatch.setattr("fedbandit.studies.search.time", SimpleNamespace(monotonic=lambda: 0.0))
    names = (
        "so-init-shift-greedy",
        "so-init-shift-baseline",
        "so-init-shift-falcon",
        "so-init-shift-softmax",
    )
    members = {name: all_presets()[name] for name in names}
    tuned = tune(members, "so", tmp_path, 100.0, say=lambda text: None)
    assert list(tuned) == [names[0], *names[2:]]  # a baseline does not learn
    assert shares == pytest.approx(
        {names[0]: 10.0, names[2]: 100 * 384 / 576, names[3]: 100.0}
    )  # of what is left
    assert tuned[names[3]].point == {"client.learning_rate": 0.02}


@pytest.mark.parametrize(
    "text", ["", "[]", '{"point": {}}', '{"for": {"no-such-key": 1}, "point": {}}']
)
def test_a_damaged_choice_is_made_again(tiny_text, tmp_path, text):
    config = small_config(data__source=str(tiny_text), rounds=2)
    (tmp_path / "softmax").mkdir()
    (tmp_path / "softmax" / "choice.json").write_text(text)
    said = []
    assert set(_best_point("softmax", config, GRID, tmp_path, said)) == set(GRID)
    assert said


def test_a_choice_of_few_words_is_understood_for_the_configuration_it_names(tmp_path):
    config = small_config()
    kept = {"point": {"client.learning_rate": 0.2}, "for": config.identity()}
    (tmp_path / "softmax").mkdir()
    (tmp_path / "softmax" / "choice.json").write_text(json.dumps(kept))
    assert _best_point("softmax", config, GRID, tmp_path, []) == {"client.learning_rate": 0.2}


@pytest.mark.parametrize("scale", [1.0, 0.25, 0.05])
def test_candidates_are_never_compared_before_two_deployments(scale):
    for name, chosen in all_presets().items():
        config = scaled(chosen, scale)
        steps = search_steps(config)
        assert steps[-1] == config.rounds
        assert min(steps) >= min(config.rounds, 2 * config.deploy_every), name


def test_the_seed_of_tuning_is_never_reported():
    assert TUNING_SEED >= 1_000_000  # figures report 0, 1, 2 and so on


def test_a_choice_that_was_changed_after_it_was_written_is_not_used(tiny_text, tmp_path):
    config = small_config(data__source=str(tiny_text), rounds=4, deploy_every=2)
    chosen = _best_point("softmax", config, GRID, tmp_path, [])
    path = tmp_path / "softmax" / "choice.json"
    kept = json.loads(path.read_text())
    path.write_text(json.dumps({**kept, "point": {**kept["point"], "server.learning_rate": 0.7}}))
    assert Choice.read(path, config) is None
    for wrong in (
        {"looked_at": None},
        {"grid_points": "3"},
        {"on_edge": 1},
        {"point": [1]},
        {"reward": "x"},
    ):
        path.write_text(json.dumps({k: v for k, v in {**kept, **wrong}.items() if k != "digest"}))
        assert Choice.read(path, config) is None, wrong
    assert _best_point("softmax", config, GRID, tmp_path, []) == chosen
