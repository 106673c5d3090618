"""What server and devices say to each other: a kind, facts as JSON, and arrays. Knows nothing of how it travels.

Steps of secure aggregation carry a message of that protocol beside them, which only its two ends understand.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

Kind = Literal["install", "train", "ready", "secure", "judge"]


@dataclass(frozen=True)
class Request:
    """From the server to one node. Not worth delivering after `seconds`."""

    kind: Kind
    node: int
    facts: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]
    seconds: float
    sealed: Mapping[str, Any] = field(default_factory=dict)  # numbers, texts, bytes and lists of one of these


@dataclass(frozen=True)
class Reply:
    """From a node, to the request with that ticket; `error` where the transport or the node failed."""

    ticket: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    error: str | None = None
    sealed: Mapping[str, Any] = field(default_factory=dict)


class Transport(Protocol):
    """Whatever carries messages. None of its calls waits for a device."""

    def nodes(self) -> list[int]:
        """The nodes in reach now."""
        ...

    def send(self, requests: Sequence[Request]) -> list[str]:
        """Send them off; a ticket for each."""
        ...

    def receive(self, tickets: Collection[str]) -> list[Reply]:
        """The replies that have come so far; each is given once."""
        ...
