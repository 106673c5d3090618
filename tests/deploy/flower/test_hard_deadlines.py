"""A device that stops in the middle of its upload delays nobody: rounds end on time, and the others' replies count."""

import threading
import time
import types
from collections.abc import Callable

import pytest
from network_builders import a_deployment, devices, settle, values

pytest.importorskip("flwr")

from flwr.app import Context, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid.http_grid import HttpGrid

from fedbandit.deploy.flower.client_app import app
from fedbandit.deploy.flower.transport import GridTransport
from fedbandit.deploy.server.rounds import Coordinator
from fedbandit.deploy.server.store import Store


class SuperLinkClient:
    """Answers a grid as a SuperLink does, of which some nodes' uploads never end: there, but not available."""

    def __init__(self) -> None:
        self.replies: dict[str, Message] = {}
        self.objects: dict[str, bytes] = {}
        self.withheld: set[str] = set()
        self.asked_for_withheld = threading.Event()
        self.whole, self.confirmed = 0, 0

    def add(self, message: Message, upload_ends: bool) -> None:
        message.metadata.__dict__["_message_id"] = message.object_id
        self.replies[message.metadata.reply_to_message_id] = message
        objects = get_all_nested_objects(message)
        self.objects |= {name: value.deflate() for name, value in objects.items()}
        if upload_ends:
            self.whole += 1
        else:
            self.withheld |= {message.object_id}

    def PullMessages(self, request) -> PullAppMessagesResponse:
        found = [
            self.replies.pop(ticket) for ticket in request.message_ids if ticket in self.replies
        ]
        trees = [get_object_tree(message) for message in found]
        protos = [message_to_proto(remove_content_from_message(message)) for message in found]
        return PullAppMessagesResponse(messages_list=protos, message_object_trees=trees)

    def PullObject(self, request) -> PullObjectResponse:
        if request.object_id in self.withheld:
            self.asked_for_withheld.set()
            return PullObjectResponse(object_found=True, object_available=False)
        content = self.objects[request.object_id]
        return PullObjectResponse(object_found=True, object_available=True, object_content=content)

    def ConfirmMessageReceived(self, _) -> None:
        self.confirmed += 1


class FreezingGrid(HttpGrid):
    """Flower's own grid over that client; it pulls as in a deployment, and devices answer when a message is pushed."""

    def __init__(self, folders: list[str]) -> None:
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
        super().__init__(token="any", insecure=True)
        self.link = self._client = SuperLinkClient()
        self._run = types.SimpleNamespace(run_id=1)
        configs = {100 + i: {"agent-dir": folder} for i, folder in enumerate(folders)}
        self.contexts = {
            node: Context(1, node, config, RecordDict(), {}) for node, config in configs.items()
        }
        self.freezes: Callable[[int, str], bool] = lambda node, kind: False
        self.number = 0

    def get_node_ids(self):
        return list(self.contexts)

    def push_messages(self, messages):
        for message in messages:
            self.number += 1
            message.metadata.__dict__["_message_id"] = f"m{self.number}"
            node, kind = message.metadata.dst_node_id, message.metadata.message_type
            self.link.add(
                app(message=message, context=self.contexts[node]), not self.freezes(node, kind)
            )
        return [message.metadata.message_id for message in messages]


class Patient:
    """Time by hand that passes only when all replies that can be fetched have been."""

    def __init__(self, link: SuperLinkClient) -> None:
        self.now, self._link = 0.0, link

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        give_up = time.monotonic() + 60
        while self._link.confirmed < self._link.whole and time.monotonic() < give_up:
            time.sleep(0.002)
        time.sleep(0.002)
        self.now += seconds


@pytest.fixture
def network(tmp_path):
    deployment = a_deployment(tmp_path, values(round_seconds=120, poll_seconds=0.7))
    participants = devices(tmp_path, 4)
    settle(deployment, participants)
    grid = FreezingGrid([str(participant.agent.folder) for participant in participants.values()])
    store, transport, clock = Store(deployment.folder), GridTransport(grid), Patient(grid.link)
    everybody = {"select": lambda deployment, nodes, number: list(nodes)}
    server = Coordinator(deployment, store, transport, clock=clock, sleep=clock.sleep, **everybody)
    yield grid, clock, server
    transport.close()
    store.close()


def test_a_round_ends_on_time_when_a_device_freezes_in_mid_upload(network):
    grid, clock, server = network
    grid.freezes = lambda node, kind: node == 100 and kind == "train.fedbandit_round"
    metrics = server.attempt()
    assert grid.link.asked_for_withheld.is_set()
    assert 120 <= clock.now <= 122
    assert (metrics["clients"], metrics["asked"]) == (3, 4)
    grid.freezes = lambda node, kind: False
    before = clock.now
    assert server.attempt()["clients"] == 4
    assert clock.now < before + 60


def test_a_frozen_device_does_not_hold_up_a_new_model_either(network):
    grid, clock, server = network
    grid.freezes = lambda node, kind: node == 101 and kind == "query.fedbandit_install"
    assert server.attempt()["clients"] == 4
    assert clock.now < 60 + 120 + 2


def test_an_upload_that_ends_late_is_named_and_not_counted(network, caplog):
    grid, _, server = network
    grid.freezes = lambda node, kind: node == 100 and kind == "train.fedbandit_round"
    server.attempt()
    grid.freezes = lambda node, kind: False
    grid.link.withheld.clear()
    give_up = time.monotonic() + 60
    while "answered late; not counted" not in caplog.text and time.monotonic() < give_up:
        assert server.attempt()["clients"] == 4
        time.sleep(0.3)
    assert "round 1: node 100 answered late; not counted" in caplog.text
