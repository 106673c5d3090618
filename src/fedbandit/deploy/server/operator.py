"""The operator's instructions to a server: kept in its folder, obeyed at the next round.

Pause, pin, rollback and revoke, and the roster of registered nodes, which an operator carries to
the devices. Every change is made under a lock, so that two commands at once both count.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import StrictBool, StrictInt, StrictStr, TypeAdapter
from pydantic.dataclasses import dataclass

from fedbandit.core.errors import DataError
from fedbandit.core.files import read_json, read_object, read_small, write_json, write_text
from fedbandit.core.process import alone_in
from fedbandit.deploy.server.database import NAME, Database
from fedbandit.deploy.server.deployment import Deployment
from fedbandit.deploy.server.store import read_facts, read_rollback, reading

if TYPE_CHECKING:  # what needs `cryptography` is imported where keys are
    from fedbandit.deploy.masking.announcements import Roster

ROSTER = "roster.pub"


@dataclass(frozen=True)
class OperatorRequests:
    """The operator's standing instructions; nodes are revoked by number, devices by name."""

    paused: StrictBool = False  # no round begins
    pinned: StrictInt | None = None  # no new model is deployed: devices keep this one
    revoked: tuple[StrictStr, ...] = ()  # not asked, and not listened to

    def to_json(self) -> dict[str, Any]:
        """As it is kept in `operator.json` and shown by `status --json`."""
        return {**asdict(self), "revoked": list(self.revoked)}

    def in_lines(self) -> list[str]:
        """Lines for a terminal; none where nothing is asked for."""
        pinned = f"to model {self.pinned}: nothing newer is deployed until `fedbandit deploy unpin`"
        lines = ["paused         no round begins until `fedbandit deploy resume`"] * self.paused
        lines += [f"pinned         {pinned}"] * (self.pinned is not None)
        return lines + [f"revoked        {', '.join(self.revoked)}"] * bool(self.revoked)


_REQUESTS: TypeAdapter[OperatorRequests] = TypeAdapter(OperatorRequests)
_NEEDED: dict[str, None] = dict.fromkeys(("paused", "revoked"))


def read_requests(folder: Path) -> OperatorRequests:
    """The operator's instructions; a damaged file is an error: it may have said `pause`."""
    path = folder / "operator.json"
    again = "remove it, then pause, pin or revoke again"
    with reading(path, again), suppress(FileNotFoundError):
        return _REQUESTS.validate_python({**_NEEDED, **read_object(path)})
    return OperatorRequests()


def change_requests(
    folder: Path, change: Callable[[OperatorRequests], OperatorRequests]
) -> OperatorRequests:
    """Change what the operator wants; what holds from now on."""
    read_facts(folder)  # a mistyped folder is refused
    with alone_in(folder):
        requests = change(read_requests(folder))
        write_json(folder / "operator.json", requests.to_json())
    return requests


def pause(folder: Path, paused: bool = True) -> None:
    """Have no new round begin; or, with False, have rounds begin again."""
    change_requests(folder, lambda requests: replace(requests, paused=paused))


def pin(folder: Path, version: int) -> bool:
    """Have the devices keep that version; whether the server has to go back to it first.

    A rollback to another version that is still pending is given up.
    """
    facts = _with_version(folder, version)
    change_requests(folder, lambda requests: replace(requests, pinned=version))
    in_use = max(facts["deployed"])
    back = version != in_use and not any(
        entry["version"] == in_use and entry["why"] == f"went back to model {version}"
        for entry in facts["extra"].get("versions", [])
    )
    (folder / "rollback.json").unlink(missing_ok=True)
    if back:
        write_json(folder / "rollback.json", {"version": version, "for": "pin"})
    return back


def unpin(folder: Path) -> int | None:
    """Have new models deployed again. A rollback that the pin still waits for is given up: its
    version.
    """
    change_requests(folder, lambda requests: replace(requests, pinned=None))
    asked = read_json(folder / "rollback.json") or {}
    if asked.get("for") != "pin":
        return None
    version = read_rollback(folder)
    (folder / "rollback.json").unlink(missing_ok=True)
    return version


def ask_rollback(folder: Path, version: int) -> None:
    """Have the server go back to a version, at its next round or when it starts."""
    _with_version(folder, version)
    pinned = read_requests(folder).pinned
    if pinned not in (None, version):
        raise DataError(
            f"{folder}: model {pinned} is pinned; unpin it first, or pin {version} instead"
        )
    write_json(folder / "rollback.json", {"version": version})


def pending(folder: Path) -> list[str]:
    """The decisions that no round has obeyed yet, as phrases."""
    version = read_rollback(folder)
    return [] if version is None else [f"going back to model {version}, at the next round"]


