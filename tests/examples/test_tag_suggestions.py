"""The example: its service, its users, its page, that suggestions get better; and, slow, all of it by one command."""

import json
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path

import pytest
from device import make_service, post, write_once
from network_builders import Network, coordinator
from page import render
from run import write_files
from users import TAGS, User

from fedbandit.deploy import Agent, Retention
from fedbandit.deploy.device.participant import Participant
from fedbandit.deploy.server.deployment import read_deployment
from fedbandit.deploy.server.store import Store
from fedbandit.federated.state import Version

EXAMPLE = Path(__file__).parents[2] / "examples" / "tag_suggestions"


@pytest.fixture
def served(tmp_path):
    """Three devices, each with its service and its user."""
    found = []
    for number in range(3):
        agent = Agent(
            tmp_path / f"device-{number}",
            retention=Retention(max_events=200),
            uniform=random.Random(number).random,
        )
        service = make_service(agent)
        threading.Thread(target=service.serve_forever, daemon=True).start()
        found.append(
            (agent, service, f"http://127.0.0.1:{service.server_address[1]}", User(number))
        )
    yield found
    for agent, service, _, _ in found:
        service.shutdown()
        service.server_close()
        agent.close()


def test_suggestions_get_better_from_model_to_model(tmp_path, served):
    deployment = read_deployment(write_files(tmp_path, rounds=8, devices=3))
    server = coordinator(
        deployment, Network({i: Participant(agent) for i, (agent, *_) in enumerate(served)})
    )
    for agent, *_ in served:
        agent.install(deployment.device_model(Version(deployment.initial), 0))
    chance = random.Random(1)
    shares = []
    for _ in range(4):
        used = [
            write_once(address, user, chance) for _, _, address, user in served for _ in range(40)
        ]
        shares.append(sum(used) / len(used))
        server.run(attempts=2)
    used = [write_once(address, user, chance) for _, _, address, user in served for _ in range(40)]
    assert shares[0] < 0.4
    assert sum(used) / len(used) > shares[0] + 0.2
    page = render(deployment.folder)
    assert (
        page.count("<rect") == 3
    )  # models 0, 1 and 2 made the choices whose rewards have been reported
    assert "round          8" in page


def test_the_service_before_there_is_a_model_and_with_bad_requests(tmp_path, served):
    agent, _, address, user = served[0]
    with pytest.raises(urllib.error.HTTPError) as refused:
        write_once(address, user, random.Random(0))
    assert refused.value.code == 503
    refused.value.close()
    deployment = read_deployment(write_files(tmp_path, rounds=1, devices=1))
    agent.install(deployment.device_model(Version(deployment.initial), 0))
    suggestion = post(address, "/suggest", {"text": "a new song for my guitar"})
    assert suggestion["tag"] in TAGS
    assert post(address, "/feedback", {"event": suggestion["event"], "used": True}) == {
        "outcome": "recorded"
    }
    assert post(address, "/feedback", {"event": suggestion["event"], "used": False}) == {
        "outcome": "duplicate"
    }
    for path, content in (("/suggest", {}), ("/elsewhere", {"text": "a"})):
        with pytest.raises(urllib.error.HTTPError) as refused:
            post(address, path, content)
        assert refused.value.code == 400
        assert "problem" in json.loads(refused.value.read())
        refused.value.close()


def test_the_page_before_the_first_round(tmp_path):
    page = render(tmp_path)
    assert "Waiting for the first round" in page
    assert 'name="viewport"' in page
    assert "color-scheme:light dark" in page
    assert "svg{max-width:100%" in page


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_one_command_runs_all_of_it_and_a_signal_ends_it(tmp_path, ending):
    pytest.importorskip("flwr")
    command = [
        sys.executable,
        str(EXAMPLE / "run.py"),
        "--out",
        str(tmp_path / "out"),
        "--devices",
        "2",
    ]
    # Who starts these tests in the background may ignore Ctrl-C, and children inherit that.
    hear = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=hear)
    try:
        address = running.stdout.readline().split()[1]
        deadline = time.monotonic() + 200
        while "after round 2 " not in (page := _read(address)):
            assert time.monotonic() < deadline, page
            assert running.poll() is None
            time.sleep(1)
    finally:
        running.send_signal(ending)
        said, _ = running.communicate(timeout=90)
    assert "<rect" in page
    assert running.returncode == (0 if ending == signal.SIGINT else 143)
    assert ("run the same command again to resume" in said) == (ending == signal.SIGINT)
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True)
    assert left.stdout == "", "a process was left behind"
    Store(tmp_path / "out" / "server").close()  # refused while a server app still has the folder


def _read(address):
    with urllib.request.urlopen(address, timeout=30) as answer:
        return answer.read().decode()
