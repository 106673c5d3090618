"""An audit of a plan's privacy: planted clients in the noise and the sampling that real rounds use,
and their attacker.

Each planted client owns one coordinate of the sum, so one run tries thousands. Says what it could
have found, too.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from fedbandit.core.randomness import Purpose, generator
from fedbandit.federated.cohorts import CyclicPoissonCohorts, PoissonCohorts
from fedbandit.federated.pipeline import in_steps
from fedbandit.privacy.accounting import epsilon_of
from fedbandit.privacy.noise import (
    RELEASE,
    GridMean,
    GridNoise,
    NoiseStream,
    PrivateMean,
    SimulatedNoise,
)
from fedbandit.privacy.plan import PrivacyPlan
from fedbandit.privacy.strategies import largest_column

Source = Literal["simulation", "deployment"]
Verdict = Literal["passed", "violated", "inconclusive"]
MISTAKE = 1e-3  # how often an audit may blame a mechanism that keeps its promise
_POWER = 1.645  # standard deviations: what an audit can find, it finds in 95% of its repetitions
SHORT = 0.5  # of the stated noise: what an audit with power finds
FEWEST, MOST_TRIALS = 200, 400_000


@dataclass(frozen=True)
class Stated:
    """What a plan promises about one release, as the worst client sees it: K turns, each a shift in
    unit noise.
    """

    shifts: tuple[float, ...]  # [K], in standard deviations
    probability: float  # of each turn; 1: the attacker knows the turns, and K is 1
    multiplier: float  # of each turn, for the accounting
    delta: float

    def score(self, seen: np.ndarray) -> np.ndarray:
        """The likelihood ratio of the two worlds, or what rises with it, of observations [K,
        trials].
        """
        shifts = np.array(self.shifts)[:, None]
        exponents = np.minimum(shifts * seen - shifts**2 / 2, 700.0)
        if self.probability == 1:
            return np.asarray(exponents.sum(axis=0))
        return np.asarray(np.log1p(self.probability * np.expm1(exponents)).sum(axis=0))

    @property
    def epsilon(self) -> float:
        return _epsilon(self.probability, self.multiplier, len(self.shifts), self.delta)

    def most_hits(self, alarms: np.ndarray) -> np.ndarray:
        """The largest share of hits that the whole delta(epsilon) profile allows at a share of
        false alarms.
        """
        epsilons, deltas = _profile(self.probability, self.multiplier, len(self.shifts))
        x = np.asarray(alarms, float)[..., None]
        accused, acquitted = np.exp(epsilons) * x + deltas, 1 - np.exp(-epsilons) * (1 - x - deltas)
        return np.asarray(np.minimum(np.minimum(accused, acquitted).min(axis=-1), 1.0))


@lru_cache(maxsize=64)
def _epsilon(probability: float, multiplier: float, turns: int, delta: float) -> float:
    from dp_accounting import GaussianDpEvent

    event = (
        GaussianDpEvent(multiplier)
        if probability == 1
        else _sampled(probability, multiplier, turns)
    )
    return epsilon_of(event, delta, "pld")


def _sampled(probability: float, multiplier: float, turns: int) -> Any:
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent

    return SelfComposedDpEvent(
        PoissonSampledDpEvent(probability, GaussianDpEvent(multiplier)), turns
    )


@lru_cache(maxsize=64)
def _profile(probability: float, multiplier: float, turns: int) -> tuple[np.ndarray, np.ndarray]:
    from dp_accounting import pld

    accountant = pld.PLDAccountant(value_discretization_interval=1e-3)
    accountant.compose(_sampled(probability, multiplier, turns))
    epsilons = np.concatenate(
        [np.linspace(0, 1, 41), np.linspace(1.1, 8, 70), np.linspace(8.5, 20, 24)]
    )
    return epsilons, np.array([accountant.get_delta(float(epsilon)) for epsilon in epsilons])


@dataclass(frozen=True)
class Finding:
    """What the attack on one release came to."""

    what: str  # updates, or the count that moves the clip norm
    source: Source
    verdict: Verdict
    stated: float  # epsilon of this release alone
    lower_bound: float  # of the true epsilon, with confidence 1 - MISTAKE
    one_run: float  # the same by Steinke et al. (arXiv 2305.08846): holds even if canaries depended on each other
    trials: int  # planted clients, half of them absent
    needed: int  # trials with which half the noise would be found in 95% of audits


def audit(
    plan: PrivacyPlan,
    source: Source = "simulation",
    *,
    trials: int | None = None,
    actual: float = 1.0,
    seed: int = 0,
) -> list[Finding]:
    """Attack every release of the plan; `actual` is the share of the noise that is really added, to
    see it fail.

    Without a number of trials it takes as many as it needs to find half the noise, up to
    `MOST_TRIALS`.
    """
    findings = []
    for what in ("updates", "count") if plan.adaptive else ("updates",):
        stated, filters = _statement(plan, what)
        needed = trials_needed(stated)
        count = trials or min(needed, MOST_TRIALS)
        present, turns = _canaries(plan, count, seed)
        attacked = _attack_updates if what == "updates" else _attack_counts
        seen = attacked(plan, _Source(source, plan, seed, actual), turns, filters)
        scores = stated.score(seen)
        violated, bound = _judged(stated, scores[present], scores[~present])
        one_run = one_run_bound(scores, present, stated.delta)
        violated |= one_run > stated.epsilon
        verdict: Verdict = (
            "violated" if violated else "passed" if count >= needed else "inconclusive"
        )
        findings.append(
            Finding(what, source, verdict, stated.epsilon, bound, one_run, count, needed)
        )
    return findings


def _statement(plan: PrivacyPlan, what: str) -> tuple[Stated, list[tuple[np.ndarray, np.ndarray]]]:
    """The promise about the worst client, and by turn the rounds and weights with which its
    attacker sums what it sees.

    Without amplification the client takes every turn that hurts most; with it the first group's, of
    which there are most. Seen through C the noise is white, so the matched filter of a turn is a
    row of C'C.
    """
    if plan.noise_multiplier == 0:
        raise ValueError("noise: a plan without noise promises nothing that could be audited")
    if what == "count":
        multiplier = 2 * plan.count_deviation
        columns = [(np.array([number]), np.ones(1)) for number in range(1, plan.rounds + 1)]
        return _of_turns(plan, columns, multiplier, np.eye(plan.rounds))
    encoder = np.zeros((plan.rounds, plan.rounds))
    for number in range(1, plan.rounds + 1):
        rows, weights = plan.strategy.column(number, plan.rounds)
        encoder[rows - 1, number - 1] = weights
    starts = range(1, plan.rounds + 1, plan.separation)
    if plan.amplified:
        return _of_turns(
            plan,
            [plan.strategy.column(t, plan.rounds) for t in starts],
            plan.update_multiplier,
            encoder,
        )
    taken = np.stack(
        [_turns_from(plan, first) for first in range(1, min(plan.separation, plan.rounds) + 1)]
    )
    moved = encoder @ taken.T
    worst = int(np.argmax((moved**2).sum(axis=0)))
    if plan.adaptive:  # independent noise, every turn the same
        shift = math.sqrt(taken[worst].sum()) / plan.update_multiplier
    else:
        shift = math.sqrt(float(plan.squared_sensitivities[-1])) / plan.noise_multiplier
    weights = (
        encoder.T @ moved[:, worst] / (np.linalg.norm(moved[:, worst]) * plan.update_multiplier)
    )
    return Stated((shift,), 1.0, 1 / shift, plan.delta), [(np.arange(plan.rounds), weights)]


def _of_turns(
    plan: PrivacyPlan,
    columns: list[tuple[np.ndarray, np.ndarray]],
    multiplier: float,
    encoder: np.ndarray,
) -> tuple[Stated, list[tuple[np.ndarray, np.ndarray]]]:
    norms = np.array([np.linalg.norm(weights) for _, weights in columns])
    filters = []
    for (rows, weights), norm in zip(columns, norms, strict=True):
        row = weights @ encoder[rows - 1] / (norm * multiplier)
        filters.append((np.flatnonzero(row), row[np.flatnonzero(row)]))
    if not plan.amplified:  # the count of a plan whose turns are known
        shift = math.sqrt(plan.turns()) / multiplier
        weights = _turns_from(plan, 1) / (math.sqrt(plan.turns()) * multiplier)
        return Stated((shift,), 1.0, 1 / shift, plan.delta), [(np.arange(plan.rounds), weights)]
    worst = multiplier / largest_column(plan.strategy, plan.rounds)
    return Stated(
        tuple(map(float, norms / multiplier)), plan.probability, worst, plan.delta
    ), filters


def _turns_from(plan: PrivacyPlan, first: int) -> np.ndarray:
    turns = np.zeros(plan.rounds)
    turns[first - 1 :: plan.separation] = 1
    return turns


def _canaries(plan: PrivacyPlan, trials: int, seed: int) -> tuple[np.ndarray, Iterator[np.ndarray]]:
    """Which planted clients are there, by fair coins, and round by round which of those take part:
    bool [trials].
    """
    present = generator(seed, Purpose.SPLIT, 0).random(trials) < 0.5
    if not plan.amplified:
        worst = max(
            (_turns_from(plan, first) for first in range(1, min(plan.separation, plan.rounds) + 1)),
            key=lambda taken: _moved(plan, taken),
        )
        return present, (present & bool(turn) for turn in worst)
    cohorts = plan.cohorts(range(plan.population), seed)
    assert isinstance(cohorts, PoissonCohorts | CyclicPoissonCohorts)
    # The plan's own sampler over more clients: with its probability each, as many as there are trials in a group.
    cohorts = replace(cohorts, pool=range(trials * plan.separation))
    group = cohorts.group(1) if isinstance(cohorts, CyclicPoissonCohorts) else np.arange(trials)
    return present, (
        present & np.isin(group, cohorts.draw(number + 1)) for number in range(plan.rounds)
    )


def _moved(plan: PrivacyPlan, taken: np.ndarray) -> float:
    total = np.zeros(plan.rounds + 1)
    for number in np.flatnonzero(taken) + 1:
        rows, weights = plan.strategy.column(int(number), plan.rounds)
        total[rows] += weights
    return float(total @ total)


def _attack_updates(
    plan: PrivacyPlan,
    source: "_Source",
    turns: Iterator[np.ndarray],
    filters: list[tuple[np.ndarray, np.ndarray]],
) -> np.ndarray:
    """[K, trials]: what the matched filters make of the released means, by the very step that
    rounds take.
    """
    mechanism = source.mechanism(0)
    clip = plan.clipping.initial
    by_round: dict[int, list[tuple[int, float]]] = {}
    for turn, (rounds, weights) in enumerate(filters):
        for index, weight in zip(rounds, weights, strict=True):
            by_round.setdefault(int(index), []).append((turn, float(weight)))
    seen = np.empty(0)
    for index, taking in enumerate(turns):
        total = source.sums(taking.astype(np.float32) * np.float32(clip), clip)
        released = mechanism.mean(total, int(taking.sum()), index + 1, clip)
        if index == 0:
            seen = np.zeros((len(filters), len(taking)))
        for turn, weight in by_round.get(index, []):
            seen[turn] += weight * (plan.clients_per_round / clip) * released
    return seen


def _attack_counts(
    plan: PrivacyPlan,
    source: "_Source",
    turns: Iterator[np.ndarray],
    filters: list[tuple[np.ndarray, np.ndarray]],
) -> np.ndarray:
    """The same of the count of unclipped clients. It is one number a round, so every planted client
    has its own run.
    """
    taking = np.stack(list(turns))
    released = np.empty(taking.shape)
    for trial in range(taking.shape[1]):
        mechanism = source.mechanism(trial + 1)
        for index in range(plan.rounds):
            there = int(
                taking[index, trial]
            )  # a client whose norm is that of the clip counts as unclipped
            share = mechanism.unclipped(there, there, index + 1)
            assert share is not None
            released[index, trial] = 2 * (share - 0.5) * plan.clients_per_round
    return np.stack([weights @ released[rounds] for rounds, weights in filters])


@dataclass(frozen=True)
class _Source:
    """Streams of noise as simulations or deployments make them, with `actual` of what they should
    have.
    """

    kind: Source
    plan: PrivacyPlan
    seed: int
    actual: float

    def mechanism(self, number: int) -> PrivateMean:
        """What releases the sums of one audited run."""
        if self.kind == "simulation":
            stream = SimulatedNoise(self.plan, self.seed, f"audit {number}")
            return PrivateMean(self.plan, _Scaled(stream, self.actual))
        noise = _AsDeployed(self.plan, self.actual)
        return GridMean(self.plan, noise, grid=RELEASE, dtype=np.dtype(np.float64))

    def sums(self, updates: np.ndarray, clip_norm: float) -> np.ndarray:
        """Clipped updates as they are summed."""
        if self.kind == "simulation":
            return updates
        return in_steps(updates, 1.0, RELEASE.step * clip_norm)


class _AsDeployed(GridNoise):
    """Deployment noise made again in every round from its kept memory, as the server does."""

    def __init__(self, plan: PrivacyPlan, actual: float) -> None:
        super().__init__(plan.strategy, actual * plan.update_multiplier / RELEASE.step)
        self._actual = actual

    def update(self, number: int, like: np.ndarray) -> np.ndarray:
        if self._actual == 0:
            return np.zeros_like(like)
        again = GridNoise(self._strategy, self._deviation, number - 1, self.memory)
        noise = again.update(number, like)
        self._memory = again._memory
        return noise

    def whole_count(self, deviation: float) -> int:
        return super().whole_count(self._actual * deviation) if self._actual else 0


@dataclass
class _Scaled:
    stream: NoiseStream
    factor: float

    def update(self, number: int, like: np.ndarray) -> np.ndarray:
        noise: np.ndarray = like.dtype.type(self.factor) * self.stream.update(number, like)
        return noise

    def count(self, number: int) -> float:
        return self.factor * self.stream.count(number)


def _judged(stated: Stated, with_client: np.ndarray, without: np.ndarray) -> tuple[bool, float]:
    """Whether the scores contradict the promise, and the epsilon that they prove."""
    if stated.probability == 1:
        return _judged_as_gaussian(stated, with_client, without)
    half = [len(world) // 2 for world in (with_client, without)]
    threshold = _best_threshold(stated, with_client[: half[0]], without[: half[1]])
    tests = [world[n:] for world, n in zip((with_client, without), half, strict=True)]
    hits, alarms = (int((world >= threshold).sum()) for world in tests)
    least_hits = _at_least(np.array(hits), len(tests[0]))
    most_alarms = _at_most(np.array(alarms), len(tests[1]))
    violated = bool(least_hits > stated.most_hits(most_alarms))
    return violated, epsilon_lower_bound(hits, len(tests[0]), alarms, len(tests[1]), stated.delta)


def _judged_as_gaussian(
    stated: Stated, with_client: np.ndarray, without: np.ndarray
) -> tuple[bool, float]:
    """Gaussian differential privacy: scores of both worlds are normal, and how far they lie apart
    is all there is.
    """
    from dp_accounting import get_epsilon_gaussian

    n, m = len(with_client), len(without)
    spread = math.sqrt(
        (with_client.var(ddof=1) * (n - 1) + without.var(ddof=1) * (m - 1)) / (n + m - 2)
    )
    if spread < 1e-6 * abs(with_client.mean() - without.mean()):
        return True, math.inf  # no noise at all
    apart = float(with_client.mean() - without.mean()) / spread
    least = _least_distance(apart, n, m)
    proven = 0.0 if least <= 0.01 else float(get_epsilon_gaussian(1 / least, stated.delta))
    return least > stated.shifts[0], proven


_NORMAL = 30.0  # standard errors from which on the noncentral t distribution is normal, and hard to compute


def _least_distance(apart: float, n: int, m: int) -> float:
    """The lower confidence bound of a distance in standard deviations: exact, by the noncentral t
    distribution.
    """
    from scipy.optimize import brentq
    from scipy.stats import nct, norm

    error = math.sqrt(1 / n + 1 / m)
    seen = apart / error
    if seen > _NORMAL:
        return apart - float(norm.isf(MISTAKE)) * math.sqrt(error**2 + apart**2 / (2 * (n + m)))
    found = brentq(lambda true: nct.sf(seen, n + m - 2, true) - MISTAKE, seen - 12, seen)
    return float(found) * error


def _best_threshold(stated: Stated, with_client: np.ndarray, without: np.ndarray) -> float:
    """The threshold at which these scores exceed the promise by most standard deviations."""
    candidates = np.unique(
        np.quantile(np.concatenate([with_client, without]), np.linspace(0.01, 0.99, 99))
    )
    hits, alarms = ((world >= candidates[:, None]).mean(axis=1) for world in (with_client, without))
    gap = hits - stated.most_hits(np.clip(alarms, 1 / len(without), 1))
    spread = np.sqrt(
        hits * (1 - hits) / len(with_client) + alarms * (1 - alarms) / len(without) + 1e-9
    )
    return float(candidates[int(np.argmax(gap / spread))])


def _at_most(count: np.ndarray, trials: int) -> np.ndarray:
    """Clopper and Pearson's upper bound of a share."""
    from scipy.stats import beta

    return np.where(
        count >= trials, 1.0, beta.ppf(1 - MISTAKE / 2, count + 1, np.maximum(trials - count, 0.5))
    )


