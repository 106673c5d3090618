"""What clients return for an off-policy estimate: sums, and the extremes they have seen. All that leaves a client."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import reduce
from math import exp, inf, nan, sqrt
from operator import add

import numpy as np

from fedbandit.core.randomness import Purpose, uniforms
from fedbandit.evaluation.ope.estimators import Estimator, Plain, Records, Weighting

_BLOCK = 4096  # clients whose replicates are drawn at a time
_MOST = 12  # a Poisson(1) variable exceeds this once in 10^10 draws
_POISSON = np.cumsum(np.cumprod([exp(-1), *(1 / k for k in range(1, _MOST + 1))]))
_ROUNDING = 1e-12  # of a sum of squares: what is below it is no variance


@dataclass(frozen=True)
class Bootstrap:
    """How many replicates, and the seed that addresses the draws."""

    replicates: int = 1000
    seed: int = 0


@dataclass(frozen=True)
class Extremes:
    """The outermost values among some events; of two groups of clients, the outermost of both."""

    low: float = inf  # of the rewards
    high: float = -inf
    predicted_low: float = inf  # of what a reward model says of them
    predicted_high: float = -inf
    weight: float = 0.0  # the largest importance weight
    events: float = 0.0  # the most that one client has

    def __add__(self, other: "Extremes") -> "Extremes":
        return Extremes(
            min(self.low, other.low),
            max(self.high, other.high),
            min(self.predicted_low, other.predicted_low),
            max(self.predicted_high, other.predicted_high),
            max(self.weight, other.weight),
            max(self.events, other.events),
        )

    @property
    def ends(self) -> tuple[float, float]:
        """Between which everything lies; where all rewards are the same, nothing shows how they differ."""
        if not self.low < self.high:
            return self.low, self.low
        return min(self.low, self.predicted_low), max(self.high, self.predicted_high)


@dataclass(frozen=True)
class Sums:
    """Sums of one client, of some, or of all: they add."""

    clients: float
    events: float
    importance: float  # of the importance weights before any clipping
    importance_squares: float
    reached: float  # events that the evaluated policy could have made
    altered: float  # events whose weight was clipped, shrunk or left out by more than a hundredth
    left_out: float  # of the importance weights, by clipping and the like
    numerator: float
    denominator: float
    client_squares: np.ndarray  # [3], over clients: numerator², numerator·denominator, denominator²
    client_fourths: (
        np.ndarray
    )  # [5], over clients: numerator⁴, numerator³·denominator, ... denominator⁴
    replicates: np.ndarray  # [5, B]: numerators, denominators, and the three squares
    extremes: Extremes = field(default_factory=Extremes)

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(
            *(getattr(self, field.name) + getattr(other, field.name) for field in fields(self))
        )


def sums_of(
    records: Records,
    estimator: Estimator,
    weighting: Weighting = Plain(),  # noqa: B008 - a frozen value
    bootstrap: Bootstrap = Bootstrap(),  # noqa: B008
) -> Sums:
    """The sums of the clients in the records: on a device one client's, at a desk those of a whole log."""
    importance = records.importance
    weights = estimator.used(weighting(importance))
    numerator, denominator = estimator.terms(records, weights)
    return sums_of_terms(
        records.clients,
        records.bounds,
        numerator,
        denominator,
        importance,
        weights,
        bootstrap,
        extremes_of(records),
    )


def extremes_of(records: Records) -> Extremes:
    """The outermost rewards, weights and sizes of the records."""
    if not len(records):
        return Extremes()
    columns = [c for c in (records.predicted, records.expected) if c is not None]
    return Extremes(
        low=float(records.rewards.min()),
        high=float(records.rewards.max()),
        predicted_low=min((float(c.min()) for c in columns), default=inf),
        predicted_high=max((float(c.max()) for c in columns), default=-inf),
        weight=float(records.importance.max()),
        events=float(np.diff(records.bounds).max()),
    )


