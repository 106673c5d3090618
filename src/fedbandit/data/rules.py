"""What must be true of the numbers in an array of a data set, so that kernels may trust them; checked block by block.

A rule finds the first entry that breaks it. The scans are numpy's own loops, which run at memory speed.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

_LARGEST = float(np.finfo(np.float32).max)
_SMALLEST = float(np.finfo(np.float32).smallest_subnormal)


class Rule(Protocol):
    def first_wrong(self, block: np.ndarray, before: np.ndarray) -> int | None:
        """The first wrong entry of a block; `before` holds the last entry of the block before it, or nothing."""
        ...

    def wrong(self, value: object) -> str:
        """What is wrong with an entry, in words."""
        ...


@dataclass(frozen=True)
class Within:
    """Numbers from `low` to `high`, both included; NaN never is."""

    low: float
    high: float
    wanted: str

    def first_wrong(self, block: np.ndarray, before: np.ndarray) -> int | None:
        # Smallest and largest take no memory of their own; NaN comes through both and compares as false.
        if block.min() >= self.low and block.max() <= self.high:
            return None
        return int(np.argmin((block >= self.low) & (block <= self.high)))

    def wrong(self, value: object) -> str:
        return f"{value} is {self.wanted}"


FINITE = Within(-_LARGEST, _LARGEST, "not finite")
PROPENSITY = Within(_SMALLEST, 1.0, "outside (0, 1]")


def below(number: int) -> Within:
    """Whole numbers from 0 to number - 1."""
    return Within(0, number - 1, f"outside 0..{number - 1}")


@dataclass(frozen=True)
class Offsets:
    """Where rows begin: from 0, never descending. The last one is the length of what they point into."""

    def first_wrong(self, block: np.ndarray, before: np.ndarray) -> int | None:
        if block[0] != 0 if not len(before) else block[0] < before[0]:
            return 0
        descending = block[1:] < block[:-1]
        return int(np.argmax(descending)) + 1 if descending.any() else None

    def wrong(self, value: object) -> str:
        return f"offset {value} does not follow: offsets ascend from 0"


@dataclass(frozen=True)
class ClientIds:
    """Ids in UTF-8, none empty, strictly ascending."""

    def first_wrong(self, block: np.ndarray, before: np.ndarray) -> int | None:
        ids = np.concatenate([before, block])
        good = np.concatenate([block[:1] > (before if len(before) else b""), ids[1:] > ids[:-1]])[-len(block) :]
        if not good.all():
            return int(np.argmin(good))
        # Each id behind a zero byte, so that half a letter at the end of one cannot be completed by the next.
        letters = np.zeros((len(block), block.dtype.itemsize + 1), np.uint8)
        letters[:, 1:] = block.view(np.uint8).reshape(len(block), -1)
        try:
            letters.tobytes().decode("utf-8")
        except UnicodeDecodeError as error:
            return error.start // letters.shape[1]
        return None

    def wrong(self, value: object) -> str:
        return f"client {value!r} is empty, not UTF-8 or not in ascending order"