def _at_least(count: np.ndarray, trials: int) -> np.ndarray:
    return np.asarray(1 - _at_most(trials - count, trials))


def epsilon_lower_bound(hits: int, present: int, alarms: int, absent: int, delta: float) -> float:
    """The epsilon that hits among those present and alarms among those absent prove as a lower
    bound.
    """
    accuse = (_at_least(np.array(hits), present) - delta) / _at_most(np.array(alarms), absent)
    acquit = (_at_least(np.array(absent - alarms), absent) - delta) / _at_most(
        np.array(present - hits), present
    )
    return max(0.0, *(math.log(ratio) for ratio in (float(accuse), float(acquit)) if ratio > 0))


def one_run_bound(scores: np.ndarray, present: np.ndarray, delta: float) -> float:
    """The epsilon that guessing the highest scores proves in one run, even if canaries depend on
    each other.
    """
    order = np.argsort(-scores, kind="stable")
    shares = (0.02, 0.1, 0.3)
    found = []
    for share in shares:
        guesses = max(1, round(share * len(scores)))
        right = int(present[order[:guesses]].sum())
        found.append(one_run_epsilon(len(scores), guesses, right, MISTAKE / len(shares), delta))
    return max(found)


def one_run_epsilon(canaries: int, guesses: int, right: int, mistake: float, delta: float) -> float:
    """Theorem 5.2 of arXiv 2305.08846: the largest epsilon that so many right guesses refute."""
    from scipy.optimize import brentq
    from scipy.stats import binom

    steps = np.arange(1, right + 1)

    def p_value(epsilon: float) -> float:
        q = 1 / (1 + math.exp(-epsilon))
        tail = float(binom.sf(right - 1, guesses, q))
        more = binom.sf(right - steps - 1, guesses, q) - tail
        return min(1.0, tail + float(np.max(more / steps, initial=0.0)) * delta * 2 * canaries)

    if p_value(0.0) >= mistake:
        return 0.0
    high = 1.0
    while p_value(high) < mistake:
        high *= 2
    return float(brentq(lambda epsilon: p_value(epsilon) - mistake, 0.0, high, xtol=1e-6))


