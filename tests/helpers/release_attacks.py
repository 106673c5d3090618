"""Attacks on what private rounds release: low bits of floating point, known cohorts."""

import math

import numpy as np
from network_builders import Network, a_deployment, coordinator, devices, settle, values
from scipy.stats import norm

from fedbandit.deploy.server.store import Store

PRIVACY = {
    "dp-fedavg": {"mechanism": "dp-fedavg", "sampling": "fixed"},
    "dp-ftrl": {"mechanism": "dp-ftrl", "separation": 1},
    "banded-mf": {"mechanism": "banded-mf", "separation": 3, "bands": 3},
    "blt": {"mechanism": "blt", "separation": 3, "buffers": 2},
}


def figures_of_a_deployment(folder, mechanism, rounds=3, number=9, noise=6.0):
    """What a real server publishes of each round's rewards, and what they were: [rounds] each.

    Each is (published sum, the noise's unit, true sum); rewards are 0 or 1, weights float32.
    """
    privacy = {**PRIVACY[mechanism], "noise_multiplier": noise, "figures_share": 0.1}
    chosen = {"rounds": rounds, "clients_per_round": number, "privacy": privacy}
    population = number * privacy.get("separation", 1)
    deployment = a_deployment(folder, values(population=population, max_events=100) | chosen)
    network = Network(devices(folder, number))
    settle(deployment, network.participants)
    store = Store(deployment.folder)
    server = coordinator(deployment, network, store)
    found = []
    gather = server._gathering.gather

    def seen(*given):
        found.append(gather(*given))
        return found[-1]

    server._gathering.gather = seen
    published = [server.attempt() for _ in range(rounds)]
    store.close()
    plan = deployment.ledger.plan
    units = [
        line["noise"]["rewards"] / math.sqrt(plan.noise_variances[0, line["round"] - 1])
        for line in published
    ]
    sums = [line["reward_sum"] for line in published]
    return list(zip(sums, units, [round(each.reward_sum) for each in found], strict=True))


def possible_sums(published: float, unit: float, most: int) -> list[int]:
    """The whole numbers up to `most` that leave a float32 as the noise: who knows its type tries them all."""
    candidates = np.arange(most + 1)
    noise = (published - candidates) / unit
    with np.errstate(over="ignore"):
        off = np.abs(noise - noise.astype(np.float32))
    return candidates[off <= 8 * np.finfo(np.float64).eps * (np.abs(published) / unit + 1)].tolist()


def impossible_with(released: np.ndarray, divisor: float, update: float) -> np.ndarray:
    """bool: releases that no float32 noise makes of a float32 sum with the client's update.

    The noise would have to be their difference, or a neighbour of it that rounds to the same.
    """
    sums, own = (released * np.float32(divisor)).astype(np.float32), np.float32(update)
    noise = (sums.astype(np.float64) - update).astype(np.float32)
    near = [noise, np.nextafter(noise, -np.inf), np.nextafter(noise, np.inf)]
    return ~np.any([own + each == sums for each in near], axis=0)


def gaussian_delta(epsilon: float, noise: float) -> float:
    """Delta of one release with this noise multiplier, exactly (Balle and Wang, 2018)."""
    half = 1 / (2 * noise)
    left, right = half - epsilon * noise, -half - epsilon * noise
    return float(norm.cdf(left) - math.exp(epsilon) * norm.cdf(right))
