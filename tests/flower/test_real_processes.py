"""A SuperLink and SuperNodes as real processes on loopback: the simulator's models, and a server killed in between."""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr")

from simulated_devices import CLIENTS, deployment_values
from test_agreement import simulated_states

from fedbandit.config import Config
from fedbandit.deploy.flower import processes
from fedbandit.deploy.flower.bundle import write_bundle
from fedbandit.simulation.state import load_state

ROUNDS = 4
CLIENT = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parent.parent)]!r}

from simulated_devices import experiment, live_a_period, open_agent

from fedbandit.deploy.flower.client_app import make_client_app


def agent_of(context):
    return open_agent(str(context.node_config["agent-dir"]), int(context.node_config["client"]))


def live(agent, context):
    live_a_period(agent, int(context.node_config["client"]), experiment({ROUNDS}))


app = make_client_app(open_agent=agent_of, after_install=live)
"""


def wait_until(holds, seconds, what):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.5)


def write_toml(folder):
    values, words = deployment_values(ROUNDS, "server")
    (folder / "words.txt").write_text("\n".join(words))
    rules = {**values.pop("deployment"), "min_reports": len(CLIENTS), "round_seconds": 150, "install_seconds": 150}
    config = Config.build({**values, "scenario": "scratch"})
    meaningless = ("scenario", "mode", "data", "pretraining", "population", "drift", "gate", "training")
    text = config.to_toml()
    blocks = [block for block in text.split("\n\n") if block.split("\n")[0].strip("[]") not in meaningless]
    lines = [line for line in "\n\n".join(blocks).splitlines() if line.split(" = ")[0] not in meaningless]
    lines += ["[deployment]", *(f"{key} = {value!r}" for key, value in rules.items())]
    path = folder / "deployment.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="kills process groups")
def test_real_processes_agree_with_the_simulator_and_survive_a_killed_server(tmp_path):
    toml, home, state = write_toml(tmp_path), tmp_path / "server" / "flower", tmp_path / "server"
    home.mkdir(parents=True)
    bundle = write_bundle(tmp_path / "app", client=CLIENT)
    plain, port = processes.Security(), processes.free_port()
    metrics = state / "metrics.jsonl"

    def superlink():
        started = processes.start_superlink(home, "127.0.0.1", port, plain, tmp_path / "superlink.db")
        processes.wait_for_port("127.0.0.1", port, started, state / "superlink.log")
        processes.write_connection(home, f"127.0.0.1:{port}", plain)
        return started

    def rounds_done():
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    running = []
    try:
        running.append(superlink())
        for client in CLIENTS:
            folder, address = tmp_path / f"device-{client}", f"127.0.0.1:{port}"
            log, own = tmp_path / f"node-{client}.log", f"client={client}"
            running.append(processes.start_supernode(folder / "home", address, folder / "agent", plain, log, own))
        processes.submit(bundle, home, toml)
        wait_until(lambda: rounds_done() >= 2, 200, "two rounds")
        os.killpg(running[0].pid, signal.SIGKILL)
        running[0].wait()
        running[0] = superlink()
        run = processes.submit(bundle, home, toml)
        wait_until(lambda: rounds_done() >= ROUNDS, 250, "all rounds")
        wait_until(lambda: processes.run_status(home, run).startswith("finished"), 60, "the end of the run")
    finally:
        for process in reversed(running):
            processes.stop(process, patience=5)
    found = load_state(state / "state.safetensors")
    *_, expected = simulated_states(ROUNDS)
    assert (found.round, sorted(found.deployed)) == (ROUNDS, [0, 1, 2])
    np.testing.assert_allclose(found.weights, expected.weights, atol=1e-6, rtol=0)
    assert "going on after round" in (state / "server.log").read_text()
