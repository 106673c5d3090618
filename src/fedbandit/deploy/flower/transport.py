"""Messages as Flower's records, and Flower's grid as a transport."""

import json
from collections.abc import Collection, Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS as SEALED
from flwr.serverapp import Grid

from fedbandit.core.errors import DataError
from fedbandit.deploy.messages import Reply, Request


def to_records(
    facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray], sealed: Mapping[str, Any] | None = None
) -> RecordDict:
    """One text, some arrays and perhaps a message of SecAgg+, ready to be sent."""
    content = RecordDict(
        {
            "facts": ConfigRecord({"json": json.dumps(dict(facts))}),
            "arrays": ArrayRecord({name: Array(np.ascontiguousarray(array)) for name, array in arrays.items()}),
        }
    )
    if sealed:
        content.config_records[SEALED] = ConfigRecord(dict(sealed))
    return content


def from_records(content: RecordDict) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The facts and arrays that `to_records` was given."""
    try:
        facts = json.loads(str(content["facts"]["json"]))
        arrays = {name: array.numpy() for name, array in content.array_records["arrays"].items()}
    except Exception as error:  # whatever a stranger's bytes make a parser do
        raise DataError(f"unreadable: {error!r}"[:300]) from None
    if not isinstance(facts, dict):
        raise DataError(f"unreadable: a {type(facts).__name__} where facts were expected")
    return facts, arrays


def sealed_in(content: RecordDict) -> dict[str, Any]:
    """The message of SecAgg+ that `to_records` was given."""
    return dict(content.config_records.get(SEALED, {}))


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
