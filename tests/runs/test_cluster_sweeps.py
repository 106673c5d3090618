"""Sweeps and figures spread over a Ray cluster of two nodes on this machine: the same bytes as without it."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from small_runs import running_metrics, small_config

from fedbandit.cli.help import runner_of
from fedbandit.core.errors import ConfigError, DataError
from fedbandit.data import FederatedDataset
from fedbandit.results.reading import write_table
from fedbandit.runs.local_runner import Job, LocalRunner
from fedbandit.studies.sweeps import read_sweep, rows_of, run_sweep

ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),
]  # the warnings are of Ray's own making

from ray.cluster_utils import Cluster  # noqa: E402 - needs ray

from fedbandit.runs import ray_runner as many_ray  # noqa: E402 - needs ray
from fedbandit.runs.ray_runner import RayRunner, Token  # noqa: E402 - needs ray

SPEC = """
start = "so-init-shift-softmax"
seeds = 2

[set]
rounds = 2400
deploy_every = 10
clients_per_round = 20
pretraining.clients = 20
pretraining.rounds = 3
data.source = "{data}"

[grid]
client.learning_rate = [0.2, 0.5, 1.0]

[halving]
factor = 3
shortest = 800
"""


@pytest.fixture(scope="module")
def cluster():
    """Two nodes of one core each; the workers have a cache of their own, as on other machines."""
    nodes = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    nodes.add_node(num_cpus=1)
    nodes.wait_for_nodes()
    yield nodes
    ray.shutdown()
    nodes.shutdown()


@pytest.fixture
def runner(cluster):
    found = RayRunner(cluster.address)
    yield found
    found.close()


@pytest.fixture
def spec(tiny_text, tmp_path):
    path = tmp_path / "sweep.toml"
    path.write_text(SPEC.format(data=tiny_text), encoding="utf-8")
    return read_sweep(path)


def files_of(spec, out, runner):
    """Everything that a sweep leaves and that is no time: the tables, the winner, every run's metrics."""
    results = run_sweep(spec, out, runner=runner, say=lambda text: None)
    write_table(rows_of(results, spec.all_seeds, out), out / "results")
    kept = [
        *out.glob("results.*"),
        out / "winner.toml",
        *out.rglob("metrics.jsonl"),
        *out.rglob("config.toml"),
    ]
    return {str(path.relative_to(out)): path.read_bytes() for path in kept}


def owner_of(path: Path) -> int | None:
    """The process that has the file open."""
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and str(path) in [
                file.path for file in process.open_files()
            ]:
                return process.pid
        except psutil.Error:
            continue
    return None


def test_members_are_spread_and_a_killed_worker_changes_nothing(spec, runner, tmp_path):
    expected = files_of(spec, tmp_path / "here", LocalRunner(1))
    assert len([name for name in expected if name.endswith("metrics.jsonl")]) == 6
    out, first_step, over = tmp_path / "there", {}, threading.Event()

    def kill_one() -> None:
        """In the middle of the second step, behind the state that the first one kept."""
        while not over.is_set():
            for metrics in running_metrics(out):
                if (
                    metrics.read_bytes().count(b"\n") > 801
                    and (owner := owner_of(metrics)) is not None
                ):
                    os.kill(owner, signal.SIGKILL)
                    lines = (
                        metrics.with_name("timings.jsonl").read_bytes().splitlines(keepends=True)
                    )
                    first_step[metrics.parent] = b"".join(lines[:801])
                    return
            time.sleep(0.01)

    killer = threading.Thread(target=kill_one)
    killer.start()
    try:
        found = files_of(spec, out, runner)
    finally:
        over.set()
        killer.join()
    assert found == expected
    assert (
        runner.attempts == 6 + 2 + 1
    )  # six to the first step, the best with two seeds to the end, and one again
    [(folder, timings)] = first_step.items()
    assert (folder / "timings.jsonl").read_bytes().startswith(timings)  # resumed, not started again
    assert not list(out.rglob(".shared-*"))
    assert files_of(spec, out, runner) == expected  # run again, it finds everything done


