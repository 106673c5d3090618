"""`fedbandit compare`: configurations over the same seeds, in folders that a person finds, resumed and extended."""

import csv

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
    assert "softmax beta=0.6" in made.stdout
    assert "nan" not in made.stdout
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "comparison.csv", "comparison.parquet", "comparison.png", "mine", "mine,policy.beta=0.6", "report.html",
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
