"""The apps and the carrier with Flower's own messages, in one process."""

import numpy as np
import pytest
from network_builders import a_deployment, coordinator, devices, settle, values

pytest.importorskip("flwr")

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from local_grid import LocalGrid

from fedbandit.core.errors import DataError
from fedbandit.deploy.flower.client_app import app
from fedbandit.deploy.flower.transport import GridTransport, from_records, to_records
from fedbandit.deploy.messages import Request
from fedbandit.deploy.server.rounds import Coordinator
from fedbandit.deploy.server.store import Store


@pytest.fixture
def deployment(tmp_path):
    return a_deployment(tmp_path, values(poll_seconds=0.001))


@pytest.fixture
def folders(tmp_path, deployment):
    participants = devices(tmp_path, 3)
    settle(deployment, participants)
    return [str(participant.agent.folder) for participant in participants.values()]


def play(deployment, grid, rounds=None):
    store = Store(deployment.folder)
    server = Coordinator(
        deployment, store, GridTransport(grid), select=lambda _, nodes, __: list(nodes)
    )
    state = server.run(attempts=rounds)
    store.close()
    return state


def test_rounds_through_flower_are_those_without(deployment, folders, tmp_path):
    state = play(deployment, LocalGrid(app, [{"agent-dir": folder} for folder in folders]))
    assert state.round == 4

    from network_builders import Network

    from fedbandit.deploy import Agent
    from fedbandit.deploy.device.participant import Participant

    other = a_deployment(tmp_path / "other")
    participants = {i: Participant(Agent(folder)) for i, folder in enumerate(folders)}
    expected = coordinator(other, Network(participants)).run()
    np.testing.assert_array_equal(state.weights, expected.weights)


def test_a_client_app_that_fails_is_named(deployment, folders, caplog):
    grid = LocalGrid(
        app, [{"agent-dir": folders[0]}, {}]
    )  # the second node does not know its folder
    state = play(deployment, grid, rounds=1)
    assert state.round == 1
    assert "node 1001 refused: failed: Flower's error 2" in caplog.text


def test_unreadable_answers_are_named(deployment, folders, caplog):
    strange = ClientApp()

    @strange.query("fedbandit_install")
    def install(message, context):
        return Message(RecordDict({"facts": ConfigRecord({"json": "[1, 2"})}), reply_to=message)

    @strange.train("fedbandit_round")
    def train(message, context):
        return Message(RecordDict({"other": ArrayRecord()}), reply_to=message)

    state = play(deployment, LocalGrid(strange, [{}, {}]), rounds=1)
    assert state.round == 0
    assert caplog.text.count("refused: failed: unreadable") == 2
    assert caplog.text.count("has not installed it: unreadable") == 2


def test_a_node_that_has_left(deployment, folders):
    transport = GridTransport(LocalGrid(app, [{"agent-dir": folders[0]}]))
    tickets = transport.send([Request("train", 5, {}, {}, 10.0), Request("train", 6, {}, {}, 10.0)])
    assert len(set(tickets)) == 2
    assert [reply.error for reply in transport.receive(tickets)] == ["the node has left"] * 2
    assert transport.receive(tickets) == []


def test_records_travel_unchanged():
    facts = {"round": 3, "clip_norm": 0.25, "nested": {"a": [1, None, True]}}
    arrays = {"x": np.arange(6, dtype=np.float32), "bytes": np.frombuffer(b"abc", np.uint8)}
    read_facts, read_arrays = from_records(to_records(facts, arrays))
    assert read_facts == facts
    for name, array in arrays.items():
        assert read_arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(read_arrays[name], array)
    with pytest.raises(DataError, match="unreadable"):
        from_records(RecordDict())
