"""Asks many nodes at once and waits no longer than it must; names who is missing, late, or answers twice.

Knows nothing of what is asked. Time is a steady clock's; no wall clock is read.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from fedbandit.deploy.flower.messages import Reply, Request, Transport

_logger = logging.getLogger("fedbandit.deploy.server")
_REMEMBERED = 10_000  # unanswered requests whose answers are still looked for
GRACE = 600.0  # seconds by which devices' clocks may be wrong: Flower drops messages by wall clock

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
        self, transport: Transport, clock: Callable[[], float], sleep: Callable[[float], None], poll_seconds: float
    ) -> None:
        self._transport, self._clock, self._sleep, self._poll_seconds = transport, clock, sleep, poll_seconds
        self._late: dict[str, _Open] = {}

    def nodes(self) -> list[int]:
        """The nodes in reach now."""
        return self._transport.nodes()

    def ask(
        self, requests: list[Request], seconds: float, what: str, enough: Callable[[Answers], bool] = lambda _: False
    ) -> Answers:
        """Send, and poll until all have answered, it is enough, or time is up; who is missing is late from then on."""
        sent = self._transport.send(requests) if requests else []
        tickets = {ticket: request.node for ticket, request in zip(sent, requests, strict=True)}
        deadline = self._clock() + seconds
        answers: dict[str, Reply] = {}

        def in_order() -> Answers:
            return [(node, answers[ticket]) for ticket, node in tickets.items() if ticket in answers]

        while True:
            for reply in self._transport.receive([*(tickets.keys() - answers.keys()), *self._late]):
                if reply.ticket in tickets and reply.ticket not in answers:
                    answers[reply.ticket] = reply
                else:
                    self._not_awaited(reply)
            if len(answers) == len(tickets) or enough(in_order()) or self._clock() >= deadline:
                break
            self._sleep(self._poll_seconds)
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
