"""One bad run folder is named and skipped, and following many or long runs stays cheap."""

import json
import os
import shutil
import time
import tracemalloc

import pytest
from builders import random_text
from small_runs import find_runs, make_run, small_config

from fedbandit.core.errors import DataError
from fedbandit.core.identity import run_in
from fedbandit.report.report import apart, outcomes, write_report
from fedbandit.report.watch import Watcher
from fedbandit.results.reading import MetricsFile
from fedbandit.runs.index import grouped
from fedbandit.runs.run import run


def line_with(number, **values):
    def damage(folder):
        path = folder / "metrics.jsonl"
        lines = path.read_text().splitlines()
        lines[number] = json.dumps({**json.loads(lines[number]), **values})
        path.write_text("\n".join(lines) + "\n")

    return damage


def text_in(name, text):
    def damage(folder):
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_text(text)

    return damage


def pipe(name):
    def damage(folder):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return damage


def huge(name):
    def damage(folder):
        with open(folder / name, "r+b") as file:
            file.truncate(10**11)  # sparse: of zeros

    return damage


DEEP = "[" * 100_000
DAMAGES = {
    "text for a number": line_with(1, running_reward="0.5"),
    "a list for a number": line_with(1, propensity=[1]),
    "truth for a number": line_with(1, epsilon=True),
    "a text for an object": line_with(1, client_reward="x"),
    "a number too large": line_with(1, running_reward=10**400),
    "a number too large at the end": line_with(-1, running_reward=10**400),
    "a number that overflows in a mean": line_with(1, running_reward=1e308),
    "a wrong type at the end": line_with(-1, running_reward={}),
    "a wrong round": line_with(1, round=7),
    "no round": line_with(-1, round=None),
    "held-out metrics as texts": line_with(1, test_accuracy="good"),
    "a deep line": text_in("metrics.jsonl", DEEP + "\n"),
    "a deep configuration": text_in("config.toml", "policy = " + DEEP),
    "dotted keys without end": text_in("config.toml", "policy." + "a." * 20_000 + "b = 1\n"),
    "a configuration of texts": text_in("config.toml", 'rounds = "12"\n'),
    "not a configuration": text_in("config.toml", "\0\0"),
    "a deep environment": text_in("environment.json", '{"a":' * 900 + "1" + "}" * 900),
    "an environment without end": text_in("environment.json", DEEP),
    "an empty summary": text_in("summary.json", "{}"),
    "a summary of lists": text_in("summary.json", '{"rounds": [], "running_reward": 1}'),
    "metrics as a pipe": pipe("metrics.jsonl"),
    "a summary as a pipe": pipe("summary.json"),
    "a configuration as a pipe": pipe("config.toml"),
    "metrics as large as a disk": huge("metrics.jsonl"),
    "a configuration as large as a disk": huge("config.toml"),
}


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad") / "runs"
    for name in ("bad", "good"):
        make_run(folder / name, rounds=3, seed=len(name))
    return folder


@pytest.mark.parametrize("name", DAMAGES)
def test_a_bad_folder_is_named_and_skipped(two_runs, tmp_path, name):
    folder = tmp_path / "runs"
    shutil.copytree(two_runs, folder)
    DAMAGES[name](folder / "bad")
    watcher = Watcher(folder)
    for _ in range(2):
        now = watcher.now()
        assert [one["name"] for one in now["runs"]] == ["good"]
        assert [one["name"] for one in now["problems"]] == ["bad"]
        assert "\n" not in now["problems"][0]["reason"]
        assert len(now["charts"]["reward"]["series"][0]["mean"]) == 3
        json.dumps(now, allow_nan=False)
    page = write_report([folder], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Could not be read" in page
    assert '<p class="error">bad: ' in page
    shutil.rmtree(folder / "good")
    with pytest.raises(DataError, match="no run can be read"):
        write_report([folder], tmp_path / "report.html")


def test_a_mended_folder_comes_back(two_runs, tmp_path):
    folder = tmp_path / "runs"
    shutil.copytree(two_runs, folder)
    watcher = Watcher(folder)
    DAMAGES["text for a number"](folder / "bad")
    assert [one["name"] for one in watcher.now()["runs"]] == ["good"]
    shutil.copy(two_runs / "bad" / "metrics.jsonl", folder / "bad" / "metrics.jsonl")
    assert [one["name"] for one in watcher.now()["runs"]] == ["bad", "good"]


def lines(first, last):
    return "".join(
        json.dumps({"round": r, "reward": 0.5, "running_reward": 1 / r, "propensity": 0.5}) + "\n"
        for r in range(first, last + 1)
    )


def test_only_what_was_appended_is_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(1, 20_000))
    metrics = MetricsFile(path)
    tracemalloc.start()
    assert metrics.follow() == path.stat().st_size
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * 20_000 * 8 * 4 + 4_000_000  # numbers alone, and a block of the file at a time
    assert metrics.follow() == 0
    with open(path, "a", encoding="utf-8") as file:
        file.write(lines(20_001, 20_003) + '{"round": 20004, "rew')
    assert metrics.follow() < 2000
    assert metrics.rounds == 20_003
    assert metrics.columns["running_reward"][-1] == 1 / 20_003
    with open(path, "a", encoding="utf-8") as file:
        file.write('ard": 1}\n')
    assert metrics.follow() < 2000
    assert metrics.rounds == 20_004


