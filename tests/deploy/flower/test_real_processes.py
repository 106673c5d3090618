"""SuperLink and SuperNodes as real processes: the simulator's models, a server killed in between, and secure sums."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr")

from masked_round import node_key, private_file, public_line
from network_builders import kept_state
from simulated_devices import CLIENTS, SECURE_TRAINING, deployment_values
from test_agreement import simulated_round, simulated_states

from fedbandit.config import Config
from fedbandit.core.files import write_json
from fedbandit.deploy.flower import processes
from fedbandit.deploy.flower.operate import write_bundle
from fedbandit.deploy.secure_sums import update_error
from fedbandit.deploy.server.deployment import read_deployment
from fedbandit.deploy.server.operator import OperatorRequests, change_requests
from fedbandit.deploy.server.server_status import read_live
from fedbandit.deploy.server.status import read_status
from fedbandit.deploy.server.store import read_ledger
from fedbandit.federated.state import State

NODES = CLIENTS[:3]
CLIENT = """
import sys
sys.path[:0] = {paths!r}

from simulated_devices import experiment, live_a_period, open_agent

from fedbandit.deploy.flower.client_app import make_client_app


def agent_of(context):
    return open_agent(str(context.node_config["agent-dir"]), int(context.node_config["client"]))


def live(agent, context):
    live_a_period(agent, int(context.node_config["client"]), experiment({rounds}, **{changed!r}))


