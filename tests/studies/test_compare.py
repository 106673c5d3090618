"""`fedbandit compare`: configurations over the same seeds, in folders that a person finds, resumed and extended."""

import csv
import json

import pytest
from command_line import fails_with_one_line, in_this_process
from small_runs import small_config

from fedbandit import compare
from fedbandit.core.errors import ConfigError
from fedbandit.studies.compare import members_of, seeds_of


def test_configurations_run_into_folders_with_their_names_and_are_not_run_twice(
    tiny_text, tmp_path
):
    start = small_config(data__source=str(tiny_text), rounds=4)
    members = {"mine": start, "with more": start.with_values({"policy.beta": 0.7})}
    results = compare(members, tmp_path, seeds=2)
    assert [run.name for run in results.runs] == [
        f"{name}/seed-{s}" for name in ("mine", "with-more") for s in (0, 1)
    ]
    assert results["reward"].shape == (4, 4)
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.jsonl")}
    more = compare(
        {**members, "other": start.with_values({"policy.name": "greedy"})}, tmp_path, seeds=2
    )
    assert len(more) == 6
    assert {path: path.stat().st_mtime_ns for path in written} == written
    longer = compare(members, tmp_path, seeds=2, set={"rounds": 6})
    assert longer["reward"].shape == (4, 6)
    assert longer["reward"][:, :4].tolist() == results["reward"].tolist()


def test_the_command_prints_a_table_and_writes_picture_table_and_report(tiny_text, tmp_path):
    (tmp_path / "mine.toml").write_text(
        small_config(data__source=str(tiny_text), rounds=3).to_toml(), encoding="utf-8"
    )
    words = [f"{tmp_path / 'mine.toml'}", f"{tmp_path / 'mine.toml'} policy.beta=0.6"]
    made = in_this_process("compare", *words, "--seeds", 2, "--workers", 1, "-o", tmp_path / "out")
    assert made.returncode == 0, made.stderr
    assert "95% interval" in made.stdout
    assert "mine policy.beta=0.6" in made.stdout
    assert "nan" not in made.stdout
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "comparison.csv", "comparison.parquet", "comparison.png", "differences.png", "mine",
        "mine,policy.beta=0.6", "report.html",
    ]  # fmt: skip
    with open(tmp_path / "out" / "comparison.csv", encoding="utf-8", newline="") as file:
        assert len(list(csv.DictReader(file))) == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "at least one"),
        (
            ["so-scratch-greedy", "so-scratch-greedy"],
            "two configurations are called so-scratch-greedy",
        ),
        (["so-scratch-greedy", "so-scratch-greedy seed=3"], "are the same configuration"),
        (["so-scratch-greedy policy.bta=3"], "policy.bta: unknown key"),
        ({"..": "so-scratch-greedy"}, "cannot be the name of a folder"),
    ],
)
def test_what_cannot_be_compared_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        members_of(given)


def test_names_never_lead_out_of_the_folder_and_seeds_are_numbers():
    assert list(members_of({"../../up": "so-scratch-greedy"})) == ["..-..-up"]
    assert [*seeds_of(3), *seeds_of([7, 7, 9])] == [0, 1, 2, 7, 9]
    with pytest.raises(ConfigError, match="seeds"):
        seeds_of(0)


def test_the_command_refuses_no_seeds_in_one_line():
    fails_with_one_line(in_this_process("compare", "so-scratch-greedy", "--seeds", 0), "seeds")


def test_configurations_keep_the_names_and_keys_that_the_user_gave_them(tiny_text, tmp_path):
    start = small_config(data__source=str(tiny_text), rounds=6, deploy_every=2)
    results = compare(
        {"my rule": start, "all": start.with_values({"seed": 9, "policy.beta": 5})},
        tmp_path,
        seeds=2,
    )
    assert {row["configuration"] for row in results.summary().rows} == {"my rule", "all"}
    assert results.differences(against="my rule").reference == "my rule"
    (tmp_path / "mine.toml").write_text(start.to_toml(), encoding="utf-8")
    changed = f"{tmp_path / 'mine.toml'} client.learning_rate=0.5 server.learning_rate=0.01"
    words = ["compare", tmp_path / "mine.toml", changed, "--seeds", 2, "--workers", 1]
    made = in_this_process(*words, "-q", "-o", tmp_path / "out")
    name = "mine client.learning_rate=0.5 server.learning_rate=0.01"
    assert name in made.stdout
    assert name in (tmp_path / "out" / "comparison.csv").read_text()
    assert name in (tmp_path / "out" / "report.html").read_text()
    assert not made.stderr
    rows = json.loads(in_this_process(*words, "-q", "--json", "-o", tmp_path / "out").stdout)
    assert [row["reward"] for row in rows] == sorted((row["reward"] for row in rows), reverse=True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["so-scratch-greedy"], "at least two"),
        (
            ["so-scratch-greedy", "so-scratch-softmax", "--against", "so-scratch-sotmax"],
            "so-scratch-softmax",
        ),
    ],
)
def test_a_comparison_that_would_be_refused_runs_nothing(tmp_path, words, said):
    fails_with_one_line(in_this_process("compare", *words, "-o", tmp_path / "out"), said)
    assert not (tmp_path / "out").exists()


def test_one_line_says_that_no_model_acts_and_there_is_no_winner(tiny_text, tmp_path):
    start = small_config(data__source=str(tiny_text), rounds=4, deploy_every=4)
    (tmp_path / "mine.toml").write_text(start.to_toml(), encoding="utf-8")
    hint = "no model that was trained acts within 4 rounds (deploy_every = 4)"
    made = in_this_process("run", tmp_path / "mine.toml", "-q", "-o", tmp_path / "run")
    assert hint in made.stdout
    words = [tmp_path / "mine.toml", f"{tmp_path / 'mine.toml'} client.learning_rate=0.1"]
    made = in_this_process("compare", *words, "--seeds", 2, "--workers", 1, "-o", tmp_path / "out")
    assert hint in made.stderr
    assert "no winner: mine, mine client.learning_rate=0.1 earned exactly the same" in made.stdout
    spec = f'start = "{tmp_path / "mine.toml"}"\ngrid = {{ client.learning_rate = [0.1, 0.5] }}\n'
    (tmp_path / "sweep.toml").write_text(spec)
    made = in_this_process(
        "sweep", tmp_path / "sweep.toml", "--workers", 1, "-o", tmp_path / "swept"
    )
    assert hint in made.stderr
    assert "no winner: 2 members earned exactly the same" in made.stdout
    assert not (tmp_path / "swept" / "winner.toml").exists()