def test_a_file_that_was_cut_replaced_or_rewritten_is_read_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(1, 20))
    metrics = MetricsFile(path)
    metrics.follow()
    path.write_text(lines(1, 5))
    metrics.follow()
    assert metrics.rounds == 5
    path.write_text(
        lines(1, 30).replace("0.5", "0.7")
    )  # the same file, longer, and with another beginning
    metrics.follow()
    assert metrics.rounds == 30
    assert set(metrics.columns["propensity"]) == {0.7}
    other = tmp_path / "other"
    other.write_text(lines(1, 30).replace("0.5", "0.9"))
    other.replace(path)
    metrics.follow()
    assert set(metrics.columns["propensity"]) == {0.9}
    path.unlink()
    metrics.follow()
    assert metrics.rounds == 0


def test_each_look_reads_a_limited_part_of_a_long_file(two_runs, tmp_path):
    folder = tmp_path / "runs"
    shutil.copytree(two_runs, folder)
    summary = json.loads((folder / "bad" / "summary.json").read_text())
    (folder / "bad" / "summary.json").write_text(json.dumps({**summary, "rounds": 120_000}))
    (folder / "bad" / "metrics.jsonl").write_text(
        json.dumps({"run": run_in(folder / "bad")}) + "\n" + lines(1, 120_000)
    )
    size = (folder / "bad" / "metrics.jsonl").stat().st_size
    watcher = Watcher(folder, most=size // 4)
    now = watcher.now()
    assert (
        next(one for one in now["runs"] if one["name"] == "bad")["rounds"] == 120_000
    )  # its last line says so
    for _ in range(6):
        now = watcher.now()
    assert now["charts"]["reward"]["series"][0]["x"][-1] == 120_000


def test_many_runs_are_looked_at_again_without_reading_them(two_runs, tmp_path):
    for number in range(200):
        shutil.copytree(
            two_runs / "good",
            tmp_path / f"{number:03d}",
            ignore=shutil.ignore_patterns("checkpoints"),
        )
    watcher = Watcher(tmp_path)
    watcher.now()
    started = time.process_time()
    assert len(watcher.now()["runs"]) == 200
    assert time.process_time() - started < 0.5  # about 0.02 on an idle machine


def test_runs_of_different_length_are_not_averaged(tmp_path):
    for seed in range(3):
        make_run(tmp_path / f"seed-{seed}", seed=seed, rounds=8)
    run(small_config(seed=3, rounds=8), tmp_path / "paused", dataset=random_text(), until=2)
    (group,) = grouped(list(find_runs([tmp_path])))
    assert [one.name for one in group.finished] == ["seed-0", "seed-1", "seed-2"]
    assert [one.name for one in group.apart] == ["paused"]
    final = [one.last["running_reward"] for one in group.finished]
    assert f">{sum(final) / 3:.4f} ± " in outcomes([group])
    assert 'data-head="seeds">3</td><td class="number" data-head="rounds">8</td>' in outcomes(
        [group]
    )
    assert "paused" in apart([group])
    assert "2 of 8" in apart([group])
    page = write_report([tmp_path], tmp_path / "report.html").read_text(encoding="utf-8")
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    (curve,) = data["charts"]["running_reward"]["series"]
    assert curve["x"][-1] == 8
    assert curve["mean"][-1] == pytest.approx(sum(final) / 3, rel=1e-5)
    (live,) = Watcher(tmp_path).now()["charts"]["reward"]["series"]
    assert live["x"][-1] == 8


def test_unfinished_runs_alone_are_drawn_each_for_itself(tmp_path):
    for seed, until in ((0, 2), (1, 5)):
        run(small_config(seed=seed), tmp_path / f"seed-{seed}", dataset=random_text(), until=until)
    page = write_report([tmp_path], tmp_path / "report.html").read_text(encoding="utf-8")
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    series = data["charts"]["running_reward"]["series"]
    assert {one["label"]: one["x"][-1] for one in series} == {
        "softmax, seed-0": 2,
        "softmax, seed-1": 5,
    }
    assert "Not in these averages" in page
