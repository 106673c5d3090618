"""Messages between server and devices, and asking many devices at once with a deadline.

Knows no transport: a transport carries `Request` and `Reply` and never waits for a device.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Annotated, Any, Literal, Protocol

import numpy as np
from pydantic import PlainValidator

Kind = Literal["install", "train", "ready", "secure", "judge"]
PROTOCOL = 2  # of what is said in requests and replies
_MOST = 2**63  # no honest count reaches it, and JSON allows integers too large for arithmetic
_LARGEST = 1e150  # what still has a square
_LONGEST_NAME = 64


def is_name(value: object) -> bool:
    """Whether it can name a device, a user or a round: 1 to 64 characters that have bytes."""
    if not isinstance(value, str) or not 0 < len(value) <= _LONGEST_NAME:
        return False
    return not any("\ud800" <= character <= "\udfff" for character in value)


def is_count(value: object) -> bool:
    """Whether it is an integer from 0, small enough to compute with."""
    return type(value) is int and 0 <= value < _MOST


def is_number(value: object) -> bool:
    """Whether it is a finite number, small enough to compute with."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


def checked(test: Callable[[Any], bool], otherwise: str) -> PlainValidator:
    """Part of a field's type: the value as it came, or an error in these words."""

    def check(value: Any) -> Any:
        if not test(value):
            raise ValueError(otherwise)
        return value

    return PlainValidator(check)


Name = Annotated[str, checked(is_name, "not a name of 1 to 64 characters")]
Count = Annotated[int, checked(is_count, "not a count")]
Number = Annotated[float, checked(is_number, "not a finite number")]


