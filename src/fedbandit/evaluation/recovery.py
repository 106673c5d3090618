"""How far a policy falls when the world changes, and how soon it recovers. Reads rewards by round, nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Recovery:
    """What one change did to one run."""

    change: int  # the first round of the changed world
    before: float  # mean reward in the last rounds before
    lowest: float  # the worst mean over as many rounds after it
    rounds: int | None  # from the change until the mean is back at the asked share of `before`; None: never
    last: float  # mean reward in the last rounds before the next change, or the end
    lost: float  # reward below `before`, summed over rounds until then: the whole price of the change

    @property
    def fall(self) -> float:
        return self.before - self.lowest


def recoveries(
    rewards: Sequence[float] | np.ndarray, changes: Sequence[int], *, window: int = 10, share: float = 0.9
) -> list[Recovery]:
    """For each change: the fall and the recovery of mean rewards over `window` rounds, to `share` of what was before.

    Rounds without events (NaN) count as nothing; the changes are the scenario's `at`, counted from 1.
    """
    values = np.asarray(rewards, np.float64)
    ends = [*changes[1:], len(values) + 1]
    return [_one(values, change, end, window, share) for change, end in zip(changes, ends, strict=True)]


def _one(values: np.ndarray, change: int, end: int, window: int, share: float) -> Recovery:
    first, stop = change - 1, min(end - 1, len(values))
    if first < 1 or stop - first < window or first < window:
        raise ValueError(f"change before round {change}: needs {window} rounds on either side")
    before = float(np.nanmean(values[first - window : first]))
    after = values[first:stop]
    means = np.array([np.nanmean(after[i : i + window]) for i in range(len(after) - window + 1)])
    lowest = int(np.argmin(means))
    back = np.flatnonzero(means[lowest:] >= share * before)
    rounds = int(lowest + back[0] + window) if len(back) else None
    lost = float(np.nansum(np.maximum(before - after, 0)))
    return Recovery(change, before, float(means[lowest]), rounds, float(means[-1]), lost)
