"""How often the intervals of off-policy evaluation hold the truth, on thirty kinds of logs.

`python -m benchmarks.coverage` prints the table of docs/off-policy.md.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from fedbandit.evaluation.ope.estimate import combine
from fedbandit.evaluation.ope.estimators import BUILT_IN, Estimator, Records
from fedbandit.evaluation.ope.intervals import IntervalKind, Range
from fedbandit.evaluation.ope.sums import (
    Bootstrap,
    Extremes,
    Sums,
    by_client,
    draws_of,
    fourths,
    replicates_of,
)

Payment = Callable[[np.random.Generator, np.ndarray], np.ndarray]
"""Draws a reward for every mean."""


def bernoulli(rng: np.random.Generator, mean: np.ndarray) -> np.ndarray:
    """One or nothing."""
    return (rng.random(len(mean)) < mean).astype(float)


def exponential(rng: np.random.Generator, mean: np.ndarray) -> np.ndarray:
    """Waiting times."""
    return mean * rng.exponential(1.0, len(mean))


def gaussian(rng: np.random.Generator, mean: np.ndarray) -> np.ndarray:
    """Of either sign, with noise of size 2."""
    return mean + 2 * rng.standard_normal(len(mean))


def lognormal(sigma: float) -> Payment:
    """Amounts of money: most are small, a few are large."""
    return lambda rng, mean: mean * np.exp(sigma * rng.standard_normal(len(mean)) - sigma**2 / 2)


def pareto(index: float) -> Payment:
    """Heavier tails than a lognormal's; below an index of 2 there is no variance."""
    return lambda rng, mean: mean * rng.pareto(index, len(mean)) * (index - 1)


