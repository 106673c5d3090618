"""Flower's grid and client app in one process: messages are Flower's own, no process is started.

A test module that uses it is skipped where Flower is not installed; `make test-slow` runs it."""

import copy
import types

import pytest

pytest.importorskip("flwr")

from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity


class LocalGrid(Grid):
    """Calls the client app at once and keeps its answer until it is pulled."""

    def __init__(self, app, node_configs, run_id=1):
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, run_id, 1
        self.app, self.replies, self.number, self.run_id = app, {}, 0, run_id
        self.contexts = {
            1000 + i: Context(run_id, 1000 + i, dict(config), RecordDict(), {})
            for i, config in enumerate(node_configs)
        }

    @property
    def run(self):
        return types.SimpleNamespace(run_id=self.run_id)

    def set_run(self, run):
        pass

    def create_message(self, *_, **__):
        raise NotImplementedError

    def get_node_ids(self):
        return list(self.contexts)

    def push_messages(self, messages):
        assert isinstance(messages, list)
        ids = []
        for message in messages:
            if message.metadata.dst_node_id not in self.contexts:
                ids.append("")
                continue
            self.number += 1
            ids.append(f"m{self.number}")
            message.metadata.__dict__["_message_id"] = ids[-1]
            given = copy.deepcopy(message)
            try:
                self.replies[ids[-1]] = self.app(
                    message=given, context=self.contexts[message.metadata.dst_node_id]
                )
            except Exception as error:
                self.replies[ids[-1]] = Message(Error(code=2, reason=repr(error)), reply_to=given)
        return ids

    def pull_messages(self, message_ids):
        return [self.replies.pop(ticket) for ticket in list(message_ids) if ticket in self.replies]

    def send_and_receive(self, messages, *, timeout=None):
        return self.pull_messages(self.push_messages(list(messages)))
