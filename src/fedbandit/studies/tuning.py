"""Choosing exploration parameters off-policy, from logged feedback, and checking the choice by simulation."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf, sqrt
from typing import Any

import numpy as np

from fedbandit.assembly.experiment import Experiment, build_experiment
from fedbandit.assembly.parts import build_policy
from fedbandit.config import Config
from fedbandit.core.contexts import rows_at
from fedbandit.core.errors import ConfigError, Diverged
from fedbandit.core.ragged import Ragged
from fedbandit.data.dataset import FederatedDataset, Log, Split
from fedbandit.evaluation.ope.estimators import Estimator, Records
from fedbandit.evaluation.ope.logs import records_of
from fedbandit.evaluation.ope.sums import by_client
from fedbandit.federated.round import Engine
from fedbandit.federated.state import State
from fedbandit.ope import BUILT_IN, Bootstrap, Estimate, estimate
from fedbandit.simulation.pretraining import starting_weights
from fedbandit.simulation.simulate import RoundEvents, simulate
from fedbandit.studies.offline import train_from_logs
from fedbandit.studies.scoring import Scorer


def collect_logs(experiment: Experiment, state: State, rounds: int) -> FederatedDataset:
    """The events of the cohorts of the next `rounds` rounds, made by the models that are deployed in `state`.

    The rounds must lie within one deployment period: what is deployed after it is not known yet.
    """
    phase, split = experiment.bandit, experiment.bandit.work.split
    if state.round % phase.deploy_every + rounds > phase.deploy_every:
        raise ValueError(
            f"{rounds} rounds after round {state.round} reach beyond the deployment period"
        )
    clients, rows, actions, rewards, propensities = [], [], [], [], []
    for number in range(state.round + 1, state.round + rounds + 1):
        if phase.scenario.stage(number).available is not None:
            raise ConfigError(
                f"drift.kind: not all actions exist in round {number}; such logs are not collected"
            )
        events = RoundEvents(phase, replace(state, round=number - 1))()
        if events.missing is not None or phase.scenario.delay:
            raise ConfigError("environment.name: logs whose rewards may miss are not collected")
        visits = phase.work.plan.visits(split, phase.cohorts.draw(number), number)
        fresh = events.fresh
        clients.append(visits.clients[fresh])
        rows.append(visits.rows[fresh])
        actions.append(events.actions[fresh])
        rewards.append(events.rewards[fresh])
        propensities.append(events.propensities[fresh])
    owner = np.concatenate(clients)
    order = np.argsort(owner, kind="stable")
    present, counts = np.unique(owner, return_counts=True)
    chosen = np.concatenate(rows)[order]
    features = (
        split.features.take(chosen)
        if isinstance(split.features, Ragged)
        else split.features[chosen]
    )
    log = Log(
        np.concatenate(actions)[order].astype(np.int32),
        np.concatenate(rewards)[order].astype(np.float32),
        np.concatenate(propensities)[order].astype(np.float32),
    )
    no_labels = Ragged(np.zeros(len(chosen) + 1, np.int64), np.empty(0, np.int32))
    offsets = np.concatenate([[0], np.cumsum(counts)])
    header = experiment.dataset.header
    logged = replace(header, logged=True, fingerprint=f"{header.fingerprint} logged")
    return FederatedDataset(
        logged, Split(split.client_ids[present], offsets, features, no_labels, split.scale, log)
    )


# What makes each policy explore more, and in which direction.
EXPLORATION = {"epsilon-greedy": ("epsilon", 1), "softmax": ("beta", 1), "falcon": ("gamma", -1)}


def exploration_around(config: Config) -> list[float]:
    """Half of what the configuration's policy explores, as much, and twice as much, in its own parameter."""
    name, _ = _parameter(config)
    now = float(getattr(build_policy(config), name))
    most = 1.0 if name == "epsilon" else inf
    return list(dict.fromkeys(min(value, most) for value in (now / 2, now, 2 * now)))


@dataclass(frozen=True)
class TuningCandidate:
    """Values to set in the configuration, and what the logs say of them."""

    settings: Mapping[str, Any]
    estimate: Estimate
    influence: np.ndarray  # [clients]: how far each client's log moves the estimate

    def apart_from(self, other: "TuningCandidate", sure: float) -> bool:
        """Whether the log tells the two apart: by the same clients, so what these have in common cancels."""
        difference = self.estimate.value - other.estimate.value
        return bool(abs(difference) > _visible(self.influence - other.influence, sure))


def _visible(influence: np.ndarray, sure: float) -> float:
    """The smallest difference that can be told from nil, for an estimate moved so by each client."""
    from scipy.special import stdtrit

    n = len(influence)
    return float(stdtrit(n - 1, sure) * sqrt(n / (n - 1) * influence @ influence)) if n > 1 else inf


