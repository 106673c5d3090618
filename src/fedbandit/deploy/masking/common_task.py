"""The common task of one attempt at a secure sum, and statements that devices sign about it.

A server that gives devices different tasks could read one of them out of the sum (Pasquini et al. 2022). So a digest
of all that must be alike goes into every mask, and devices sign it for each other. No I/O here.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from fedbandit.core.errors import DataError
from fedbandit.deploy.masking.announcements import Announcement
from fedbandit.deploy.masking.primitives import (
    PROTOCOL,
    SECRET,
    SIGNATURE,
    digest_of,
    framed,
    is_signed,
    signature_of,
)

NODE = 8  # bytes of a node's number
STATEMENT = SECRET + SIGNATURE  # bytes of a signed digest
TASK, SURVIVORS = b"common task", b"survivors"  # what statements are about
_ENTRY = NODE + SECRET


def task_digest(facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bytes:
    """The digest of a request to train: every fact in it, and every array with its type and shape."""
    parts = [json.dumps(dict(facts), sort_keys=True).encode()]
    for name, array in sorted(arrays.items()):
        described = json.dumps([name, array.dtype.str, array.shape]).encode()
        parts += [described, np.ascontiguousarray(array).tobytes()]
    return digest_of(b"task", *parts)


@dataclass(frozen=True)
class CommonTask:
    """All that the devices of one attempt must have been told alike."""

    token: str
    task: bytes  # the digest of the request to train
    threshold: int  # shares that recover a secret
    cohort: bytes  # who takes part, and with which keys: see `cohort_of`

    @property
    def digest(self) -> bytes:
        """32 bytes that differ wherever any of it does."""
        threshold = self.threshold.to_bytes(NODE, "big")
        return digest_of(TASK, self.token.encode(), self.task, threshold, self.cohort)

    def check_holds(self, announced: Mapping[int, Announcement]) -> None:
        """Refuse a cohort in which these nodes are not, each with the keys that it announced."""
        entries = [
            self.cohort[start : start + _ENTRY] for start in range(0, len(self.cohort), _ENTRY)
        ]
        nodes = [entry[:NODE] for entry in entries]
        if len(self.cohort) % _ENTRY or any(a >= b for a, b in pairwise(nodes)):
            raise DataError("cohort: not a list of nodes in their order")
        own = cohort_of(announced)
        if not {own[at : at + _ENTRY] for at in range(0, len(own), _ENTRY)} <= set(entries):
            raise DataError("cohort: not with the keys that this device and its neighbours have")


def cohort_of(announced: Mapping[int, Announcement]) -> bytes:
    """Each node's number and the digest of its announcement, in the order of the numbers."""
    return b"".join(
        node.to_bytes(NODE, "big") + digest_of(b"announcement", announced[node].to_bytes())
        for node in sorted(announced)
    )


def survivors_of(nodes: bytes) -> set[int]:
    """The nodes in a list as `in_order` writes it; refuses any other."""
    found = [int.from_bytes(nodes[at : at + NODE], "big") for at in range(0, len(nodes), NODE)]
    if in_order(found) != nodes:
        raise DataError("survivors: not a list of nodes in their order")
    return set(found)


def in_order(nodes: Iterable[int]) -> bytes:
    """Nodes as bytes, each once, in the order of their numbers."""
    return b"".join(node.to_bytes(NODE, "big") for node in sorted(set(nodes)))


def statement(key: bytes, purpose: bytes, digest: bytes) -> bytes:
    """A digest under the signature of a device's key for this attempt."""
    return digest + signature_of(key, framed(PROTOCOL, purpose, digest))


def check_alike(
    said: Mapping[int, bytes], signers: Mapping[int, bytes], purpose: bytes, own: bytes, what: str
) -> None:
    """Refuse unless each of these nodes has signed the very digest that this device has."""
    for node, signed in said.items():
        if node not in signers:
            raise DataError(f"a statement of node {node}, which is no neighbour")
        found = signed[:SECRET]
        if not is_signed(signers[node], signed[SECRET:], framed(PROTOCOL, purpose, found)):
            raise DataError(f"node {node} has not signed what the server relays in its name")
        if found != own:
            raise DataError(f"the server has told node {node} of {what} than this device")
