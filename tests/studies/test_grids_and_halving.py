"""Grids, the race over them, and what happens to candidates that diverge or run out of time."""

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_runs import small_config

from fedbandit.core.errors import ConfigError
from fedbandit.presets import preset
from fedbandit.runs.folder import read_metrics
from fedbandit.runs.local_runner import LocalRunner, shared_start
from fedbandit.studies.search import (
    SearchCandidate,
    appendix,
    cost,
    on_edge,
    one_two_five,
    points,
    race,
    rungs,
)


def test_short_form_gives_the_appendix_grids():
    assert one_two_five("0.02..5") == [0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5]
    assert one_two_five("0.0002..0.05") == [0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05]
    assert one_two_five("1..1") == [1]


@pytest.mark.parametrize("text", ["5..0.02", "0..1", "a..b", "-1..1", "1..", "3..4", "1..inf"])
def test_short_form_refuses_what_it_cannot_mean(text):
    with pytest.raises(ConfigError):
        one_two_five(text)


@given(st.floats(1e-8, 1e8), st.floats(1, 1e6))
def test_short_form_stays_between_its_ends(low, ratio):
    try:
        values = one_two_five(f"{low!r}..{low * ratio!r}")
    except ConfigError:
        assert ratio < 2.5  # the largest step between two neighbours
        return
    assert values == sorted(values)
    assert all(low * 0.999999 <= value <= low * ratio * 1.000001 for value in values)


@pytest.mark.parametrize(
    ("name", "family", "size"),
    [
        ("so-init-shift-softmax", "so", 8 * 8 * 3),
        ("so-init-shift-falcon", "so", 8 * 8 * 6),
        ("so-init-shift-greedy", "so", 8 * 8),
        ("emnist-scratch-epsilon-greedy", "emnist", 6 * 7 * 2),
    ],
)
def test_appendix_grids_have_the_paper_size(name, family, size):
    assert len(points(appendix(family, preset(name)))) == size


def test_published_values_lie_on_the_appendix_grid():
    for family in ("emnist", "so"):
        for setting in ("scratch", "init", "init-shift", "init-shift-deploy40"):
            for policy in ("softmax", "falcon", "greedy", "epsilon-greedy"):
                config = preset(f"{family}-{setting}-{policy}")
                grid = appendix(family, config)
                assert config.client.learning_rate in grid["client.learning_rate"]
                assert config.server.learning_rate in grid["server.learning_rate"]


def test_edges_are_named_only_where_there_is_a_middle():
    grid = {"a": [1, 2, 5], "b": [1, 2], "c": ["x", "y", "z"], "d": [0.1, 0.2, 0.5]}
    assert on_edge({"a": 5, "b": 2, "c": "x", "d": 0.2}, grid) == ["a"]
    assert on_edge({"a": 2, "b": 1, "c": "z", "d": 0.1}, grid) == ["d"]


def test_rungs_end_at_the_last_round_and_begin_late_enough():
    assert rungs(1500, 3, 400) == [500, 1500]
    assert rungs(1500, 3, 100) == [167, 500, 1500]
    assert rungs(10, 3, 10) == [10]
    assert cost(9, [10, 30], 3) == 9 * 10 + 3 * 20


def _candidates(source, rates):
    configs = {
        rate: small_config(data__source=str(source), client__learning_rate=rate) for rate in rates
    }
    return [
        SearchCandidate(f"rate-{rate:g}", config, {"rate": rate})
        for rate, config in configs.items()
    ]


def test_race_pauses_and_goes_on_without_playing_twice(tiny_text, tmp_path):
    candidates = _candidates(tiny_text, [0.01, 0.5, 2.0])
    standings = race(
        candidates, [0], lambda c, s: tmp_path / c.name, [4, 12], 3, runner=LocalRunner(1)
    )
    assert [s.rounds for s in standings] == [12, 4, 4]
    winner = standings[0].candidate
    lines = read_metrics(tmp_path / winner.name)
    assert [line["round"] for line in lines] == list(range(1, 13))
    at_first_step = {
        c.name: read_metrics(tmp_path / c.name)[3]["running_reward"] for c in candidates
    }
    assert max(at_first_step, key=at_first_step.get) == winner.name

    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.jsonl")}
    again = race(candidates, [0], lambda c, s: tmp_path / c.name, [4, 12], 3, runner=LocalRunner(1))
    assert again == standings
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.jsonl")} == written


def test_race_is_the_same_as_playing_straight_through(tiny_text, tmp_path):
    [candidate] = _candidates(tiny_text, [0.5])
    paused = race(
        [candidate], [3], lambda c, s: tmp_path / "paused", [4, 12], 3, runner=LocalRunner(1)
    )
    straight = race(
        [candidate], [3], lambda c, s: tmp_path / "straight", [12], 3, runner=LocalRunner(1)
    )
    assert paused[0].rewards == straight[0].rewards
    assert (tmp_path / "paused/metrics.jsonl").read_bytes() == (
        tmp_path / "straight/metrics.jsonl"
    ).read_bytes()


def test_a_run_that_lacks_only_its_summary_is_finished(tiny_text, tmp_path):
    [candidate] = _candidates(tiny_text, [0.5])
    first = race([candidate], [0], lambda c, s: tmp_path / "run", [12], 3, runner=LocalRunner(1))
    (tmp_path / "run" / "summary.json").unlink()  # killed between the last round and the end
    again = race([candidate], [0], lambda c, s: tmp_path / "run", [12], 3, runner=LocalRunner(1))
    assert again == first
    assert (tmp_path / "run" / "summary.json").exists()


def test_a_diverged_candidate_loses_and_is_not_played_again(tiny_text, tmp_path):
    wild = small_config(
        data__source=str(tiny_text), client__learning_rate=1e30, clipping__enabled=False
    )
    candidates = [SearchCandidate("wild", wild, {}), *_candidates(tiny_text, [0.5])]
    for _ in range(2):
        standings = race(
            candidates, [0], lambda c, s: tmp_path / c.name, [4, 12], 2, runner=LocalRunner(1)
        )
        assert [s.candidate.name for s in standings] == ["rate-0.5", "wild"]
        assert standings[1].score == -math.inf
        assert standings[1].statuses == ("diverged",)
    assert (tmp_path / "wild" / "error.json").exists()


def test_race_out_of_time_answers_with_what_it_has(tiny_text, tmp_path):
    candidates = _candidates(tiny_text, [0.1, 0.5])
    late = time.monotonic() - 1
    assert (
        race(
            candidates,
            [0],
            lambda c, s: tmp_path / c.name,
            [4, 12],
            2,
            runner=LocalRunner(1),
            deadline=late,
        )
        == []
    )


def test_runs_that_differ_in_privacy_do_not_count_as_sharing_their_pretrained_model():
    config = small_config(scenario="init", clipping__norm=0.5)
    settings = {
        "privacy.mechanism": "dp-fedavg",
        "privacy.delta": 1e-3,
        "privacy.noise_multiplier": 1.0,
    }
    accounted = config.with_values({**settings, "privacy.pretraining": "accounted"})
    assert shared_start(config) != shared_start(accounted)
    assert shared_start(accounted) != shared_start(
        accounted.with_values({"privacy.noise_multiplier": 2.0})
    )
    assert shared_start(config) == shared_start(
        config.with_values({"seed": 9, "policy.beta": 0.5, "rounds": 3})
    )
