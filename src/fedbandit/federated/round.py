"""Algorithm 4, one round at a time: draw clients, let them act and train, aggregate, step, maybe
deploy, record.

A round is a function of the state; nothing else crosses from one round to the next.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from fedbandit.core.errors import ConfigError, Diverged
from fedbandit.core.prediction import Progress
from fedbandit.core.process import Stopwatch
from fedbandit.data.dataset import Split
from fedbandit.environments import Scenario
from fedbandit.federated.algorithm import RoundFacts
from fedbandit.federated.clients import Broadcast, ChunkResult, ClientWork
from fedbandit.federated.cohorts import Cohorts
from fedbandit.federated.memory import Memory
from fedbandit.federated.pipeline import Clipping, Vectors, zeros_to_send
from fedbandit.federated.server import PlainMean, Server
from fedbandit.federated.state import State, Version


class Engine(Protocol):
    """Runs the work of a round; yields the chunks' results in the order of the chunks.

    It decides where chunks run, never what they are or what they compute. `memory` is what clients
    remember.
    """

    def run(
        self,
        work: ClientWork,
        chunks: list[np.ndarray],
        broadcast: Broadcast,
        memory: Memory | None = None,
    ) -> Iterator[ChunkResult]: ...

    def close(self) -> None: ...


class GateVerdict(Protocol):
    """A gate's answer about a candidate model."""

    @property
    def passes(self) -> bool: ...

    def to_json(self) -> dict[str, Any]: ...


class DeploymentGate(Protocol):
    """Decides whether a candidate, weights and rule, may replace the newest deployed version."""

    def judge(
        self, work: ClientWork, broadcast: Broadcast, candidate: Version, cohort: np.ndarray
    ) -> GateVerdict: ...


