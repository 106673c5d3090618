"""Which examples are held out for testing when a source has no split of its own: a fixed function of the client's id.

The same data gives the same split on every machine and in any order of clients. Text is held out by client,
images and other dense features by example within a client.
"""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from fedbandit.errors import ConfigError
from fedbandit.randomness import Purpose, uniforms

_SEED = 0  # part of the format: another seed would be another split


class HoldOut:
    """Decides row by row; remembers how many rows of each client it has seen."""

    def __init__(self, fraction: float, *, by_client: bool) -> None:
        if not 0 <= fraction < 1:
            raise ConfigError(f"test-fraction: must be at least 0 and below 1, got {fraction}")
        self._fraction, self._by_client = fraction, by_client
        self._keys: dict[str, int] = {}
        self._seen: dict[str, int] = {}

    def is_test(self, clients: Sequence[str]) -> np.ndarray:
        """For each row whether it is held out: bool [rows]."""
        if self._fraction == 0:
            return np.zeros(len(clients), bool)
        keys = np.array([self._key(client) for client in clients], np.uint64)
        if self._by_client:
            return uniforms(_SEED, Purpose.SPLIT, keys) < self._fraction
        positions = np.empty(len(clients), np.int64)
        seen = self._seen
        for row, client in enumerate(clients):
            positions[row] = seen.get(client, 0)
            seen[client] = positions[row] + 1
        # A client's first example always trains, so that nobody is left with test examples only.
        return (uniforms(_SEED, Purpose.SPLIT, keys, positions) < self._fraction) & (positions > 0)

    def _key(self, client: str) -> int:
        if client not in self._keys:
            self._keys[client] = int.from_bytes(blake2b(client.encode(), digest_size=8).digest(), "little")
        return self._keys[client]
