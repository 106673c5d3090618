"""The entries of a secure sum: a device's numbers between -1 and 1 on a fixed grid, and back again.

Each entry is rounded to a neighbouring point of the grid by chance. Knows nothing of masks or of
messages.
"""

from dataclasses import dataclass
from math import ceil, sqrt

import numpy as np

from fedbandit.federated.pipeline import clip_factor

RANGE = 1.0  # entries lie between -RANGE and RANGE
LEVELS = 2**22
MODULUS = 2**40
STEP = 2 * RANGE / LEVELS  # of the grid; whole multiples of it travel exactly
MOST = MODULUS // LEVELS - 1  # devices whose sum cannot wrap around
MOST_EVENTS = LEVELS // 2
LEAST = 3  # devices in a sum that a device lends itself to: with two, each knows the other's part
MOST_SHARES = 1024  # devices, itself included, that a device makes masks with
_TAIL = (
    5  # entries behind the update: unclipped, events, rewards, propensities, one for being there
)
TOLERANCE = 1e-3  # a device computes its norm in other steps than the server does


@dataclass(frozen=True)
class SecureMinimum:
    """The least that a device hides among: its app sets it, never a server.

    With a threshold of two thirds of the shares and fewer than a third of the devices working with
    the server, two sets of devices that could each unmask a sum have an honest device in common.
    """

    cohort: int = LEAST  # devices whose keys it has checked, itself included
    threshold: float = 2 / 3  # the part of them without whose help nothing is unmasked

    def __post_init__(self) -> None:
        if not (type(self.cohort) is int and self.cohort >= LEAST):
            raise ValueError(f"cohort: at least {LEAST} devices, or each knows the other's part")
        if not 2 / 3 <= self.threshold <= 1:
            raise ValueError("threshold: from two thirds to 1")

    def shares_of(self, number: int) -> int:
        """The shares out of `number` that must be needed to recover a secret."""
        return max(-(-2 * number // 3), ceil(self.threshold * number - 1e-9))


@dataclass(frozen=True)
class ReportBounds:
    """The most that one device may report in one round: number of events, and size of each
    reward.
    """

    events: int
    reward: float

    def to_json(self) -> dict[str, float]:
        """As servers say them to devices."""
        return {"events": self.events, "reward": self.reward}


@dataclass(frozen=True)
class Figures:
    """Metrics of one device, or summed over many."""

    update: np.ndarray
    unclipped: int
    events: int
    reward_sum: float
    propensity_sum: float
    devices: int = 1


def length(parameters: int) -> int:
    """Number of entries of a vector for a model with this many parameters."""
    return parameters + _TAIL


def clip_share(parameters: int) -> float:
    """The part of the clip norm that an update may have before it is rounded, so that it has at
    most the whole of it after.

    Rounding moves each entry by less than a step. A little more is left for errors of floating
    point.
    """
    share = 1 - STEP / RANGE * sqrt(parameters) - 2.0**-32
    if share <= 0:
        what = "too many for the grid: rounding alone exceeds the clip norm"
        raise ValueError(f"{parameters} parameters are {what}")
    return share


def encode(
    own: Figures,
    clip_norm: float,
    bounds: ReportBounds,
    generator: np.random.Generator | None = None,
) -> np.ndarray:
    """One device's figures as points of the grid, int64 [P + 5]; counts are exact.

    The update is clipped once more, so that what its entries are rounded to is no longer than the
    clip norm. `generator` decides which neighbouring point an entry becomes; by default the
    operating system seeds it.

    Examples:
        >>> bounds = ReportBounds(events=100, reward=1.0)
        >>> own = Figures(np.array([0.3, -0.4]), 1, 10, 4.0, 5.0)
        >>> levels = encode(own, 1.0, bounds) + encode(own, 1.0, bounds)  # of two devices
        >>> found = decode(levels, 2, 1.0, bounds)
        >>> found.events, found.devices, bool(abs(found.update[0] - 0.6) < 2 * STEP)
        (20, 2, True)
    """
    update = own.update.astype(np.float64)
    vector = np.empty(length(update.size))
    longest = clip_norm * clip_share(update.size)
    vector[:-_TAIL] = update * (clip_factor(float(np.linalg.norm(update)), longest) / clip_norm)
    vector[-_TAIL:] = (
        own.unclipped * STEP,
        own.events * STEP,
        own.reward_sum / (bounds.events * bounds.reward),
        own.propensity_sum / bounds.events,
        own.devices * STEP,
    )
    if not (np.abs(vector) <= RANGE * (1 + 1e-9)).all():  # also refuses what is not a number
        raise ValueError("figures beyond their bounds cannot be summed securely")
    return to_grid(vector, generator or np.random.default_rng())


def to_grid(vector: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Entries between -RANGE and RANGE as int64 levels from 0 to LEVELS: the point below or above,
    without bias.
    """
    exact = (np.clip(vector, -RANGE, RANGE) + RANGE) / STEP
    below = np.floor(exact)
    levels: np.ndarray = (below + (generator.random(exact.shape) < exact - below)).astype(np.int64)
    return levels


def decode(levels: np.ndarray, devices: int, clip_norm: float, bounds: ReportBounds) -> Figures:
    """The figures of a sum over `devices`, from its grid points modulo MODULUS: int64 [P + 5]."""
    total = levels * STEP - devices * RANGE
    unclipped, events, rewards, propensities, present = total[-_TAIL:]
    return Figures(
        update=total[:-_TAIL] * clip_norm,
        unclipped=round(unclipped / STEP),
        events=round(events / STEP),
        reward_sum=float(rewards) * bounds.events * bounds.reward,
        propensity_sum=float(propensities) * bounds.events,
        devices=round(present / STEP),
    )


def nothing(parameters: int) -> Figures:
    """Zeros, for a device in a private sum that has nothing to train on; it is not counted."""
    return Figures(np.zeros(parameters, np.int64), 0, 0, 0.0, 0.0, devices=0)


def decode_private(levels: np.ndarray, devices: int, bounds: ReportBounds) -> Figures:
    """The figures of a private sum, which is never refused for what is in it: one device could
    decide that.

    The update is whole steps modulo MODULUS, int64 [P], and the rest is as it adds up: noise comes
    first, bounds after.
    """
    steps = (levels - devices * (LEVELS // 2)) % MODULUS
    unclipped, events, rewards, propensities, present = (
        int(step) for step in (steps[-_TAIL:] + MODULUS // 2) % MODULUS - MODULUS // 2
    )
    return Figures(
        update=steps[:-_TAIL],
        unclipped=unclipped,
        events=events,
        reward_sum=rewards * STEP * bounds.events * bounds.reward,
        propensity_sum=propensities * STEP * bounds.events,
        devices=present,
    )


def figure_steps(bounds: ReportBounds) -> np.ndarray:
    """Of what the events, rewards and propensities of a private sum are whole multiples: [3]."""
    return np.array([1.0, STEP * bounds.events * bounds.reward, STEP * bounds.events])


def figures_modulo(bounds: ReportBounds) -> tuple[float, float, float]:
    """The moduli of the events, rewards and propensities of a sum, each in its own unit."""
    events = MODULUS * STEP * bounds.events
    return float(MODULUS), events * bounds.reward, events


def update_error(devices: int, clip_norm: float) -> float:
    """The most by which rounding can change an entry of the summed update; counts stay exact."""
    return devices * clip_norm * STEP / RANGE


def reward_error(devices: int, bounds: ReportBounds) -> float:
    """The most by which rounding can change the sum of rewards."""
    return devices * bounds.events * bounds.reward * STEP / RANGE


def why_impossible(
    found: Figures, devices: int, clip_norm: float, bounds: ReportBounds
) -> str | None:
    """The reason to refuse a sum over `devices`, or None if honest devices could have
    produced it.
    """
    if found.devices != devices:
        return f"{found.devices} devices are in it, {devices} should be"
    if not (0 <= found.unclipped <= devices and 0 <= found.events <= devices * bounds.events):
        return f"{found.unclipped} unclipped updates and {found.events} events of {devices} devices"
    largest = devices * clip_norm * (1 + TOLERANCE) + np.sqrt(found.update.size) * update_error(
        devices, clip_norm
    )
    norm = float(np.linalg.norm(found.update))
    if not norm <= largest:
        return f"norm {norm:.4g} of {devices} updates that devices clip to {clip_norm:.4g}"
    slack = devices * bounds.events * STEP
    if not -slack <= found.propensity_sum <= found.events * (1 + TOLERANCE) + slack:
        return f"propensities that add up to {found.propensity_sum:.4g} over {found.events} events"
    if not abs(found.reward_sum) <= found.events * bounds.reward + reward_error(devices, bounds):
        return f"rewards that add up to {found.reward_sum:.4g} over {found.events} events"
    return None
