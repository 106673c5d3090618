"""The paper's recipe for clip norms, and an audit of the privacy that a plan promises."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedbandit.building.experiment import build_experiment
from fedbandit.config import Config
from fedbandit.core.errors import Diverged
from fedbandit.core.process import Stopwatch
from fedbandit.core.ragged import Ragged
from fedbandit.data import FederatedDataset
from fedbandit.data.dataset import Header, Split
from fedbandit.federated.clients import Broadcast, ChunkResult, ClientWork
from fedbandit.federated.memory import Memory
from fedbandit.federated.pipeline import RowSum, Vectors
from fedbandit.federated.round import Phase, run_round
from fedbandit.privacy.accounting import Ledger
from fedbandit.privacy.noise import PrivateMean, SimulatedNoise
from fedbandit.privacy.plan import PrivacyPlan
from fedbandit.privacy.reporting import MEANINGLESS, assumptions
from fedbandit.results.plots import require_picture, save_picture, write_heading
from fedbandit.simulation.simulate import simulate

_LADDER = (1.0, 2.0, 5.0)  # the paper's grids are of this form, times powers of ten


@dataclass(frozen=True)
class Tried:
    """One point of the grid; a reward of None has diverged."""

    server_learning_rate: float
    client_learning_rate: float
    running_reward: float | None


def estimate_norm(config: Config, dataset: FederatedDataset | None = None, quantile: float = 0.5) -> float:
    """The norm at which adaptive clipping without noise settles: the median of the last quarter of rounds."""
    plain = config.with_values({"privacy": {}, "clipping": {"quantile": quantile, "initial": 0.1}})
    norms = simulate(plain, dataset).collect()["clip_norm"]
    return float(np.median(norms[-max(1, len(norms) // 4) :]))


def rates_around(rate: float) -> tuple[float, ...]:
    """A rate with its lower and upper neighbour in 1, 2, 5, 10, 20, ..."""
    ladder = [step * 10.0**power for power in range(-6, 4) for step in _LADDER]
    nearest = int(np.argmin(np.abs(np.log(np.array(ladder) / rate))))
    return tuple(float(f"{ladder[i]:g}") for i in (nearest - 1, nearest, nearest + 1))


def try_rates(config: Config, norm: float, dataset: FederatedDataset | None = None) -> Iterator[Tried]:
    """Run the configuration with the norm fixed, for every pair of rates around its own."""
    for server in rates_around(config.server.learning_rate):
        for client in rates_around(config.client.learning_rate):
            member = config.with_values(
                {"clipping.norm": norm, "server.learning_rate": server, "client.learning_rate": client}
            )
            try:
                reward = float(simulate(member, dataset).collect()["running_reward"][-1])
            except Diverged:
                reward = None
            yield Tried(server, client, reward)


def rounded(norm: float) -> float:
    """Two digits, as one would write a clip norm down."""
    return float(f"{norm:.2g}")


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

    def __call__(
        self, clients: np.ndarray, broadcast: Broadcast, memory: Mapping[int, Vectors] | None = None
    ) -> ChunkResult:
        result = super().__call__(clients[clients != _CANARY], broadcast, memory)
        if not self.present or _CANARY not in clients:
            return result
        planted = _Planted(result.sent.sums["weights"], broadcast.clip_norm)
        norms = np.append(result.norms, broadcast.clip_norm)
        return replace(result, sent=replace(result.sent, sums={"weights": planted}, norms=norms))


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

    def run(
        self, work: ClientWork, chunks: list[np.ndarray], broadcast: Broadcast, memory: Memory | None = None
    ) -> Iterator[ChunkResult]:
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
    """The epsilon that hits with the client and alarms without it prove as a lower bound (Clopper-Pearson)."""
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
        aggregation=PrivateMean(plan, SimulatedNoise(plan, seed)),
    )
    state = phase.start(np.zeros(_WORDS * _ACTIONS + _ACTIONS))
    watch, engine = Stopwatch(), _Here()
    seen, turns = np.zeros(plan.rounds), np.zeros(plan.rounds)
    place = _SECRET_WORD * _ACTIONS
    for number in range(1, plan.rounds + 1):
        following, _ = run_round(phase, state, engine, watch)
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


_EXACT_POINTS = 12  # a privacy loss distribution takes a second each


def draw_epsilon(ledger: Ledger, path: Path) -> Path:
    """Epsilon by RDP after every round, and by privacy loss distributions at some, saved by the path's suffix."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    require_picture(path)
    plan = ledger.plan
    rounds = np.unique(np.linspace(1, plan.rounds, min(plan.rounds, 200)).astype(int))
    # Closer together at the beginning, where epsilon bends.
    some = np.unique(1 + np.square(np.linspace(0, 1, _EXACT_POINTS)) * (plan.rounds - 1)).astype(int)
    by_rdp = [ledger.epsilon(int(number)) for number in rounds]
    by_pld = [ledger.tight_epsilon(int(number)) for number in some]
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(rounds, by_rdp, color="#0072B2", linewidth=1.6, label="RDP")
    axes.plot(some, by_pld, color="#D55E00", linewidth=1.6, marker="o", markersize=3, label="PLD")
    if max(by_rdp) > MEANINGLESS:
        axes.axhspan(MEANINGLESS, max(by_rdp), color="#eeeeee", zorder=0, label="no meaningful guarantee")
    axes.set(xlabel="round", ylabel=f"epsilon at delta = {plan.delta:g}", ylim=(0, None), xlim=(1, plan.rounds))
    title = f"noise {plan.noise_multiplier:g}, {plan.clients_per_round} of {plan.population:,} clients a round"
    write_heading(axes, title, f"{plan.sampling} sampling; adjacency: {assumptions(plan)['adjacency']}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return save_picture(figure, path)
