"""From clients' sums to an estimate with an interval. Sums add up over clients, and are all that leaves a client."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import reduce
from math import exp, inf, log, nan, sqrt
from operator import add
from typing import Any

import numpy as np

from fedbandit.core.errors import ConfigError
from fedbandit.core.parts import nearest
from fedbandit.core.randomness import Purpose, uniforms
from fedbandit.evaluation.ope.estimators import Estimator, Plain, Records, Weighting
from fedbandit.policies import Policy, Prediction, Uniform, make_policy


@dataclass(frozen=True)
class Constant:
    """Always the same action; uniform over what there is where it is not available."""

    action: int

    def probabilities(self, prediction: Prediction, available: np.ndarray | None = None) -> np.ndarray:
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


_BLOCK = 4096  # clients whose replicates are drawn at a time


_MOST = 12  # a Poisson(1) variable exceeds this once in 10^10 draws


_POISSON = np.cumsum(np.cumprod([exp(-1), *(1 / k for k in range(1, _MOST + 1))]))


@dataclass(frozen=True)
class Bootstrap:
    """How many replicates, and the seed that addresses the draws."""

    replicates: int = 1000
    seed: int = 0


@dataclass(frozen=True)
class Sums:
    """Sums of one client, of some, or of all: they add."""

    clients: float
    events: float
    importance: float  # of the importance weights before any clipping
    importance_squares: float
    reached: float  # events that the evaluated policy could have made
    altered: float  # events whose weight was clipped or shrunk by more than a hundredth
    numerator: float
    denominator: float
    numerator_squares: float  # over events
    client_squares: np.ndarray  # [3], over clients: numerator², numerator·denominator, denominator²
    replicates: np.ndarray  # [2, B]: numerators and denominators

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


def sums_of(
    records: Records,
    estimator: Estimator,
    weighting: Weighting = Plain(),  # noqa: B008 - a frozen value
    bootstrap: Bootstrap = Bootstrap(),  # noqa: B008
) -> Sums:
    """The sums of the clients in the records: on a device one client's, at a desk those of a whole log."""
    importance = records.importance
    weights = weighting(importance)
    numerator, denominator = estimator.terms(records, weights)
    return sums_of_terms(records.clients, records.bounds, numerator, denominator, importance, weights, bootstrap)


def sums_of_terms(
    clients: np.ndarray,
    bounds: np.ndarray,
    numerator: np.ndarray,
    denominator: np.ndarray,
    importance: np.ndarray,
    weights: np.ndarray,
    bootstrap: Bootstrap,
) -> Sums:
    """The sums of an estimate whose terms are known, [n] each; client i owns rows bounds[i]:bounds[i + 1]."""
    per_client = np.stack([_by_client(numerator, bounds), _by_client(denominator, bounds)])
    return Sums(
        clients=float(len(clients)),
        events=float(len(numerator)),
        importance=float(importance.sum()),
        importance_squares=float(importance @ importance),
        reached=float((importance > 0).sum()),
        altered=float((weights < 0.99 * importance).sum()),
        numerator=float(per_client[0].sum()),
        denominator=float(per_client[1].sum()),
        numerator_squares=float(numerator @ numerator),
        client_squares=np.array(
            [per_client[0] @ per_client[0], per_client[0] @ per_client[1], per_client[1] @ per_client[1]]
        ),
        replicates=_replicates(per_client, clients, bootstrap),
    )


