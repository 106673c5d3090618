"""Compression of what clients send: a stage has a client's half and a server's half.

Your own is one small class with `encode` and `decode`.

Examples:
    >>> import numpy as np
    >>> stage = TopK(fraction=0.5)
    >>> payload = stage.encode(np.array([0.1, -3.0, 2.0, 0.0]), np.random.default_rng(0))
    >>> stage.decode(payload, 4)
    array([ 0., -3.,  2.,  0.])
"""

from dataclasses import dataclass

import numpy as np

from fedbandit.federated.pipeline import CompressionStage, Vectors

__all__ = ["BUILT_IN", "CompressionStage", "Quantize", "TopK", "Vectors"]


@dataclass(frozen=True)
class Quantize:
    """Every entry in `bits` bits: its sign, and one of 2**(bits - 1) - 1 steps up to the largest
    entry.
    """

    bits: int = 8

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 16:
            raise ValueError(f"bits must be from 2 to 16, not {self.bits}")

    @property
    def levels(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def encode(self, update: np.ndarray, rng: np.random.Generator) -> Vectors:
        scale = np.abs(update).max(initial=0)
        if not np.isfinite(scale):
            return {"codes": np.zeros(0, np.uint8), "scale": np.array([np.nan], update.dtype)}
        places = update / scale * self.levels if scale > 0 else np.zeros_like(update)
        lower = np.floor(places)
        steps = lower + (rng.random(len(update)) < places - lower)
        return {
            "codes": self._pack(steps.astype(np.int32) + self.levels),
            "scale": np.array([scale], update.dtype),
        }

    def decode(self, payload: Vectors, size: int) -> np.ndarray:
        scale: np.floating = payload["scale"][0]
        if not np.isfinite(scale):
            return np.full(size, np.nan, payload["scale"].dtype)
        steps = self._unpack(payload["codes"], size) - self.levels
        return np.asarray(steps.astype(scale.dtype) * (scale / scale.dtype.type(self.levels)))

    def _pack(self, codes: np.ndarray) -> np.ndarray:
        """`bits` bits for each code, without gaps."""
        if self.bits in (8, 16):
            return codes.astype(f"<u{self.bits // 8}").view(np.uint8)
        digits = (codes[:, None] >> np.arange(self.bits)) & 1
        return np.packbits(digits.astype(np.uint8).reshape(-1), bitorder="little")

    def _unpack(self, packed: np.ndarray, size: int) -> np.ndarray:
        if self.bits in (8, 16):
            return packed.view(f"<u{self.bits // 8}").astype(np.int32)
        digits = np.unpackbits(packed, count=size * self.bits, bitorder="little").reshape(
            size, self.bits
        )
        return np.asarray(digits.astype(np.int32) @ (1 << np.arange(self.bits)))


@dataclass(frozen=True)
class TopK:
    """The `fraction` of entries that are largest in size, as places and values; ties go to the
    first.
    """

    fraction: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction must be above 0 and at most 1, not {self.fraction}")

    def encode(self, update: np.ndarray, rng: np.random.Generator) -> Vectors:
        k = max(1, round(self.fraction * len(update)))
        sizes = np.abs(update)
        smallest = np.partition(sizes, len(sizes) - k)[len(sizes) - k]
        above, equal = np.flatnonzero(sizes > smallest), np.flatnonzero(sizes == smallest)
        places = np.sort(np.concatenate([above, equal[: k - len(above)]]))
        if not np.isfinite(
            update
        ).all():  # an update that is not finite must not look as if it were
            places = np.flatnonzero(~np.isfinite(update))[:1]
        return {"places": places.astype(np.uint32), "values": update[places]}

    def decode(self, payload: Vectors, size: int) -> np.ndarray:
        update = np.zeros(size, payload["values"].dtype)
        update[payload["places"]] = payload["values"]
        return update


def no_compression() -> None:
    """Makes no stage: updates are sent as they are."""


BUILT_IN = {"none": no_compression, "quantize": Quantize, "top-k": TopK}