def with_protocol(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a message, with the protocol that its sender speaks."""
    return {"protocol": PROTOCOL, **facts}


def protocol_problem(facts: Mapping[str, Any]) -> str | None:
    """Why the protocol of a message cannot be known; None if it can.

    An older or newer one is no problem: each side reads what it knows, and asks for the rest with
    `required`.
    """
    found = facts.get("protocol", PROTOCOL)
    fine = type(found) is int and 1 <= found < 2**31
    return None if fine else "protocol: not a version number"


def _size(arrays: Mapping[str, np.ndarray], sealed: Mapping[str, Any]) -> int:
    parcels = (part for value in sealed.values()
               for part in (value if isinstance(value, list) else [value]))  # fmt: skip
    found = sum(getattr(array, "nbytes", 0) for array in arrays.values())
    return int(found) + sum(len(part) for part in parcels if isinstance(part, bytes))


@dataclass(frozen=True)
class Request:
    """From the server to one node. Not worth delivering after `seconds`.

    | kind | asks a device to | arrays | reply |
    | --- | --- | --- | --- |
    | `install` | act with a model | `model`: the bytes of its file, uint8 | the version in use |
    | `ready` | say whether it can take part in a secure sum | | sealed: keys for the attempt |
    | `train` | train on its log, in clear | `weights` | sums of rewards; `update`, clipped |
    | `secure` | take a step of a secure sum | `weights`, in one of the steps | sealed |
    | `judge` | judge a candidate by its log | `weights` | sums of gains |
    """

    kind: Kind
    node: int
    facts: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]
    seconds: float
    sealed: Mapping[str, Any] = field(default_factory=dict)  # numbers, texts, bytes, lists of them

    @property
    def size(self) -> int:
        """Bytes of its arrays and sealed parts."""
        return _size(self.arrays, self.sealed)


@dataclass(frozen=True)
class Reply:
    """From a node, to the request with that ticket; `error` where transport or node failed."""

    ticket: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    error: str | None = None
    sealed: Mapping[str, Any] = field(default_factory=dict)
    travelled: int | None = None  # bytes, where the transport knows better than the arrays

    @property
    def size(self) -> int:
        """Bytes that travelled for its arrays and sealed parts."""
        return _size(self.arrays, self.sealed) if self.travelled is None else self.travelled


class Transport(Protocol):
    """A non-blocking carrier of messages: none of its calls waits for a device."""

    def nodes(self) -> list[int]:
        """The nodes in reach now."""

    def send(self, requests: Sequence[Request]) -> list[str]:
        """Send them off; a ticket for each."""

    def receive(self, tickets: Collection[str]) -> list[Reply]:
        """The replies that have come so far; each is given once."""


class Observer:
    """Told what passes between server and nodes; changes nothing. This one does not listen."""

    def reach(self, nodes: Collection[int]) -> None:
        """These nodes are in reach now."""

    def asked(self, request: Request, number: int) -> None:
        """Requests like this one have gone out to this many nodes."""

    def sent(self, size: int) -> None:
        """This many bytes have gone out."""

    def heard(self, node: int, reply: Reply) -> None:
        """A node has answered."""

    def alive(self) -> None:
        """The server is still waiting."""


_logger = logging.getLogger("fedbandit.deploy.server")
_REMEMBERED = 10_000  # unanswered requests whose answers are still looked for
_AT_ONCE = 16  # requests that are made before they are sent: however many nodes, so few in memory
Answers = list[tuple[int, Reply]]
"""Nodes and what they replied, in the order in which they were asked."""
Take = Callable[[int, Reply], Reply]
"""Called with each node's reply as it comes; what it returns is kept in its place."""


@dataclass(frozen=True)
class _Open:
    """An unanswered request that nobody waits for; `take` where its answer still counts."""

    node: int
    what: str
    take: Take | None = None


class RequestPoller:
    """Carries requests out over one transport, and polls for the answers.

    Nodes and devices that the operator has revoked are not asked, and answers of theirs fail.
    `patience` stretches every deadline: rounds that fail because all are slow get more time.

    Examples:
        A transport needs three methods. Node 2 of this one never answers, and is late.

        >>> class InProcess:
        ...     def nodes(self):
        ...         return [1, 2]
        ...     def send(self, requests):
        ...         return [str(request.node) for request in requests]
        ...     def receive(self, tickets):
        ...         return [Reply(ticket, {"ready": True}) for ticket in tickets if ticket == "1"]
        >>> times = iter(range(100))  # a clock, in seconds
        >>> poller = RequestPoller(InProcess(), lambda: next(times), lambda seconds: None, 1.0)
        >>> requests = [Request("ready", node, {}, {}, 5.0) for node in poller.nodes()]
        >>> [(node, reply.facts) for node, reply in poller.ask(requests, 5.0, "ready")]
        [(1, {'ready': True})]
        >>> poller.late
        1
    """

    def __init__(
        self,
        transport: Transport,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
        poll_seconds: float,
        observer: Observer | None = None,
        note: Callable[[int, Reply], None] = lambda _, __: None,
    ) -> None:
        """`observer` is told what passes and changes nothing; `note` sees each reply first."""
        self._note = note
        self._transport, self._clock, self._sleep = transport, clock, sleep
        self._poll_seconds, self._observer = poll_seconds, observer or Observer()
        self._late: dict[str, _Open] = {}
        self._turned_away: set[int] = set()  # nodes that have said to be a revoked device
        self.revoked: frozenset[str] = frozenset()
        self.patience = 1.0
        self.late = 0  # requests so far that were not answered in time

    def nodes(self) -> list[int]:
        """The nodes in reach now, without those that are revoked."""
        self._turned_away = self._turned_away if self.revoked else set()
        away = self._turned_away
        found = [n for n in self._transport.nodes() if str(n) not in self.revoked and n not in away]
        self._observer.reach(found)
        return found

    def ask(
        self,
        requests: Iterable[Request],
        seconds: float,
        what: str,
        enough: Callable[[Answers], bool] = lambda _: False,
        take: Take = lambda _, reply: reply,
    ) -> Answers:
        """Send, and poll until all have answered, it is enough, or time is up.

        Who is missing then is late: named in the log, and not counted when the answer comes.
        """
        deadline = self._clock() + seconds * self.patience
        tickets = self._send(requests)
        answers: dict[str, Reply] = {}

        def in_order() -> Answers:
            return [(tickets[ticket], answers[ticket]) for ticket in tickets if ticket in answers]

        while True:
            for reply in self._transport.receive([*(tickets.keys() - answers.keys()), *self._late]):
                if reply.ticket in tickets and reply.ticket not in answers:
                    node = tickets[reply.ticket]
                    answers[reply.ticket] = take(node, self._heard(node, reply))
                else:
                    self._not_awaited(reply)
            self._observer.alive()
            if len(answers) == len(tickets) or enough(in_order()) or self._clock() >= deadline:
                break
            self._sleep(min(self._poll_seconds, max(deadline - self._clock(), 0.0)))
        for ticket in [ticket for ticket in tickets if ticket not in answers]:
            _logger.warning("%s: node %d has not answered in time", what, tickets[ticket])
            self._later(ticket, _Open(tickets[ticket], what))
        self.late += len(tickets) - len(answers)
        return in_order()

    def post(self, requests: Iterable[Request], what: str, take: Take) -> None:
        """Send without waiting; answers are taken whenever a later question polls for its own."""
        for ticket, node in self._send(requests).items():
            self._later(ticket, _Open(node, what, take))

    def _send(self, requests: Iterable[Request]) -> dict[str, int]:
        """Make and send a few requests at a time; the nodes by ticket, in order."""
        tickets: dict[str, int] = {}
        more = iter(requests)
        while some := list(islice(more, _AT_ONCE)):
            stretched = [
                replace(r, facts=with_protocol(r.facts), seconds=r.seconds * self.patience)
                for r in some
            ]
            sent = self._transport.send(stretched)
            tickets |= {ticket: r.node for ticket, r in zip(sent, some, strict=True)}
            self._observer.sent(sum(request.size for request in some))
            self._observer.asked(some[0], len(tickets))
        return tickets

    def _heard(self, node: int, reply: Reply) -> Reply:
        """The reply, or an error in its place where its node or device is revoked."""
        device = reply.facts.get("device")
        if str(node) in self.revoked or (isinstance(device, str) and device in self.revoked):
            self._turned_away.add(node)
            said = f"revoked by the operator: device {str(device)[:64]}"
            reply = Reply(reply.ticket, error=said)
        self._note(node, reply)
        self._observer.heard(node, reply)
        return reply

    def _later(self, ticket: str, request: _Open) -> None:
        self._late[ticket] = request
        while len(self._late) > _REMEMBERED:
            self._late.pop(next(iter(self._late)))

    def _not_awaited(self, reply: Reply) -> None:
        late = self._late.pop(reply.ticket, None)
        if late is None:
            _logger.warning("an answer came twice; not counted")
            return
        reply = self._heard(late.node, reply)
        if late.take is not None:
            late.take(late.node, reply)
        else:
            _logger.warning("%s: node %d answered late; not counted", late.what, late.node)
