"""From clients' sums to an estimate with an interval, the choice among estimators, and the policies to evaluate."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np

from fedbandit.core.errors import ConfigError
from fedbandit.core.parts import nearest
from fedbandit.evaluation.ope.estimators import Estimator, Plain, Records, Weighting
from fedbandit.evaluation.ope.intervals import Interval, IntervalKind, Range, interval_of
from fedbandit.evaluation.ope.sums import (
    Bootstrap,
    Sums,
    by_client,
    standard_error,
    sums_of,
    value_of,
)
from fedbandit.policies import Policy, Prediction, Uniform, make_policy


@dataclass(frozen=True)
class Constant:
    """Always the same action; uniform over what there is where it is not available."""

    action: int

    def probabilities(
        self, prediction: Prediction, available: np.ndarray | None = None
    ) -> np.ndarray:
        chosen = np.zeros(prediction.mean.shape)
        chosen[..., self.action] = 1
        if available is None:
            return chosen
        can = np.broadcast_to(available, chosen.shape)[..., self.action, None]
        return np.where(can, chosen, Uniform().probabilities(prediction, available))


def target_policy(name: str, parameters: Mapping[str, Any], actions: tuple[str, ...]) -> Policy:
    """The policy of that name: `uniform`, `constant` (with `action`), a built-in one, or an import path."""
    if name == "constant":
        return Constant(_action(parameters, actions))
    return make_policy(name, parameters)


def looks_at_scores(name: str) -> bool:
    """Whether the policy of that name needs a model."""
    return name not in ("uniform", "constant")


def _action(parameters: Mapping[str, Any], actions: tuple[str, ...]) -> int:
    unknown = [key for key in parameters if key != "action"]
    if unknown:
        raise ConfigError(f"policy.{unknown[0]}: unknown key; constant takes only action")
    if "action" not in parameters:
        raise ConfigError("policy.action: missing; for example --set action=" + actions[0])
    named = str(parameters["action"])
    if named not in actions:
        raise ConfigError(f"policy.action: no action called {named!r}{nearest(named, actions)}")
    return actions.index(named)


_FEW_EVENTS = (
    100  # fewer effective events than this say little about rewards, whatever the interval claims
)
_SMALL_SHARE = 0.01  # of the log's events
_FEW_CLIENTS = 20  # the bootstrap needs clients to draw from


@dataclass(frozen=True)
class Estimate:
    """What a log says about a policy it did not follow."""

    value: float
    standard_error: float
    interval: Interval
    effective_sample_size: float  # of events as good as the policy's own
    mean_weight: (
        float  # 1 in expectation, if the propensities are right and the log explores enough
    )
    events: int
    clients: int
    warnings: tuple[str, ...] = ()


def combine(
    sums: Sums,
    estimator: Estimator,
    *,
    confidence: float = 0.95,
    weighting: Weighting = Plain(),  # noqa: B008 - a frozen value
    interval: IntervalKind = "bootstrap",
    within: Range | None = None,
) -> Estimate:
    """The server's part: from the clients' added sums to an estimate.

    `within` says what is known of rewards and propensities; without it their extremes in the log are taken for it.
    """
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence: must be between 0 and 1, not {confidence}")
    effective = sums.importance**2 / sums.importance_squares if sums.importance_squares else 0.0
    return Estimate(
        value=value_of(sums),
        standard_error=standard_error(sums),
        interval=interval_of(sums, estimator, confidence, interval, within, weighting.largest),
        effective_sample_size=effective,
        mean_weight=sums.importance / sums.events if sums.events else 0.0,
        events=int(sums.events),
        clients=int(sums.clients),
        warnings=tuple(_warnings(sums, effective)),
    )


def estimate(
    records: Records,
    estimators: Mapping[str, Estimator],
    *,
    confidence: float = 0.95,
    weighting: Weighting = Plain(),  # noqa: B008
    bootstrap: Bootstrap = Bootstrap(),  # noqa: B008
    interval: IntervalKind = "bootstrap",
    within: Range | None = None,
) -> dict[str, Estimate]:
    """Several estimators on one log: `estimate(records, {"ips": IPS()})["ips"].value`."""
    if within is not None:
        _check_range(records, within)
    found = {}
    for name, estimator in estimators.items():
        sums = sums_of(records, estimator, weighting, bootstrap)
        found[name] = combine(
            sums,
            estimator,
            confidence=confidence,
            weighting=weighting,
            interval=interval,
            within=within,
        )
    return found


_FOLDS = 10
_PREFERRED = (
    "dr",
    "snips",
    "ips",
    "switch",
    "dm",
)  # those that a wrong reward model cannot mislead come first


def choose_estimator(
    records: Records,
    estimators: Mapping[str, Estimator],
    weighting: Weighting = Plain(),  # noqa: B008
    among: Collection[str] | None = None,
) -> str | None:
    """The estimator that predicts held-out clients best, by cross-validation over clients' sums; None if none can.

    Each tenth of the clients is predicted from the others, and judged by the unbiased estimate of the tenth itself
    (Cief et al., 2024). An estimator that is no more than two standard errors behind the best is as good as it; among
    those, one that a wrong reward model cannot mislead is chosen. `among` names those to choose from.
    """
    judge = next((name for name in ("dr", "ips") if name in estimators), None)
    if judge is None or records.num_clients < 2 * _FOLDS:
        return None
    fold = np.arange(records.num_clients) % _FOLDS
    importance = records.importance

    def folded(estimator: Estimator, given: np.ndarray) -> np.ndarray:
        terms = estimator.terms(records, estimator.used(given))
        return np.stack(
            [np.bincount(fold, by_client(part, records.bounds), minlength=_FOLDS) for part in terms]
        )

    top, bottom = folded(estimators[judge], importance)  # without clipping: it has to be unbiased
    if not bottom.all():
        return None
    truth, losses = top / bottom, {}
    for name in estimators if among is None else among:
        own = folded(estimators[name], weighting(importance))
        rest = own.sum(axis=1, keepdims=True) - own
        if rest[1].all():
            losses[name] = (rest[0] / rest[1] - truth) ** 2
    if not losses:
        return None
    best = min(losses, key=lambda name: float(losses[name].mean()))
    order = [name for name in (*_PREFERRED, *losses) if name in losses]
    for name in order:
        behind = losses[name] - losses[best]
        if behind.mean() <= 2 * behind.std(ddof=1) / sqrt(_FOLDS):
            return name
    return best


def _check_range(records: Records, within: Range) -> None:
    low, high = within.low, within.high
    room = 1e-9 * (
        high - low
    )  # a weighted mean of predictions in the range may leave it by rounding
    columns = {
        "rewards": records.rewards,
        "predicted rewards": records.predicted,
        "expected rewards": records.expected,
    }
    for name, column in columns.items():
        if (
            column is not None
            and len(column)
            and not (column.min() >= low - room and column.max() <= high + room)
        ):
            raise ConfigError(
                f"interval: {name} leave the range [{low:g}, {high:g}] that the interval is for"
            )
    if (
        within.floor is not None
        and len(records)
        and records.propensities.min() < within.floor * (1 - 1e-6)
    ):
        raise ConfigError(f"floor: the log has propensities below {within.floor:g}")


def _warnings(sums: Sums, effective: float) -> list[str]:
    said = []
    if not sums.events or not sums.reached:
        return ["the log holds nothing that the policy would do: it says nothing about it"]
    if effective < _FEW_EVENTS or effective < _SMALL_SHARE * sums.events:
        said.append(
            f"poor overlap: {sums.events:.0f} events are worth {effective:.0f} of the policy's own"
        )
    mean = sums.importance / sums.events
    error = sqrt(max(0.0, sums.importance_squares / sums.events - mean**2) / sums.events)
    if abs(mean - 1) > max(4 * error, 0.02):
        said.append(
            f"the weights average {mean:.3f} and should average 1: the propensities are wrong,"
            " or the log never takes actions that the policy takes"
        )
    if sums.altered > _SMALL_SHARE * sums.events:
        share = 100 * sums.altered / sums.events
        said.append(
            f"clipping, shrinkage or switching touched {share:.0f}% of the weights: less variance, more bias"
        )
    if sums.clients < _FEW_CLIENTS:
        said.append(f"only {sums.clients:.0f} clients: whoever is missing may be unlike them")
    return said
