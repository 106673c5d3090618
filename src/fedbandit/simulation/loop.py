"""Algorithm 4, one round at a time: draw clients, let them act and train, aggregate, step, maybe deploy, record.

A round is a function of the state; nothing else crosses from one round to the next.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedbandit.engines import Engine
from fedbandit.errors import Diverged
from fedbandit.evaluation.gate import Gate
from fedbandit.evaluation.metrics import round_metrics
from fedbandit.federated.aggregation import Aggregation, PlainMean
from fedbandit.federated.client import Broadcast, ChunkResult, ClientWork
from fedbandit.federated.clipping import Clipping
from fedbandit.federated.cohorts import Cohorts
from fedbandit.federated.optimizers import ServerOptimizer
from fedbandit.federated.stepping import Stepping
from fedbandit.simulation.scenarios import Scenario
from fedbandit.simulation.state import State
from fedbandit.timing import Stopwatch


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
