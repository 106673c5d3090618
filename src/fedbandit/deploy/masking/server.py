"""The server's half of a secure sum: who keeps shares for whom, and how masks come off the sum.

Vectors are added up as they come, so that one sum is held and not a thousand vectors. No I/O here.
"""

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedbandit.core.errors import DataError
from fedbandit.deploy.masking.announcements import Announcement
from fedbandit.deploy.masking.common_task import CommonTask
from fedbandit.deploy.masking.device import (
    commitment,
    own_mask_seed,
    pair_mask_seed,
    places_of,
    sign_of,
)
from fedbandit.deploy.masking.primitives import ENTRY, add_mask, public_of, recovered, unpacked
from fedbandit.deploy.secure_sums import MODULUS, SecureMinimum

_order = random.SystemRandom()


@dataclass(frozen=True)
class Sharing:
    """The number of shares of each device's secrets, and how many of them recover one."""

    shares: int
    threshold: int

    @classmethod
    def of(cls, devices: int, shares: int, threshold: float) -> "Sharing":
        """Among this many devices; the threshold is a fraction, of at least two thirds."""
        shares = min(devices, shares)
        if shares < devices and shares % 2 == 0:
            shares -= 1  # a device and as many neighbours on either side
        return cls(shares, SecureMinimum(threshold=threshold).shares_of(shares))

    def neighbours(self, nodes: Sequence[int]) -> dict[int, set[int]]:
        """Who keeps shares for each node, itself included.

        All do, or the nearest on a ring in random order (Bell et al. 2020).
        """
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

    def __init__(self, common: CommonTask, size: int) -> None:
        self._common, self._digest, self._size = common, common.digest, size
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
        announced: Mapping[int, Announcement],
        neighbours: Mapping[int, Collection[int]],
        sharing: Collection[int],
    ) -> np.ndarray:
        """The sum without its masks: int64 [size], modulo MODULUS.

        `shares` has enough of each device's, by who kept them: of the seed of its own mask where it
        is in the sum, of its key for masks otherwise. `sharing` are all that have sent packets.
        Call it once.
        """
        for node in sharing:
            secret = self._secret(node, shares[node], announced[node], places_of(neighbours[node]))
            if node in self.nodes:
                add_mask(self._total, own_mask_seed(self._digest, node, secret), -1)
                continue
            for other in set(neighbours[node]) & self.nodes:
                seed = pair_mask_seed(self._digest, secret, announced[other].mask)
                add_mask(self._total, seed, -sign_of(other, node))
        return (self._total % np.uint64(MODULUS)).astype(np.int64)

    def _secret(
        self,
        node: int,
        held: Mapping[int, bytes],
        said: Announcement,
        places: Mapping[int, int],
    ) -> bytes:
        """The secret that the shares recover, if it is the one that the device announced."""
        enough = sorted(held.items())[: self._common.threshold]
        secret = recovered({places[keeper]: share for keeper, share in enough})
        if secret is not None:
            token = self._common.token
            if node in self.nodes and commitment(token, node, secret) == said.commitment:
                return secret
            if node not in self.nodes and public_of(secret) == said.mask:
                return secret
        raise DataError(f"the shares of node {node}'s secret do not recover it")