def _by_client(values: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    owner = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    return np.bincount(owner, values, minlength=len(bounds) - 1)


def _replicates(per_client: np.ndarray, clients: np.ndarray, bootstrap: Bootstrap) -> np.ndarray:
    total = np.zeros((2, bootstrap.replicates))
    numbers = np.arange(bootstrap.replicates)
    for start in range(0, len(clients), _BLOCK):
        block = slice(start, start + _BLOCK)
        draws = uniforms(bootstrap.seed, Purpose.BOOTSTRAP, clients[block, None], numbers)
        total += per_client[:, block] @ np.searchsorted(_POISSON, draws, side="right")
    return total


@dataclass(frozen=True)
class Interval:
    """Where the value lies with the given confidence, and by which argument."""

    low: float
    high: float
    confidence: float
    method: str

    def contains(self, value: float) -> bool:
        return self.low <= value <= self.high


def value_of(sums: Sums) -> float:
    """The estimate itself; NaN where nothing in the log says anything about the policy."""
    return sums.numerator / sums.denominator if sums.denominator else nan


def standard_error(sums: Sums) -> float:
    """Of the estimate, with clients as the independent units; infinite for a single client."""
    if sums.clients < 2 or not sums.denominator:
        return inf
    value = value_of(sums)
    squares, products, sizes = sums.client_squares
    residual = max(0.0, squares - 2 * value * products + value**2 * sizes)
    return sqrt(residual * sums.clients / (sums.clients - 1)) / abs(sums.denominator)


def bootstrap_interval(sums: Sums, confidence: float) -> Interval:
    """Percentiles of the replicates that the clients' own draws made."""
    numerators, denominators = sums.replicates
    kept = denominators != 0
    if not kept.any():
        return Interval(nan, nan, confidence, "bootstrap over clients")
    tail = 100 * (1 - confidence) / 2
    low, high = np.percentile(numerators[kept] / denominators[kept], [tail, 100 - tail])
    return Interval(float(low), float(high), confidence, "bootstrap over clients")


def bernstein_interval(sums: Sums, confidence: float, span: float) -> Interval:
    """Maurer and Pontil's empirical Bernstein bound, for independent events whose terms lie within `span`."""
    if sums.events < 2:
        return Interval(-inf, inf, confidence, "empirical Bernstein")
    n, value = sums.events, value_of(sums)
    variance = max(0.0, sums.numerator_squares - n * value**2) / (n - 1)
    spread = log(4 / (1 - confidence))  # half of the error on each side
    margin = sqrt(2 * variance * spread / n) + 7 * span * spread / (3 * (n - 1))
    return Interval(value - margin, value + margin, confidence, "empirical Bernstein")


_FEW_EVENTS = 100  # fewer effective events than this say little about rewards, whatever the interval claims


_SMALL_SHARE = 0.01  # of the log's events


_FEW_CLIENTS = 20  # the bootstrap needs clients to draw from


@dataclass(frozen=True)
class Estimate:
    """What a log says about a policy it did not follow."""

    value: float
    standard_error: float
    interval: Interval
    effective_sample_size: float  # of events as good as the policy's own
    mean_weight: float  # 1 in expectation, if the propensities are right and the log explores enough
    events: int
    clients: int
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bernstein:
    """Asks for empirical Bernstein intervals: rewards, and what a reward model says of them, lie in [low, high].

    No logged propensity lies below `floor`.
    """

    low: float
    high: float
    floor: float


def combine(
    sums: Sums,
    estimator: Estimator,
    *,
    confidence: float = 0.95,
    weighting: Weighting = Plain(),  # noqa: B008 - a frozen value
    bernstein: Bernstein | None = None,
) -> Estimate:
    """The server's part: from the clients' added sums to an estimate."""
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence: must be between 0 and 1, not {confidence}")
    if bernstein is None:
        interval = bootstrap_interval(sums, confidence)
    else:
        span = estimator.span(weighting.largest(1 / bernstein.floor), bernstein.low, bernstein.high)
        if span is None:
            raise ConfigError("interval: a self-normalised estimate is no mean; use the bootstrap for it")
        interval = bernstein_interval(sums, confidence, span)
    effective = sums.importance**2 / sums.importance_squares if sums.importance_squares else 0.0
    return Estimate(
        value=value_of(sums),
        standard_error=standard_error(sums),
        interval=interval,
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
    bernstein: Bernstein | None = None,
) -> dict[str, Estimate]:
    """Several estimators on one log: `estimate(records, {"ips": IPS()})["ips"].value`."""
    if bernstein is not None:
        _check_range(records, bernstein)
    found = {}
    for name, estimator in estimators.items():
        sums = sums_of(records, estimator, weighting, bootstrap)
        bounds = bernstein if estimator.span(1.0, 0.0, 1.0) is not None else None
        found[name] = combine(sums, estimator, confidence=confidence, weighting=weighting, bernstein=bounds)
    return found


def added(parts: list[Sums]) -> Sums:
    """The sums of several clients or groups of clients as one."""
    return reduce(add, parts)


def _check_range(records: Records, bernstein: Bernstein) -> None:
    low, high = bernstein.low, bernstein.high
    room = 1e-9 * (high - low)  # a weighted mean of predictions in the range may leave it by rounding
    columns = {
        "rewards": records.rewards,
        "predicted rewards": records.predicted,
        "expected rewards": records.expected,
    }
    for name, column in columns.items():
        if column is not None and len(column) and not (column.min() >= low - room and column.max() <= high + room):
            raise ConfigError(f"interval: {name} leave the range [{low:g}, {high:g}] that the Bernstein bound is for")


def _warnings(sums: Sums, effective: float) -> list[str]:
    said = []
    if not sums.events or not sums.reached:
        return ["the log holds nothing that the policy would do: it says nothing about it"]
    if effective < _FEW_EVENTS or effective < _SMALL_SHARE * sums.events:
        said.append(f"poor overlap: {sums.events:.0f} events are worth {effective:.0f} of the policy's own")
    mean = sums.importance / sums.events
    error = sqrt(max(0.0, sums.importance_squares / sums.events - mean**2) / sums.events)
    if abs(mean - 1) > max(4 * error, 0.02):
        said.append(
            f"the weights average {mean:.3f} and should average 1: the propensities are wrong,"
            " or the log never takes actions that the policy takes"
        )
    if sums.altered > _SMALL_SHARE * sums.events:
        share = 100 * sums.altered / sums.events
        said.append(f"clipping or shrinkage touched {share:.0f}% of the weights: less variance, more bias")
    if sums.clients < _FEW_CLIENTS:
        said.append(f"only {sums.clients:.0f} clients: intervals over clients are not to be trusted")
    return said
