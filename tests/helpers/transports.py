"""Sites in one process, over participants directly or over Flower: the same devices, servers and faults."""

from dataclasses import dataclass, field

from network_builders import HandTime, Network, a_deployment, devices, settle

from fedbandit.deploy.device.participant import Participant
from fedbandit.deploy.device.secure_round import Identity
from fedbandit.deploy.masking import primitives as wire
from fedbandit.deploy.server.rounds import Coordinator
from fedbandit.deploy.server.store import Store

SECURE = {"secure_aggregation": True, "min_reports": 3, "round_seconds": 30, "secure_seconds": 10}


def step_of(request):
    """The step of a secure sum, or the kind of any other request."""
    return request.sealed.get(wire.STEP, request.kind)


@dataclass
class Faulty:
    """A transport between the server and another one, which loses and changes what it carries."""

    carrier: object
    change: object = lambda request: request  # what is sent in place of a request
    lost: set = field(default_factory=set)  # (node, step) whose replies never come
    sent: list = field(default_factory=list)  # requests, as they went out
    received: list = field(default_factory=list)  # (node, step, reply)
    tickets: dict = field(default_factory=dict)

    def nodes(self):
        return self.carrier.nodes()

    def send(self, requests):
        requests = [self.change(request) for request in requests]
        self.sent += requests
        tickets = self.carrier.send(requests)
        about = [(request.node, step_of(request)) for request in requests]
        self.tickets |= dict(zip(tickets, about, strict=True))
        return tickets

    def receive(self, tickets):
        found = self.carrier.receive(tickets)
        found = [reply for reply in found if self.tickets[reply.ticket] not in self.lost]
        self.received += [(*self.tickets[reply.ticket], reply) for reply in found]
        return found


@dataclass
class Site:
    """A deployment, its devices, and the transport between them."""

    deployment: object
    participants: dict  # by node
    transport: Faulty

    @property
    def nodes(self):
        return list(self.participants)

    def server(self, store=None):
        time = HandTime()
        everybody = {"select": lambda _, nodes, __: list(nodes)}
        store = store or Store(self.deployment.folder)
        return Coordinator(
            self.deployment, store, self.transport, clock=time, sleep=time.sleep, **everybody
        )


def in_process(folder, number, given, *, secure_only=True, limits=None):
    """Participants that are called directly."""
    deployment, found = _lived(folder, number, given)
    own = {"secure_only": secure_only, "identity": Identity(unsigned=True), "limits": limits}
    participants = {node: Participant(p.agent, **own) for node, p in found.items()}
    return Site(deployment, participants, Faulty(Network(participants)))


def over_flower(folder, number, given, *, secure_only=True, limits=None):
    """The same participants behind Flower's messages and client app."""
    from local_grid import LocalGrid

    from fedbandit.deploy.flower.client_app import make_client_app
    from fedbandit.deploy.flower.transport import GridTransport

    deployment, found = _lived(folder, number, given)
    own = {"secure-aggregation": secure_only, "unsigned-keys": True}
    configs = [{"agent-dir": str(p.agent.folder), **own} for p in found.values()]
    grid = LocalGrid(make_client_app(limits=limits), configs)
    participants = dict(zip(grid.contexts, found.values(), strict=True))
    return Site(deployment, participants, Faulty(GridTransport(grid)))


def _lived(folder, number, given):
    deployment, participants = a_deployment(folder, given), devices(folder, number)
    settle(deployment, participants)
    return deployment, participants
