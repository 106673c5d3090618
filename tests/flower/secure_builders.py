"""A network with secure aggregation in one process: Flower's own messages, all of them recorded, some of them lost."""

from flwr.common.secure_aggregation.secaggplus_constants import Key, Stage
from local_grid import LocalGrid
from network_builders import HandTime, a_deployment, devices, settle, values

from fedbandit.deploy.flower.client_app import make_client_app
from fedbandit.deploy.flower.grid import GridTransport
from fedbandit.deploy.flower.records import SEALED
from fedbandit.deploy.flower.rounds import Coordinator
from fedbandit.deploy.flower.store import Store

SECURE = {"secure_aggregation": True, "min_reports": 3, "round_seconds": 30, "secure_seconds": 10}
KEYS, SHARES, TRAINING, UNMASKING = Stage.all()
READY = "ready"


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
        return message.metadata.message_type.split("fedbandit_")[-1] if sealed is None else sealed[Key.STAGE]


def secure_values(**rules):
    return values(**{**SECURE, **rules})


def a_network(folder, number=5, given=None, *, secure=True):
    """A deployment, its grid, and the participants whose agents the nodes use."""
    deployment = a_deployment(folder, given or secure_values())
    participants = devices(folder, number)
    settle(deployment, participants)
    configs = [{"agent-dir": str(p.agent.folder), "secure-aggregation": secure} for p in participants.values()]
    return deployment, RecordingGrid(make_client_app(), configs), list(participants.values())


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
