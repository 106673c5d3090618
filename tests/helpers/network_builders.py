"""A network in one process: devices with agents, a carrier of messages that misbehaves on request, and time by hand."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from fedbandit.deploy import Agent
from fedbandit.deploy.device.participant import Participant
from fedbandit.deploy.messages import Reply, Request
from fedbandit.deploy.server.deployment import Deployment, build_deployment
from fedbandit.deploy.server.rounds import Coordinator
from fedbandit.deploy.server.store import Store
from fedbandit.federated.state import State

WORDS = ("the", "cat", "sat", "on", "a", "mat", "dog")
ACTIONS = ("animals", "furniture", "other")


class HandTime:
    """A steady clock that moves only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


Fault = Callable[[Request, Reply], list[Reply]]
"""What arrives in place of an honest reply: nothing, another one, or several."""


@dataclass
class Network:
    """Carries messages to participants at once. `faults` act on replies to training, by node, as `lies` on judging."""

    participants: dict[int, Participant]
    faults: dict[int, Fault] = field(default_factory=dict)
    lies: dict[int, Fault] = field(default_factory=dict)
    unreachable: set[int] = field(default_factory=set)
    slow: dict[int, float] = field(default_factory=dict)  # node -> seconds until its reply arrives
    deaf: set[int] = field(
        default_factory=set
    )  # nodes that never answer when they are sent a model
    time: HandTime = field(default_factory=HandTime)
    sent: list[Request] = field(default_factory=list)
    received: list[Reply] = field(default_factory=list)
    _waiting: list[tuple[float, Reply]] = field(default_factory=list)

    def nodes(self) -> list[int]:
        return [node for node in self.participants if node not in self.unreachable]

    def send(self, requests) -> list[str]:
        tickets = []
        for request in requests:
            self.sent.append(request)
            ticket = f"t{len(self.sent)}"
            tickets.append(ticket)
            replies = [self._answered(request, ticket)]
            faults = {"train": self.faults, "judge": self.lies}.get(request.kind, {})
            if request.node in faults:
                replies = faults[request.node](request, replies[0])
            if request.kind == "install" and request.node in self.deaf:
                continue
            arrives = self.time() + (
                self.slow.get(request.node, 0.0) if request.kind == "train" else 0.0
            )
            self._waiting += [(arrives, reply) for reply in replies]
        return tickets

    def _answered(self, request: Request, ticket: str) -> Reply:
        if request.node not in self.participants:
            return Reply(ticket, error="the node has left")
        try:
            return self.participants[request.node].reply(request, ticket)
        except Exception as error:
            return Reply(ticket, error=repr(error))

    def receive(self, tickets) -> list[Reply]:
        there = [
            reply
            for arrives, reply in self._waiting
            if arrives <= self.time() and reply.ticket in set(tickets)
        ]
        self._waiting = [
            (at, reply) for at, reply in self._waiting if not any(reply is seen for seen in there)
        ]
        self.received += there
        return there


def changed(**facts) -> Fault:
    return lambda request, reply: [replace(reply, facts={**reply.facts, **facts})]


def with_update(make: Callable[[np.ndarray], object]) -> Fault:
    return lambda request, reply: [replace(reply, arrays={"update": make(reply.arrays["update"])})]


def values(**deployment) -> dict:
    """A small deployment, as TOML would give it."""
    return {
        "rounds": 4,
        "deploy_every": 2,
        "clients_per_round": 100,
        "server": {"optimizer": "sgd", "learning_rate": 1.0},
        "client": {"learning_rate": 0.1, "batch_size": 4},
        "clipping": {"norm": 1.0},
        "policy": {"name": "softmax", "beta": 0.3},
        "deployment": {"state": "server", "actions": ACTIONS, "shape": [len(WORDS)], **deployment},
    }


def a_deployment(folder: Path, given: dict | None = None) -> Deployment:
    return build_deployment(given or values(), folder)


def devices(folder: Path, number: int, **agent) -> dict[int, Participant]:
    """Participants by node, with empty logs; what they choose follows from their number."""

    def made(i: int) -> Agent:
        return Agent(
            folder / f"device-{i}", **{"uniform": np.random.default_rng(1000 + i).random, **agent}
        )

    return {100 + i: Participant(made(i)) for i in range(number)}


def live(participant: Participant, events: int = 6, seed: int = 0) -> float:
    """Let an app use the agent a little; the sum of its rewards."""
    rng = np.random.default_rng(seed)
    total = 0.0
    for _ in range(events):
        context = rng.random(len(WORDS)).astype(np.float32)
        decision = participant.agent.choose(context)
        reward = float(decision.action == int(context.argmax()) % len(ACTIONS))
        participant.agent.reward(decision.event_id, reward)
        total += reward
    return total


def settle(deployment: Deployment, participants: dict[int, Participant]) -> None:
    """Install the initial model and let everybody act."""
    payload = deployment.device_model(deployment.start().deployed[0], 0).to_bytes()
    for i, participant in enumerate(participants.values()):
        participant.agent.install(payload)
        live(participant, seed=i)


def coordinator(
    deployment: Deployment, network: Network, store: Store | None = None, **more
) -> Coordinator:
    store = store or Store(deployment.folder)
    everybody = {"select": lambda deployment, nodes, number: list(nodes)}
    return Coordinator(
        deployment,
        store,
        network,
        clock=network.time,
        sleep=network.time.sleep,
        **(everybody | more),
    )


def kept_state(folder: Path) -> State:
    """The state in a server's folder, once its server has ended."""
    store = Store(folder)
    try:
        kept = store.load()
    finally:
        store.close()
    assert kept is not None
    return kept.state
