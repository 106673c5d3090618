"""The server's door: whatever comes in from outside is checked before it may touch a sum.

An update that does not fit is left out, counted and named, never averaged in. Knows nothing of transports.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fedbandit.federated.updates import clip_factor


@dataclass(frozen=True)
class Screened:
    """The sum of the accepted updates, clipped; who was left out, and why."""

    total: np.ndarray
    norms: np.ndarray  # float64 [accepted], before clipping
    rejected: dict[str, str]  # client -> reason

    @property
    def accepted(self) -> int:
        return len(self.norms)


def why_not(update: object, like: np.ndarray) -> str | None:
    """The reason to refuse an update to weights like `like`, or None if it is sound."""
    if not isinstance(update, np.ndarray):
        return f"not an array but {type(update).__name__}"
    if update.dtype != like.dtype:
        return f"dtype {update.dtype}, expected {like.dtype}"
    if update.shape != like.shape:
        return f"shape {update.shape}, expected {like.shape}"
    wrong = np.count_nonzero(~np.isfinite(update))
    if wrong:
        return f"{wrong} of {update.size} values are not finite"
    if not np.isfinite(np.linalg.norm(update.astype(np.float64, copy=False))):
        return "its norm is not finite"
    return None


def clipped_sum(updates: Iterable[tuple[str, object]], like: np.ndarray, clip_norm: float) -> Screened:
    """Add up the sound updates of (client, update) pairs, each clipped; a second one of the same client is refused."""
    total = np.zeros_like(like)
    norms: list[float] = []
    rejected: dict[str, str] = {}
    seen: set[str] = set()
    for client, update in updates:
        if client in seen:
            rejected[client] = "a second update in the same round"
            continue
        seen.add(client)
        if reason := why_not(update, like):
            rejected[client] = reason
            continue
        assert isinstance(update, np.ndarray)
        norm = float(np.linalg.norm(update.astype(np.float64, copy=False)))
        total += update.dtype.type(clip_factor(norm, clip_norm)) * update
        norms.append(norm)
    return Screened(total, np.array(norms), rejected)