@dataclass(frozen=True)
class Kind:
    """A kind of log: who acted how often, by which policy, what is asked about, and how it pays."""

    name: str
    clients: int = 100
    events: int = 10  # of a client, on average
    sizes: Literal["same", "geometric", "pareto", "telling"] = (
        "same"  # telling: busy clients pay less
    )
    logging: Sequence[float] = (0.6, 0.3, 0.1)
    target: Sequence[float] = (0.1, 0.2, 0.7)
    means: Sequence[float] = (0.3, 0.5, 0.6)
    payment: Payment = bernoulli
    shift: float = 0.0  # added to every reward
    sign: float = 1.0
    taste: float = 0.0  # clients pay more or less than the mean by this share
    copies: bool = False  # all events of a client are one and the same
    mirrored: bool = (
        False  # in half of the events the policy likes the actions in the opposite order
    )
    within: Range | None = None  # what the one who evaluates knows
    estimators: Mapping[str, Estimator] = field(
        default_factory=lambda: {name: BUILT_IN[name] for name in ("ips", "snips", "dr", "switch")}
    )

    @property
    def truth(self) -> float:
        """What the policy earns per event."""
        target, means = np.array(self.target), np.array(self.means)
        earned = (target @ means + target[::-1] @ means) / 2 if self.mirrored else target @ means
        if self.sizes == "telling":
            busy, idle = 0.2 * 4 * self.events, 0.8 * (self.events // 4)
            earned *= (busy * (1 - self.taste) + idle * (1 + self.taste)) / (busy + idle)
        return float(self.sign * earned + self.shift)

    def records(self, rng: np.random.Generator, draws: int) -> Records:
        """Some logs one after another: client number d·clients + c is the c-th of log d."""
        count = draws * self.clients
        sizes = self._sizes(rng, count)
        liked = sizes <= self.events if self.sizes == "telling" else rng.random(count) < 0.5
        taste = np.where(liked, 1 + self.taste, 1 - self.taste)
        bounds = np.concatenate([[0], np.cumsum(sizes)])
        owner = np.arange(count) if self.copies else np.repeat(np.arange(count), sizes)
        logging, target, means = (
            np.array(a, float) for a in (self.logging, self.target, self.means)
        )
        actions = np.searchsorted(
            np.cumsum(logging), rng.random(len(owner)) * logging.sum(), side="right"
        )
        turned = rng.random(len(owner)) < 0.5 if self.mirrored else np.zeros(len(owner), bool)
        wanted = np.where(turned, target[::-1][actions], target[actions])
        rewards = self.sign * self.payment(rng, means[actions] * taste[owner]) + self.shift
        model = (
            self.sign * (0.7 * means + 0.1 * means.mean()) + self.shift
        )  # a reward model that is a little wrong
        columns = {
            "rewards": rewards,
            "propensities": logging[actions],
            "target": wanted,
            "predicted": model[actions],
            "expected": np.where(turned, target[::-1] @ model, target @ model),
        }
        if self.copies:
            columns = {name: np.repeat(column, sizes) for name, column in columns.items()}
        return Records(clients=np.arange(count), bounds=bounds, **columns)

    def _sizes(self, rng: np.random.Generator, count: int) -> np.ndarray:
        if self.sizes == "geometric":
            return rng.geometric(1 / self.events, count)
        if self.sizes == "pareto":
            return np.minimum(
                np.ceil(rng.pareto(1.5, count) * self.events / 2 + 1), 50 * self.events
            ).astype(int)
        if self.sizes == "telling":
            return np.where(rng.random(count) < 0.2, 4 * self.events, self.events // 4)
        return np.full(count, self.events)


def _greedy(epsilon: float, actions: int) -> tuple[float, ...]:
    return (1 - epsilon + epsilon / actions, *[epsilon / actions] * (actions - 1))


_TEN = tuple(np.linspace(0.2, 0.6, 10))

KINDS = (
    Kind("plain"),
    Kind("the log's own policy", target=(0.6, 0.3, 0.1)),
    Kind("many clients", clients=1000, events=5),
    Kind("one event a client", clients=300, events=1),
    Kind("sizes vary", sizes="geometric"),
    Kind("a few huge clients", clients=200, sizes="pareto"),
    Kind("busy clients pay less", sizes="telling", taste=0.6),
    Kind("clients differ", taste=0.9, means=(0.2, 0.3, 0.4)),
    Kind("copies of one event", clients=150, copies=True),
    Kind("copies, sizes vary", clients=150, copies=True, sizes="geometric"),
    Kind("rewards 1 in 60", means=(0.01, 0.01, 0.02)),
    Kind("rewards 1 in 600", clients=300, means=(0.001, 0.001, 0.002)),
    Kind("rewards 1 in 200, one event", clients=1000, events=1, means=(0.003, 0.003, 0.006)),
    Kind("no reward matched", means=(0.2, 0.2, 0.0), target=(0.0, 0.0, 1.0)),
    Kind("rewards elsewhere", means=(0.1, 0.1, 0.01), target=(0.0, 0.0, 1.0)),
    Kind("rewards nearly always", means=(0.95, 0.97, 0.99)),
    Kind("exponential", payment=exponential),
    Kind("lognormal 1", payment=lognormal(1.0)),
    Kind("lognormal 1.5", clients=50, payment=lognormal(1.5)),
    Kind("lognormal 2", payment=lognormal(2.0)),
    Kind("pareto 2.5", payment=pareto(2.5)),
    Kind("pareto 1.8", payment=pareto(1.8)),
    Kind("gaussian", payment=gaussian),
    Kind("negative", sign=-1.0, payment=exponential),
    Kind("rare losses", sign=-1.0, means=(0.01, 0.02, 0.02)),
    Kind("a win or a loss", sign=2.0, shift=-1.0),
    Kind("5 clients", clients=5),
    Kind("10 clients", clients=10),
    Kind("20 clients, rare rewards", clients=20, means=(0.02, 0.05, 0.05)),
    Kind("8 clients, lognormal", clients=8, payment=lognormal(1.0)),
    Kind(
        "ε-greedy 0.1, 10 actions",
        logging=_greedy(0.1, 10),
        target=_greedy(0.1, 10)[::-1],
        means=_TEN,
    ),
    Kind(
        "ε-greedy 0.02",
        clients=200,
        logging=_greedy(0.02, 10),
        target=_greedy(0.02, 10)[::-1],
        means=_TEN,
    ),
    Kind(
        "ε-greedy, half alike",
        logging=_greedy(0.1, 10),
        target=_greedy(0.5, 10)[::-1],
        means=_TEN,
        mirrored=True,
    ),
    Kind("an action never logged", logging=(0.7, 0.3, 0.0)),
)


@dataclass(frozen=True)
class Covered:
    """Of an estimator's intervals on one kind of log."""

    coverage: float  # of those that were given
    refused: float  # the share that was not
    bootstrapped: float  # the share of those given that are bootstrap intervals
    width: float  # the median


def covered(
    kind: Kind,
    draws: int,
    *,
    interval: IntervalKind = "bootstrap",
    replicates: int = 1000,
    seed: int = 0,
) -> dict[str, Covered]:
    """Draw logs of a kind, and see how many intervals hold the truth; the replicates of all logs are the same ones."""
    records = kind.records(np.random.default_rng(seed), draws)
    counts = draws_of(np.arange(kind.clients), Bootstrap(replicates, seed))
    found = {}
    for name, estimator in kind.estimators.items():
        low, high, refused, booted = np.array(
            [
                (i.low, i.high, bool(i.refusal), i.method.startswith("bootstrap"))
                for sums in _sums(kind, records, estimator, counts, draws)
                for i in [combine(sums, estimator, interval=interval, within=kind.within).interval]
            ]
        ).T
        given = refused == 0
        holds = (low <= kind.truth + 1e-9) & (high >= kind.truth - 1e-9)
        found[name] = Covered(
            coverage=float(holds[given].mean()) if given.any() else float("nan"),
            refused=float(1 - given.mean()),
            bootstrapped=float(booted[given].mean()) if given.any() else float("nan"),
            width=float(np.median((high - low)[given])) if given.any() else float("nan"),
        )
    return found


def _sums(
    kind: Kind, records: Records, estimator: Estimator, counts: np.ndarray, draws: int
) -> list[Sums]:
    """The sums of each log, computed for all at once: what `sums_of` says of one."""
    importance = records.importance
    weights = estimator.used(importance)
    shape = (draws, kind.clients)

    def per_log(values: np.ndarray) -> np.ndarray:
        return by_client(values, records.bounds).reshape(shape)

    top, bottom = (per_log(part) for part in estimator.terms(records, weights))
    squares = np.stack([top * top, top * bottom, bottom * bottom])
    fourth = fourths(squares)
    sizes = np.diff(records.bounds).reshape(shape)
    starts = records.bounds[:: kind.clients][:-1]
    assert records.predicted is not None
    assert records.expected is not None
    low, *lows = (
        np.minimum.reduceat(c, starts)
        for c in (records.rewards, records.predicted, records.expected)
    )
    high, *highs = (
        np.maximum.reduceat(c, starts)
        for c in (records.rewards, records.predicted, records.expected)
    )
    heaviest = np.maximum.reduceat(importance, starts)
    ends = np.stack(
        [low, high, np.min(lows, axis=0), np.max(highs, axis=0), heaviest, sizes.max(axis=1)]
    )
    totals = {
        name: per_log(values).sum(axis=1)
        for name, values in {
            "importance": importance,
            "importance_squares": importance**2,
            "reached": importance > 0,
            "altered": weights < 0.99 * importance,
            "left_out": importance - weights,
        }.items()
    }
    return [
        Sums(
            clients=float(kind.clients),
            events=float(sizes[d].sum()),
            **{name: float(total[d]) for name, total in totals.items()},
            numerator=float(top[d].sum()),
            denominator=float(bottom[d].sum()),
            client_squares=squares[:, d].sum(axis=1),
            client_fourths=fourth[:, d],
            replicates=replicates_of(
                np.stack([top[d], bottom[d], *squares[:, d]]), lambda block: counts[block]
            ),
            extremes=Extremes(*ends[:, d].tolist()),
        )
        for d in range(draws)
    ]


def table(draws: int, say: Callable[[str], None] = print) -> None:
    """Print coverage of all kinds and estimators as Markdown, each line as it is known."""
    names = list(KINDS[0].estimators)
    say("| log | " + " | ".join(f"{name} (refused)" for name in names) + " | Bernstein, ips |")
    say("| --- |" + " --- |" * (len(names) + 1))
    for kind in KINDS:
        found = covered(kind, draws)
        bound = covered(kind, max(1, draws // 4), interval="bernstein", replicates=0)["ips"]
        say(
            "| "
            + " | ".join([kind.name, *(_cell(found[name]) for name in names), _cell(bound)])
            + " |"
        )


def _cell(found: Covered) -> str:
    refused = f" ({100 * found.refused:.0f}%)" if found.refused >= 0.005 else ""
    return f"–{refused}" if found.refused == 1 else f"{found.coverage:.3f}{refused}"


if __name__ == "__main__":
    table(int(sys.argv[1]) if len(sys.argv) > 1 else 2000, lambda line: print(line, flush=True))
