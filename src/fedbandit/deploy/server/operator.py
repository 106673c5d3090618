"""What the operator has told a server: kept in its folder, obeyed at the next round, until it is taken back.

Every change is made under a lock, so that two commands at once both count.
"""

import fcntl
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fedbandit.core.errors import DataError
from fedbandit.core.files import read_object, write_json
from fedbandit.deploy.messages import Reply, Request, Transport
from fedbandit.deploy.server.deployment import Deployment
from fedbandit.deploy.server.store import ask_rollback, read_status

_REMEMBERED = 20_000  # requests of which it is known whom they went to


@dataclass(frozen=True)
class Wishes:
    """The operator's standing instructions."""

    paused: bool = False  # no round begins
    pinned: int | None = None  # no new model is deployed while the devices are to keep this one
    revoked: tuple[
        str, ...
    ] = ()  # nodes by number, devices by name: not asked, and not listened to

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "revoked": list(self.revoked)}


def read_wishes(folder: Path) -> Wishes:
    """What the operator of that folder wants; a damaged file is an error, since it may have said `pause`."""
    path = folder / "operator.json"
    try:
        found = read_object(path)
    except FileNotFoundError:
        return Wishes()
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path}: cannot be read ({error}); remove it, then pause, pin or revoke again"
        ) from None
    paused, pinned, revoked = found.get("paused"), found.get("pinned"), found.get("revoked")
    right = isinstance(paused, bool) and (pinned is None or type(pinned) is int)
    if (
        not right
        or not isinstance(revoked, list)
        or not all(isinstance(name, str) for name in revoked)
    ):
        raise DataError(f"{path}: damaged; remove it, then pause, pin or revoke again")
    return Wishes(bool(paused), pinned, tuple(revoked))


def change_wishes(folder: Path, change: Callable[[Wishes], Wishes]) -> Wishes:
    """Change what the operator wants; what holds from now on."""
    known_versions(folder)  # a mistyped folder is refused
    with open(folder / "operator.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        wishes = change(read_wishes(folder))
        write_json(folder / "operator.json", wishes.to_json())
    return wishes


def known_versions(folder: Path) -> list[int]:
    """The versions that a deployment keeps; an error where the folder is not one of a deployment."""
    versions: list[int] = read_status(folder)["kept_versions"]
    return versions


def pause(folder: Path, paused: bool = True) -> None:
    """Have no new round begin; or, with False, have rounds begin again."""
    change_wishes(folder, lambda wishes: replace(wishes, paused=paused))


def unpin(folder: Path) -> None:
    """Have new models deployed again."""
    change_wishes(folder, lambda wishes: replace(wishes, pinned=None))


def pin(folder: Path, version: int) -> bool:
    """Have the devices keep that version: nothing newer is deployed. Whether the server has to go back to it first."""
    found = read_status(folder)
    if version not in found["kept_versions"]:
        raise DataError(
            f"{folder}: version {version} is not kept; there are {found['kept_versions']}"
        )
    change_wishes(folder, lambda wishes: replace(wishes, pinned=version))
    in_use = found["model_version"]
    restored = any(
        entry["version"] == in_use and entry["why"] == f"went back to model {version}"
        for entry in found["versions"]
    )
    back = version != in_use and not restored
    if back:
        ask_rollback(folder, version)
    return back


def least_reach(deployment: Deployment) -> int:
    """The nodes that have to be in reach before a round begins.

    A private round is paid for whoever takes part, so it has to be worth its price before anybody is drawn. Looking
    at who was drawn would be too late: that depends on the draw, which the accounting counts on.
    """
    rules = deployment.rules
    if deployment.ledger is None:
        return rules.min_reports
    return rules.least_reach(deployment.ledger.plan.population)


def why_not_now(deployment: Deployment, wishes: Wishes, in_reach: int) -> str | None:
    """What a round has to wait for; None if nothing."""
    if wishes.paused:
        return "paused by the operator, until `fedbandit deploy resume`"
    needed = least_reach(deployment)
    if in_reach >= needed:
        return None
    why = f"waiting for nodes: {in_reach} in reach, {needed} needed"
    if needed > deployment.rules.min_reports:
        why += f" (deployment.min_reach of a population of {deployment.rules.population}; nothing is spent meanwhile)"
    return why


class Admission:
    """A transport without the nodes and devices that are revoked: they are not asked, and answers of theirs fail."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.revoked: frozenset[str] = frozenset()
        self._open: dict[str, int] = {}  # ticket -> node
        self._turned_away: set[int] = set()  # nodes that have said to be a revoked device

    def nodes(self) -> list[int]:
        self._turned_away = self._turned_away if self.revoked else set()
        found = self._transport.nodes()
        return [
            node
            for node in found
            if str(node) not in self.revoked and node not in self._turned_away
        ]

    def send(self, requests: Sequence[Request]) -> list[str]:
        tickets = self._transport.send(requests)
        self._open |= {
            ticket: request.node for ticket, request in zip(tickets, requests, strict=True)
        }
        while len(self._open) > _REMEMBERED:
            del self._open[next(iter(self._open))]
        return tickets

    def receive(self, tickets: Collection[str]) -> list[Reply]:
        return [self._judged(reply) for reply in self._transport.receive(tickets)]

    def _judged(self, reply: Reply) -> Reply:
        node, device = self._open.pop(reply.ticket, None), reply.facts.get("device")
        if str(node) not in self.revoked and not (
            isinstance(device, str) and device in self.revoked
        ):
            return reply
        if node is not None:
            self._turned_away.add(node)
        return Reply(reply.ticket, error=f"revoked by the operator: device {str(device)[:64]}")


def shown_wishes(wishes: Wishes) -> list[str]:
    """The same as lines for a terminal; none where nothing is asked for."""
    lines = []
    if wishes.paused:
        lines.append("paused         no round begins until `fedbandit deploy resume`")
    if wishes.pinned is not None:
        lines.append(
            f"pinned         to model {wishes.pinned}: nothing newer is deployed until `fedbandit deploy unpin`"
        )
    if wishes.revoked:
        lines.append(f"revoked        {', '.join(wishes.revoked)}")
    return lines
