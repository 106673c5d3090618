"""Real processes that are killed, frozen and started again: nothing is left behind, nobody counts twice, rounds end."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

pytest.importorskip("flwr")

from ending_processes import lives, status, words_of
from network_builders import a_deployment, devices, settle, values

from fedbandit.deploy.flower import processes
from fedbandit.deploy.flower.processes import marked

TOML = """
rounds = 1000
deploy_every = 1000
clients_per_round = 2
[server]
optimizer = "sgd"
learning_rate = 1.0
[clipping]
norm = 1.0
[deployment]
state = "server"
actions = ["animals", "furniture", "other"]
shape = [7]
{rules}
"""
# A SuperNode that stops itself where it would upload its second reply, whose first part the SuperLink has got.
FREEZES = """
import os, signal, sys
if any("flower-supernode" in word for word in sys.orig_argv):
    from flwr.supercore.inflatable import inflatable_utils
    push, calls = inflatable_utils.push_object_contents_from_iterable, []
    def stops(*given, **named):
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        return push(*given, **named)
    inflatable_utils.push_object_contents_from_iterable = stops
"""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="kills and freezes processes"),
]


def wait_until(holds, seconds, what):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


class Site:
    """A server's folder and devices' folders, and the operator's commands in them."""

    def __init__(self, folder, number, rules):
        self.folder, self.port, self.commands = folder, processes.free_port(), []
        self.toml, self.state = folder / "deployment.toml", folder / "server"
        self.toml.write_text(TOML.format(rules=rules))
        settle(a_deployment(folder / "same", values()), devices(folder, number))

    def deploy(self, name, *arguments, **environment):
        command = [sys.executable, "-m", "fedbandit", "deploy", *map(str, arguments)]
        with open(self.folder / f"{name}.out", "ab") as file:
            started = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **environment},
            )
        self.commands.append(started)
        return started

    def server(self):
        return self.deploy("server", "server", self.toml, "--insecure", "--port", self.port)

    def client(self, number, **environment):
        joins = ("--server", f"127.0.0.1:{self.port}", "--insecure")
        return self.deploy(
            f"client-{number}", "client", self.folder / f"device-{number}", *joins, **environment
        )

    def home(self, what):
        return self.folder / what / "flower"

    def said(self, name):
        path = self.folder / f"{name}.out"
        return path.read_text() if path.exists() else ""

    def rounds(self):
        path = self.state / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def next_round(self, seconds=300):
        """Wait for one more round; its metrics."""
        there = len(self.rounds())
        wait_until(
            lambda: len(self.rounds()) > there, seconds, f"round {there + 1}: {self.said('server')}"
        )
        return self.rounds()[there]

    def listens(self):
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def nothing_left(self, *what, seconds):
        wait_until(
            lambda: not any(marked(self.home(one)) for one in what),
            seconds,
            f"processes of {what} are left",
        )

    def end(self):
        for command in self.commands:
            if command.poll() is None:
                command.kill()
                command.wait()
        for home in (self.state / "flower", *self.folder.glob("device-*/flower")):
            processes.end_leftovers(home, print, patience=0.1)


@pytest.fixture
def site(tmp_path):
    found = []

    def make(*given):
        found.append(Site(tmp_path, *given))
        return found[-1]

    yield make
    for one in found:
        one.end()


# "after 15 s" of the tests below is given three times as long, since they may share their machine.
SOON = 45.0


def test_kills_leave_nothing_behind_and_a_restart_goes_on(site):
    site = site(1, "round_seconds = 100")
    server, client = site.server(), site.client(0)
    first = site.next_round()
    assert (first["asked"], first["clients"]) == (1, 1)

    client.kill()  # -9: nobody is left to tell its SuperNode
    client.wait()
    site.nothing_left("device-0", seconds=SOON)
    client = site.client(0)

    server.kill()
    server.wait()
    site.nothing_left("server", seconds=SOON)
    wait_until(lambda: not site.listens(), SOON, "the SuperLink still listens")
    server = site.server()

    def link():
        return [
            p
            for p in marked(site.home("server"))
            if "flower-superlink" in " ".join(p.cmdline()[:3])
        ]

    site.next_round()
    for process in link():
        process.kill()  # the SuperLink alone
    wait_until(lambda: "starting it again" in site.said("server"), 60, "its death is not noticed")
    wait_until(site.listens, 90, "the SuperLink is not started again")
    last = site.next_round()
    assert all("twice" not in found["refused"] for found in site.rounds())
    assert (last["asked"], last["clients"], [found["round"] for found in site.rounds()]) == (
        1, 1, list(range(1, 1 + len(site.rounds()))),
    )  # fmt: skip

    for command in (client, server):
        command.send_signal(signal.SIGTERM)
    for command in (client, server):
        assert command.wait(SOON) == 143
    assert marked(site.home("server")) == marked(site.home("device-0")) == []


def test_orphans_that_nobody_could_end_are_ended_by_a_restart(site):
    """The worst case: supervisor and guard are killed at once, and what they ran lives on."""
    site = site(1, "round_seconds = 100")
    server, client = site.server(), site.client(0)
    site.next_round()
    orphans = []
    for command, what in ((server, "server"), (client, "device-0")):
        there = marked(site.home(what))
        guards = [process for process in there if "processes.py" in " ".join(words_of(process)[:4])]
        assert len(guards) == 1
        command.kill()
        guards[0].kill()
        command.wait()
        orphans += [process for process in there if process != guards[0]]
    assert any(lives(process) for process in orphans)
    server, client = site.server(), site.client(0)
    wait_until(lambda: "left behind" in site.said("server"), SOON, "the server finds its orphans")
    wait_until(lambda: "left behind" in site.said("client-0"), SOON, "the client finds its orphans")
    assert not any(lives(process) for process in orphans)
    site.next_round()
    last = site.next_round()
    assert (last["asked"], last["clients"], last["refused"]) == (1, 1, {})
    second = site.deploy(
        "second", "client", site.folder / "device-0", "--server", "127.0.0.1:1", "--insecure"
    )
    assert second.wait(60) == 2
    assert "another `deploy client` is running for this folder" in site.said("second")


def test_a_device_frozen_in_mid_upload_does_not_delay_a_round(site, tmp_path):
    """Flower alone would wait for it for three minutes and more."""
    limit = 75.0
    site = site(2, f"round_seconds = {limit:g}\nmin_reports = 2\ninstall_seconds = 100")
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(FREEZES)
    path = os.pathsep.join([str(tmp_path / "hook"), os.environ.get("PYTHONPATH", "")])
    site.server()
    site.client(0)
    site.client(1, PYTHONPATH=path)

    def frozen():
        return any(
            status(process) == psutil.STATUS_STOPPED for process in marked(site.home("device-1"))
        )

    wait_until(frozen, 400, f"a frozen device: {site.said('server')}")
    waits = lambda: "has not answered in time" in (site.state / "server.log").read_text()  # noqa: E731
    wait_until(waits, limit + 30, "the round did not end on time")
    asked = [json.loads(line) for line in (site.state / "server.log").read_text().splitlines()]
    assert not any("the server has stopped" in line["message"] for line in asked)
    assert "round 1: 1 reports, 2 needed; it is run again" in "\n".join(
        line["message"] for line in asked
    )