def sums_of_terms(
    clients: np.ndarray,
    bounds: np.ndarray,
    numerator: np.ndarray,
    denominator: np.ndarray,
    importance: np.ndarray,
    weights: np.ndarray,
    bootstrap: Bootstrap,
    extremes: Extremes = Extremes(),  # noqa: B008
) -> Sums:
    """The sums of an estimate whose terms are known, [n] each; client i owns rows bounds[i]:bounds[i + 1]."""
    top, bottom = by_client(numerator, bounds), by_client(denominator, bounds)
    squares = np.stack([top * top, top * bottom, bottom * bottom])
    return Sums(
        clients=float(len(clients)),
        events=float(len(numerator)),
        importance=float(importance.sum()),
        importance_squares=float(importance @ importance),
        reached=float((importance > 0).sum()),
        altered=float((weights < 0.99 * importance).sum()),
        left_out=float((importance - weights).sum()),
        numerator=float(top.sum()),
        denominator=float(bottom.sum()),
        client_squares=squares.sum(axis=1),
        client_fourths=fourths(squares),
        replicates=replicates_of(
            np.stack([top, bottom, *squares]), lambda block: draws_of(clients[block], bootstrap)
        ),
        extremes=extremes,
    )


def by_client(values: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """The sums of the clients' values: [clients]."""
    owner = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    return np.bincount(owner, values, minlength=len(bounds) - 1)


def fourths(squares: np.ndarray) -> np.ndarray:
    """[5, ...]: the sums of fourth powers, from the squares and the product of each client, [3, ..., clients]."""
    a, b, c = squares
    return np.stack([(x * y).sum(axis=-1) for x, y in ((a, a), (a, b), (b, b), (b, c), (c, c))])


def replicates_of(per_client: np.ndarray, draws: Callable[[slice], np.ndarray]) -> np.ndarray:
    """[5, B]: the sums as they are when each client counts as often as drawn; `draws(block)` is [clients, B]."""
    total = None
    for start in range(0, max(1, per_client.shape[-1]), _BLOCK):
        block = slice(start, start + _BLOCK)
        part = per_client[..., block] @ draws(block)
        total = part if total is None else total + part
    return np.asarray(total)


def draws_of(clients: np.ndarray, bootstrap: Bootstrap) -> np.ndarray:
    """How often each client counts in each replicate: Poisson(1), [clients, B]."""
    uniform = uniforms(
        bootstrap.seed, Purpose.BOOTSTRAP, clients[:, None], np.arange(bootstrap.replicates)
    )
    return np.searchsorted(_POISSON, uniform, side="right").astype(np.float64)


def added(parts: list[Sums]) -> Sums:
    """The sums of several clients or groups of clients as one."""
    return reduce(add, parts)


def value_of(sums: Sums) -> float:
    """The estimate itself; NaN where nothing in the log says anything about the policy."""
    return sums.numerator / sums.denominator if sums.denominator else nan


def standard_error(sums: Sums) -> float:
    """Of the estimate, with clients as the independent units; infinite for a single client."""
    if sums.clients < 2 or not sums.denominator:
        return inf
    residual = float(residual_squares(value_of(sums), sums.client_squares))
    return sqrt(residual * sums.clients / (sums.clients - 1)) / abs(sums.denominator)


def residual_squares(value: "float | np.ndarray", squares: np.ndarray) -> np.ndarray:
    """The clients' squared residuals (numerator - value·denominator) added up; rounding is cut off."""
    own, products, sizes = squares
    found = own - 2 * value * products + value**2 * sizes
    return np.where(found > _ROUNDING * (own + value**2 * sizes), found, 0.0)


def effective_clients(sums: Sums) -> float:
    """Of how many clients with residuals of one size the standard error is made: few, if it is a few clients'."""
    value = value_of(sums)
    squares = float(residual_squares(value, sums.client_squares))
    signs = np.array([1, -4 * value, 6 * value**2, -4 * value**3, value**4])
    fourth = float(signs @ sums.client_fourths)
    return min(max(squares**2 / fourth, 1.0), sums.clients) if fourth > 0 else sums.clients
