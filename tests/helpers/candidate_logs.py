"""A logged data set over candidates, whose world is known: what its items pay, and how it was logged."""

import numpy as np

from fedbandit.core.ragged import Ragged
from fedbandit.data.dataset import Catalogue, FederatedDataset, Log
from fedbandit.data.writer import DatasetWriter

ITEMS, CLIENTS, EVENTS = 30, 80, 15


def world(seed=0):
    """Features of items float32 [items, 4], and the probability [items] with which each pays."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(ITEMS, 4)).astype(np.float32)
    return features, 1 / (1 + np.exp(-1.5 * features[:, 0] / np.linalg.norm(features, axis=1)))


def logged(folder, seed=0, clients=CLIENTS):
    """Lists of 2 to 6 items; the logging policy likes what pays. The data set, and both truths.

    Truths: what choosing uniformly earns, and what choosing the best item earns.
    """
    features, pays = world()
    rng = np.random.default_rng(seed + 1)
    n = clients * EVENTS
    lists = [rng.choice(ITEMS, rng.integers(2, 7), replace=False) for _ in range(n)]
    actions, propensities, rewards = [], [], []
    for items in lists:
        p = np.exp(pays[items])
        p /= p.sum()
        place = rng.choice(len(items), p=p)
        actions.append(place)
        propensities.append(p[place])
        rewards.append(float(rng.random() < pays[items[place]]))
    log = Log(
        np.array(actions, np.int32),
        np.array(rewards, np.float32),
        np.array(propensities, np.float32),
    )
    owners = [f"u{i // EVENTS:03d}" for i in range(n)]
    held = np.arange(n) // EVENTS % 4 == 0
    shared = np.ones((n, 2), np.float32)
    catalogue = Catalogue(features)
    with DatasetWriter(folder, kind="dense", shape=(2,), catalogue=catalogue, logged=True) as out:
        for split, rows in (("train", np.flatnonzero(~held)), ("test", np.flatnonzero(held))):
            out.add_many(
                [owners[row] for row in rows],
                shared[rows],
                Ragged.from_rows([[] for _ in rows]),
                split=split,
                log=Log(log.actions[rows], log.rewards[rows], log.propensities[rows]),
                candidates=Ragged.from_rows([lists[row].tolist() for row in rows]),
            )
        out.finish()
    uniform = np.mean([pays[items].mean() for items in lists])
    best = np.mean([pays[items].max() for items in lists])
    return FederatedDataset.open(folder), float(uniform), float(best)
