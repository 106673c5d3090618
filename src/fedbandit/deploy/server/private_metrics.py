"""Metrics of rewards and of candidates: exact, or with the noise of a private deployment.

Private figures are further entries of the vector whose noisy sum a round releases: bounded by 1 for
each device, and given noise by the same mechanism as the model, so that all of it together costs
what the plan says.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from fedbandit.deploy.secure_sums import TOLERANCE, ReportBounds, figure_steps
from fedbandit.deploy.server.gathering import RoundContribution
from fedbandit.evaluation.gate import Verdict
from fedbandit.privacy.noise import GridNoise
from fedbandit.privacy.plan import PrivacyPlan
from fedbandit.privacy.strategies import Memory

_ENTRIES = 3  # of the figures: events, rewards, propensities; of the gate: gain, its square, judges
_FIGURES = np.full(_ENTRIES, 3**-0.5)  # squares add up to 1: how a share is divided among entries
_GATE = np.sqrt([0.8, 0.1, 0.1])  # the verdict hangs on the first; the others say how sure it is
_CLEAR = 2.0  # standard deviations of the noise above which a count is worth dividing by
_FINE = 2.0**34  # steps of the noise's grid in what one device may add to all its figures together
_GAIN = 2.0**-21  # the step in which a device's gain is counted


class RoundNoise:
    """All the noise of a private round: of the model, of its figures and of what its gate is told.

    Figures come as whole numbers of public steps and get whole numbers of a fraction of that step
    as noise. What is released is a function of their sum, so it shows nothing but the sum.
    """

    def __init__(
        self,
        plan: PrivacyPlan,
        number: int,
        memory: Memory,
        of_weights: Callable[[int, Memory], GridNoise],
    ) -> None:
        """`of_weights` makes the noise of the model from the rounds before and their memory."""
        self._plan, self._number = plan, number
        noisy = plan.noise_multiplier > 0
        self._entries = (
            _ENTRIES * ((plan.figures_share > 0) + (plan.gate_share > 0)) if noisy else 0
        )
        cut = {at: (value[: len(value) - self._entries], value[len(value) - self._entries :])
               for at, value in memory.items()}  # fmt: skip
        self.weights = of_weights(number - 1, {at: both[0] for at, both in cut.items()})
        own = {at: both[1] for at, both in cut.items()}
        self._own = GridNoise(plan.strategy, plan.noise_multiplier * _FINE, number - 1, own)
        self._drawn = np.zeros(2 * _ENTRIES, np.int64)
        if self._entries:
            self._drawn = self._own.update(number, np.zeros(self._entries))

    @property
    def memory(self) -> dict[int, np.ndarray]:
        """The memory to keep, secretly, once the noise of the model has been drawn."""
        if not self._entries:
            return self.weights.memory
        own = self._own.memory
        return {at: np.concatenate([value, own[at]]) for at, value in self.weights.memory.items()}

    def figures(
        self,
        sums: np.ndarray,
        bounds: ReportBounds,
        modulo: Sequence[float] | None = None,
    ) -> "Noised | None":
        """The round's figures with noise, from sums of `figure_steps`: [3]; None without a share.

        They may be known modulo something. The noise comes first: one device could wrap what
        hostile ones have prepared.
        """
        share = self._plan.figures_share
        if not share:
            return None
        most = np.array([bounds.events, bounds.events * bounds.reward, bounds.events])
        most = most * (1 + TOLERANCE)
        parts = np.sqrt(share) * _FIGURES
        return self._noised(sums, figure_steps(bounds), most, parts, self._drawn[:_ENTRIES], modulo)

    def gate(self, sums: np.ndarray) -> "Noised":
        """Sums over judges with noise: gains, squares, number; no device adds more than 1: [3]."""
        share = self._plan.gate_share
        assert share, "a private deployment without gate_share has no gate"
        steps, most = np.array([_GAIN, _GAIN, 1.0]), np.ones(_ENTRIES)
        return self._noised(sums, steps, most, np.sqrt(share) * _GATE, self._drawn[-_ENTRIES:])

    def _noised(
        self,
        sums: np.ndarray,
        steps: np.ndarray,
        most: np.ndarray,
        parts: np.ndarray,
        drawn: np.ndarray,
        modulo: Sequence[float] | None = None,
    ) -> "Noised":
        """`parts` of the budget's root pay for each entry, which one device moves by `most`."""
        finer = np.floor(steps / most * parts * _FINE)
        released = []
        for i, (sum_, fine) in enumerate(zip(np.rint(sums / steps), finer, strict=True)):
            value = int(sum_) * int(fine) + int(drawn[i])  # may be more than 64 bits
            if modulo is not None:
                most_of_it = round(modulo[i] / steps[i]) * int(fine)
                value = (value + most_of_it // 2) % most_of_it - most_of_it // 2
            released.append(float(value))
        unit = steps / finer
        of_round, of_prefix = np.sqrt(self._plan.noise_variances[:, self._number - 1])
        deviation = self._plan.noise_multiplier * _FINE * unit
        return Noised(np.array(released) * unit, deviation * of_round, deviation * of_prefix)


@dataclass(frozen=True)
class Noised:
    """Sums as anybody may see them."""

    sums: np.ndarray
    deviations: np.ndarray  # of their noise
    of_prefix: np.ndarray  # of the noise of the sums over all rounds so far


def reported(found: RoundContribution, private: bool) -> dict[str, Any]:
    """Metrics of a round's rewards where sums are exact; null in a private round."""
    if private:
        names = ("reward", "propensity", "events", "idle", "unclipped", "rewards_by_version")
        return {"clients": found.accepted + found.idle, **dict.fromkeys(names)}
    bounded = {}
    if found.reported is not None:
        bounded = {
            "reward_reported": found.reported / found.events,
            "events_by_version": found.events_by_version,
            "reward_median": found.median,
            "largest_share": found.largest_share,
        }
    return {
        "reward": found.reward_sum / found.events if found.events else None,
        "propensity": found.propensity_sum / found.events if found.events else None,
        "events": found.events,
        "clients": found.accepted,
        "idle": found.idle,
        "unclipped": found.below / found.accepted if found.accepted else None,
        "rewards_by_version": found.by_version,
        **bounded,
    }


_SIZES = ("asked", "clients", "refused", "model_versions")


def published(metrics: Mapping[str, Any], private: bool) -> dict[str, Any]:
    """A round's metrics as anybody may see them: nothing in those of a private one counts devices.

    With the exact size of a cohort known, one client more means another one less: twice the
    sensitivity that epsilon is stated for.
    """
    if not private:
        return dict(metrics)
    found = {**metrics, **dict.fromkeys(_SIZES)}
    if "gate" in metrics:
        found["gate"] = {**metrics["gate"], "asked": None, "refused": None}
    return found


def reported_with_noise(
    found: RoundContribution, noise: RoundNoise, bounds: ReportBounds, before: Mapping[str, float]
) -> tuple[dict[str, Any], dict[str, float]]:
    """Metrics of a private round's rewards, and noised totals so far; empty without a share.

    `before` are the totals up to the round before. A reward is left out where the noise could have
    made the events.
    """
    sums = np.array([found.events, found.reward_sum, found.propensity_sum])
    noised = noise.figures(sums, bounds, found.known_modulo)
    if noised is None:
        return {}, {}
    events, rewards, propensities = map(float, noised.sums)
    totals = {
        "events": before.get("events", 0.0) + events,
        "rewards": before.get("rewards", 0.0) + rewards,
    }
    clear = events > _CLEAR * noised.deviations[0]
    so_far = totals["events"] > _CLEAR * noised.of_prefix[0]
    return {
        "reward": _within(rewards / events, -bounds.reward, bounds.reward) if clear else None,
        "propensity": _within(propensities / events, 0.0, 1.0) if clear else None,
        "events": round(events),
        "reward_sum": rewards,
        "noise": {"events": float(noised.deviations[0]), "rewards": float(noised.deviations[1])},
        "running_reward": _within(
            totals["rewards"] / totals["events"], -bounds.reward, bounds.reward
        )
        if so_far
        else None,
    }, totals


def private_verdict(
    gains: np.ndarray, noise: RoundNoise, bounds: ReportBounds, confidence: float, margin: float
) -> tuple[Verdict, int]:
    """Whether a candidate passes, by noised sums over devices' gains per event: [n]; and about how
    many devices.

    Each device is worth the same: its gain, above what may be lost, cut at what means can differ
    by. A model passes if the sum of that is above 0 with the confidence asked for. The sum's
    deviation is that of the devices, for which their squares stand, and that of the noise, which is
    known.
    """
    widest = 2 * bounds.reward
    terms = np.clip(gains + margin, -widest, widest) / widest
    gained, squared = (_GAIN * np.trunc(each / _GAIN).sum() for each in (terms, np.square(terms)))
    noised = noise.gate(np.array([gained, squared, len(terms)]))
    total, squares, devices = map(float, noised.sums)
    # The squares have noise of their own; one deviation more widens the interval.
    error = float(np.sqrt(max(squares + noised.deviations[1], 0.0) + noised.deviations[0] ** 2))
    lower = total - NormalDist().inv_cdf(confidence) * error
    enough = devices > _CLEAR * noised.deviations[2]
    per = widest / devices if enough else np.nan
    found = Verdict(
        passes=bool(enough and lower >= 0),
        gain=total * per - margin,
        standard_error=error * per,
        lower=lower * per - margin,
        effective_sample_size=np.nan,
        events=0,
    )
    return found, max(0, round(devices))


def _within(value: float, low: float, high: float) -> float:
    return float(min(max(value, low), high))
