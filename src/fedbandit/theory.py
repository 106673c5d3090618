"""The regret bounds of section 6, as functions. Rewards lie in [0, 1]; constants are dropped, and
ln|F| is an input.

So the bounds say how regret grows with delay, actions and samples. Compare shapes; a measurement
that lies below one of these numbers proves nothing, since the dropped constants could move it
anywhere.

Examples:
    >>> setting = Setting(actions=50, epsilon=0.05, log_class=100.0)
    >>> round(falcon_per_event(setting, samples=100_000, periods=20), 3)
    0.051
    >>> is_vacuous(federated_regret(setting, 1_000_000, 20), 1_000_000, 20)
    False
"""

from dataclasses import dataclass
from math import log, sqrt

import numpy as np

__all__ = [
    "Setting",
    "centralised_regret",
    "epsilon_greedy_per_event",
    "falcon_per_event",
    "federated_regret",
    "inverse_roots",
    "is_vacuous",
    "longest_useful_period",
]

_EXACT_TERMS = 1_000_000  # sums up to here are added up; beyond, the Euler-Maclaurin formula is exact to rounding
_ZETA_HALF = -1.4603545088095868  # Riemann's zeta function at 1/2


@dataclass(frozen=True)
class Setting:
    """Problem constants that the bounds depend on.

    actions: K, a count. epsilon: the exploration rate, a probability. log_class: ln|F|, in nats.
    delta: with which probability the bound may fail. optimization_error: ε_fed or ε_opt, how far
    the regression oracle's mean squared error lies above the smallest possible one, in squared
    reward.
    """

    actions: int
    epsilon: float = 0.1
    log_class: float = 10.0
    delta: float = 0.05
    optimization_error: float = 0.0

    def __post_init__(self) -> None:
        checks = {
            "actions": self.actions >= 2,
            "epsilon": 0 < self.epsilon <= 1,
            "log_class": self.log_class >= 0,
            "delta": 0 < self.delta < 1,
            "optimization_error": self.optimization_error >= 0,
        }
        for name, holds in checks.items():
            if not holds:
                raise ValueError(f"{name} cannot be {getattr(self, name)}")


def epsilon_greedy_per_event(setting: Setting, samples: int, periods: int) -> float:
    """Expected regret of one event after `periods` trainings of `samples` events each, in reward
    (unnumbered).
    """
    _check(samples, periods)
    statistical = _log_term(setting, periods) / (samples * periods)
    error = statistical + setting.optimization_error
    return setting.epsilon + sqrt(2 * setting.actions / setting.epsilon * error)


def falcon_per_event(setting: Setting, samples: int, periods: int) -> float:
    """The same for FALCON, without the price of fixed exploration: sqrt(K · error), in reward
    (unnumbered).
    """
    _check(samples, periods)
    statistical = _log_term(setting, periods) / (samples * periods)
    return sqrt(setting.actions * (statistical + setting.optimization_error))


def federated_regret(setting: Setting, samples: int, periods: int) -> float:
    """Cumulative regret of ε-greedy over `samples · periods` events, deploying after each period,
    in reward (eq. 9).
    """
    _check(samples, periods)
    delayed = sqrt(2 * setting.actions / setting.epsilon * samples * _log_term(setting, periods))
    return _lasting(setting) * samples * periods + samples + delayed * inverse_roots(periods - 1)


def centralised_regret(setting: Setting, samples: int, periods: int) -> float:
    """The same when the model is updated after every event, in reward (eq. 10)."""
    _check(samples, periods)
    events = samples * periods
    statistical = sqrt(2 * setting.actions / setting.epsilon * _log_term(setting, events))
    return _lasting(setting) * events + 1 + statistical * inverse_roots(events - 1)


def is_vacuous(regret: float, samples: int, periods: int) -> bool:
    """Whether a cumulative bound says nothing: rewards lie in [0, 1], so no policy loses more than
    1 an event.
    """
    return regret >= samples * periods


def longest_useful_period(setting: Setting, events: int) -> int | None:
    """The most events a period may have, of the divisors of `events`, before the federated bound
    says nothing.
    """
    useful = [
        samples
        for samples in _divisors(events)
        if not is_vacuous(
            federated_regret(setting, samples, events // samples), samples, events // samples
        )
    ]
    return max(useful, default=None)


def inverse_roots(count: int) -> float:
    """1/√1 + 1/√2 + ... + 1/√count."""
    if count <= _EXACT_TERMS:
        return float((1 / np.sqrt(np.arange(1, count + 1))).sum())
    return float(2 * sqrt(count) + _ZETA_HALF + 1 / (2 * sqrt(count)) - 1 / (24 * count**1.5))


def _lasting(setting: Setting) -> float:
    """The cost of every event, however long one learns: exploration, and a regression that is not
    solved exactly.
    """
    return setting.epsilon + sqrt(
        2 * setting.actions / setting.epsilon * setting.optimization_error
    )


def _log_term(setting: Setting, count: int) -> float:
    """ln(|F| · count / δ)."""
    return setting.log_class + log(count / setting.delta)


def _check(samples: int, periods: int) -> None:
    if samples < 1 or periods < 1:
        raise ValueError(f"samples and periods must be at least 1, not {samples} and {periods}")


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, int(sqrt(number)) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