@dataclass(frozen=True)
class Phase:
    """The parts of a run that stay the same from round to round. Pre-training is a phase like any
    other.
    """

    work: ClientWork
    cohorts: Cohorts
    clipping: Clipping
    deploy_every: int
    aggregation: PlainMean = field(default_factory=PlainMean)
    gate: DeploymentGate | None = None  # decides whether a new model is deployed; None: always
    planned_events: int | None = (
        None  # a round; under privacy they stand for those that were logged
    )

    @property
    def scenario(self) -> Scenario:
        """The world in which its clients act."""
        return self.work.world

    def start(self, weights: np.ndarray) -> State:
        """The state before the first round, from the initial weights of the whole model."""
        freezing, algorithm = self.work.freezing, self.work.algorithm
        kept = algorithm.init(weights if freezing is None else freezing.pick(weights))
        if freezing is None:
            weights = algorithm.model(kept)
        return State(
            round=0,
            weights=weights,
            deployed={0: Version(weights, Progress(actions=self.work.num_actions))},
            server_state=kept,
            clip_norm=self.clipping.initial,
        )

    def progress(self, number: int, events: int) -> Progress:
        """The run's progress at the end of a round: what the rule of a version deployed then
        depends on.
        """
        counted = events if self.planned_events is None else number * self.planned_events
        return Progress(number // self.deploy_every, number, counted, self.work.num_actions)


def run_round(
    phase: Phase, state: State, engine: Engine, watch: Stopwatch, memory: Memory | None = None
) -> tuple[State, dict[str, Any]]:
    """One round: the next state and the round's metrics."""
    number, work = state.round + 1, phase.work
    individually = phase.aggregation.keep_individual_updates
    broadcast = work.broadcast(state, keep_individual_updates=individually)

    with watch("sample"):
        cohort = phase.cohorts.draw(number)
    running = engine.run(work, work.chunks(cohort), broadcast, memory)
    results, totals = _collect(running, broadcast, phase, memory, watch)
    with (
        watch("step"),
        np.errstate(over="ignore", invalid="ignore"),
    ):  # looked for below, and reported once
        norms = _joined(results, "norms")
        accepted = np.isfinite(norms)
        if len(norms) and 2 * accepted.sum() <= len(norms):
            lost = len(norms) - int(accepted.sum())
            raise Diverged(
                f"diverged at round {number}: {lost} of {len(norms)} updates are not finite"
            )
        below = norms[accepted] <= state.clip_norm
        facts = RoundFacts(
            number, phase.aggregation.denominator(len(below)), len(phase.cohorts.pool)
        )
        server = Server(work.algorithm, phase.clipping, phase.aggregation)
        step = server.step(
            facts, state.server_state, state.clip_norm, totals, len(below), int(below.sum())
        )
        weights = (
            step.weights
            if work.freezing is None
            else work.freezing.join(step.weights, state.weights)
        )

    metrics = round_metrics(work.split, cohort, results, state, below, step.update)
    events = metrics["events"]
    deployed, verdict = state.deployed, None
    deploys = number % phase.deploy_every == 0
    if deploys:
        candidate = Version(weights, phase.progress(number, state.events + events))
        if phase.gate is not None:
            with watch("gate"):
                verdict = phase.gate.judge(work, broadcast, candidate, cohort)
        needed_from = work.plan.oldest_version(number + 1)
        deployed = {version: kept for version, kept in deployed.items() if version >= needed_from}
        # Versions count periods: a refused model leaves its number to the version that is out
        # already.
        refused = verdict is not None and not verdict.passes
        deployed[number // phase.deploy_every] = (
            state.deployed[max(state.deployed)] if refused else candidate
        )

    following = state.after(step, weights, deployed, metrics["reward"], events)
    metrics["running_reward"] = following.running_reward
    metrics |= phase.aggregation.metrics(number, deploys)
    if verdict is not None:
        metrics["gate"] = verdict.to_json()
    return following, metrics


def _collect(
    results: Iterable[ChunkResult],
    broadcast: Broadcast,
    phase: Phase,
    memory: Memory | None,
    watch: Stopwatch,
) -> tuple[list[ChunkResult], Vectors]:
    """The chunks' figures, and what the aggregation's accumulator makes of all they sent."""
    algorithm, work = phase.work.algorithm, phase.work
    zeros = zeros_to_send(algorithm.sends, broadcast.received["weights"])
    if work.step is not None:
        zeros = {name: np.zeros(zero.shape, np.int64) for name, zero in zeros.items()}
    accumulator = phase.aggregation.accumulator(zeros)
    kept = []
    here = Stopwatch()
    with here("all"):
        for result in results:
            if work.step is not None and not result.sent.whole:
                raise ConfigError(
                    f"algorithm.name: {type(algorithm).__name__} adds up its updates;"
                    ' privacy.noise = "system" needs them from pipeline.collect'
                )
            with here("aggregate"):
                try:
                    accumulator.add(result.sent.sums, int(np.isfinite(result.norms).sum()))
                except ValueError as error:
                    kind = type(algorithm).__name__
                    raise ConfigError(f"algorithm.name: {kind} {error}") from error
                if memory is not None:
                    memory.write(broadcast.round, result.sent.memory)
                elif result.sent.memory:
                    kind = type(algorithm).__name__
                    raise ConfigError(
                        f"algorithm.name: {kind} returns memory, but does not say so in `memory_vectors`"
                    )
            kept.append(result.figures())
        with here("aggregate"):
            totals = accumulator.totals()
    aggregate = here.seconds["aggregate"]
    watch.add({"aggregate": aggregate, **_shares(here.seconds["all"] - aggregate, kept)})
    return kept, totals


def _shares(waited: float, results: list[ChunkResult]) -> dict[str, float]:
    """The time in which chunks worked side by side, divided in proportion to what each of them
    spent it on.
    """
    worked = Stopwatch()
    for result in results:
        worked.add(dict(result.seconds))
    whole = sum(worked.seconds.values())
    return (
        {name: waited * seconds / whole for name, seconds in worked.seconds.items()}
        if whole
        else {}
    )


def _joined(results: list[ChunkResult], name: str) -> np.ndarray:
    return np.concatenate([getattr(result, name) for result in results]) if results else np.zeros(0)


_PERCENTS = (10, 25, 50, 75, 90)
_PUBLISHED = ("round", "clip_norm", "update_norm", "model_version", "epsilon", "epsilon_pld")


def published(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The part that others may be told of a round, or of a run, whose noise and cohorts are secret.

    What follows from the released models and the plan stays. All else is exact, and null: a mean
    tells how many events it is over, and a count how many clients took part.
    """
    return {name: value if name in _PUBLISHED else None for name, value in metrics.items()}


def round_metrics(
    split: Split,
    cohort: np.ndarray,
    results: list[ChunkResult],
    state: State,
    below: np.ndarray,
    update: np.ndarray,
) -> dict[str, Any]:
    """One line of `metrics.jsonl`. Everything in it is a function of the run's configuration, never
    of the machine.

    `below` says for each accepted client whether its update was not clipped.
    """
    events, norms, rewards = (_joined(results, name) for name in ("events", "norms", "reward_sums"))
    count = int(events.sum())
    had_events = events > 0
    client_rewards = rewards[had_events] / events[had_events]
    finite = np.isfinite(norms)
    metrics = {
        "round": state.round + 1,
        "reward": float(rewards.sum() / count) if count else None,
        "running_reward": None,
        "propensity": float(_joined(results, "propensity_sums").sum() / count) if count else None,
        "events": count,
        "clients": len(cohort),
        "clip_norm": state.clip_norm if np.isfinite(state.clip_norm) else None,
        "unclipped": int(below.sum()) / len(below) if len(below) else None,
        "update_norm": float(np.linalg.norm(update)),
        "client_norm_median": _median(np.sort(norms[finite]).tolist()),
        "client_reward": _spread(client_rewards),
        "model_version": max(state.deployed),
        "rejected": [split.client_id(int(cohort[i])) for i in np.flatnonzero(~finite)],
    }
    lost = [result.regret_sums for result in results if result.regret_sums is not None]
    if lost:
        metrics["regret"] = float(np.concatenate(lost).sum() / count) if count else None
    missing = [result.missing for result in results if result.missing is not None]
    if missing:
        metrics["missing"] = int(np.concatenate(missing).sum())
    sizes = [result.sent.bytes for result in results if result.sent.bytes is not None]
    if sizes:
        metrics["sent_bytes"] = int(np.concatenate(sizes).sum())
    return metrics


def _spread(rewards: np.ndarray) -> dict[str, float] | None:
    """The spread of a round's reward over its clients: an average can hide who loses."""
    if not len(rewards):
        return None
    ordered = np.sort(rewards)
    values = ordered.tolist()
    quantiles = {f"p{percent}": _quantile(values, percent / 100) for percent in _PERCENTS}
    return {**quantiles, "worst_decile": float(ordered[: max(1, len(rewards) // 10)].mean())}


def _quantile(ordered: list[float], share: float) -> float:
    """The same as `np.quantile`, to the last bit, in less time."""
    place = share * (len(ordered) - 1)
    below = int(place)
    low, high, part = ordered[below], ordered[min(below + 1, len(ordered) - 1)], place - below
    return low + (high - low) * part if part < 0.5 else high - (high - low) * (1 - part)


def _median(ordered: list[float]) -> float | None:
    """The same as `np.median`; None of nothing."""
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2 if ordered else None
