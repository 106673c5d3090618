"""A run folder with wrong bytes, or one that cannot be read: nothing is lost, and one line says what is wrong."""

import errno
from dataclasses import replace

import pytest
from builders import random_text
from small_runs import small_config

from fedbandit.assembly.experiment import build_experiment
from fedbandit.core.errors import ConfigError, DataError
from fedbandit.federated import state as states
from fedbandit.runs.folder import RunFolder, checkpoints
from fedbandit.runs.run import execute, run
from fedbandit.simulation import pretrained_file


@pytest.fixture
def stopped(tmp_path):
    """A run with two checkpoints, of rounds 4 and 8, and lines for both."""
    out = tmp_path / "run"
    for until in (4, 8):
        run(small_config(), out, dataset=random_text(), until=until)
    return out


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in (".lock", "error.json")
    }


def flip(path, position=-5):
    damaged = bytearray(path.read_bytes())
    damaged[position] ^= 4
    path.write_bytes(damaged)


def uninterrupted(folder):
    run(small_config(), folder, dataset=random_text())
    return (folder / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES, errno.EIO])
def test_a_checkpoint_that_cannot_be_read_is_never_deleted(stopped, tmp_path, monkeypatch, number):
    before = contents(stopped)

    def refuse(path):
        raise OSError(number, "refused", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(states, "read_packed", refuse)
        with pytest.raises(DataError, match=r"round-000008.safetensors: cannot be read"):
            run(small_config(), stopped, dataset=random_text())
    assert contents(stopped) == before
    run(small_config(), stopped, dataset=random_text())
    assert (stopped / "metrics.jsonl").read_bytes() == uninterrupted(tmp_path / "whole")


def test_a_flipped_bit_sets_the_checkpoint_aside_and_says_so(stopped, tmp_path, capsys):
    newest = checkpoints(stopped)[0]
    flip(newest)
    damaged = newest.read_bytes()
    run(small_config(), stopped, dataset=random_text())
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "round-000008.safetensors: damaged checkpoint: its checksum does not match" in said
    assert (stopped / "checkpoints" / "round-000008.safetensors.damaged").read_bytes() == damaged
    assert (stopped / "metrics.jsonl").read_bytes() == uninterrupted(tmp_path / "whole")


def test_without_a_readable_checkpoint_the_metrics_stay(stopped):
    for path in checkpoints(stopped):
        flip(path)
    lines = (stopped / "metrics.jsonl").read_bytes()
    for _ in range(2):  # the files have been set aside by the second time
        with pytest.raises(
            DataError, match=r"no checkpoint is left to resume from .* 8 rounds are kept"
        ):
            run(small_config(), stopped, dataset=random_text())
    assert (stopped / "metrics.jsonl").read_bytes() == lines
    assert len(list((stopped / "checkpoints").glob("*.damaged"))) == 2


def test_a_run_stopped_before_its_first_checkpoint_starts_again(stopped, tmp_path):
    for path in checkpoints(stopped):
        path.unlink()
    run(small_config(), stopped, dataset=random_text())
    assert (stopped / "metrics.jsonl").read_bytes() == uninterrupted(tmp_path / "whole")


def test_a_checkpoint_under_a_wrong_name_is_set_aside(stopped, capsys):
    checkpoints(stopped)[0].rename(stopped / "checkpoints" / "round-000011.safetensors")
    run(small_config(), stopped, dataset=random_text())
    assert "it is of round 8" in capsys.readouterr().err


def test_checkpoints_are_sorted_by_number(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for number in (1_000_000, 999_999, 12):
        (tmp_path / "checkpoints" / f"round-{number:06d}.safetensors").touch()
    (tmp_path / "checkpoints" / "round-x.safetensors").touch()
    assert [int(path.stem[6:]) for path in checkpoints(tmp_path)] == [1_000_000, 999_999, 12]


def test_past_a_million_rounds_the_newest_checkpoints_are_kept(stopped, tmp_path):
    state = states.load_state(checkpoints(stopped)[0])
    experiment = build_experiment(small_config(rounds=2_000_000), random_text())
    with RunFolder(tmp_path / "long", experiment) as folder:
        for number in (999_998, 999_999, 1_000_000, 1_000_001):
            folder.checkpoint(replace(state, round=number))
        assert [path.stem for path in checkpoints(folder.path)] == [
            "round-1000001",
            "round-1000000",
        ]


@pytest.mark.parametrize("name", ["metrics.jsonl", "timings.jsonl"])
@pytest.mark.parametrize(
    "line", ["{not json\n", "[1]\n", '{"round": 7, "seconds": 1}\n', "[" * 100_000 + "\n"]
)
def test_damaged_lines_are_found_before_a_round_is_run(stopped, name, line):
    lines = (stopped / name).read_text().splitlines(keepends=True)
    lines[2] = line
    (stopped / name).write_text("".join(lines))
    before = contents(stopped)
    with pytest.raises(DataError, match=f"{name}: line 3 is damaged"):
        run(
            small_config(),
            stopped,
            dataset=random_text(),
            callbacks=[lambda *_: pytest.fail("a round was run")],
        )
    assert contents(stopped) == before


@pytest.mark.parametrize(
    "text",
    ["{}", "[]", "", '{"rounds": "12"}', '{"rounds": 12, "running_reward": []}', "[" * 10**5],
)
def test_a_damaged_summary_is_made_again_from_the_last_checkpoint(tmp_path, capsys, text):
    run(small_config(), tmp_path / "run", dataset=random_text())
    summary = tmp_path / "run" / "summary.json"
    whole = summary.read_bytes()
    summary.write_text(text)
    outcome = execute(small_config(), tmp_path / "run", dataset=random_text())
    assert not outcome.finished_before
    assert summary.read_bytes() == whole
    assert "summary.json: damaged" in capsys.readouterr().err


def test_a_summary_that_cannot_be_read_is_not_overwritten(tmp_path):
    run(small_config(), tmp_path / "run", dataset=random_text())
    summary = tmp_path / "run" / "summary.json"
    summary.rename(tmp_path / "elsewhere")
    summary.mkdir()
    with pytest.raises(DataError, match=r"summary.json: cannot be read"):
        run(small_config(), tmp_path / "run", dataset=random_text())


def test_a_checkpoint_of_another_model_is_refused(stopped):
    other = random_text(words=50)
    other = replace(other, header=replace(other.header, fingerprint="other words"))
    run(small_config(), stopped.parent / "other", dataset=other, until=8)
    checkpoints(stopped)[0].write_bytes(checkpoints(stopped.parent / "other")[0].read_bytes())
    with pytest.raises(DataError, match="of another run"):
        run(small_config(), stopped, dataset=random_text())


PRETRAINED = {"scenario": "init", "pretraining__rounds": 2, "pretraining__clients": 6, "rounds": 2}


def test_a_damaged_pretrained_model_is_set_aside_and_made_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FEDBANDIT_CACHE", str(tmp_path / "cache"))
    config = small_config(**PRETRAINED)
    run(config, tmp_path / "first", dataset=random_text())
    kept = pretrained_file(build_experiment(config, random_text()))
    flip(kept)
    run(config, tmp_path / "second", dataset=random_text())
    assert "damaged checkpoint" in capsys.readouterr().err
    assert kept.with_name(f"{kept.name}.damaged").exists()
    assert (tmp_path / "first" / "metrics.jsonl").read_bytes() == (
        tmp_path / "second" / "metrics.jsonl"
    ).read_bytes()


def test_a_pretrained_model_that_cannot_be_read_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDBANDIT_CACHE", str(tmp_path / "cache"))
    config = small_config(**PRETRAINED)
    run(config, tmp_path / "first", dataset=random_text())
    kept = pretrained_file(build_experiment(config, random_text()))
    payload = kept.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(
            states,
            "read_packed",
            lambda path: (_ for _ in ()).throw(OSError(errno.EMFILE, "too many")),
        )
        with pytest.raises(DataError, match="cannot be read"):
            run(config, tmp_path / "second", dataset=random_text())
    assert kept.read_bytes() == payload


ENDLESS = [
    "policy = " + "[" * 100_000,
    "policy." + "a." * 20_000 + "b = 1\n",
    "a = 1\n" * 4_000_000,
]


@pytest.mark.parametrize("text", ENDLESS, ids=["deep", "dotted", "large"])
def test_a_configuration_without_end_is_refused_when_a_run_is_resumed(stopped, text):
    (stopped / "config.toml").write_text(text)
    with pytest.raises(
        ConfigError, match=r"config\.toml: (nested too deeply|config\.toml is larger than)"
    ):
        run(small_config(), stopped, dataset=random_text())
