"""The server's half of a secure sum: who keeps shares for whom, and how masks come off the sum, never off one vector.

Vectors are added up as they come, so that one sum is held and not a thousand vectors. Knows no transport.
"""

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from fedbandit.core.errors import DataError
from fedbandit.deploy.masking.announcements import Announcement
from fedbandit.deploy.masking.device import (
    commitment,
    own_mask_seed,
    pair_mask_seed,
    places_of,
    sign_of,
)
from fedbandit.deploy.masking.primitives import ENTRY, add_mask, public_of, recovered, unpacked
from fedbandit.deploy.secure_sums import MODULUS

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


class MaskedSum:
    """Adds up masked vectors of `size` entries, and takes the masks off the sum."""

    def __init__(self, token: str, size: int) -> None:
        self._token, self._size = token, size
        self._total = np.zeros(size, np.uint64)
        self.nodes: set[int] = set()  # whose vectors are in it

    def add(self, node: int, vector: bytes) -> None:
        """Add a node's vector, as it came."""
        if len(vector) != ENTRY * self._size:
            raise DataError(
                f"a masked vector of {len(vector)} bytes, expected {ENTRY * self._size}"
            )
        if node in self.nodes:
            raise DataError("a second masked vector")
        self._total += unpacked(vector)
        self.nodes.add(node)

    def unmasked(
        self,
        shares: Mapping[int, Mapping[int, bytes]],
        threshold: int,
        announced: Mapping[int, Announcement],
        neighbours: Mapping[int, Collection[int]],
        sharing: Collection[int],
    ) -> np.ndarray:
        """The sum without its masks: int64 [size], modulo MODULUS.

        `shares` has enough of each device's, by who kept them: of those in the sum of their own mask's seed, of the
        others of their key for masks. `sharing` are all that have sent packets. Call it once.
        """
        for node in sharing:
            secret = self._secret(
                node, shares[node], threshold, announced[node], places_of(neighbours[node])
            )
            if node in self.nodes:
                add_mask(self._total, own_mask_seed(self._token, node, secret), -1)
                continue
            for other in set(neighbours[node]) & self.nodes:
                seed = pair_mask_seed(self._token, secret, announced[other].mask)
                add_mask(self._total, seed, -sign_of(other, node))
        return (self._total % np.uint64(MODULUS)).astype(np.int64)

    def _secret(
        self,
        node: int,
        held: Mapping[int, bytes],
        threshold: int,
        said: Announcement,
        places: Mapping[int, int],
    ) -> bytes:
        """What the shares recover, if it is what the device announced."""
        secret = recovered(
            {places[keeper]: share for keeper, share in sorted(held.items())[:threshold]}
        )
        if secret is not None:
            if node in self.nodes and commitment(self._token, node, secret) == said.commitment:
                return secret
            if node not in self.nodes and public_of(secret) == said.mask:
                return secret
        raise DataError(f"the shares of node {node}'s secret do not recover it")
