"""Algorithm 4, one round at a time: draw clients, let them act and train, aggregate, step, maybe deploy, record.

A round is a function of the state; nothing else crosses from one round to the next.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedbandit.engines import Engine, chunks_of
from fedbandit.errors import Diverged
from fedbandit.evaluation.metrics import round_metrics
from fedbandit.federated.client import Broadcast, ChunkResult, ClientWork
from fedbandit.federated.clipping import Clipping
from fedbandit.federated.optimizers import ServerOptimizer
from fedbandit.simulation.cohorts import Cohorts
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
    with watch("clients"):
        results, total = _collect(engine.run(phase.work, chunks_of(cohort), broadcast), state.weights)
    with watch("step"):
        norms = np.concatenate([result.norms for result in results]) if results else np.zeros(0)
        accepted = np.isfinite(norms)
        if len(norms) and 2 * accepted.sum() <= len(norms):
            lost = len(norms) - int(accepted.sum())
            raise Diverged(f"diverged at round {number}: {lost} of {len(norms)} updates are not finite")
        update = total / max(1, int(accepted.sum()))
        optimizer, weights = phase.optimizer.step(state.optimizer, state.weights, update)
        if not np.isfinite(weights).all():
            raise Diverged(f"diverged at round {number}: the model's weights are not finite")
        unclipped = float((norms[accepted] <= state.clip_norm).mean()) if accepted.any() else None
        clip_norm = state.clip_norm if unclipped is None else phase.clipping.following(state.clip_norm, unclipped)

    deployed = state.deployed
    if number % phase.deploy_every == 0:
        needed_from = phase.work.plan.oldest_version(number + 1)
        deployed = {version: kept for version, kept in deployed.items() if version >= needed_from}
        deployed[number // phase.deploy_every] = weights

    metrics = round_metrics(number, phase.work.split, cohort, results, state, unclipped, update)
    following = State(
        round=number,
        weights=weights,
        deployed=deployed,
        optimizer=optimizer,
        clip_norm=clip_norm,
        reward_total=state.reward_total + (metrics["reward"] or 0.0),
        rewarded_rounds=state.rewarded_rounds + (metrics["reward"] is not None),
        extra=state.extra,
    )
    metrics["running_reward"] = following.running_reward
    return following, metrics


def _collect(results: Iterable[ChunkResult], like: np.ndarray) -> tuple[list[ChunkResult], np.ndarray]:
    """The chunks' results, and the sum of their updates added in the order of the chunks."""
    total = np.zeros_like(like)
    kept = []
    for result in results:
        result.update.add_to(total)
        kept.append(result)
    return kept, total