app = make_client_app(open_agent=agent_of, after_install=live)
"""


def wait_until(holds, seconds, what):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.5)


def write_toml(folder, rounds, clients, rules=None, **changed):
    given = {
        "min_reports": len(clients),
        "round_seconds": 150,
        "install_seconds": 150,
        **(rules or {}),
    }
    values, words = deployment_values(rounds, "server", given, **changed)
    (folder / "words.txt").write_text("\n".join(words))
    rules = values.pop("deployment")
    config = Config.build({**values, "scenario": "scratch"})
    meaningless = (
        "scenario",
        "mode",
        "data",
        "pretraining",
        "population",
        "drift",
        "gate",
        "training",
    )
    text = config.to_toml()
    blocks = [
        block for block in text.split("\n\n") if block.split("\n")[0].strip("[]") not in meaningless
    ]
    lines = [
        line for line in "\n\n".join(blocks).splitlines() if line.split(" = ")[0] not in meaningless
    ]
    lines += ["[deployment]", *(f"{key} = {json.dumps(value)}" for key, value in rules.items())]
    path = folder / "deployment.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


class RealNetwork:
    """A SuperLink and a SuperNode for each client, as processes; ended when the block ends."""

    def __init__(self, folder, toml, clients, rounds, own="", **changed):
        self.folder, self.toml, self.clients, self.own = folder, toml, clients, own
        self.state, self.home = folder / "server", folder / "server" / "flower"
        self.home.mkdir(parents=True)
        paths = [str(Path(__file__).parents[2] / "helpers")]
        client = CLIENT.format(paths=paths, rounds=rounds, changed=changed)
        self.bundle = write_bundle(folder / "app", client=client)
        self.port, self.nodes = processes.free_port(), []

    def __enter__(self):
        self.link = self.start_link()
        for client in self.clients:
            device, log = self.folder / f"device-{client}", self.folder / f"node-{client}.log"
            address, own = (
                f"127.0.0.1:{self.port}",
                f"client={client} {self.own.format(client=client)}".strip(),
            )
            plain = processes.Security()
            self.nodes.append(
                processes.start_supernode(
                    device / "home", address, device / "agent", plain, log, own
                )
            )
        return self

    def __exit__(self, *_):
        homes = [
            self.folder / f"device-{client}" / "home" for client in self.clients[: len(self.nodes)]
        ]
        for process, home in zip([*self.nodes, self.link], [*homes, self.home], strict=True):
            processes.stop(process, home)

    def start_link(self):
        plain = processes.Security()
        link = processes.start_superlink(
            self.home, "127.0.0.1", self.port, plain, self.folder / "superlink.db"
        )
        processes.wait_for_port("127.0.0.1", self.port, link, self.state / "superlink.log")
        processes.write_connection(self.home, f"127.0.0.1:{self.port}", plain)
        return link

    def kill_link(self):
        """The SuperLink, and with it the server app, by kill -9; then a new SuperLink."""
        os.killpg(self.link.pid, signal.SIGKILL)
        processes.stop(
            self.link, self.home
        )  # waits until the last of them is gone, and its port is free
        self.link = self.start_link()

    def submit(self):
        return processes.submit(self.bundle, self.home, self.toml)

    def wait_for_rounds(self, rounds, seconds):
        metrics = self.state / "metrics.jsonl"
        wait_until(
            lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= rounds,
            seconds,
            f"{rounds} rounds",
        )

    def wait_for_end(self, run):
        wait_until(
            lambda: processes.run_status(self.home, run).startswith("finished"),
            60,
            "the end of the run",
        )


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="kills process groups")
def test_real_processes_agree_with_the_simulator_and_survive_a_killed_server(tmp_path):
    rounds = 4
    with RealNetwork(tmp_path, write_toml(tmp_path, rounds, NODES), NODES, rounds) as network:
        network.submit()
        network.wait_for_rounds(2, 500)
        network.kill_link()
        run = network.submit()
        network.wait_for_rounds(rounds, 500)
        network.wait_for_end(run)
    found = kept_state(network.state)
    *_, expected = simulated_states(rounds, NODES)
    assert (found.round, sorted(found.deployed)) == (rounds, [0, 1, 2])
    np.testing.assert_allclose(found.weights, expected.weights, atol=1e-6, rtol=0)
    assert "resuming after round" in (network.state / "server.log").read_text()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="kills process groups")
def test_real_processes_with_secure_aggregation_agree_up_to_rounding(tmp_path):
    """Every round deploys, so the weights after each are kept: each is compared with the simulator's next.

    Devices sign their keys, and believe those on the roster alone.
    """
    rounds = 2
    rules = {"secure_aggregation": True, "secure_seconds": 100}
    toml = write_toml(tmp_path, rounds, NODES, rules, **SECURE_TRAINING)
    keys = {client: node_key() for client in NODES}
    for client, key in keys.items():
        (tmp_path / f"key-{client}").write_bytes(private_file(key))
    (tmp_path / "roster.pub").write_bytes(b"\n".join(public_line(key) for key in keys.values()))
    own = f'secure-aggregation=true roster="{tmp_path}/roster.pub" node-key="{tmp_path}/key-{{client}}"'
    with RealNetwork(tmp_path, toml, NODES, rounds, own, **SECURE_TRAINING) as network:
        run = network.submit()
        network.wait_for_rounds(rounds, 600)
        network.wait_for_end(run)
    found = kept_state(network.state)
    lines = [
        json.loads(line) for line in (network.state / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["clients"] for line in lines] == [len(NODES)] * rounds
    assert sorted(found.deployed) == [0, 1, 2]
    for line in lines:
        number, clip_norm = line["round"], line["clip_norm"]
        kept = {version: weights for version, weights in found.deployed.items() if version < number}
        before = State(
            number - 1,
            kept[number - 1].weights,
            kept,
            {"weights": kept[number - 1].weights},
            clip_norm,
        )
        expected = simulated_round(before, rounds, NODES, **SECURE_TRAINING)
        bound = update_error(len(NODES), clip_norm) / len(NODES) + 1e-6
        np.testing.assert_allclose(
            found.deployed[number].weights, expected.weights, atol=bound, rtol=0
        )
    assert np.abs(found.weights - found.deployed[0].weights).max() > 0.01


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="kills process groups")
def test_real_processes_with_secure_aggregation_and_privacy_survive_a_killed_device(tmp_path):
    """The server sees sums, adds the plan's noise and states the plan's epsilon; one of four devices is killed."""
    changed = {**SECURE_TRAINING, "clipping": {"norm": 0.3}}
    privacy = {"mechanism": "dp-fedavg", "noise_multiplier": 2.0, "sampling": "fixed"}
    rules = {"secure_aggregation": True, "min_reports": 3, "population": 4, "secure_seconds": 30}
    toml = write_toml(tmp_path, 1, CLIENTS, rules, **changed, privacy=privacy)
    with RealNetwork(
        tmp_path, toml, CLIENTS, 1, "secure-aggregation=true unsigned-keys=true", **changed
    ) as network:

        def said():
            return read_live(network.state) or {"in_reach": 0, "doing": ""}

        write_json(
            network.state / "operator.json", OperatorRequests(paused=True).to_json()
        )  # until all four are there
        run = network.submit()
        wait_until(lambda: said()["in_reach"] == 4, 100, "four nodes in reach")
        change_requests(network.state, lambda _: OperatorRequests())
        wait_until(
            lambda: "a secure sum over nodes" in said()["doing"], 200, "the exchange of keys"
        )
        os.killpg(network.nodes[0].pid, signal.SIGKILL)
        network.wait_for_rounds(1, 400)
        network.wait_for_end(run)
    plan, status = read_deployment(toml).ledger, read_status(network.state)
    assert status["secure_aggregation"] is True
    assert (status["privacy"]["epsilon_rdp"], status["privacy"]["epsilon_pld"]) == (
        plan.epsilon(1),
        None,
    )
    assert read_ledger(network.state / "ledger.jsonl").released == 1
    [line] = [
        json.loads(line) for line in (network.state / "metrics.jsonl").read_text().splitlines()
    ]
    assert line["clients"] is None  # how many took part is not published
    # Noise of two clip norms on the sum in each of many weights, far above the updates of three devices.
    noise = 2.0 * 0.3 / 4 * np.sqrt(kept_state(network.state).weights.size)
    assert line["update_norm"] == pytest.approx(noise, rel=0.5)
    assert "has not answered in time" in (network.state / "server.log").read_text()