def _with_version(folder: Path, version: int) -> dict[str, Any]:
    """The facts of a state that keeps that version."""
    facts = read_facts(folder)
    if version not in facts["deployed"]:
        raise DataError(f"{folder}: version {version} is not kept; there are {facts['deployed']}")
    return facts


def revoke(folder: Path, name: str, undo: bool = False) -> None:
    """Exclude a node, by its number, or a device, by its name, from the next round on.

    Who was never seen and is not registered is refused: it may be a slip of the pen.
    """
    revoked = read_requests(folder).revoked
    if undo and name not in revoked:
        raise DataError(f"{folder}: {name} is not revoked; revoked are {', '.join(revoked) or '-'}")
    if not undo and name not in revoked and not _is_known(folder, name):
        raise DataError(
            f"{folder}: no node or device {name} is known; `fedbandit deploy nodes` lists those"
            " that are"
        )

    def change(requests: OperatorRequests) -> OperatorRequests:
        others = tuple(known for known in requests.revoked if known != name)
        return replace(requests, revoked=others if undo else (*others, name))

    change_requests(folder, change)


def _is_known(folder: Path, name: str) -> bool:
    read_facts(folder)
    seen = (read_json(folder / "live.json") or {}).get("nodes", {})
    database, number = Database(folder / NAME), [int(name)] if name.isdigit() else []
    return (
        name in seen
        or any(isinstance(about, dict) and about.get("device") == name for about in seen.values())
        or bool(database.marks([name]) or database.devices(number) or database.held(number))
        or bool(registered_nodes(folder) & set(number))
    )


OPEN = (
    "anybody may join, and nothing bounds single updates: one device in a hundred can plant a"
    " backdoor; register nodes, or choose an aggregation.name (docs/deployment.md)"
)


def is_open(deployment: Deployment) -> bool:
    """Whether strangers could plant a backdoor without the operator having allowed it.

    Where devices are not registered and privacy does not forbid rules over single updates, the mean
    has to be chosen by name.
    """
    config, rules = deployment.config, deployment.rules
    chosen = "name" in config.aggregation.model_fields_set or rules.secure_aggregation
    return not (chosen or deployment.ledger is not None or registered_nodes(deployment.folder))


def why_not_now(deployment: Deployment, requests: OperatorRequests, in_reach: int) -> str | None:
    """The reason for a round to wait; None if there is none."""
    if requests.paused:
        return "paused by the operator, until `fedbandit deploy resume`"
    rules = deployment.rules
    needed = rules.least_reach(deployment.ledger is not None)
    if in_reach >= needed:
        return None
    why = f"waiting for nodes: {in_reach} in reach, {needed} needed"
    if needed > rules.min_reports:
        why += (
            f" (deployment.min_reach of a population of {rules.population};"
            " nothing is spent meanwhile)"
        )
    return why


def read_roster(state: Path) -> "Roster | None":
    """The registered nodes' keys; None where nodes have none.

    The server leaves out early whom devices would not believe. Devices read copies of their own.
    """
    from fedbandit.deploy.masking.announcements import Roster

    text = _roster_text(state)
    return None if text is None else Roster.of(text, str(state / ROSTER))


def registered_nodes(state: Path) -> set[int]:
    """The numbers of the nodes on the roster: each of them is bound to a key."""
    numbers = (line.split()[-1].removeprefix("node=") for line in _roster_lines(state))
    return {int(number) for number in numbers if number.isdigit()}


def key_line(public_key: Path, comment: str = "") -> str:
    """A node's public key as a line of the roster; refuses a file that is none."""
    from fedbandit.deploy.masking.announcements import roster_line

    with reading(public_key, "give the file of a public key"):
        return roster_line(read_small(public_key), comment, str(public_key))


def add_node(state: Path, line: str) -> None:
    """Put a node's line on the roster, in place of the one that its key had."""
    key = " ".join(line.split()[:2])
    others = [known for known in _roster_lines(state) if not known.startswith(f"{key} ")]
    write_text(state / ROSTER, "\n".join([*others, line]) + "\n")


def remove_node(state: Path, node: str) -> bool:
    """Take the key of a node from the roster; whether it was on it."""
    lines = _roster_lines(state)
    left = [line for line in lines if line.split()[-1] != f"node={node}"]
    if len(left) == len(lines):
        return False
    # a roster without any key is an error, which one with a comment alone stays
    write_text(state / ROSTER, "\n".join(left or ["# registered nodes, one a line"]) + "\n")
    return True


def _roster_lines(state: Path) -> list[str]:
    lines = (_roster_text(state) or "").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def _roster_text(state: Path) -> str | None:
    path = state / ROSTER
    with reading(path, "restore it, or register the nodes again"), suppress(FileNotFoundError):
        return read_small(path).decode()
    return None
