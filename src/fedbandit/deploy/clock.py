"""Time as the event log counts it: seconds that never run backwards and do not follow a clock that somebody sets.

Knows nothing of events; only two clocks that each tell half of the truth.
"""

import time
import uuid
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Reading:
    """Both clocks at one moment."""

    wall: float  # seconds since 1970; users, networks and flat batteries make it jump
    steady: float  # seconds since the boot, sleep included where the system can tell; never jumps
    boot: str  # readings of the steady clock can be compared only within one boot


def read_clocks() -> Reading:
    """Both clocks now."""
    steady = time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()
    return Reading(time.time(), steady, _BOOT)


def seconds_between(before: Reading, now: Reading) -> float:
    """How much time has passed: by the steady clock within a boot, by the wall clock across one, never less than 0."""
    if before.boot == now.boot:
        return max(0.0, now.steady - before.steady)
    return max(0.0, now.wall - before.wall)


def _this_boot() -> str:
    """The system's name for this boot; where it has none, the steady clock is trusted within one process only."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return uuid.uuid4().hex


_BOOT = _this_boot()
