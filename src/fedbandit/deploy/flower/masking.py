"""The server's half of Flower's SecAgg+: who keeps shares for whom, and how masks come off a sum, never off one vector.

Pure functions around Flower's own cryptography. Knows nothing of messages or of what the numbers mean.
"""

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
from flwr.common import bytes_to_ndarray
from flwr.common.secure_aggregation.crypto.shamir import combine_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
from flwr.common.secure_aggregation.secaggplus_constants import Key, Stage
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from flwr.supercore.primitives.asymmetric import bytes_to_private_key, bytes_to_public_key

from fedbandit.core.errors import DataError
from fedbandit.deploy.secure_sums import LEVELS, MODULUS, RANGE

Keys = tuple[bytes, bytes]
"""A device's public keys: for masks between two devices, and for shares that travel by way of the server."""
_order = random.SystemRandom()


@dataclass(frozen=True)
class Terms:
    """What the devices of a round agree on: the number of shares of each secret, and how many recover it."""

    devices: int
    shares: int
    threshold: int

    @classmethod
    def of(cls, devices: int, shares: int, threshold: float) -> "Terms":
        """Terms for this many devices; the threshold is a fraction of the shares, and always more than half of them."""
        shares = min(devices, shares)
        if shares < devices and shares % 2 == 0:
            shares -= 1  # a device and as many neighbours on either side
        return cls(devices, shares, max(ceil(threshold * shares), shares // 2 + 1))

    def setup(self) -> dict[str, Any]:
        """The first message of the protocol."""
        return {
            Key.STAGE: Stage.SETUP,
            Key.SAMPLE_NUMBER: self.devices,
            Key.SHARE_NUMBER: self.shares,
            Key.THRESHOLD: self.threshold,
            Key.CLIPPING_RANGE: RANGE,
            Key.TARGET_RANGE: LEVELS,
            Key.MOD_RANGE: MODULUS,
            Key.MAX_WEIGHT: 1.0,
        }

    def neighbours(self, nodes: Sequence[int]) -> dict[int, set[int]]:
        """Who keeps shares for whom, oneself included: all for all, or the nearest on a ring in random order."""
        if len(nodes) <= self.shares:
            return {node: set(nodes) for node in nodes}
        ring, half = list(nodes), self.shares // 2
        _order.shuffle(ring)
        return {
            node: {ring[(place + step) % len(ring)] for step in range(-half, half + 1)}
            for place, node in enumerate(ring)
        }


def public_keys(answer: Mapping[str, Any]) -> Keys:
    """The keys in an answer to the setup."""
    first, second = answer.get(Key.PUBLIC_KEY_1), answer.get(Key.PUBLIC_KEY_2)
    if not (isinstance(first, bytes) and isinstance(second, bytes)):
        raise DataError("no public keys")
    return first, second


def share_keys(keys: Mapping[int, Keys]) -> dict[str, Any]:
    """The second message, to one device: its neighbours' keys and its own."""
    return {Key.STAGE: Stage.SHARE_KEYS, **{str(node): list(pair) for node, pair in keys.items()}}


def sealed_shares(answer: Mapping[str, Any], neighbours: Collection[int]) -> dict[int, bytes]:
    """From an answer to the second message: by neighbour, a share that only this neighbour can open."""
    to, shares = answer.get(Key.DESTINATION_LIST), answer.get(Key.CIPHERTEXT_LIST)
    if not (isinstance(to, list) and isinstance(shares, list) and len(to) == len(shares)):
        raise DataError("no shares")
    if sorted(to) != sorted(neighbours) or not all(isinstance(share, bytes) for share in shares):
        raise DataError("shares for others than its neighbours")
    return dict(zip(to, shares, strict=True))


def collect(shares: Mapping[int, bytes]) -> dict[str, Any]:
    """The third message, beside the task: by neighbour, the share that it has sent."""
    return {
        Key.STAGE: Stage.COLLECT_MASKED_VECTORS,
        Key.CIPHERTEXT_LIST: list(shares.values()),
        Key.SOURCE_LIST: list(shares),
    }


def masked_vector(answer: Mapping[str, Any], size: int) -> np.ndarray:
    """From an answer to the third message: int64 [1 + size], the weight and then the entries, all masked."""
    found = answer.get(Key.MASKED_PARAMETERS)
    if not (isinstance(found, list) and len(found) == 2 and all(isinstance(part, bytes) for part in found)):
        raise DataError("no masked vector")
    try:
        weight, entries = (bytes_to_ndarray(part) for part in found)
    except Exception as error:  # whatever a stranger's bytes make a parser do
        raise DataError(f"unreadable: {error!r}"[:300]) from None
    if weight.shape != (1,) or entries.shape != (size,) or weight.dtype != np.int64 or entries.dtype != np.int64:
        raise DataError(f"a masked vector of {entries.shape} {entries.dtype}, expected ({size},) int64")
    return np.concatenate([weight, entries])


def unmask(active: Collection[int], dead: Collection[int]) -> dict[str, Any]:
    """The fourth message, to one device: which of its neighbours are in the sum, and which have dropped out."""
    return {
        Key.STAGE: Stage.UNMASK,
        Key.ACTIVE_NODE_ID_LIST: sorted(active),
        Key.DEAD_NODE_ID_LIST: sorted(dead),
    }


def shares_told(answer: Mapping[str, Any]) -> dict[int, bytes]:
    """From an answer to the fourth message: shares of the neighbours' secrets."""
    nodes, shares = answer.get(Key.NODE_ID_LIST), answer.get(Key.SHARE_LIST)
    if not (isinstance(nodes, list) and isinstance(shares, list) and len(nodes) == len(shares)):
        raise DataError("no shares")
    if not all(isinstance(share, bytes) for share in shares):
        raise DataError("shares that are no bytes")
    return dict(zip(nodes, shares, strict=True))


def unmasked_sum(
    vectors: Mapping[int, np.ndarray],
    shares: Mapping[int, Mapping[int, bytes]],
    keys: Mapping[int, Keys],
    neighbours: Mapping[int, Collection[int]],
) -> np.ndarray:
    """The sum of masked vectors without its masks: int64 [1 + P], modulo MODULUS.

    `shares` has enough of each device's, by who kept them: of those in `vectors` for their own mask, of those that have
    dropped out for the masks between them and their neighbours.
    """
    total = np.sum(list(vectors.values()), axis=0)
    shapes: list[tuple[int, ...]] = [(1,), (len(total) - 1,)]

    def mask(seed: bytes) -> np.ndarray:
        return np.concatenate(pseudo_rand_gen(seed, MODULUS, shapes))

    for node, held in shares.items():
        try:
            secret = combine_shares(list(held.values()))
            if node in vectors:
                total -= mask(secret)
                continue
            private = bytes_to_private_key(secret)
            for other in set(neighbours[node]) & vectors.keys():
                between = mask(generate_shared_key(private, bytes_to_public_key(keys[other][0])))
                total += between if node > other else -between
        except Exception as error:  # a wrong share makes cryptography fail in many ways
            raise DataError(f"the shares of node {node}'s secret do not fit: {error!r}"[:300]) from None
    wrapped: np.ndarray = total % MODULUS
    return wrapped
