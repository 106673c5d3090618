"""An empirical audit: plays the real rounds with and without a planted client, attacks them, and bounds epsilon below.

The bound is statistically valid whatever the attack; a bound above the stated epsilon means that the code is broken.
A bound below it proves nothing: a better attack may exist.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedbandit.config import Config
from fedbandit.data import FederatedDataset
from fedbandit.data.dataset import Header, Split
from fedbandit.data.ragged import Ragged
from fedbandit.federated.client import Broadcast, ChunkResult, ClientWork
from fedbandit.federated.updates import RowSum
from fedbandit.privacy.mechanisms import PrivateMean
from fedbandit.privacy.noise import SimulatedNoise
from fedbandit.privacy.plan import PrivacyPlan
from fedbandit.simulation.experiment import build_experiment
from fedbandit.simulation.loop import Phase, play_round
from fedbandit.timing import Stopwatch

_WORDS, _ACTIONS = 8, 2
_CANARY = 0  # the planted client
_SECRET_WORD = _WORDS - 1  # nobody else's update touches its weights


@dataclass(frozen=True)
class Audit:
    """What an attacker achieved."""

    stated: float  # epsilon of the plan
    lower_bound: float  # of the true epsilon, with the given confidence
    confidence: float
    trials: int  # of each world
    true_positives: float  # at the attacker's threshold, on trials it was not chosen on
    false_positives: float

    @property
    def passed(self) -> bool:
        return self.lower_bound <= self.stated


@dataclass(frozen=True)
class _WithCanary(ClientWork):
    """The work of clients of which the planted one sends an update of exactly the clip norm, or nothing."""

    present: bool = False

    def __call__(self, clients: np.ndarray, broadcast: Broadcast) -> ChunkResult:
        result = super().__call__(clients[clients != _CANARY], broadcast)
        if not self.present or _CANARY not in clients:
            return result
        norms = np.append(result.norms, broadcast.clip_norm)
        return replace(result, update=_Planted(result.update, broadcast.clip_norm), norms=norms)


@dataclass(frozen=True)
class _Planted:
    """A chunk's sum with the planted update added."""

    rest: Any
    norm: float

    def add_to(self, total: np.ndarray) -> None:
        self.rest.add_to(total)
        values = np.zeros((1, _ACTIONS), total.dtype)
        values[0, 0] = self.norm
        RowSum(np.array([_SECRET_WORD], np.int32), values, np.zeros(_ACTIONS, total.dtype)).add_to(total)


class _Here:
    """Runs the chunks one after the other: rounds are too small to share out."""

    def run(self, work: ClientWork, chunks: list[np.ndarray], broadcast: Broadcast) -> Iterator[ChunkResult]:
        return (work(chunk, broadcast) for chunk in chunks)

    def close(self) -> None:
        pass


def audit(
    plan: PrivacyPlan, stated: float, *, trials: int = 500, noise: float | None = None, confidence: float = 0.95
) -> Audit:
    """Attack `trials` runs with and as many without the planted client; `noise` in place of the plan's, to see it fail.

    Half of the runs choose the attacker's threshold, the other half measure it.
    """
    actual = plan if noise is None else replace(plan, noise_multiplier=noise)
    phase = _phase(plan)
    worlds = [
        np.array([_score(plan, _released(phase, actual, 2 * trial + present, present)) for trial in range(trials)])
        for present in (False, True)
    ]
    without, with_canary = worlds
    half = trials // 2
    threshold = _best_threshold(without[:half], with_canary[:half], plan.delta)
    hits, alarms = int((with_canary[half:] >= threshold).sum()), int((without[half:] >= threshold).sum())
    judged = trials - half
    bound = epsilon_lower_bound(hits, alarms, judged, plan.delta, confidence)
    return Audit(stated, bound, confidence, trials, hits / judged, alarms / judged)


