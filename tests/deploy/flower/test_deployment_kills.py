"""Kills over Flower's processes: the recount notices what is wrong, and a short history ends sound."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr")

from fedbandit.deploy import Agent
from fedbandit.deploy.server.rounds import Coordinator
from fedbandit.deploy.server.store import Store

SCRIPTS = Path(__file__).parents[3] / "scripts"


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Two devices that were asked three times, in one process; nothing was killed."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import deployment_kills
    import soak

    found = deployment_kills.Site(tmp_path, 2)
    words = (np.arange(soak.WORDS), np.ones(soak.WORDS))
    for device in found.devices:
        with Agent(device) as agent, open(device / "told.txt", "a") as told:
            for reward in (1.0, 0.0, 1.0):
                event = agent.choose(words).event_id
                print("made", event, file=told)
                print(agent.reward(event, reward).name, event, file=told)
    store, carrier = Store(found.state), soak.Carrier(found.devices, lossy=False)
    Coordinator(found.deployment, store, carrier).run(attempts=3)
    store.close()
    return found


def claims_of(site):
    from deployment_kills import recount

    return recount(site, unheard=0)["claims"]


def test_what_is_right_is_found_right(site):
    assert all(claims_of(site).values())
    assert len(claims_of(site)) == 7


def test_an_update_that_was_not_accepted_is_noticed(site):
    path = site.folder / "accepted" / "2.bin"
    updates = np.frombuffer(path.read_bytes(), np.float32).copy()
    updates[0] += 0.5
    path.write_bytes(updates.tobytes())
    assert [claim for claim, holds in claims_of(site).items() if not holds] == [
        "model recomputed from accepted reports"
    ]


def test_a_reward_that_counts_twice_is_noticed(site):
    path = site.state / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[-1] |= {"events": 1, "reward_reported": 1.0}
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    wrong = {claim for claim, holds in claims_of(site).items() if not holds}
    assert wrong == {"each reward counted once", "rewards add up"}


def test_an_event_that_was_lost_is_noticed(site):
    with open(site.devices[0] / "told.txt", "a") as told:
        print("made 99-x\nRECORDED 99-x", file=told)
    wrong = {claim for claim, holds in claims_of(site).items() if not holds}
    assert wrong == {"no event lost", "no reward lost"}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="kills processes")
def test_a_deployment_survives_a_few_kills(tmp_path):
    few = ["--histories", "1", "--kills", "4", "--devices", "2", "--out", str(tmp_path / "out")]
    command = [sys.executable, str(SCRIPTS / "deployment_kills.py"), str(tmp_path / "work"), *few]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out").read_text())
    assert (found["kills"], found["sound"]) == (4, True)
