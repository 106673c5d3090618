"""Runs side by side in processes: the same files as one after another, stopped and resumed together."""

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from ending_processes import words_of
from small_runs import find_runs, running_metrics, small_config

from fedbandit.core.errors import FedbanditError
from fedbandit.runs.local_runner import Job, LocalRunner
from fedbandit.studies.compare import run_members

pytestmark = pytest.mark.slow


def test_side_by_side_gives_the_same_files(tiny_text, tmp_path):
    config = small_config(data__source=str(tiny_text))
    members = {"a": config, "b": config.with_values({"policy.beta": 0.5})}
    for workers in (1, 2, 3):  # of three, the last run has the cores of all to itself
        out = tmp_path / str(workers)
        run_members(
            members,
            [0, 1],
            out.joinpath,
            runner=LocalRunner(workers),
        )
    for label in ("a/seed-0", "a/seed-1", "b/seed-0", "b/seed-1"):
        assert (
            len({(tmp_path / workers / label / "metrics.jsonl").read_bytes() for workers in "123"})
            == 1
        )


def test_a_diverged_run_does_not_stop_its_neighbours(tiny_text, tmp_path):
    good = small_config(data__source=str(tiny_text))
    wild = good.with_values({"client.learning_rate": 1e30, "clipping.enabled": False})
    jobs = [Job(wild, tmp_path / "w"), Job(good, tmp_path / "g"), Job(good, tmp_path / "h")]
    ends = LocalRunner(2).run(jobs)
    assert [end.status for end in ends] == ["diverged", "finished", "finished"]


def test_a_worker_that_is_killed_ends_the_command_in_one_line(tiny_text, tmp_path):
    config = small_config(data__source=str(tiny_text), rounds=20_000)
    jobs = [Job(config.with_values({"seed": seed}), tmp_path / str(seed)) for seed in range(2)]

    def kill_one() -> None:
        while not running_metrics(tmp_path):
            time.sleep(0.05)
        workers = [
            p for p in psutil.Process().children() if "--multiprocessing-fork" in words_of(p)
        ]
        workers[0].kill()

    killer = threading.Thread(target=kill_one, daemon=True)
    killer.start()
    with pytest.raises(FedbanditError, match="run the same command again to resume"):
        LocalRunner(2).run(jobs)


@pytest.mark.parametrize("killer", [signal.SIGTERM, signal.SIGKILL])
def test_killed_and_started_again_it_goes_on(tiny_text, tmp_path, killer):
    command = [
        sys.executable,
        "-m",
        "fedbandit",
        "figure",
        "fig2a",
        "--data",
        str(tiny_text),
        "--seeds",
        "1",
    ]
    command += [
        "--scale",
        "0.5",
        "--set",
        "clients_per_round=8",
        "--workers",
        "2",
        "--out",
        str(tmp_path / "out"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    running = tmp_path / "out" / "runs"
    end = time.monotonic() + 120
    while not [path for path in running_metrics(running) if path.stat().st_size > 20_000]:
        assert time.monotonic() < end, "no run ever started"
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.2)
    os.kill(process.pid, killer)
    process.communicate(timeout=120)
    deadline = time.monotonic() + 60
    while not _released(running):  # the workers end by themselves
        assert time.monotonic() < deadline, "a worker outlived the command"
        time.sleep(0.2)
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert finished.returncode == 0, finished.stderr
    assert "softmax above greedy" in finished.stdout


def _released(folder):
    """Whether no process holds a lock below the folder."""

    return all(run.status != "running" for run in find_runs([folder]))
