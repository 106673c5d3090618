"""The messages of a secure sum. Neither side believes anything in them before it is checked here.

| step | to a device | back |
| --- | --- | --- |
| `ready` | (the token of the attempt) | its announcement |
| `shares` | common task, its neighbours' announcements | a packet for each neighbour, a statement |
| `vector` | packets and statements of its neighbours, beside the task | its masked vector |
| `survivors` | who is in the sum | a statement |
| `unmask` | statements of its neighbours | one share of each neighbour |
"""

from collections.abc import Mapping
from typing import Any

from fedbandit.core.errors import DataError
from fedbandit.deploy.secure_sums import MOST_SHARES

Said = Mapping[str, Any]
"""One message: numbers, texts, bytes and lists of one of these."""
STEP = "step"
SHARES, VECTOR, SURVIVORS, UNMASK = "shares", "vector", "survivors", "unmask"
STEPS = (SHARES, VECTOR, SURVIVORS, UNMASK)
THRESHOLD, TASK, COHORT, NODES, PARCELS = "threshold", "task", "cohort", "nodes", "parcels"
ANNOUNCEMENT, STATEMENT = "announcement", "statement"
MASKED = "vector"
_MOST_NODES = 2**64


def parcels(by_node: Mapping[int, bytes]) -> dict[str, Any]:
    """Bytes for or from each of some nodes."""
    return {NODES: list(by_node), PARCELS: list(by_node.values())}


def read_parcels(said: Mapping[str, Any], length: int | None = None) -> dict[int, bytes]:
    """The bytes by node; all of them as long as `length` if it is given."""
    nodes, found = _read_nodes(said), said.get(PARCELS, [])
    if not (isinstance(found, list) and all(isinstance(parcel, bytes) for parcel in found)):
        raise DataError(f"{PARCELS}: not a list of bytes")
    if len(nodes) != len(found):
        raise DataError(f"{PARCELS}: {len(found)} for {len(nodes)} nodes")
    if length is not None and any(len(parcel) != length for parcel in found):
        raise DataError(f"{PARCELS}: not of {length} bytes each")
    return dict(zip(nodes, found, strict=True))


def _read_nodes(said: Mapping[str, Any]) -> list[int]:
    nodes = said.get(NODES, [])  # an empty list does not travel
    if not (isinstance(nodes, list) and len(nodes) < MOST_SHARES + 1):
        raise DataError(f"{NODES}: not a list of at most {MOST_SHARES} nodes")
    if not all(type(node) is int and 0 <= node < _MOST_NODES for node in nodes):
        raise DataError(f"{NODES}: not the numbers of nodes")
    if len(set(nodes)) < len(nodes):
        raise DataError(f"{NODES}: a node stands in it twice")
    return nodes


def read_number(said: Mapping[str, Any], name: str) -> int:
    """A whole number that is not negative."""
    found = said.get(name)
    if not (type(found) is int and found >= 0):
        raise DataError(f"{name}: not a whole number")
    return found


def read_bytes(said: Mapping[str, Any], name: str, length: int | None = None) -> bytes:
    """Bytes, as many as `length` if it is given."""
    found = said.get(name)
    if not isinstance(found, bytes) or length not in (None, len(found)):
        raise DataError(f"{name}: no bytes" + ("" if length is None else f", or not {length}"))
    return found
