"""Bake-offs: what is crossed, equal effort, the same bytes after a kill, and what is refused before the first round."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_runs import small_config

from fedbandit.core.errors import ConfigError
from fedbandit.report.bakeoff import outcomes_of, ranks_of, write_bakeoff
from fedbandit.runs.folder import read_metrics
from fedbandit.runs.local_runner import LocalRunner
from fedbandit.studies.bakeoff import BakeoffSpec, cells_of, read_bakeoff, run_bakeoff
from fedbandit.studies.search import TUNING_SEED
from fedbandit.studies.sweeps import spec_of

SHIPPED = Path(__file__).parents[2] / "benchmarks" / "bakeoff"
RATES = [0.01, 0.1, 0.5, 1.0]


def _spec(tmp_path, source, **changes):
    start = tmp_path / "start.toml"
    start.write_text(small_config(data__source=str(source)).to_toml(), encoding="utf-8")
    values = {
        "start": str(start),
        "seeds": 2,
        "tries": 3,
        "situations": {"period": {"2": {"deploy_every": 2}, "4": {"deploy_every": 4}}},
        "contenders": {
            "rule": {"softmax": {}, "greedy": {"policy": {"name": "greedy"}}},
            "algorithm": {
                "fedavg": {"tune": {"client.learning_rate": RATES}},
                "untouched": {"training": False},
            },
        },
        "cross": [{"algorithm": "fedavg"}, {"rule": "greedy"}],
    }
    return spec_of(BakeoffSpec, values | changes)


def _bake(spec, out, situations=None, **options):
    found = None
    steps = run_bakeoff(spec, out, runner=LocalRunner(1), say=lambda text: None, **options)
    for number, found in enumerate(steps, start=1):
        write_bakeoff(found, out)
        if number == situations:
            break
    return found


def _written(out):
    """Every file but what this machine measured, and what stands in run folders."""
    names = ("results", "summary", "ranks", "bakeoff", "rewards", "along")
    tables = {p.name: p.read_bytes() for p in out.iterdir() if p.stem in names}
    runs = {
        str(p.relative_to(out)): p.read_bytes()
        for p in (*out.rglob("metrics.jsonl"), *out.rglob("choice.json"))
    }
    return tables | runs


def test_everything_meets_what_the_blocks_say(tmp_path, tiny_text):
    cells = cells_of(_spec(tmp_path, tiny_text))
    assert [(cell.where, cell.who) for cell in cells if cell.where == "2"] == [
        ("2", "softmax, fedavg"),
        ("2", "greedy, fedavg"),
        ("2", "greedy, untouched"),
    ]
    assert len(cells) == 6
    assert {cell.config.deploy_every for cell in cells if cell.where == "4"} == {4}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cross": [{"rul": "softmax"}]}, "cross 1: no axis 'rul'; did you mean rule?"),
        ({"cross": [{"rule": ["softmx"]}]}, "cross 1.rule: no 'softmx'; did you mean softmax?"),
        ({"against": "softmax"}, "against: there is no 'softmax'"),
        ({"along": "periods"}, "along: there is no 'periods'; did you mean period?"),
        (
            {"cross": [{"rule": "softmax", "algorithm": "untouched", "period": []}]},
            "no contender is left",
        ),
    ],
)
def test_a_name_that_no_axis_has_is_refused(tmp_path, tiny_text, changes, message):
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        cells_of(_spec(tmp_path, tiny_text, **changes))


def test_a_contender_that_does_not_fit_is_refused_before_the_first_round(tmp_path, tiny_text):
    wrong = {"model": {"big": {"clients_per_round": 10_000}}}
    spec = _spec(tmp_path, tiny_text, contenders=wrong, cross=[])
    with pytest.raises(ConfigError, match="2: big: clients_per_round"):
        _bake(spec, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_every_contender_has_as_many_tries_on_a_seed_apart(tmp_path, tiny_text):
    out = tmp_path / "out"
    found = _bake(_spec(tmp_path, tiny_text), out)
    assert {choice.looked_at for choice in found.choices.values()} == {3}
    tuned = list((out / "tuning").rglob("config.toml"))
    assert len(tuned) == 3 * 4
    assert all(f"seed = {TUNING_SEED}" in path.read_text() for path in tuned)
    assert {row["seed"] for row in found.rows} == {0, 1}
    assert len(found.rows) == 6 * 2
    for row in found.rows:
        folder = (
            out
            / "runs"
            / row["period"]
            / f"{row['rule']}-{row['algorithm']}"
            / f"seed-{row['seed']}"
        )
        assert row["reward"] == read_metrics(folder)[-1]["running_reward"]
        assert row["bytes_sent"] == row["bytes_received"] > 0
    groups = outcomes_of(found)
    for group in groups.values():
        assert [one.mean for one in group] == sorted((one.mean for one in group), reverse=True)
    ranks = ranks_of(groups)
    assert ranks.situations == 2
    assert sum(ranks.means.values()) == pytest.approx(6)  # 1 + 2 + 3


def test_stopped_after_a_situation_and_resumed_it_writes_the_same_bytes(tmp_path, tiny_text):
    spec = _spec(tmp_path, tiny_text, along="period")
    _bake(spec, tmp_path / "whole")
    _bake(spec, tmp_path / "resumed", situations=1)
    assert "2" in (tmp_path / "resumed" / "bakeoff.md").read_text()
    _bake(spec, tmp_path / "resumed")
    whole = _written(tmp_path / "whole")
    assert {"results.csv", "summary.json", "ranks.csv", "bakeoff.md", "along.png"} <= whole.keys()
    assert _written(tmp_path / "resumed") == whole


@pytest.mark.slow
def test_killed_anywhere_it_ends_with_the_same_bytes(tmp_path, tiny_text):
    spec = _spec(tmp_path, tiny_text)
    _bake(spec, tmp_path / "whole")
    spec_file = tmp_path / "spec.toml"
    import tomli_w

    spec_file.write_text(tomli_w.dumps(spec.model_dump(exclude_none=True)), encoding="utf-8")
    out = tmp_path / "killed"
    command = [sys.executable, "-m", "fedbandit", "bakeoff", str(spec_file), "-o", str(out)]
    for seconds in (2.0, 2.6, 3.2, 3.8, 4.4):
        started = subprocess.Popen([*command, "--workers", "1", "-q"], start_new_session=True)
        time.sleep(seconds)
        os.killpg(started.pid, signal.SIGKILL)
        started.wait()
    subprocess.run([*command, "--workers", "1", "-q"], check=True)
    assert _written(out) == _written(tmp_path / "whole")


def test_too_long_a_bake_off_is_refused_and_a_dry_run_runs_nothing(tmp_path, tiny_text):
    spec, out = _spec(tmp_path, tiny_text), tmp_path / "out"
    with pytest.raises(ConfigError, match="more than 0; --yes starts it"):
        _bake(spec, out, most_hours=0.0)
    assert _bake(spec, out, dry_run=True) is None
    assert {path.name for path in out.iterdir()} == {"plan.json"}


def test_a_folder_of_another_file_is_refused_but_more_seeds_are_added(tmp_path, tiny_text):
    out = tmp_path / "out"
    _bake(_spec(tmp_path, tiny_text), out, situations=1)
    with pytest.raises(ConfigError, match="of another file"):
        _bake(_spec(tmp_path, tiny_text, tries=2), out)
    found = _bake(_spec(tmp_path, tiny_text, seeds=3), out, situations=1)
    assert len(found.rows) == 9


def test_a_best_point_on_the_edge_is_followed_beyond_it(tmp_path, tiny_text):
    spec = _spec(
        tmp_path,
        tiny_text,
        extend=2,
        tries=9,
        situations={"world": {"one": {"client.learning_rate": 1e-8}}},
        contenders={"rates": {"low": {"tune": {"client.learning_rate": [1e-8, 1e-7, 1e-6]}}}},
        cross=[],
    )
    found = _bake(spec, tmp_path / "out")
    [choice] = found.choices.values()
    assert choice.looked_at == 5
    assert choice.grid_points == 5
    assert max(choice.point.values()) == pytest.approx(5e-6) or not choice.on_edge


@pytest.mark.parametrize("name", ["a", "b", "c", "d", "e", "full"])
def test_the_bake_offs_that_ship_can_be_read(name):
    spec = read_bakeoff(SHIPPED / f"{name}.toml")
    assert len(cells_of(spec)) >= 6
