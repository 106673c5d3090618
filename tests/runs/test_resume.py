"""A run that is interrupted, killed or starved of disk goes on as if nothing had happened: the same bytes."""

import json
import resource
import signal
import subprocess
import time

import pytest
from command_line import COMMAND, fails_with_one_line, fedbandit

from fedbandit.config import Config
from fedbandit.runs.run import run

RUN = (
    "run",
    "so-init-shift-softmax",
    "--rounds",
    60,
    "--set",
    "deploy_every=7",
    "--set",
    "pretraining.rounds=3",
    "-q",
)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The bytes of `metrics.jsonl` after a run that nothing disturbed."""
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    result = fedbandit(*RUN, "--out", out)
    assert result.returncode == 0, result.stderr
    return (out / "metrics.jsonl").read_bytes()


def _lines(path):
    """How many rounds a file has; its first line names the run."""
    return max(0, path.read_bytes().count(b"\n") - 1) if path.exists() else 0


def _start_and_signal(out, number, after_rounds):
    """Start the run, send a signal once it has recorded some rounds, and wait for its end."""
    command = [*COMMAND, *map(str, RUN), "--out", str(out), "--checkpoint-seconds", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    checkpoint = out / "checkpoints"
    while time.monotonic() < deadline and process.poll() is None:
        if checkpoint.exists() and any(
            int(p.stem[6:]) >= after_rounds for p in checkpoint.glob("round-*.safetensors")
        ):
            break
        time.sleep(0.005)
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    return process.returncode, output, errors


def test_ctrl_c_stops_cleanly_and_the_same_command_goes_on(tmp_path, uninterrupted):
    out = tmp_path / "run"
    code, output, errors = _start_and_signal(out, signal.SIGINT, after_rounds=5)
    assert code == 130, errors
    assert "stopped after round" in output
    assert not (out / "summary.json").exists()
    stopped_at = _lines(out / "metrics.jsonl")
    assert 5 <= stopped_at < 60
    result = fedbandit(*RUN, "--out", out)
    assert result.returncode == 0
    assert (out / "metrics.jsonl").read_bytes() == uninterrupted


def test_kill_9_loses_nothing(tmp_path, uninterrupted):
    out = tmp_path / "run"
    for after in (3, 20, 40):
        code, _, _ = _start_and_signal(out, signal.SIGKILL, after_rounds=after)
        assert code in (-signal.SIGKILL, 0)
    result = fedbandit(*RUN, "--out", out)
    assert result.returncode == 0, result.stderr
    assert (out / "metrics.jsonl").read_bytes() == uninterrupted
    assert _lines(out / "timings.jsonl") == 60


def test_a_finished_run_is_shown_and_not_run_again(tmp_path, uninterrupted):
    out = tmp_path / "run"
    first = fedbandit(*RUN, "--out", out)
    before = {
        path.name: path.stat().st_mtime_ns
        for path in out.rglob("*")
        if path.is_file() and path.name != ".lock"
    }
    second = fedbandit(*RUN, "--out", out)
    after = {
        path.name: path.stat().st_mtime_ns
        for path in out.rglob("*")
        if path.is_file() and path.name != ".lock"
    }
    assert before == after
    assert (
        second.stdout
        == "already finished; more --rounds extend it; for another run use another folder\n"
        + first.stdout
    )
    summary = json.loads((out / "summary.json").read_text())
    assert summary["rounds"] == 60
    assert summary["running_reward"] == json.loads(uninterrupted.splitlines()[-1])["running_reward"]
    assert summary["seconds_per_round"] > 0


def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path, uninterrupted):
    out = tmp_path / "run"
    _start_and_signal(out, signal.SIGKILL, after_rounds=10)
    newest = max((out / "checkpoints").glob("round-*.safetensors"))
    newest.write_bytes(newest.read_bytes()[:1000])
    assert fedbandit(*RUN, "--out", out).returncode == 0
    assert (out / "metrics.jsonl").read_bytes() == uninterrupted


def test_threads_do_not_change_a_byte_and_may_change_between_calls(tmp_path, uninterrupted):
    out = tmp_path / "run"
    command = [
        *COMMAND,
        *map(str, RUN),
        "--out",
        str(out),
        "--threads",
        "1",
        "--checkpoint-seconds",
        "0",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while (
        _lines(out / "metrics.jsonl") < 1
        and not (out / "checkpoints").exists()
        and process.poll() is None
    ):
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert fedbandit(*RUN, "--out", out, "--threads", 3).returncode == 0
    assert (out / "metrics.jsonl").read_bytes() == uninterrupted


def test_metrics_hold_no_times_and_timings_do(tmp_path, uninterrupted):
    line = json.loads(uninterrupted.splitlines()[1])
    assert {"round", "reward", "running_reward", "propensity", "events", "clip_norm"} <= set(line)
    assert not any("second" in key or "time" in key for key in line)


def test_a_full_disk_is_one_line_and_the_run_goes_on_later(tmp_path, uninterrupted):
    out = tmp_path / "run"

    def little_disk():
        # Small enough for no checkpoint to fit; raises EFBIG where a full disk raises ENOSPC.
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    command = [*COMMAND, *map(str, RUN), "--out", str(out), "--checkpoint-seconds", "0"]
    result = subprocess.run(
        command, capture_output=True, text=True, preexec_fn=little_disk, timeout=120
    )
    fails_with_one_line(result, "free some space")
    assert not list(out.rglob("*.tmp"))
    assert fedbandit(*RUN, "--out", out).returncode == 0
    assert (out / "metrics.jsonl").read_bytes() == uninterrupted


def test_a_second_process_in_the_same_folder_is_refused(tmp_path):
    out = tmp_path / "run"
    config = Config.build({"rounds": 50, "scenario": "scratch"})

    class SecondProcess:
        """Started by the first run's progress, so that it surely runs at the same time."""

        result = None

        def __init__(self, name, rounds, done):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

        def update(self, metrics):
            if SecondProcess.result is None:
                settings = ("--set", "deploy_every=200", "--set", "scenario=scratch")
                toml = tmp_path / "same.toml"
                toml.write_text(config.to_toml())
                SecondProcess.result = fedbandit("run", toml, "--out", out, *settings)

    run(config, out, progress=SecondProcess)
    fails_with_one_line(SecondProcess.result, "another process")


def test_what_a_killed_atomic_write_left_goes_at_the_next_start(tmp_path):
    out = tmp_path / "run"
    assert fedbandit(*RUN, "--rounds", 3, "--out", out).returncode == 0
    leftovers = [
        out / ".summary.json.123-4.tmp",
        out / "checkpoints" / ".round-000003.safetensors.123-4.tmp",
    ]
    for path in leftovers:
        path.write_bytes(b"half")
    assert fedbandit(*RUN, "--rounds", 3, "--out", out).returncode == 0
    assert not [path for path in leftovers if path.exists()]


def test_the_package_is_a_command():
    import sys

    result = subprocess.run(
        [sys.executable, "-m", "fedbandit", "--help"], capture_output=True, text=True, check=True
    )
    assert "Usage" in result.stdout
    assert "simulate" in result.stdout
