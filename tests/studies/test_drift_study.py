"""`fedbandit drift`: its runs are kept and resumed, and a policy that diverges is counted and ends nothing."""

import json

import numpy as np
import pytest

from fedbandit.cli.runs import drift as command
from fedbandit.core.errors import ConfigError, Diverged
from fedbandit.paper.records import page, read_figures
from fedbandit.runs.local_runner import LocalRunner
from fedbandit.studies import drift
from fedbandit.studies.drift import DriftStudy, run_study, table

SHORT = {"rounds": 24, "deploy_every": 4, "seeds": 2}
SETTINGS = {"clients_per_round": 8, "client.max_examples": 8}


def _said(capsys, words, out):
    """What the command answers, as lines, and what it says meanwhile."""
    answer = command(**words, out=out)
    return answer.text.splitlines(), capsys.readouterr().err


def test_the_command_keeps_its_runs_and_runs_none_twice(tiny_text, tmp_path, capsys):
    settings = [f"{key}={value}" for key, value in SETTINGS.items()]
    words = {
        **SHORT,
        "data": str(tiny_text),
        "at": "12",
        "policies": "greedy,softmax",
        "settings": settings,
        "workers": 1,
    }
    said, heard = _said(capsys, words, tmp_path / "drift.png")
    assert (tmp_path / "drift.png").read_bytes().startswith(b"\x89PNG")
    assert [line.split()[0] for line in said[1:3]] == ["greedy", "softmax"]
    assert heard.count("finished") == 4
    assert len(list((tmp_path / "drift-runs").rglob("summary.json"))) == 4
    kept = json.loads((tmp_path / "drift.json").read_text(encoding="utf-8"))
    for line in said[1:3]:
        falls = [
            change["before"] - change["lowest"] for [change] in kept["members"][line.split()[0]]
        ]
        assert len(falls) == 2
        assert float(line.split()[3]) == pytest.approx(np.mean(falls), abs=6e-4)
    page_of_all = page(read_figures([tmp_path]), tmp_path)
    assert page_of_all.count("<img") == 1
    assert "Labels trade places" in page_of_all
    again, heard = _said(capsys, words, tmp_path / "drift.png")
    assert again == said
    assert "finished" not in heard
    more = {**words, "settings": [*settings, "policy.beta=1"], "policies": "softmax"}
    _, heard = _said(capsys, more, tmp_path / "drift.png")
    assert heard.count("finished") == 2  # another study, beside the first one's runs


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"policies": ","}, "--policies"),
        ({"at": "x"}, "--at"),
        ({"at": "20"}, "leave at least"),
        ({}, "png"),
    ],
)
def test_wrong_words_are_refused_before_anything_is_run(tiny_text, tmp_path, wrong, message):
    with pytest.raises(ConfigError, match=message):
        command(
            **{**SHORT, "data": str(tiny_text), "at": "12", **wrong}, out=tmp_path / "drift.gif"
        )
    assert not list(tmp_path.iterdir())


def test_a_policy_that_diverges_is_counted_and_the_others_are_told(
    tiny_text, tmp_path, monkeypatch
):
    study = DriftStudy(
        str(tiny_text),
        at=(12,),
        policies=("greedy", "softmax"),
        settings=tuple(SETTINGS.items()),
        **SHORT,
    )
    tame = drift.members(study)
    wild = {"client.learning_rate": 1e30, "clipping.enabled": False}
    monkeypatch.setattr(
        drift, "members", lambda study: {**tame, "greedy": tame["greedy"].with_values(wild)}
    )
    greedy, softmax = outcomes = run_study(study, tmp_path.joinpath, runner=LocalRunner(1))
    assert (greedy.diverged, softmax.diverged) == ((0, 1), ())
    assert len(softmax.recovered) == 2
    text = table(study, outcomes)
    assert "greedy: 2 of 2 seeds diverged" in text
    assert "the mean of 10 is back" in text
    monkeypatch.setattr(
        drift, "members", lambda study: {"greedy": tame["greedy"].with_values(wild)}
    )
    with pytest.raises(Diverged, match="every run"):
        run_study(study, tmp_path.joinpath, runner=LocalRunner(1))


@pytest.mark.parametrize(
    "key", ["seed", "rounds", "drift.at", "drift.kind", "data.source", "scenario"]
)
def test_what_the_study_decides_is_not_set_beside_it(key):
    with pytest.raises(ConfigError, match=f"--set {key}"):
        DriftStudy(settings=((key, 1),))
