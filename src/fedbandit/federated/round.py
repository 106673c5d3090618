"""Algorithm 4, one round at a time: draw clients, let them act and train, aggregate, step, maybe deploy, record.

A round is a function of the state; nothing else crosses from one round to the next.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from fedbandit.core.errors import Diverged
from fedbandit.core.timing import Stopwatch
from fedbandit.data.dataset import Split
from fedbandit.federated.clients import Broadcast, ChunkResult, ClientWork
from fedbandit.federated.cohorts import Cohorts
from fedbandit.federated.pipeline import Clipping
from fedbandit.federated.server import Aggregation, PlainMean, ServerOptimizer, Stepping
from fedbandit.federated.state import State
from fedbandit.rewards.scenarios import Scenario


class Engine(Protocol):
    """Runs the work of a round; yields the chunks' results in the order of the chunks."""

    def run(self, work: ClientWork, chunks: list[np.ndarray], broadcast: Broadcast) -> Iterator[ChunkResult]: ...

    def close(self) -> None: ...


class Verdict(Protocol):
    """What a gate says of a candidate model."""

    @property
    def passes(self) -> bool: ...

    def to_json(self) -> dict[str, Any]: ...


class Gate(Protocol):
    """Decides whether a candidate may replace the newest deployed model."""

    def judge(self, work: ClientWork, broadcast: Broadcast, candidate: np.ndarray, cohort: np.ndarray) -> Verdict: ...


@dataclass(frozen=True)
class Phase:
    """The parts of a run that stay the same from round to round. Pre-training is a phase like any other."""

    work: ClientWork
    cohorts: Cohorts
    scenario: Scenario
    optimizer: ServerOptimizer
    clipping: Clipping
    deploy_every: int
    aggregation: Aggregation = field(default_factory=PlainMean)
    gate: Gate | None = None  # decides whether a new model is deployed; None: always

    def start(self, weights: np.ndarray) -> State:
        """The state before the first round, from initial weights."""
        return State(
            round=0,
            weights=weights,
            deployed={0: weights},
            optimizer=self.optimizer.init(weights),
            clip_norm=self.clipping.initial,
        )


def play_round(phase: Phase, state: State, engine: Engine, watch: Stopwatch) -> tuple[State, dict[str, Any]]:
    """One round: the next state and the round's metrics."""
    number = state.round + 1
    stage = phase.scenario.stage(number)
    broadcast = Broadcast(number, state.weights, state.deployed, state.clip_norm, stage.rewards, stage.available)

    with watch("sample"):
        cohort = phase.cohorts.draw(number)
    results, total = _collect(engine.run(phase.work, phase.work.chunks(cohort), broadcast), state.weights, watch)
    with watch("step"), np.errstate(over="ignore", invalid="ignore"):  # looked for below, and reported once
        norms = np.concatenate([result.norms for result in results]) if results else np.zeros(0)
        accepted = np.isfinite(norms)
        if len(norms) and 2 * accepted.sum() <= len(norms):
            lost = len(norms) - int(accepted.sum())
            raise Diverged(f"diverged at round {number}: {lost} of {len(norms)} updates are not finite")
        below = norms[accepted] <= state.clip_norm
        unclipped = float(below.mean()) if len(below) else None
        step = Stepping(phase.optimizer, phase.clipping, phase.aggregation).step(
            number, state.weights, state.optimizer, state.clip_norm, total, len(below), int(below.sum())
        )
        weights = step.weights

    deployed, verdict = state.deployed, None
    deploys = number % phase.deploy_every == 0
    if deploys:
        if phase.gate is not None:
            with watch("gate"):
                verdict = phase.gate.judge(phase.work, broadcast, weights, cohort)
        needed_from = phase.work.plan.oldest_version(number + 1)
        deployed = {version: kept for version, kept in deployed.items() if version >= needed_from}
        # Versions count periods: a refused model leaves its number to the weights that are out already.
        refused = verdict is not None and not verdict.passes
        deployed[number // phase.deploy_every] = state.deployed[max(state.deployed)] if refused else weights

    metrics = round_metrics(number, phase.work.split, cohort, results, state, unclipped, step.update)
    following = state.after(step, deployed, metrics["reward"])
    metrics["running_reward"] = following.running_reward
    metrics |= phase.aggregation.metrics(number, deploys)
    if verdict is not None:
        metrics["gate"] = verdict.to_json()
    return following, metrics


def _collect(
    results: Iterable[ChunkResult], like: np.ndarray, watch: Stopwatch
) -> tuple[list[ChunkResult], np.ndarray]:
    """The chunks' figures, and the sum of their updates added in the order of the chunks."""
    total = np.zeros_like(like)
    kept = []
    here = Stopwatch()
    with here("all"):
        for result in results:
            with here("aggregate"):
                result.update.add_to(total)
            kept.append(result.figures())
    aggregate = here.seconds["aggregate"]
    watch.add({"aggregate": aggregate, **_shares(here.seconds["all"] - aggregate, kept)})
    return kept, total


def _shares(waited: float, results: list[ChunkResult]) -> dict[str, float]:
    """The time in which chunks worked side by side, divided in proportion to what each of them spent it on."""
    worked = Stopwatch()
    for result in results:
        worked.add(dict(result.seconds))
    whole = sum(worked.seconds.values())
    return {name: waited * seconds / whole for name, seconds in worked.seconds.items()} if whole else {}


_PERCENTS = (10, 25, 50, 75, 90)


def round_metrics(
    number: int,
    split: Split,
    cohort: np.ndarray,
    results: list[ChunkResult],
    state: State,
    unclipped: float | None,
    update: np.ndarray,
) -> dict[str, Any]:
    """One line of `metrics.jsonl`. Everything in it is a function of the run's configuration, never of the machine."""

    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(result, name) for result in results]) if results else np.zeros(0)

    events, norms = joined("events"), joined("norms")
    count = int(events.sum())
    had_events = events > 0
    client_rewards = joined("reward_sums")[had_events] / events[had_events]
    rejected = np.flatnonzero(~np.isfinite(norms))
    return {
        "round": number,
        "reward": float(joined("reward_sums").sum() / count) if count else None,
        "running_reward": None,
        "propensity": float(joined("propensity_sums").sum() / count) if count else None,
        "events": count,
        "clients": len(cohort),
        "clip_norm": state.clip_norm if np.isfinite(state.clip_norm) else None,
        "unclipped": unclipped,
        "update_norm": float(np.linalg.norm(update)),
        "client_norm_median": float(np.median(norms[np.isfinite(norms)])) if np.isfinite(norms).any() else None,
        "client_reward": _spread(client_rewards),
        "model_version": max(state.deployed),
        "rejected": [split.client_id(int(cohort[i])) for i in rejected],
    }


def _spread(rewards: np.ndarray) -> dict[str, float] | None:
    """How a round's reward spreads over its clients: an average can hide who loses."""
    if not len(rewards):
        return None
    values = np.quantile(rewards, np.array(_PERCENTS) / 100).tolist()
    quantiles = {f"p{percent}": value for percent, value in zip(_PERCENTS, values, strict=True)}
    worst = np.sort(rewards)[: max(1, len(rewards) // 10)]
    return {**quantiles, "worst_decile": float(worst.mean())}
