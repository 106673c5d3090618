"""What a client returns: sums, and nothing else. Adding them up is all the server does, so it need not see any one.

The bootstrap over clients fits this too: each client draws how often it counts in each replicate (a Poisson variable,
as in the Poisson bootstrap) and returns its sums times that, so that what is added up are the replicates themselves.
"""

from dataclasses import dataclass, fields
from math import exp

import numpy as np

from fedbandit.evaluation.ope.estimators import Estimator
from fedbandit.evaluation.ope.records import Records
from fedbandit.evaluation.ope.weighting import Plain, Weighting
from fedbandit.randomness import Purpose, uniforms

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
