"""How often the intervals of off-policy evaluation hold the truth, on 45 kinds of logs.

`python -m benchmarks.coverage [DRAWS [LAST]]` prints the table of docs/off-policy.md (the LAST kinds
alone, where that is given) and writes benchmarks/coverage.json, from which it resumes. With the
package `obp` in reach its intervals stand beside ours, on the same logs.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from fedbandit.core.ragged import Ragged
from fedbandit.data.dataset import FederatedDataset, Header, Log, Split
from fedbandit.evaluation.estimates import Interval, IntervalKind, Range, combine
from fedbandit.evaluation.estimators import (
    BUILT_IN,
    Bootstrap,
    Estimator,
    Extremes,
    Records,
    Sums,
    alike_within,
    by_client,
    draws_of,
    fourths,
    replicates_of,
)
from fedbandit.policies import Uniform
from fedbandit.studies.evaluate import EvaluationRequest, evaluate_logs

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
class Drawn(Records):
    """Records with what an app would have logged."""

    actions: np.ndarray = field(default_factory=lambda: np.empty(0))
    turned: np.ndarray = field(default_factory=lambda: np.empty(0))


@dataclass(frozen=True)
class Kind:
    """A kind of log: who acted how often, by which policy, what is asked about, and how it pays."""

    name: str
    clients: int = 100
    events: int = 10  # of a client, on average
    sizes: Literal["same", "geometric", "pareto", "telling", "unequal"] = "same"
    # telling: busy clients pay less; unequal: every fiftieth client has as much as all the others
    drift: bool = False  # half-way through its events a client pays otherwise
    moved: Sequence[float] | None = None  # how the log chooses from there on
    estimated: bool = False  # the log recorded no propensities; with contexts where it is mirrored
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
        if self.drift:
            earned = (earned + target @ means[::-1]) / 2
        if self.sizes == "telling":
            busy, idle = 0.2 * 4 * self.events, 0.8 * (self.events // 4)
            earned *= (busy * (1 - self.taste) + idle * (1 + self.taste)) / (busy + idle)
        return float(self.sign * earned + self.shift)

    def records(self, rng: np.random.Generator, draws: int) -> "Drawn":
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
        late = np.zeros(len(owner), bool)
        if self.drift or self.moved is not None:
            place = np.arange(len(owner)) - bounds[owner]
            late = 2 * place >= sizes[owner]
        turned = rng.random(len(owner)) < 0.5 if self.mirrored else np.zeros(len(owner), bool)
        chances = np.where(
            late[:, None], np.array(self.moved or self.logging, float), logging / logging.sum()
        )
        if self.estimated:
            chances = np.where(turned[:, None], chances[:, ::-1], chances)
        drawn = rng.random(len(owner))[:, None] >= np.cumsum(chances, axis=1)
        actions = np.minimum(drawn.sum(axis=1), len(logging) - 1)
        means = np.where((late & self.drift)[:, None], means[::-1], means)
        paid = means[np.arange(len(owner)), actions]
        wanted = np.where(turned, target[::-1][actions], target[actions])
        rewards = self.sign * self.payment(rng, paid * taste[owner]) + self.shift
        model = (
            self.sign * (0.7 * np.array(self.means) + 0.1 * np.mean(self.means)) + self.shift
        )  # a reward model that is a little wrong
        columns = {
            "rewards": rewards,
            "propensities": chances[np.arange(len(owner)), actions],
            "target": wanted,
            "predicted": model[actions],
            "expected": np.where(turned, target[::-1] @ model, target @ model),
        }
        if self.copies:
            columns = {name: np.repeat(column, sizes) for name, column in columns.items()}
        facts = {"actions": actions, "turned": turned}
        return Drawn(clients=np.arange(count), bounds=bounds, **columns, **facts)

    def _sizes(self, rng: np.random.Generator, count: int) -> np.ndarray:
        if self.sizes == "geometric":
            return rng.geometric(1 / self.events, count)
        if self.sizes == "pareto":
            return np.minimum(
                np.ceil(rng.pareto(1.5, count) * self.events / 2 + 1), 50 * self.events
            ).astype(int)
        if self.sizes == "unequal":
            huge = np.arange(count) % 50 == 0
            return np.where(huge, 49 * self.events, self.events)
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
    Kind("no propensities", estimated=True),
    Kind("no propensities, contexts decide", estimated=True, mirrored=True),
    Kind("no propensities, 30 clients", clients=30, estimated=True, mirrored=True),
    Kind("every 50th client has half", clients=200, sizes="unequal"),
    Kind(
        "the same of 1,000, who differ",
        clients=1000,
        events=3,
        sizes="unequal",
        taste=0.9,
        means=(0.2, 0.3, 0.4),
    ),
    Kind(
        "the same of 200, who differ",
        clients=200,
        sizes="unequal",
        taste=0.9,
        means=(0.2, 0.3, 0.4),
    ),
    Kind("rewards drift", drift=True),
    Kind("the log drifts", moved=(0.2, 0.3, 0.5)),
    Kind("log and rewards drift", drift=True, moved=(0.2, 0.3, 0.5)),
    Kind("support 1 in 200", logging=(0.695, 0.3, 0.005), clients=300),
    Kind(
        "support 1 in 200, rare rewards",
        logging=(0.695, 0.3, 0.005),
        clients=300,
        means=(0.01, 0.01, 0.02),
    ),
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
    if kind.estimated:
        return _covered_by_estimates(kind, draws, interval, replicates, seed)
    records = kind.records(np.random.default_rng(seed), draws)
    counts = draws_of(np.arange(kind.clients), Bootstrap(replicates, seed))
    found = {}
    for name, estimator in kind.estimators.items():
        found[name] = _counted(
            kind,
            [
                combine(sums, estimator, interval=interval, within=kind.within).interval
                for sums in _sums(kind, records, estimator, counts, draws)
            ],
        )
    return found


def _counted(kind: Kind, intervals: Sequence[Interval]) -> Covered:
    low, high, refused, booted = np.array(
        [(i.low, i.high, bool(i.refusal), i.method.startswith("bootstrap")) for i in intervals]
    ).T
    given = refused == 0
    holds = (low <= kind.truth + 1e-9) & (high >= kind.truth - 1e-9)
    return Covered(
        coverage=float(holds[given].mean()) if given.any() else float("nan"),
        refused=float(1 - given.mean()),
        bootstrapped=float(booted[given].mean()) if given.any() else float("nan"),
        width=float(np.median((high - low)[given])) if given.any() else float("nan"),
    )


def _covered_by_estimates(
    kind: Kind, draws: int, interval: IntervalKind, replicates: int, seed: int
) -> dict[str, Covered]:
    """The same for logs without propensities, through `fedbandit.evaluate` with its estimates of them."""
    found: dict[str, list[Interval]] = {name: [] for name in kind.estimators}
    for draw in range(draws):
        records = kind.records(np.random.default_rng([seed, draw]), 1)
        dataset = _logged(kind, records)
        said = evaluate_logs(
            dataset,
            EvaluationRequest(
                policy=_Fixed(tuple(kind.target), kind.mirrored),
                estimators=list(kind.estimators),
                estimate_propensities=True,
                interval=interval,
                replicates=replicates,
            ),
        )
        for name in found:
            found[name].append(said[name].interval)
    return {name: _counted(kind, intervals) for name, intervals in found.items()}


@dataclass(frozen=True)
class _Fixed(Uniform):
    """The kind's policy, which likes the actions in the opposite order where the context says so."""

    target: tuple[float, ...] = ()
    mirrored: bool = False

    def probabilities(self, prediction, available=None, contexts=None):  # type: ignore[no-untyped-def]
        target = np.broadcast_to(np.array(self.target), prediction.mean.shape)
        turned = contexts.shared[:, :1] > 0 if self.mirrored else False
        return np.where(turned, target[:, ::-1], target)


