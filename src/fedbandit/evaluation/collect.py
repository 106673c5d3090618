"""What the clients of a simulation logged, as a logged data set: the same thing that a user's own logs become."""

from dataclasses import replace

import numpy as np

from fedbandit.data.dataset import FederatedDataset, Log, Split
from fedbandit.data.ragged import Ragged
from fedbandit.errors import ConfigError
from fedbandit.federated.client import Broadcast
from fedbandit.simulation.experiment import Experiment
from fedbandit.simulation.state import State


def collect_logs(experiment: Experiment, state: State, rounds: int) -> FederatedDataset:
    """The events of the cohorts of the next `rounds` rounds, made by the models that are deployed in `state`.

    The rounds must lie within one deployment period: what is deployed after it is not known yet.
    """
    phase, split = experiment.bandit, experiment.bandit.work.split
    if state.round % phase.deploy_every + rounds > phase.deploy_every:
        raise ValueError(f"{rounds} rounds after round {state.round} reach beyond the deployment period")
    clients, rows, actions, rewards, propensities = [], [], [], [], []
    for number in range(state.round + 1, state.round + rounds + 1):
        stage = phase.scenario.stage(number)
        if stage.available is not None:
            raise ConfigError(f"drift.kind: not all actions exist in round {number}; such logs are not collected")
        cohort = phase.cohorts.draw(number)
        events = phase.work.act(
            cohort, Broadcast(number, state.weights, state.deployed, state.clip_norm, stage.rewards, stage.available)
        )
        visits = phase.work.plan.visits(split, cohort, number)
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
    features = split.features.take(chosen) if isinstance(split.features, Ragged) else split.features[chosen]
    log = Log(
        np.concatenate(actions)[order].astype(np.int32),
        np.concatenate(rewards)[order].astype(np.float32),
        np.concatenate(propensities)[order].astype(np.float32),
    )
    no_labels = Ragged(np.zeros(len(chosen) + 1, np.int64), np.empty(0, np.int32))
    offsets = np.concatenate([[0], np.cumsum(counts)])
    header = experiment.dataset.header
    logged = replace(header, logged=True, fingerprint=f"{header.fingerprint} logged")
    return FederatedDataset(logged, Split(split.client_ids[present], offsets, features, no_labels, split.scale, log))