@lru_cache(maxsize=64)
def trials_needed(stated: Stated) -> int:
    """How many planted clients it takes to find half the noise in 95% of audits."""
    if stated.probability < 1:
        return _trials_by_profile(stated)
    from scipy.stats import norm

    shift = stated.shifts[0]
    apart = shift / SHORT
    enough = (
        (float(norm.isf(MISTAKE)) + _POWER) * math.sqrt(4 + apart**2 / 2) / (apart - shift)
    ) ** 2
    return max(FEWEST, math.ceil(1.2 * enough))


_MODELLED = 20_000  # scores of the promise kept by half, from which the power is computed


def _trials_by_profile(stated: Stated) -> int:
    rng, shifts = np.random.default_rng(0), np.array(stated.shifts)[:, None]
    worlds = []
    for share in (stated.probability, 0.0):
        scores = np.empty(_MODELLED)
        for part in np.array_split(
            np.arange(_MODELLED), max(1, len(shifts) * _MODELLED // 4_000_000)
        ):
            shape = (len(shifts), len(part))
            taking = rng.random(shape) < share
            scores[part] = stated.score(shifts * taking + SHORT * rng.standard_normal(shape))
        worlds.append(scores)
    with_client, without = worlds
    thresholds = np.quantile(np.concatenate(worlds), np.linspace(0.01, 0.99, 99))
    hits, alarms = ((world >= thresholds[:, None]).mean(axis=1) for world in (with_client, without))
    trials = FEWEST
    while trials < 2**40:
        n = trials // 4  # of each world, in the half of the trials that judges
        fewer = np.floor(n * hits - _POWER * np.sqrt(n * hits * (1 - hits)))
        more = np.ceil(n * alarms + _POWER * np.sqrt(n * alarms * (1 - alarms)))
        least, most = _at_least(np.maximum(fewer, 0), n), _at_most(np.minimum(more, n), n)
        if (least > stated.most_hits(most)).any():
            return math.ceil(1.2 * trials)
        trials = math.ceil(1.25 * trials)
    return trials