@dataclass(frozen=True)
class Tuned:
    """The choice, all candidates (best estimate first), and how much the log decides."""

    chosen: TuningCandidate
    candidates: list[TuningCandidate]
    logged_reward: float
    events: int

    @property
    def sure(self) -> float:
        """The quantile to compare by: 95%, over as many comparisons as there are candidates beside the best."""
        return 1 - 0.025 / max(1, len(self.candidates) - 1)

    @property
    def told_apart(self) -> int:
        """How many candidates the log shows to be worse than the best."""
        return sum(other.apart_from(self.candidates[0], self.sure) for other in self.candidates[1:])

    @property
    def smallest_visible(self) -> float:
        """The median difference to the best that a log of this size would show."""
        best = self.candidates[0].influence
        seen = [_visible(one.influence - best, self.sure) for one in self.candidates[1:]]
        return float(np.median(seen)) if seen else 0.0

    @property
    def decides(self) -> bool:
        """Whether the log rules out at least half of what the best was chosen from."""
        return 2 * self.told_apart >= len(self.candidates) - 1


def tune(
    config: Config,
    dataset: FederatedDataset,
    *,
    server_rates: Sequence[float],
    client_rates: Sequence[float],
    exploration: Sequence[float],
    engine: Engine,
    estimator: str = "snips",
    cost: float = 0.05,
    on_candidate: Callable[[TuningCandidate], Any] = lambda candidate: None,
) -> Tuned:
    """Play one period with the configuration as it stands, and choose from its logs what to do in the next ones.

    Half of the clients' logs train the candidates, from the deployed model on; the other half evaluate them. `cost` is
    the share of the best estimate that more exploration may cost.
    """
    name, _ = _parameter(config)
    if not 0 <= cost < inf:
        raise ConfigError(f"cost: must be 0 or more, not {cost:g}")
    experiment = build_experiment(config, dataset)
    if experiment.privacy is not None:
        raise ConfigError(
            "privacy.mechanism: candidates are trained on a period's logs, which no stated epsilon covers"
        )
    start = starting_weights(experiment, engine)
    logs = collect_logs(
        experiment, experiment.bandit.start(start), min(config.deploy_every, config.rounds)
    )
    middle = logs.train.num_clients // 2
    if middle < 1:
        raise ConfigError(
            "clients_per_round: the period's logs come from too few clients to hold any out"
        )
    held_out = _clients_from(logs, middle)
    candidates = []
    for server, client in product(server_rates, client_rates):
        rates = {"server.learning_rate": server, "client.learning_rate": client}
        shorter = config.with_values({**rates, "rounds": min(config.deploy_every, config.rounds)})
        try:
            trained = train_from_logs(
                shorter, logs, start=start, clients=range(middle), engine=engine
            )
        except Diverged:
            continue
        scorer = Scorer(trained.experiment.bandit.work.predictor, trained.weights)
        predictions, modelled = scorer.on(held_out.train), scorer.rewards_on(held_out.train)
        for value in exploration:
            settings = {**rates, f"policy.{name}": value}
            policy = build_policy(config.with_values(settings))
            records = records_of(
                held_out.train, policy, dataset.header.num_actions, predictions, rewards=modelled
            )
            by = BUILT_IN[estimator]
            found = estimate(records, {estimator: by}, bootstrap=Bootstrap(200, config.seed))[
                estimator
            ]
            if not np.isfinite(found.value):  # nothing in the log is like what it would do
                continue
            candidates.append(TuningCandidate(settings, found, _influence(records, by)))
            on_candidate(candidates[-1])
    if not candidates:
        raise Diverged(
            "every candidate diverged or does nothing that the log has; give smaller learning rates"
        )
    candidates.sort(key=lambda candidate: -candidate.estimate.value)
    assert logs.train.log is not None
    rewards = logs.train.log.rewards
    return Tuned(
        _most_exploring(config, candidates, cost), candidates, float(rewards.mean()), len(rewards)
    )


def _influence(records: Records, estimator: Estimator) -> np.ndarray:
    top, bottom = (
        by_client(part, records.bounds) for part in estimator.terms(records, records.importance)
    )
    moved: np.ndarray = (top - top.sum() / bottom.sum() * bottom) / bottom.sum()
    return moved