def test_runs_land_on_both_nodes(runner, tiny_text, tmp_path, cluster):
    config = small_config(data__source=str(tiny_text), rounds=400)
    jobs = [Job(config.with_values({"seed": seed}), tmp_path / str(seed)) for seed in range(4)]
    parents = set()

    def look() -> None:
        while not parents or len(parents) < 2:
            for process in psutil.process_iter(["ppid", "cmdline"]):
                if any("run_task" in part for part in process.info["cmdline"] or ()):
                    parents.add(process.info["ppid"])
            if over.is_set():
                return
            time.sleep(0.01)

    over = threading.Event()
    watcher = threading.Thread(target=look)
    watcher.start()
    ends = runner.run(jobs)
    over.set()
    watcher.join()
    assert [end.status for end in ends] == ["finished"] * 4
    assert len(parents) == 2  # each node's own raylet starts its workers


def test_a_diverged_run_and_wrong_data_are_told_as_at_home(
    runner, tiny_text, tmp_path, monkeypatch
):
    good = small_config(data__source=str(tiny_text))
    wild = good.with_values({"client.learning_rate": 1e30, "clipping.enabled": False})
    assert [
        end.status for end in runner.run([Job(wild, tmp_path / "w"), Job(good, tmp_path / "g")])
    ] == [
        "diverged",
        "finished",
    ]
    assert (
        runner.run([Job(good, tmp_path / "late")], deadline=time.monotonic() - 1)[0].status
        == "not run"
    )
    assert not (tmp_path / "late").exists()
    with pytest.raises(ConfigError, match="made by another configuration"):
        runner.run([Job(good.with_values({"seed": 3}), tmp_path / "g")])
    dataset = FederatedDataset.open(tiny_text)
    other = replace(dataset, header=replace(dataset.header, fingerprint="another"))
    monkeypatch.setattr(many_ray, "dataset_of", lambda job: other)
    with pytest.raises(DataError, match="other data"):
        runner.run([Job(good, tmp_path / "h")])


def test_a_folder_that_is_not_shared_is_refused(runner, tiny_text, tmp_path, monkeypatch):
    """As the driver's file is not there for the others, so is its folder."""
    monkeypatch.setattr(many_ray, "_SEE_SECONDS", 0.0)
    monkeypatch.setattr(Path, "write_text", lambda *args, **kwargs: 0)
    with pytest.raises(ConfigError, match=r"--out: .* all machines share"):
        runner.run([Job(small_config(data__source=str(tiny_text)), tmp_path / "run")])
    assert not (tmp_path / "run").exists()


def test_a_token_of_another_folder_is_not_taken_for_ours(tmp_path, monkeypatch):
    monkeypatch.setattr(many_ray, "_SEE_SECONDS", 0.0)
    (tmp_path / "token").write_text("theirs", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"10\.0\.0\.7"):
        Token(str(tmp_path / "token"), "ours").check("10.0.0.7")
    Token(str(tmp_path / "token"), "theirs").check("10.0.0.7")


def test_ctrl_c_keeps_what_was_run(tiny_text, tmp_path):
    """Through the command line, on a cluster of its own, with paths that mean something here only."""
    path = tmp_path / "sweep.toml"
    path.write_text(
        SPEC.format(data=tiny_text).replace("rounds = 2400", "rounds = 50000"), encoding="utf-8"
    )
    command = [
        sys.executable,
        "-m",
        "fedbandit",
        "sweep",
        "sweep.toml",
        "-o",
        "out",
        "--engine",
        "ray",
    ]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    end = time.monotonic() + 180
    while not [p for p in running_metrics(tmp_path / "out") if p.stat().st_size > 5000]:
        assert time.monotonic() < end, "no run ever started"
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert "run the same command again to resume" in said
    for folder in [p.parent for p in (tmp_path / "out").rglob("metrics.jsonl")]:
        rounds = (folder / "metrics.jsonl").read_bytes().count(b"\n") - 1  # behind the run's id
        assert (folder / "checkpoints" / f"round-{rounds:06d}.safetensors").exists()


def test_figures_take_the_same_runner(tiny_text, tmp_path, cluster):
    from fedbandit.paper.figures import FigureRequest, make_figure
    from fedbandit.paper.records import text_of

    settings = {"clients_per_round": 8, "pretraining.clients": 20}
    with runner_of("ray", cluster.address) as there:
        request = FigureRequest(
            str(tiny_text), seeds=1, scale=0.004, settings=settings, runner=there
        )
        away = make_figure("fig2c", request, tmp_path / "away", lambda text: None)
    request = FigureRequest(
        str(tiny_text), seeds=1, scale=0.004, settings=settings, runner=LocalRunner(1)
    )
    home = make_figure("fig2c", request, tmp_path / "home", lambda text: None)
    assert text_of(away) == text_of(home)
    assert away.png.read_bytes() == home.png.read_bytes()