def _logged(kind: Kind, records: Drawn) -> FederatedDataset:
    """One log as a data set: which way an event is turned is its context."""
    n = len(records)
    target = np.array(kind.target)
    actions = records.actions
    turned = records.turned
    features = (
        np.where(turned, 1.0, -1.0)[:, None].astype(np.float32)
        if kind.mirrored
        else np.empty((n, 0), np.float32)
    )
    log = Log(actions.astype(np.int32), records.rewards, np.ones(n))
    ids = np.array([f"{c:05d}".encode() for c in range(kind.clients)])
    none = Ragged(np.zeros(n + 1, np.int64), np.empty(0, np.int32))
    split = Split(ids, records.bounds, features, none, log=log)
    names = tuple(str(a) for a in range(len(target)))
    header = Header("log", "dense", features.shape[1:], names, (0,) * len(names), logged=True)
    return FederatedDataset(header, split)


def _sums(
    kind: Kind, records: Records, estimator: Estimator, counts: np.ndarray, draws: int
) -> list[Sums]:
    """The sums of each log, computed for all at once: what `sums_of` says of one."""
    importance = records.importance
    weights = estimator.used(importance)
    shape = (draws, kind.clients)

    def per_log(values: np.ndarray) -> np.ndarray:
        return by_client(values, records.bounds).reshape(shape)

    terms = estimator.terms(records, weights)
    top, bottom = (per_log(part) for part in terms)
    alike = alike_within(*terms, records.bounds).reshape(5, *shape).sum(axis=2)
    squares = np.stack([top * top, top * bottom, bottom * bottom])
    fourth = fourths(squares)
    sizes, excess = np.diff(records.bounds).reshape(shape), per_log(importance - 1)
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
            weight_squares=float((excess[d] ** 2).sum()),
            alike=alike[:, d],
        )
        for d in range(draws)
    ]