@dataclass(frozen=True)
class Check:
    """What simulation says of the candidates, each by its mean reward over the same rounds."""

    runs: np.ndarray  # [candidates, seeds], in the order of the candidates
    position: int  # of the choice
    cost: float  # the share of the best that a choice may fall short by

    @property
    def rewards(self) -> np.ndarray:
        """[candidates]: means over seeds."""
        means: np.ndarray = self.runs.mean(axis=1)
        return means

    @property
    def chosen(self) -> float:
        return float(self.rewards[self.position])

    @property
    def best(self) -> float:
        return float(self.rewards.max())

    @property
    def rank(self) -> int:
        """Of the choice, from 1."""
        return 1 + int((self.rewards > self.chosen).sum())

    @property
    def refutes(self) -> bool:
        """Whether the choice falls short by more than it may, and by more than seeds differ."""
        behind = self.runs[int(np.argmax(self.rewards))] - self.runs[self.position]
        noise = behind.std(ddof=1) / sqrt(len(behind)) if len(behind) > 1 else 0.0
        return bool(behind.mean() > self.cost * abs(self.best) and behind.mean() > 2 * noise)


def check(
    config: Config,
    dataset: FederatedDataset,
    tuned: Tuned,
    *,
    seeds: Sequence[int],
    engine: Engine,
    cost: float = 0.05,
) -> Check:
    """Play every candidate for the configuration's rounds, on these seeds, and see how near the best the choice is."""
    rewards = []
    for candidate in tuned.candidates:
        runs = []
        for seed in seeds:
            chosen = config.with_values({**candidate.settings, "seed": seed})
            try:
                runs.append(
                    simulate(chosen, dataset, engine=engine).collect()["running_reward"][-1]
                )
            except Diverged:
                runs.append(0.0)
        rewards.append(runs)
    position = next(i for i, candidate in enumerate(tuned.candidates) if candidate is tuned.chosen)
    return Check(np.array(rewards, float), position, cost)


def verdict(tuned: Tuned, found: Check | None) -> list[str]:
    """What the log decides, what the check says of it, and a recommendation where neither speaks against it."""
    others = len(tuned.candidates) - 1
    lines = [
        f"the log shows {tuned.told_apart} of {others} other candidates to be worse than its best; differences below"
        f" about {tuned.smallest_visible:.4f} cannot be seen in a log of this size"
    ]
    if not tuned.decides:
        worth = tuned.chosen.estimate.effective_sample_size
        lines.append(
            f"warning: little overlap: {tuned.chosen.estimate.events} held-out events are worth {worth:.0f} of the"
            " choice's own, which rules out less than half of the candidates; by the log alone the choice is a guess"
        )
    settings = " ".join(f"--set {key}={value:g}" for key, value in tuned.chosen.settings.items())
    if found is None:
        return [
            *lines,
            f"use it: {settings}" if tuned.decides else f"not checked; a guess: {settings}",
        ]
    share = 100 * found.chosen / found.best if found.best else 0.0
    lines += [
        f"by simulation the choice earns {found.chosen:.4f}, {share:.1f}% of the best candidate's {found.best:.4f}",
        f"(rank {found.rank} of {len(found.rewards)}; the worst earns {found.rewards.min():.4f})",
    ]
    if not found.refutes:
        return [*lines, f"use it: {settings}"]
    best = tuned.candidates[int(np.argmax(found.rewards))].settings
    return [
        *lines,
        "the check refutes the choice: the log does not recommend anything here",
        "best by simulation, not by the log: "
        + " ".join(f"--set {key}={value:g}" for key, value in best.items()),
    ]


def _most_exploring(
    config: Config, candidates: list[TuningCandidate], cost: float
) -> TuningCandidate:
    """The most exploration that costs no more than asked; among equals the better estimate."""
    name, sign = _parameter(config)
    best = candidates[0].estimate.value
    alike = [c for c in candidates if c.estimate.value >= best - cost * abs(best)]
    return max(alike, key=lambda c: (sign * c.settings[f"policy.{name}"], c.estimate.value))


def _parameter(config: Config) -> tuple[str, int]:
    if config.policy.name not in EXPLORATION:
        known = ", ".join(EXPLORATION)
        raise ConfigError(
            f"policy.name: {config.policy.name} has no exploration to tune from its logs; known: {known}"
        )
    return EXPLORATION[config.policy.name]


def _clients_from(logs: FederatedDataset, first: int) -> FederatedDataset:
    """The clients from `first` on, as a logged data set of their own."""
    split = logs.train
    assert split.log is not None
    rows = np.arange(split.offsets[first], split.offsets[-1])
    log = replace(
        split.log,
        actions=split.log.actions[rows],
        rewards=split.log.rewards[rows],
        propensities=split.log.propensities[rows],
    )
    part = replace(
        split,
        client_ids=split.client_ids[first:],
        offsets=split.offsets[first:] - split.offsets[first],
        features=rows_at(split.features, rows),
        labels=split.labels.take(rows),
        log=log,
    )
    return replace(logs, train=part)