def epsilon_lower_bound(hits: int, alarms: int, trials: int, delta: float, confidence: float = 0.95) -> float:
    """What a test with so many hits with, and alarms without, the client proves about epsilon (Clopper and Pearson)."""
    from scipy.stats import beta

    miss = (1 - confidence) / 2

    def at_most(count: int) -> float:
        return 1.0 if count == trials else float(beta.ppf(1 - miss, count + 1, trials - count))

    def at_least(count: int) -> float:
        return 0.0 if count == 0 else float(beta.ppf(miss, count, trials - count + 1))

    accuse = (at_least(hits) - delta) / at_most(alarms)
    acquit = (at_least(trials - alarms) - delta) / at_most(trials - hits)
    return max(0.0, *(math.log(ratio) for ratio in (accuse, acquit) if ratio > 0))


def _phase(plan: PrivacyPlan) -> Phase:
    """Real rounds over a population of the plan's size; the server's step is plain, so weights tell the releases."""
    config = Config.build(
        {
            "scenario": "scratch",
            "rounds": plan.rounds,
            "clients_per_round": plan.clients_per_round,
            "dtype": "float64",
            "policy": {"name": "softmax", "beta": 1.0},
            "server": {"optimizer": "sgd", "learning_rate": 1.0},
        }
    )
    phase = build_experiment(config, _population(plan.population)).bandit
    return replace(phase, clipping=plan.clipping)


def _population(clients: int) -> FederatedDataset:
    """One example a client; nobody has the secret word."""
    words = np.arange(clients, dtype=np.int32) % _SECRET_WORD
    rows = np.arange(clients + 1, dtype=np.int64)
    labels = Ragged(rows, (words % _ACTIONS).astype(np.int32))
    counts = tuple(int(count) for count in np.bincount(labels.ids, minlength=_ACTIONS))
    header = Header("audit", "sparse", (_WORDS,), tuple(f"a{i}" for i in range(_ACTIONS)), counts, multilabel=True)
    ids = np.array([f"c{i:07d}" for i in range(clients)], dtype=bytes)
    return FederatedDataset(header, Split(ids, rows, Ragged(rows, words, np.ones(clients, np.float32)), labels))


def _released(phase: Phase, plan: PrivacyPlan, seed: int, present: bool) -> tuple[np.ndarray, np.ndarray]:
    """What an observer of the weights sees of the planted direction each round, in clip norms; and the turns taken."""
    cohorts = plan.cohorts(range(plan.population), seed)
    phase = replace(
        phase,
        work=_WithCanary(**{**vars(phase.work), "seed": seed, "present": present}),
        cohorts=cohorts,
        aggregation=PrivateMean(plan, SimulatedNoise(plan.strategy, seed)),
    )
    state = phase.start(np.zeros(_WORDS * _ACTIONS + _ACTIONS))
    watch, engine = Stopwatch(), _Here()
    seen, turns = np.zeros(plan.rounds), np.zeros(plan.rounds)
    place = _SECRET_WORD * _ACTIONS
    for number in range(1, plan.rounds + 1):
        following, _ = play_round(phase, state, engine, watch)
        moved = following.weights[place] - state.weights[place]
        seen[number - 1] = moved * plan.clients_per_round / state.clip_norm
        turns[number - 1] = _CANARY in cohorts.draw(number)
        state = following
    return seen, turns


def _score(plan: PrivacyPlan, released: tuple[np.ndarray, np.ndarray]) -> float:
    """The likelihood ratio of the two worlds, or what is monotone in it: the strongest test of what is released."""
    seen, turns = released
    z = max(plan.update_multiplier, 1e-3)
    if plan.amplified:  # whether the client took part is hidden, and stays hidden
        q = plan.probability
        exponent = np.minimum((2 * seen - 1) / (2 * z * z), 700.0)
        return float(np.log1p(q * np.expm1(exponent)).sum())
    encoder = np.zeros((plan.rounds, plan.rounds))  # accounting without amplification lets the attacker know the turns
    for number in range(1, plan.rounds + 1):
        rows, weights = plan.strategy.column(number, plan.rounds)
        encoder[rows - 1, number - 1] = weights
    return float((encoder @ turns) @ (encoder @ seen))


def _best_threshold(without: np.ndarray, with_canary: np.ndarray, delta: float) -> float:
    """The threshold that proves most on these trials."""
    candidates = np.unique(np.concatenate([without, with_canary]))
    bounds = [
        epsilon_lower_bound(int((with_canary >= t).sum()), int((without >= t).sum()), len(without), delta)
        for t in candidates
    ]
    return float(candidates[int(np.argmax(bounds))])
