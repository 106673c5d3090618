"""Off-policy estimators, and the sums of them that a client returns: all that leaves it.

An estimate is a ratio of two sums over the events of all clients. A client adds up its own, the
server adds up the clients', and `evaluation.estimates` makes values and intervals of them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from math import exp, inf, nan, sqrt

import numpy as np

from fedbandit.core.errors import DataError, refuse
from fedbandit.core.randomness import Purpose, uniforms

_COLUMNS = ("rewards", "propensities", "target", "predicted", "expected")
_BLOCK = 4096  # clients whose replicates are drawn at a time
_MOST = 12  # a Poisson(1) variable exceeds this once in 10^10 draws
_POISSON = np.cumsum(np.cumprod([exp(-1), *(1 / k for k in range(1, _MOST + 1))]))
_ROUNDING = 1e-12  # of a sum of squares: what is below it is no variance


@dataclass(frozen=True)
class Records:
    """Logged events of some clients, in float64; client i owns rows bounds[i]:bounds[i + 1].

    `predicted` and `expected` come from a reward model. The direct method and the doubly robust
    estimator need one.

    Examples:
        >>> log = Records(
        ...     clients=np.array([0, 1]),
        ...     bounds=np.array([0, 1, 3]),
        ...     rewards=np.array([1.0, 0.0, 1.0]),
        ...     propensities=np.array([0.5, 0.5, 0.25]),
        ...     target=np.array([1.0, 0.0, 0.5]),
        ... )
        >>> log.importance, len(log.client(1))
        (array([2., 0., 2.]), 2)
    """

    clients: np.ndarray  # int64 [clients]: a number of each client's own, for its bootstrap draws
    bounds: np.ndarray  # int64 [clients + 1]
    rewards: np.ndarray  # [n]
    propensities: np.ndarray  # [n]: with which the logging policy took the action
    target: np.ndarray  # [n]: with which the evaluated policy takes it
    predicted: np.ndarray | None = None  # [n]: the modelled reward of the action taken
    expected: np.ndarray | None = None  # [n]: the modelled reward of the evaluated policy

    def __post_init__(self) -> None:
        for name in _COLUMNS:
            column = getattr(self, name)
            if column is None:
                continue
            if len(column) != self.bounds[-1]:
                raise DataError(f"{name}: {len(column)} values for {self.bounds[-1]} events")
            if len(bad := np.flatnonzero(~np.isfinite(column))):
                raise DataError(f"{name}: event {int(bad[0])} is not finite")
        logged, target = self.propensities, self.target
        refuse(
            (
                ((logged <= 0) | (logged > 1)).any(),
                "propensities: must be above 0 and at most 1",
            ),
            (
                ((target < 0) | (target > 1 + 1e-6)).any(),
                "target: probabilities must lie between 0 and 1",
            ),
            error=DataError,
        )

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def num_clients(self) -> int:
        """The number of clients, also of those without events."""
        return len(self.bounds) - 1

    @property
    def importance(self) -> np.ndarray:
        """Target probability over propensity: how much more often the policy does what was done,
        [n].
        """
        return np.asarray(self.target / self.propensities)

    def client(self, position: int) -> "Records":
        """The records of one client, as it would hold them."""
        rows = slice(self.bounds[position], self.bounds[position + 1])
        columns = {name: getattr(self, name) for name in _COLUMNS}
        return replace(
            self,
            clients=self.clients[position : position + 1],
            bounds=np.array([0, rows.stop - rows.start]),
            **{name: c[rows] for name, c in columns.items() if c is not None},
        )


class Weighting:
    """Turns importance weights into the weights that an estimator uses.

    One of your own defines `__call__`, and `largest` where a smaller weight can come out of a
    larger one.
    """

    def __call__(self, importance: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def largest(self, importance: float) -> float:
        """The largest weight that can come out when no importance weight exceeds the given one."""
        return float(self(np.asarray(importance)))


@dataclass(frozen=True)
class Plain(Weighting):
    """Importance weights unchanged: unbiased, and of any size."""

    def __call__(self, importance: np.ndarray) -> np.ndarray:
        return importance


@dataclass(frozen=True)
class Clipped(Weighting):
    """No weight above `limit`. Where rewards are not negative, IPS then errs downwards."""

    limit: float

    def __post_init__(self) -> None:
        _require_positive("limit", self.limit)

    def __call__(self, importance: np.ndarray) -> np.ndarray:
        return np.asarray(np.minimum(importance, self.limit))


@dataclass(frozen=True)
class Shrunk(Weighting):
    """Optimistic shrinkage (Su et al., 2020): `strength·w / (w² + strength)`.

    No weight exceeds sqrt(strength) / 2. Small weights hardly change, large ones vanish.

    Examples:
        >>> Shrunk(100.0)(np.array([0.1, 10.0, 1000.0])).round(3)
        array([0.1, 5. , 0.1])
    """

    strength: float

    def __post_init__(self) -> None:
        _require_positive("strength", self.strength)

    def __call__(self, importance: np.ndarray) -> np.ndarray:
        return self.strength * importance / (importance**2 + self.strength)

    def largest(self, importance: float) -> float:
        peak = sqrt(self.strength)
        return peak / 2 if importance >= peak else super().largest(importance)


def _require_positive(name: str, value: float) -> None:
    if not 0 < value < inf:
        raise ValueError(f"{name} must be positive and finite, not {value}")


class Estimator:
    """The estimate is the sum of `terms(...)[0]` over the sum of `terms(...)[1]`, over all events.

    An estimator of your own defines `terms` and `limits`, and what differs of the others:

    - `used(weights)`: the weights it uses of those it is given.
    - `limits(value, weight, low, high)`: between which an event's residual (first term minus value
      times second) lies, for rewards in [low, high]; None where residuals do not show how wrong
      the estimate is.
    - `unseen(value, low, high)`: how far the truth may lie from the value, down and up, for the
      share of the policy's choices that the estimate sees nothing of.
    """

    needs_model = False

    def used(self, weights: np.ndarray) -> np.ndarray:
        return weights

    def terms(self, records: Records, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        raise NotImplementedError

    def limits(
        self, value: float, weight: float, low: float, high: float
    ) -> tuple[float, float] | None:
        raise NotImplementedError

    def unseen(self, value: float, low: float, high: float) -> tuple[float, float]:
        return low - high, high - low


class IPS(Estimator):
    """Inverse propensity scoring: mean of w·r.

    Unbiased where the log explores whatever the policy does; varies a lot with large weights.
    """

    def terms(self, records: Records, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return weights * records.rewards, np.ones(len(records))

    def limits(
        self, value: float, weight: float, low: float, high: float
    ) -> tuple[float, float] | None:
        return weight * min(low, 0.0) - value, weight * max(high, 0.0) - value

    def unseen(self, value: float, low: float, high: float) -> tuple[float, float]:
        return low, high


class SelfNormalisedIPS(Estimator):
    """Sum of w·r over sum of w: a little bias for much less variance.

    Never leaves the range of the rewards, whatever the weights.
    """

    def terms(self, records: Records, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return weights * records.rewards, weights

    def limits(
        self, value: float, weight: float, low: float, high: float
    ) -> tuple[float, float] | None:
        return weight * (low - value), weight * (high - value)

    def unseen(self, value: float, low: float, high: float) -> tuple[float, float]:
        return low - value, high - value


class DirectMethod(Estimator):
    """The reward model's expectation of the policy: no variance from weights, all its bias."""

    needs_model = True

    def terms(self, records: Records, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return _model(records)[1], np.ones(len(records))

    def limits(
        self, value: float, weight: float, low: float, high: float
    ) -> tuple[float, float] | None:
        return None


class DoublyRobustEstimator(Estimator):
    """The direct method, corrected by w·(r - predicted).

    Unbiased if the propensities are right, or the model is.
    """

    needs_model = True

    def terms(self, records: Records, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        predicted, expected = _model(records)
        return expected + weights * (records.rewards - predicted), np.ones(len(records))

    def limits(
        self, value: float, weight: float, low: float, high: float
    ) -> tuple[float, float] | None:
        return low - weight * (high - low) - value, high + weight * (high - low) - value


@dataclass(frozen=True)
class Switch(DoublyRobustEstimator):
    """SWITCH (Wang et al., 2017): doubly robust where weights are at most `limit`, else the model.

    Its interval allows for a model that is wrong wherever it is relied on.
    """

    limit: float = 10.0

    def __post_init__(self) -> None:
        _require_positive("limit", self.limit)

    def used(self, weights: np.ndarray) -> np.ndarray:
        return np.where(weights <= self.limit, weights, 0.0)


BUILT_IN: dict[str, Estimator] = {
    "ips": IPS(),
    "snips": SelfNormalisedIPS(),
    "dm": DirectMethod(),
    "dr": DoublyRobustEstimator(),
    "switch": Switch(),
}


def _model(records: Records) -> tuple[np.ndarray, np.ndarray]:
    if records.predicted is None or records.expected is None:
        raise DataError("the direct method and the doubly robust estimator need a reward model")
    return records.predicted, records.expected


@dataclass(frozen=True)
class Bootstrap:
    """The number of replicates, and the seed that addresses their draws."""

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

    @classmethod
    def of(cls, records: Records) -> "Extremes":
        """The outermost rewards, weights and sizes of the records."""
        if not len(records):
            return cls()
        columns = [c for c in (records.predicted, records.expected) if c is not None]
        return cls(
            low=float(records.rewards.min()),
            high=float(records.rewards.max()),
            predicted_low=min((float(c.min()) for c in columns), default=inf),
            predicted_high=max((float(c.max()) for c in columns), default=-inf),
            weight=float(records.importance.max()),
            events=float(np.diff(records.bounds).max()),
        )

    def __add__(self, other: "Extremes") -> "Extremes":
        lower = dict.fromkeys(("low", "predicted_low"), min)
        return Extremes(
            *(
                lower.get(f.name, max)(getattr(self, f.name), getattr(other, f.name))
                for f in fields(self)
            )
        )

    @property
    def ends(self) -> tuple[float, float]:
        """The range of everything; a single point where all rewards are the same."""
        if not self.low < self.high:
            return self.low, self.low
        return min(self.low, self.predicted_low), max(self.high, self.predicted_high)


@dataclass(frozen=True)
class Sums:
    """Sums of one client, of some, or of all: they add.

    Everything an estimate and its interval are made of. Over many clients they can be added by
    secure aggregation, except for `extremes`.
    """

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
    client_fourths: np.ndarray  # [5], over clients: numerator⁴, ... denominator⁴
    replicates: np.ndarray  # [5, B]: numerators, denominators, and the three squares
    extremes: Extremes = field(default_factory=Extremes)
    weight_squares: float = 0.0  # over clients, of (importance weights - events): their own error
    alike: np.ndarray = field(default_factory=lambda: np.zeros(5))  # `alike_within`, over clients

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def value(self) -> float:
        """The estimate itself; NaN where nothing in the log says anything about the policy."""
        return self.numerator / self.denominator if self.denominator else nan

    @property
    def standard_error(self) -> float:
        """Of the estimate, with clients as the independent units; infinite for a single client."""
        if self.clients < 2 or not self.denominator:
            return inf
        residual = float(residual_squares(self.value, self.client_squares))
        return sqrt(residual * self.clients / (self.clients - 1)) / abs(self.denominator)

    @property
    def unequal_error(self) -> float:
        """The standard error if clients of every size differ as all do on average.

        Four of 200 clients may have half of the events: how they could differ is seen in the rest.
        """
        squares, clients, sizes = self.alike[:3], self.alike[3], self.alike[4]
        if not clients or not self.denominator:
            return 0.0
        variance = float(residual_squares(self.value, squares)) / clients
        return sqrt(variance * sizes) / abs(self.denominator)

    @property
    def mean_weight(self) -> float:
        """Of the importance weights: 1 in expectation, if propensities are right and all is
        explored.
        """
        return self.importance / self.events if self.events else 0.0

    @property
    def weight_error(self) -> float:
        """The standard error of `mean_weight`: over events, or over clients where these vary more."""
        if not self.events:
            return inf
        spread = max(0.0, self.importance_squares / self.events - self.mean_weight**2)
        about = self.mean_weight - 1
        per_client = max(0.0, self.weight_squares - (about * self.events) ** 2 / self.clients)
        return max(sqrt(spread / self.events), sqrt(per_client) / self.events)

    @property
    def effective_sample_size(self) -> float:
        """The number of events of the policy's own that the log is worth."""
        return self.importance**2 / self.importance_squares if self.importance_squares else 0.0

    @property
    def effective_clients(self) -> float:
        """Clients with residuals of one size that the standard error is made of: few, if a few
        decide.
        """
        value = self.value
        squares = float(residual_squares(value, self.client_squares))
        signs = np.array([1, -4 * value, 6 * value**2, -4 * value**3, value**4])
        fourth = float(signs @ self.client_fourths)
        return min(max(squares**2 / fourth, 1.0), self.clients) if fourth > 0 else self.clients


def sums_of(
    records: Records,
    estimator: Estimator,
    weighting: Weighting = Plain(),  # noqa: B008 - a frozen value
    bootstrap: Bootstrap = Bootstrap(),  # noqa: B008
) -> Sums:
    """The sums of the clients in the records: on a device one client's, at a desk a whole log's."""
    weights = estimator.used(weighting(records.importance))
    return sums_of_terms(
        records.clients,
        records.bounds,
        *estimator.terms(records, weights),
        records.importance,
        weights,
        bootstrap,
        Extremes.of(records),
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
    """The sums of an estimate whose terms are known, [n] each; client i owns rows
    bounds[i]:bounds[i + 1].
    """
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
        weight_squares=float((by_client(importance - 1, bounds) ** 2).sum()),
        alike=alike_within(numerator, denominator, bounds).sum(axis=1),
    )


def alike_within(numerator: np.ndarray, denominator: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """How far the events of a client are alike, [5, clients]: the mean product of two different
    events' numerators, of numerator and denominator, of denominators; whether it has two events;
    and the square of its size.
    """
    sizes = np.diff(bounds).astype(float)
    several = sizes > 1
    columns = []
    for a, b in ((numerator, numerator), (numerator, denominator), (denominator, denominator)):
        others = by_client(a, bounds) * by_client(b, bounds) - by_client(a * b, bounds)
        columns.append(np.where(several, others / np.maximum(sizes * (sizes - 1), 1), 0.0))
    return np.stack([*columns, several, sizes**2])


def by_client(values: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """The sum of each client's values: [clients]."""
    owner = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    return np.bincount(owner, values, minlength=len(bounds) - 1)


def fourths(squares: np.ndarray) -> np.ndarray:
    """[5, ...]: sums of fourth powers, from the squares and the product of each client, [3, ...,
    clients].
    """
    a, b, c = squares
    return np.stack([(x * y).sum(axis=-1) for x, y in ((a, a), (a, b), (b, b), (b, c), (c, c))])


def replicates_of(per_client: np.ndarray, draws: Callable[[slice], np.ndarray]) -> np.ndarray:
    """[5, B]: the sums where each client counts as often as drawn; `draws(block)` is [clients, B]."""
    starts = range(0, max(1, per_client.shape[-1]), _BLOCK)
    blocks = (slice(start, start + _BLOCK) for start in starts)
    return np.asarray(sum(per_client[..., block] @ draws(block) for block in blocks))


def draws_of(clients: np.ndarray, bootstrap: Bootstrap) -> np.ndarray:
    """Counts of each client in each replicate: Poisson(1), [clients, B]."""
    uniform = uniforms(
        bootstrap.seed, Purpose.BOOTSTRAP, clients[:, None], np.arange(bootstrap.replicates)
    )
    return np.searchsorted(_POISSON, uniform, side="right").astype(np.float64)


def residual_squares(value: "float | np.ndarray", squares: np.ndarray) -> np.ndarray:
    """The clients' squared residuals (numerator - value·denominator) summed; rounding is cut off."""
    own, products, sizes = squares
    found = own - 2 * value * products + value**2 * sizes
    return np.where(found > _ROUNDING * (own + value**2 * sizes), found, 0.0)
