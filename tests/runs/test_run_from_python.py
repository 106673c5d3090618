"""`run` from Python: it returns results, resumes, and says when it was interrupted."""

import signal

import pytest
from builders import random_text

from fedbandit import Results, run
from fedbandit.config import Config
from fedbandit.core.errors import Interrupted

CONFIG = Config.build(
    {"scenario": "scratch", "rounds": 6, "deploy_every": 2, "clients_per_round": 5}
)


def test_it_returns_what_is_in_the_folder(tmp_path):
    results = run(CONFIG, str(tmp_path / "some" / "run"), dataset=random_text())
    assert results["reward"].shape == (6,)
    assert results.runs == Results.open(tmp_path / "some" / "run").runs
    assert results.runs[0].summary["running_reward"] == results["running_reward"][-1]
    assert (
        run(CONFIG, tmp_path / "some" / "run", dataset=random_text()).runs == results.runs
    )  # only read


def test_ctrl_c_stops_after_the_round_and_a_second_call_resumes(tmp_path):
    def interrupt(state, events, metrics):
        if metrics["round"] == 3:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted, match="run it again to resume"):
        run(CONFIG, tmp_path / "run", dataset=random_text(), callbacks=[interrupt])
    stopped = Results.open(tmp_path / "run")
    assert stopped.problems == ("run: unfinished, after 3 of 6 rounds",)
    resumed = run(CONFIG, tmp_path / "run", dataset=random_text())
    assert resumed.problems == ()
    run(CONFIG, tmp_path / "whole", dataset=random_text())
    files = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("run", "whole")]
    assert files[0] == files[1]


def test_progress_is_shown_when_asked_for(tmp_path, capsys):
    run(CONFIG, tmp_path / "silent", dataset=random_text())
    assert capsys.readouterr().err == ""
    run(CONFIG, tmp_path / "shown", dataset=random_text(), progress=True)
    assert "round 6/6" in capsys.readouterr().err
