"""Top-k sparsification (Aji and Heafield, 2017): the largest entries of an update, and none of the others."""

from dataclasses import dataclass

import numpy as np

from fedbandit.federated.pipeline import Vectors


@dataclass(frozen=True)
class TopK:
    """The `fraction` of entries that are largest in size, as places and values; ties go to the first."""

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
