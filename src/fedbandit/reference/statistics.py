"""LinUCB from statistics, over fixed actions or over candidates: A = λI + Σ x x', b = Σ r x.

One event at a time, as in the rest of the reference: the rows x are written out by hand, and every
system is solved again for each version.
"""

from typing import Any
from zlib import crc32

import numpy as np

from fedbandit.core.randomness import Purpose, generator, uniforms
from fedbandit.data.dataset import FederatedDataset, Split
from fedbandit.reference.inference import context_of, draw, labels_of, simple_visits
from fedbandit.reference.simulation import PAYS, world_of


def run_linucb(
    config: Any, dataset: FederatedDataset
) -> tuple[list[dict[str, float]], list[np.ndarray]]:
    """A whole run of `statistics` with `ucb` in simple mode: each round's metrics, and the last θ.

    There is one regression for each fixed action, and one for all candidates.
    """
    split, actions, seed = dataset.train, dataset.header.num_actions, config.seed
    told, rule = config.algorithm.parameters, config.policy.parameters
    reward, _ = world_of(config, dataset.header)
    features = int(np.prod(dataset.header.shape))
    size = len(rows_of(split, 0, actions, features)[0])
    sums = [(np.zeros((size, size)), np.zeros(size)) for _ in range(max(1, actions))]
    deployed, history = [solved(sums, **told)], []
    for t in range(1, config.rounds + 1):
        rng = generator(seed, Purpose.COHORT, t)
        sums = [(told.get("keep", 1.0) * a, told.get("keep", 1.0) * b) for a, b in sums]
        rewards, propensities = [], []
        for client in rng.choice(split.num_clients, config.clients_per_round, replace=False):
            most, every = config.client.max_examples, config.deploy_every
            for visit in simple_visits(split, int(client), t, seed, every, most):
                rows = rows_of(split, visit.row, actions, features)
                bounds = []
                for action, x in enumerate(rows):
                    theta, inverse = deployed[visit.version][action if actions else 0]
                    bounds.append(x @ theta + rule["alpha"] * np.sqrt(x @ inverse @ x))
                p = np.full(len(rows), rule["floor"] / len(rows))
                p[np.argmax(bounds)] += 1 - rule["floor"]
                address = visit.time, int(client), visit.position
                action = draw(p, float(uniforms(seed, Purpose.ACTIONS, *address)))
                item = action if actions else items_of(split, visit.row)[action]
                chance = uniforms(seed, Purpose.WORLD, crc32(b"click"), *address, item)
                mean = reward(labels_of(split, visit.row), action)
                rewards.append(PAYS[config.environment.name](mean, chance))
                propensities.append(p[action])
                a, b = sums[action if actions else 0]
                a += np.outer(rows[action], rows[action])
                b += rewards[-1] * rows[action]
        history.append({"reward": np.mean(rewards), "propensity": np.mean(propensities)})
        if t % config.deploy_every == 0:
            deployed.append(solved(sums, **told))
    return history, [theta for theta, _ in solved(sums, **told)]


def solved(
    sums: list[tuple[np.ndarray, np.ndarray]], prior: float = 1.0, **_: Any
) -> list[tuple[np.ndarray, np.ndarray]]:
    """θ = A⁻¹ b and A⁻¹ of each regression."""
    inverses = [np.linalg.inv(prior * np.eye(len(b)) + a) for a, b in sums]
    return [(inverse @ b, inverse) for inverse, (_, b) in zip(inverses, sums, strict=True)]


def rows_of(split: Split, row: int, actions: int, features: int) -> list[np.ndarray]:
    """The row x of every action that can be chosen, with a 1 for the bias at the end.

    Fixed actions share the context, of length one if it is dense. A candidate's row holds its
    item's features, the context and all products of the two, each of length one, all times 1/√3.
    """
    context = context_of(split, row)
    if actions:
        x = np.zeros(features + 1)
        if isinstance(context, list):
            for word, value in context:
                x[word] += value
        else:
            x[:-1] = context / max(np.sqrt(np.sum(context * context)), 1e-12)
        x[-1] = 1
        return [x] * actions
    catalogue = split.catalogue
    assert catalogue is not None
    assert isinstance(catalogue.features, np.ndarray)
    rows, shared = [], _unit(context)
    for item in items_of(split, row):
        own = _unit(np.asarray(catalogue.features[item], np.float64).reshape(-1))
        crossed = (shared[:, None] * own).reshape(-1)
        parts = np.concatenate([own, shared, crossed]) * np.float32(3**-0.5)
        rows.append(np.append(parts.astype(np.float64), 1.0))
    return rows


def items_of(split: Split, row: int) -> list[int]:
    """The candidates of an example, in their order."""
    assert split.candidates is not None
    begin, end = split.candidates.offsets[row], split.candidates.offsets[row + 1]
    return [int(item) for item in split.candidates.ids[begin:end]]


def _unit(vector: np.ndarray) -> np.ndarray:
    """The vector at length one, in single precision, as features are stored."""
    length = np.sqrt(np.sum(vector * vector))
    return np.asarray(vector / (length if length > 0 else 1.0), np.float32)