def by_obp(kind: Kind, draws: int, seed: int = 0) -> dict[str, float]:
    """Coverage of obp's own bootstrap intervals on the same logs; none without the package."""
    try:
        from obp.ope import InverseProbabilityWeighting, SelfNormalizedInverseProbabilityWeighting
    except ImportError:
        return {}
    used = {
        "ips": InverseProbabilityWeighting(),
        "snips": SelfNormalizedInverseProbabilityWeighting(),
    }
    together = 1 if kind.estimated else draws  # as `covered` draws them
    holds: dict[str, list[bool]] = {name: [] for name in used}
    for draw in range(draws):
        if draw % together == 0:
            addressed = np.random.default_rng([seed, draw] if kind.estimated else seed)
            records = kind.records(addressed, together)
            first = records.bounds[:: kind.clients]
        rows = slice(first[draw % together], first[draw % together + 1])
        n, wanted = rows.stop - rows.start, records.target[rows]
        shares = np.bincount(records.actions[rows], minlength=len(kind.target)) / n
        guess = shares[records.actions[rows]]  # what its users do where a log recorded none
        for name, estimator in used.items():
            said = estimator.estimate_interval(
                reward=records.rewards[rows],
                action=np.zeros(n, int),  # the logged one against all others
                pscore=guess if kind.estimated else records.propensities[rows],
                action_dist=np.stack([wanted, 1 - wanted], axis=1)[:, :, None],
                n_bootstrap_samples=200,
                random_state=draw,
            )
            _, low, high = said.values()
            holds[name].append(bool(low <= kind.truth <= high))
    return {name: float(np.mean(one)) for name, one in holds.items()}


def table(
    draws: int,
    say: Callable[[str], None] = print,
    out: Path | None = None,
    kinds: Sequence[Kind] = KINDS,
) -> None:
    """Print coverage of all kinds and estimators as Markdown, each line as it is known.

    What `out` holds already is not computed again.
    """
    names = list(KINDS[0].estimators)
    known = json.loads(out.read_text()) if out is not None and out.exists() else {}
    said = [f"{name} (refused)" for name in names] + ["Bernstein, ips", "obp: ips", "obp: snips"]
    say("| log | " + " | ".join(said) + " |")
    say("| --- |" + " --- |" * len(said))
    for kind in kinds:
        own = draws // 5 if kind.estimated else draws
        if known.get(kind.name, {}).get("draws") != own:
            found = covered(kind, own)
            bound = covered(kind, max(1, own // 4), interval="bernstein", replicates=0)["ips"]
            row = {name: asdict(one) for name, one in {**found, "bernstein": bound}.items()}
            known[kind.name] = {"draws": own, **row}
        row = known[kind.name]
        if not row.get("obp"):
            row["obp"] = {} if kind.copies else by_obp(kind, own)
        if out is not None:
            out.write_text(json.dumps(known, indent=1) + "\n")
        cells = [_cell(Covered(**row[name])) for name in (*names, "bernstein")]
        theirs = [f"{row['obp'][name]:.2f}" if row["obp"] else "" for name in ("ips", "snips")]
        say("| " + " | ".join([kind.name, *cells, *theirs]) + " |")


def _cell(found: Covered) -> str:
    refused = f" ({100 * found.refused:.0f}%)" if found.refused >= 0.005 else ""
    return f"–{refused}" if found.refused == 1 else f"{found.coverage:.3f}{refused}"


if __name__ == "__main__":
    asked, last = [*map(int, sys.argv[1:]), *(2000, len(KINDS))[len(sys.argv) - 1 :]]
    kept = Path(__file__).with_suffix(".json")
    table(asked, lambda line: print(line, flush=True), kept, KINDS[-last:])
