"""What an agent keeps is its owner's alone, also in a folder that others could read before."""

import os

import pytest
from device_builders import text_model
from network_builders import Network, a_deployment, coordinator, devices, settle

from fedbandit.deploy import Agent

pytestmark = pytest.mark.skipif(os.name == "nt", reason="rights are others there")


def too_open(folder):
    """What somebody else could read, write or enter."""
    return [str(path) for path in (folder, *folder.rglob("*")) if path.stat().st_mode & 0o077]


def test_a_folder_that_everybody_could_read_is_closed(tmp_path):
    folder = tmp_path / "agent"
    folder.mkdir()
    folder.chmod(0o755)
    with Agent(folder) as agent:
        agent.install(text_model())
        agent.reward(agent.choose("cat").event_id, 1.0)
        assert (folder / "events.sqlite-wal").exists()
        assert too_open(folder) == []
    assert folder.stat().st_mode & 0o777 == 0o700


def test_files_of_an_agent_that_left_them_open_are_closed(tmp_path):
    folder = tmp_path / "agent"
    with Agent(folder) as agent:
        agent.install(text_model())
        agent.choose("cat")
    for path in (folder, folder / "models"):
        path.chmod(0o755)
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o644)
    assert too_open(folder)
    Agent(folder).close()
    assert too_open(folder) == []


def test_what_a_round_leaves_behind_is_private(tmp_path):
    participants, deployment = devices(tmp_path, 1), a_deployment(tmp_path)
    settle(deployment, participants)
    assert coordinator(deployment, Network(participants)).attempt()["clients"] == 1
    (participant,) = participants.values()
    assert (participant.agent.folder / "device.json").exists()
    assert too_open(participant.agent.folder) == []
