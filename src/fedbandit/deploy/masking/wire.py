"""The messages of a secure sum: numbers and lists, of which neither side believes anything before it is checked here.

| step | to a device | back |
| --- | --- | --- |
| `ready` | (the token of the attempt) | its announcement |
| `shares` | threshold, its neighbours' announcements | a sealed packet for each neighbour |
| `vector` | the packets sealed for it, beside the task | its masked vector |
| `unmask` | which of its neighbours are in the sum, and which have dropped out | one share for each of them |
"""

from collections.abc import Collection, Mapping
from typing import Any

from fedbandit.core.errors import DataError
from fedbandit.deploy.secure_sums import MOST_SHARES

Said = Mapping[str, Any]
"""One message: numbers, texts, bytes and lists of one of these."""
STEP = "step"
SHARES, VECTOR, UNMASK = "shares", "vector", "unmask"
STEPS = (SHARES, VECTOR, UNMASK)
THRESHOLD, NODES, PARCELS, ACTIVE, DROPPED = "threshold", "nodes", "parcels", "active", "dropped"
ANNOUNCEMENT = "announcement"
MASKED = "vector"
_MOST_NODES = 2**64


def parcels(by_node: Mapping[int, bytes]) -> dict[str, Any]:
    """Bytes for or from each of some nodes."""
    return {NODES: list(by_node), PARCELS: list(by_node.values())}


def read_parcels(said: Mapping[str, Any], length: int | None = None) -> dict[int, bytes]:
    """The bytes by node; all of them as long as `length` if it is given."""
    nodes, found = read_nodes(said, NODES), said.get(PARCELS)
    if not (isinstance(found, list) and all(isinstance(parcel, bytes) for parcel in found)):
        raise DataError(f"{PARCELS}: not a list of bytes")
    if len(nodes) != len(found):
        raise DataError(f"{PARCELS}: {len(found)} for {len(nodes)} nodes")
    if length is not None and any(len(parcel) != length for parcel in found):
        raise DataError(f"{PARCELS}: not of {length} bytes each")
    return dict(zip(nodes, found, strict=True))


def read_nodes(said: Mapping[str, Any], name: str) -> list[int]:
    """A list of nodes, each of them once."""
    nodes = said.get(name, [])  # an empty list does not travel
    if not (isinstance(nodes, list) and len(nodes) < MOST_SHARES + 1):
        raise DataError(f"{name}: not a list of at most {MOST_SHARES} nodes")
    if not all(type(node) is int and 0 <= node < _MOST_NODES for node in nodes):
        raise DataError(f"{name}: not the numbers of nodes")
    if len(set(nodes)) < len(nodes):
        raise DataError(f"{name}: a node stands in it twice")
    return nodes


def read_number(said: Mapping[str, Any], name: str) -> int:
    """A whole number that is not negative."""
    found = said.get(name)
    if not (type(found) is int and found >= 0):
        raise DataError(f"{name}: not a whole number")
    return found


def read_bytes(said: Mapping[str, Any], name: str) -> bytes:
    """Bytes of any length."""
    found = said.get(name)
    if not isinstance(found, bytes):
        raise DataError(f"{name}: no bytes")
    return found


def unmask(active: Collection[int], dropped: Collection[int]) -> dict[str, Any]:
    """The last message: who is in the sum, and who of those that had sent packets is not."""
    return {STEP: UNMASK, ACTIVE: sorted(active), DROPPED: sorted(dropped)}
