"""A finished run is extended by asking for more rounds: what it holds then is what a longer run would hold."""

import json

import pytest
from builders import random_text
from command_line import fails_with_one_line, in_this_process
from small_runs import small_config

from fedbandit.config import Config
from fedbandit.core.errors import ConfigError
from fedbandit.data import open_dataset
from fedbandit.federated.state import load_state
from fedbandit.runs import folder as run_folder
from fedbandit.runs.run import run

PARTS = {
    "softmax": {},
    "a schedule, with momentum on the server": {
        "policy": {"name": "falcon-schedule"},
        "server__optimizer": "adam",
    },
    "clients that remember": {"algorithm__name": "scaffold"},
    "population": {"mode": "population"},
}


def lines_of(folder):
    return [
        json.loads(line)
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[1:]
    ]


def without_evaluation(line):
    return {key: value for key, value in line.items() if not key.startswith("test_")}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_an_extended_run_is_the_longer_run_but_for_the_evaluation_at_its_first_end(tmp_path, parts):
    data = random_text() if parts else open_dataset("topics")  # which has clients held out
    short, long = (small_config(rounds=rounds, **parts) for rounds in (6, 11))
    run(short, tmp_path / "run", dataset=data)
    extended = run(long, tmp_path / "run", dataset=data)
    run(long, tmp_path / "whole", dataset=data)
    ours, theirs = lines_of(tmp_path / "run"), lines_of(tmp_path / "whole")
    assert [without_evaluation(line) for line in ours] == [
        without_evaluation(line) for line in theirs
    ]
    assert [line for line in ours if line["round"] != 6] == [
        line for line in theirs if line["round"] != 6
    ]
    assert any(key.startswith("test_") for key in ours[5]) == (not parts)
    summaries = [
        json.loads((tmp_path / name / "summary.json").read_text()) for name in ("run", "whole")
    ]
    assert [one["rounds"] for one in summaries] == [11, 11]
    assert summaries[0]["running_reward"] == summaries[1]["running_reward"]
    states = [
        load_state(tmp_path / name / "checkpoints" / "round-000011.safetensors")
        for name in ("run", "whole")
    ]
    assert states[0].weights.tobytes() == states[1].weights.tobytes()
    assert extended.problems == ()
    assert Config.build(extended.runs[0].config).rounds == 11


def test_killed_while_it_is_extended_a_run_is_still_whole(tmp_path, monkeypatch):
    data = random_text()
    run(small_config(rounds=4), tmp_path / "run", dataset=data)

    def killed(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(run_folder, "write_text", killed)
        with pytest.raises(KeyboardInterrupt):
            run(small_config(rounds=8), tmp_path / "run", dataset=data)
    assert run(small_config(rounds=4), tmp_path / "run", dataset=data)["reward"].shape == (4,)
    assert run(small_config(rounds=8), tmp_path / "run", dataset=data)["reward"].shape == (8,)


def test_what_cannot_be_extended_is_refused_and_left_alone(tmp_path):
    data = random_text(clients=40)
    private = {
        "privacy__mechanism": "dp-ftrl",
        "privacy__noise_multiplier": 1.0,
        "clipping__norm": 1.0,
    }
    run(small_config(rounds=4, **private), tmp_path / "private", dataset=data)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match="a private run cannot be extended from 4 to 5 rounds"):
        run(small_config(rounds=5, **private), tmp_path / "private", dataset=data)
    with pytest.raises(ConfigError, match="holds a run of 4 rounds, not 3"):
        run(small_config(rounds=3, **private), tmp_path / "private", dataset=data)
    with pytest.raises(ConfigError, match="made by another configuration"):
        run(small_config(rounds=5, policy__beta=0.9), tmp_path / "private", dataset=data)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_the_command_extends_and_says_how(tmp_path):
    command = ["run", "so-scratch-softmax", "-o", tmp_path / "run", "--set", "clients_per_round=4"]
    assert in_this_process(*command, "--rounds", 2, "-q").returncode == 0
    longer = in_this_process(*command, "--rounds", 4)
    assert longer.returncode == 0, longer.stderr
    assert "resuming after round 2" in longer.stderr
    assert "after 4 rounds" in longer.stdout
    fails_with_one_line(in_this_process(*command, "--rounds", 3), "holds a run of 4 rounds, not 3")
