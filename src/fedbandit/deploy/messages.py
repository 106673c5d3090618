"""What server and devices say to each other, and asking many devices at once with a deadline. Knows no transport."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np

Kind = Literal["install", "train", "ready", "secure", "judge"]
PROTOCOL = 2  # of what is said in requests and replies
_HIGHEST_PROTOCOL = 2**31


def with_protocol(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a message, with the protocol that its sender speaks."""
    return {"protocol": PROTOCOL, **facts}


def protocol_problem(facts: Mapping[str, Any]) -> str | None:
    """Why the protocol of a message cannot be known; None if it can.

    An older or newer one is no problem: each side reads what it knows, and asks for the rest with `required`.
    """
    found = facts.get("protocol", PROTOCOL)
    return (
        None
        if type(found) is int and 1 <= found < _HIGHEST_PROTOCOL
        else "protocol: not a version number"
    )


@dataclass(frozen=True)
class Request:
    """From the server to one node. Not worth delivering after `seconds`."""

    kind: Kind
    node: int
    facts: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]
    seconds: float
    sealed: Mapping[str, Any] = field(
        default_factory=dict
    )  # numbers, texts, bytes and lists of one of these


@dataclass(frozen=True)
class Reply:
    """From a node, to the request with that ticket; `error` where the transport or the node failed."""

    ticket: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    error: str | None = None
    sealed: Mapping[str, Any] = field(default_factory=dict)


class Transport(Protocol):
    """A non-blocking carrier of messages: none of its calls waits for a device."""

    def nodes(self) -> list[int]:
        """The nodes in reach now."""
        ...

    def send(self, requests: Sequence[Request]) -> list[str]:
        """Send them off; a ticket for each."""
        ...

    def receive(self, tickets: Collection[str]) -> list[Reply]:
        """The replies that have come so far; each is given once."""
        ...


_logger = logging.getLogger("fedbandit.deploy.server")
_REMEMBERED = 10_000  # unanswered requests whose answers are still looked for
Answers = list[tuple[int, Reply]]
"""Nodes and what they replied, in the order in which they were asked."""


@dataclass(frozen=True)
class _Open:
    """An unanswered request."""

    node: int
    what: str


class Courier:
    """Carries requests out and answers home over one transport."""

    def __init__(
        self,
        transport: Transport,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
        poll_seconds: float,
    ) -> None:
        self._transport, self._clock, self._sleep, self._poll_seconds = (
            transport,
            clock,
            sleep,
            poll_seconds,
        )
        self._late: dict[str, _Open] = {}

    def nodes(self) -> list[int]:
        """The nodes in reach now."""
        return self._transport.nodes()

    def ask(
        self,
        requests: list[Request],
        seconds: float,
        what: str,
        enough: Callable[[Answers], bool] = lambda _: False,
        take: Callable[[int, Reply], Reply] = lambda _, reply: reply,
    ) -> Answers:
        """Send, and poll until all have answered, it is enough, or time is up; who is missing is late from then on.

        `take` is called with each node's reply as it comes; what it returns is kept in its place.
        """
        deadline = self._clock() + seconds
        requests = [replace(request, facts=with_protocol(request.facts)) for request in requests]
        sent = self._transport.send(requests) if requests else []
        tickets = {ticket: request.node for ticket, request in zip(sent, requests, strict=True)}
        answers: dict[str, Reply] = {}

        def in_order() -> Answers:
            return [
                (node, answers[ticket]) for ticket, node in tickets.items() if ticket in answers
            ]

        while True:
            for reply in self._transport.receive([*(tickets.keys() - answers.keys()), *self._late]):
                if reply.ticket in tickets and reply.ticket not in answers:
                    answers[reply.ticket] = take(tickets[reply.ticket], reply)
                else:
                    self._not_awaited(reply)
            if len(answers) == len(tickets) or enough(in_order()) or self._clock() >= deadline:
                break
            self._sleep(min(self._poll_seconds, max(deadline - self._clock(), 0.0)))
        for ticket in [ticket for ticket in tickets if ticket not in answers]:
            _logger.warning("%s: node %d has not answered in time", what, tickets[ticket])
            self._late[ticket] = _Open(tickets[ticket], what)
        while len(self._late) > _REMEMBERED:
            self._late.pop(next(iter(self._late)))
        return in_order()

    def _not_awaited(self, reply: Reply) -> None:
        late = self._late.pop(reply.ticket, None)
        if late is not None:
            _logger.warning("%s: node %d answered late; not counted", late.what, late.node)
        else:
            _logger.warning("an answer came twice; not counted")
