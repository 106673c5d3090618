"""Devices that live the lives of a simulation's clients: the same contexts, draws and rewards, but through agents.

Used by the tests that compare a deployment with the simulator, in one process and in many.
"""

from pathlib import Path

import numpy as np
from builders import random_text

from fedbandit.assembly.experiment import build_experiment
from fedbandit.config import Config
from fedbandit.core.ragged import Ragged
from fedbandit.deploy import Agent, Retention, SimulatedDraws
from fedbandit.environments import Met

SEED, EVENTS, CACHE, DEPLOY_EVERY = 5, 8, 12, 2
CLIENTS = (
    4,
    1,
    9,
    2,
)  # with enough examples to fill a cache at the full rate: the simulator forgets by periods
TRAINING = {
    "seed": SEED,
    "deploy_every": DEPLOY_EVERY,
    "clients_per_round": 4,
    "policy": {"name": "softmax", "beta": 0.2},
    "objective": {"name": "regression"},
    "client": {"learning_rate": 0.3, "batch_size": 4},
    "server": {"optimizer": "adam", "learning_rate": 0.05, "epsilon": 1e-3},
    "clipping": {"quantile": 0.5, "initial": 0.3},
}


SECURE_TRAINING = {
    "deploy_every": 1,
    "server": {"optimizer": "sgd", "learning_rate": 1.0},
}  # rounding is not enlarged


def experiment(rounds: int, **changed):
    """The simulation: clients that act in every period and train on their newest events."""
    world = {"scenario": "scratch", "mode": "population", "rounds": rounds}
    lives = {"population": {"events_per_period": EVENTS, "cache_size": CACHE}}
    return build_experiment(
        Config.build({**TRAINING, **world, **lives, **changed}), random_text(words=40)
    )


def deployment_values(
    rounds: int, state: str, rules: dict | None = None, **changed
) -> tuple[dict, list[str]]:
    words = [f"w{i}" for i in range(40)]
    return {
        **TRAINING,
        **changed,
        "rounds": rounds,
        "deployment": {
            "state": state,
            "actions": [f"a{i}" for i in range(6)],
            "vocabulary": "words.txt",
            **(rules or {}),
        },
    }, words


def open_agent(folder: Path | str, client: int) -> Agent:
    return Agent(
        folder, retention=Retention(max_events=CACHE), uniform=SimulatedDraws(SEED, client, time=0)
    )


def live_a_period(agent: Agent, client: int, simulated) -> None:
    """What a client does between two deployments; the period is the number of the model in use."""
    period = agent.model_version
    agent._uniform.start(period)
    work = simulated.bandit.work
    first_round = period * simulated.bandit.deploy_every + 1
    visits = work.plan.visits(work.split, np.array([client]), first_round)
    for row in visits.rows[visits.fresh]:
        contexts = work.split.shared(np.array([row]))
        assert isinstance(contexts, Ragged)
        decision = agent.choose((contexts.ids, contexts.values))
        met = Met.at_rows(work.split, np.array([row]), work.num_actions, first_round)
        reward = work.world.rewards(met, np.array([decision.action]))
        agent.reward(decision.event_id, float(reward[0]))
