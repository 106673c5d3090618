"""`fedbandit deploy server` and `client` as real processes with TLS and node keys, ended by Ctrl-C."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("flwr")

from network_builders import a_deployment, devices, settle, values

from fedbandit.core.errors import DataError
from fedbandit.deploy.flower import operate, processes
from fedbandit.deploy.server.status import full_status

TOML = """
rounds = {rounds}
deploy_every = 1
clients_per_round = 10
[server]
optimizer = "sgd"
learning_rate = 1.0
[clipping]
norm = 1.0
[deployment]
state = "server"
actions = ["animals", "furniture", "other"]
shape = [7]
"""


def openssl(*arguments):
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def make_keys(folder):
    """A certificate authority, a server's certificate for loopback, and a node's key."""
    ca, server, node = folder / "ca", folder / "server-key", folder / "node"
    openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", 2, "-subj", "/CN=test authority",
            "-keyout", f"{ca}.key", "-out", f"{ca}.crt")  # fmt: skip
    openssl(
        "req",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-subj",
        "/CN=localhost",
        "-keyout",
        server,
        "-out",
        f"{server}.csr",
    )
    names = folder / "names"
    names.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
    openssl("x509", "-req", "-in", f"{server}.csr", "-CA", f"{ca}.crt", "-CAkey", f"{ca}.key", "-CAcreateserial",
            "-days", 2, "-extfile", names, "-out", folder / "server.pem")  # fmt: skip
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", node], check=True
    )
    return folder / "ca.crt", folder / "server.pem", server, node


def deploy(log, *arguments):
    command = [sys.executable, "-m", "fedbandit", "deploy", *map(str, arguments)]
    with open(log, "wb") as file:
        return subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=hear_ctrl_c,
        )


def hear_ctrl_c():
    """Who starts these tests in the background may ignore Ctrl-C, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def end(process):
    """Ctrl-C, and no mercy after half a minute."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_until(holds, seconds, what):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.5)


needs_tools = pytest.mark.skipif(
    not (shutil.which("openssl") and shutil.which("ssh-keygen")),
    reason="needs openssl and ssh-keygen",
)


@pytest.fixture
def joined(tmp_path):
    """Start a server with keys for so many rounds, and a registered device: both commands, ended after the test."""
    running = []

    def start(rounds):
        ca, certificate, key, node = make_keys(tmp_path)
        toml, port = tmp_path / "deployment.toml", processes.free_port()
        toml.write_text(TOML.format(rounds=rounds))
        settle(a_deployment(tmp_path / "same", values()), devices(tmp_path, 1))
        options = ("--ca", ca, "--certificate", certificate, "--key", key, "--port", port)
        running.append(deploy(tmp_path / "server.out", "server", toml, *options))
        wait_until(lambda: "listening" in (tmp_path / "server.out").read_text(), 120, "a server")
        registered = deploy(
            tmp_path / "register.out",
            "register",
            tmp_path / "server",
            f"{node}.pub",
            "--name",
            "device-0",
        )
        assert registered.wait(120) == 0, (tmp_path / "register.out").read_text()
        joins = (
            "client",
            tmp_path / "device-0",
            "--server",
            f"127.0.0.1:{port}",
            "--ca",
            ca,
            "--key",
            node,
        )
        running.append(deploy(tmp_path / "client.out", *joins))
        return running

    yield start
    for process in reversed(running):
        end(process)


def test_a_state_that_cannot_be_resumed_is_refused_before_anything_starts(tmp_path, monkeypatch):
    toml = tmp_path / "deployment.toml"
    toml.write_text(TOML.format(rounds=1))
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "metrics.jsonl").write_text('{"round": 7}\n')
    monkeypatch.setattr(
        operate, "start_superlink", lambda *_: pytest.fail("a SuperLink was started")
    )
    with pytest.raises(DataError, match=r"server\.sqlite is missing, but metrics\.jsonl is here"):
        operate.serve(toml, "127.0.0.1", processes.free_port(), processes.Security())


@pytest.mark.slow
@needs_tools
def test_a_server_and_a_device_with_keys(tmp_path, joined):
    server, client = joined(rounds=1)
    kind, key, name, number = (tmp_path / "server" / "roster.pub").read_text().split()
    assert (tmp_path / "node.pub").read_text().startswith(f"{kind} {key} ")
    assert (name, number[:5]) == ("device-0", "node=")
    assert server.wait(200) == 0, (tmp_path / "server.out").read_text()
    end(client)
    said = (tmp_path / "server.out").read_text()
    assert "round 1: 1 of 1 devices, reward" in said
    assert "all rounds are done" in said
    found = full_status(tmp_path / "server")
    assert (found["round"], found["live"]["doing"], found["warnings"]) == (
        1,
        "all rounds are done",
        {},
    )
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True)
    assert left.stdout == "", "a process was left behind"


@pytest.mark.slow
@needs_tools
def test_a_revoked_key_cannot_connect_any_more(tmp_path, joined):
    server, _ = joined(rounds=1000)
    wait_until(
        lambda: "round 1: 1 of 1 devices" in (tmp_path / "server.out").read_text(), 300, "a round"
    )
    (node,) = full_status(tmp_path / "server")["live"]["nodes"]
    revoked = deploy(tmp_path / "revoke.out", "revoke", tmp_path / "server", node["node"])
    assert revoked.wait(120) == 0, (tmp_path / "revoke.out").read_text()
    assert f"{node['node']} cannot connect any more" in (tmp_path / "revoke.out").read_text()
    assert "ecdsa" not in (tmp_path / "server" / "roster.pub").read_text()
    wait_until(
        lambda: "the node ended with code" in (tmp_path / "client.out").read_text(),
        200,
        "a refused node",
    )
    wait_until(
        lambda: "waiting for nodes: 0 in reach" in (tmp_path / "server.out").read_text(),
        200,
        "nobody in reach",
    )
    assert server.poll() is None
