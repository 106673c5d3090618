"""Flower's grid as a carrier of messages: a list is pushed, replies are polled for, nothing waits."""

from collections.abc import Collection, Sequence
from itertools import count

from flwr.app import Message
from flwr.serverapp import Grid

from fedbandit.deploy.flower.messages import Reply, Request
from fedbandit.deploy.flower.records import from_records, sealed_in, to_records
from fedbandit.errors import DataError

# SecAgg+ acts on the plain type alone: an update under any other name would travel in clear.
TYPES = {
    "install": "query.fedbandit_install",
    "ready": "query.fedbandit_ready",
    "train": "train.fedbandit_round",
    "secure": "train",
    "judge": "query.fedbandit_judge",
}


class GridTransport:
    """Sends to and receives from the nodes of a SuperLink."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._numbers = count()
        self._undeliverable: list[Reply] = []

    def nodes(self) -> list[int]:
        return sorted(self._grid.get_node_ids())

    def send(self, requests: Sequence[Request]) -> list[str]:
        messages = [
            Message(
                to_records(request.facts, request.arrays, request.sealed),
                dst_node_id=request.node,
                message_type=TYPES[request.kind],
                ttl=request.seconds,
            )
            for request in requests
        ]
        tickets = list(self._grid.push_messages(messages))  # a list: a generator is answered with an error
        return [ticket or self._never_sent() for ticket in tickets]

    def receive(self, tickets: Collection[str]) -> list[Reply]:
        failed, self._undeliverable = self._undeliverable, []
        asked = [ticket for ticket in tickets if not ticket.startswith("-")]
        return failed + [_reply(message) for message in self._grid.pull_messages(asked)] if asked else failed

    def _never_sent(self) -> str:
        """A ticket for a message that the SuperLink did not take; its failure is there to be received."""
        ticket = f"-{next(self._numbers)}"
        self._undeliverable.append(Reply(ticket, error="the node has left"))
        return ticket


def _reply(message: Message) -> Reply:
    ticket = message.metadata.reply_to_message_id
    if message.has_error():
        return Reply(ticket, error=f"Flower's error {message.error.code}: {message.error.reason}"[:300])
    try:
        return Reply(ticket, *from_records(message.content), sealed=sealed_in(message.content))
    except DataError as problem:
        return Reply(ticket, error=str(problem))
