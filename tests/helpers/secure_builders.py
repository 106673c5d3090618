"""A network with secure aggregation in one process: Flower's own messages, all of them recorded, some of them lost."""

import json

import numpy as np
from local_grid import LocalGrid
from masked_round import node_key, private_file, public_line
from network_builders import HandTime, Network, a_deployment, coordinator, devices, settle, values

from fedbandit.deploy.flower.client_app import make_client_app
from fedbandit.deploy.flower.transport import SEALED, GridTransport
from fedbandit.deploy.masking import primitives as wire
from fedbandit.deploy.server.gathering import PlainReports
from fedbandit.deploy.server.rounds import Coordinator
from fedbandit.deploy.server.store import Store

SECURE = {"secure_aggregation": True, "min_reports": 3, "round_seconds": 30, "secure_seconds": 10}
SHARES, TRAINING, SURVIVORS, UNMASKING = wire.STEPS
READY = "ready"
FIRST = 1000  # the first node


class RecordingGrid(LocalGrid):
    """Keeps all that reaches the server; `lost` names (node, step) pairs whose answers never come."""

    def __init__(self, app, node_configs):
        super().__init__(app, node_configs)
        self.lost, self.broken, self.received, self.steps = set(), {}, [], []

    def push_messages(self, messages):
        steps = [self._step(message) for message in messages]
        ids = super().push_messages(messages)
        for ticket, step, message in zip(ids, steps, messages, strict=True):
            node = message.metadata.dst_node_id
            self.steps.append((node, step))
            if (node, step) in self.broken:
                self.broken[node, step](self.replies[ticket])
            if (node, step) in self.lost:
                del self.replies[ticket]
            elif ticket in self.replies:
                self.received.append((node, step, self.replies[ticket]))
        return ids

    @staticmethod
    def _step(message):
        sealed = message.content.config_records.get(SEALED)
        return (
            message.metadata.message_type.split("fedbandit_")[-1]
            if sealed is None
            else sealed[wire.STEP]
        )


def secure_values(**rules):
    return values(**{**SECURE, **rules})


def a_network(folder, number=5, given=None, *, secure=True):
    """A deployment, its grid, and the participants whose agents the nodes use, all without keys of their nodes."""
    deployment = a_deployment(folder, given or secure_values())
    participants = devices(folder, number)
    settle(deployment, participants)
    given = {"secure-aggregation": secure, "unsigned-keys": True}
    configs = [{"agent-dir": str(p.agent.folder), **given} for p in participants.values()]
    return deployment, RecordingGrid(make_client_app(), configs), list(participants.values())


def with_keys(grid, folder):
    """Give each node of a grid a key and the roster of all of them; the keys by node."""
    folder.mkdir()
    keys = {node: node_key() for node in grid.contexts}
    (folder / "roster.pub").write_bytes(b"\n".join(public_line(key) for key in keys.values()))
    for node, key in keys.items():
        (folder / str(node)).write_bytes(private_file(key))
        config = grid.contexts[node].node_config
        del config["unsigned-keys"]
        config.update({"roster": str(folder / "roster.pub"), "node-key": str(folder / str(node))})
    return keys


def a_server(deployment, grid, store=None):
    time = HandTime()
    return Coordinator(
        deployment,
        store or Store(deployment.folder),
        GridTransport(grid),
        clock=time,
        sleep=time.sleep,
        select=lambda _, nodes, __: list(nodes),
    )


def lines_of(deployment):
    return [
        json.loads(line) for line in (deployment.folder / "metrics.jsonl").read_text().splitlines()
    ]


def plain_round(folder, participants):
    """The same devices' next round without secure aggregation: its server, after one round."""
    server = coordinator(a_deployment(folder, values()), Network(dict(enumerate(participants))))
    server.attempt()
    return server


def clear_task(folder):
    """What a server without secure aggregation asks for in its first round."""
    deployment = a_deployment(folder, values())
    return PlainReports(deployment, None)._task(deployment.start(), 0, 1, "token", None)


def own_parts(deployment, participants):
    """What each device would have sent in clear."""
    task, found = clear_task(deployment.folder.parent), []
    for participant in participants:
        facts, arrays = participant.answer("train", task.facts, task.arrays)
        found.append((facts, arrays["update"].astype(np.float64)))
    return found
