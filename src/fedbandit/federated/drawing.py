"""Loops over events, compiled: drawing actions as `fedbandit.events.draw_actions` does, and adding up what they earned.

Devices draw by the plain form, which needs numpy alone; a test holds the two together, to the last bit.
"""

import numba
import numpy as np


def draw_actions(probabilities: np.ndarray, uniforms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Actions [n] and their probabilities [n] for probabilities [n, K] and uniforms [n] in [0, 1)."""
    actions = np.empty(len(probabilities), np.int64)
    propensities = np.empty(len(probabilities), probabilities.dtype)
    _draw(np.ascontiguousarray(probabilities), uniforms, actions, propensities)
    return actions, propensities


@numba.njit(nogil=True, cache=True)
def _draw(probabilities, uniforms, actions, propensities):  # type: ignore[no-untyped-def]
    n, k = probabilities.shape
    cumulative = np.empty(k, probabilities.dtype)
    for i in range(n):
        row = probabilities[i]
        total = row[0]
        cumulative[0] = total
        for a in range(1, k):
            total = total + row[a]
            cumulative[a] = total
        threshold = probabilities.dtype.type(uniforms[i]) * total
        chosen = 0
        while chosen < k and cumulative[chosen] <= threshold:
            chosen += 1
        if chosen == k:  # the threshold was rounded up to the total
            chosen = k - 1
            while chosen > 0 and row[chosen] == 0:
                chosen -= 1
        actions[i] = chosen
        propensities[i] = row[chosen]


@numba.njit(nogil=True, cache=True)
def fresh_sums(bounds, fresh, rewards, propensities):  # type: ignore[no-untyped-def]
    """For each client of some events: how many are fresh, and the sums of their rewards and propensities."""
    clients = len(bounds) - 1
    counts, reward_sums, propensity_sums = np.zeros(clients, np.int64), np.zeros(clients), np.zeros(clients)
    for client in range(clients):
        for i in range(bounds[client], bounds[client + 1]):
            if fresh[i]:
                counts[client] += 1
                reward_sums[client] += rewards[i]
                propensity_sums[client] += propensities[i]
    return counts, reward_sums, propensity_sums
