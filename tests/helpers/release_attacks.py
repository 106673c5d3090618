"""Attacks on what private rounds release: low bits of floating point, known cohorts."""

import math

import numpy as np
from builders import dataset_in_memory
from network_builders import Network, a_deployment, coordinator, devices, settle, values
from scipy.stats import beta, norm

from fedbandit.assembly.experiment import build_experiment
from fedbandit.config import Config
from fedbandit.deploy.server.store import Store
from fedbandit.federated.cohorts import PoissonCohorts
from fedbandit.federated.pipeline import in_steps
from fedbandit.privacy.accounting import Ledger
from fedbandit.privacy.noise import RELEASE

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
    """The whole numbers up to `most` that leave a float32 as the noise; all of them are tried."""
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


def most_without(with_client: float, noise: float) -> float:
    """How likely without a client a release may be that has this probability with it.

    For one release with this noise multiplier, exactly (Dong, Roth and Su, 2022).
    """
    return float(norm.cdf(norm.ppf(with_client) + 1 / noise))


def planted_client(seed: int, has_secret: bool = False, trials: int = 40_000) -> dict:
    """The epsilon that a planted client's score proves at 99.9%, by one who recomputes its cohorts.

    Each of `trials` clients owns a coordinate, is there by a fair coin, and sends its clip norm in
    every round that draws it. Cohorts and releases are those of a `system` run; the attacker adds a
    coordinate up over the turns that the public configuration says the client had. One who has the
    secret shows what the attack can do.
    """
    rounds = 100
    chosen = Config.build(
        {
            "scenario": "scratch",
            "seed": seed,
            "rounds": rounds,
            "clients_per_round": trials // 100,
            "clipping": {"norm": 1.0},
            "client": {"learning_rate": 0.1},
            "privacy": {"mechanism": "dp-fedavg", "noise_multiplier": 1.0, "noise": "system"},
        }
    )
    features = np.ones((trials, 1), np.float32)
    data = dataset_in_memory(features, [[0]] * trials, np.arange(trials + 1), 2)
    experiment = build_experiment(chosen, data)
    phase, plan = experiment.bandit, experiment.privacy.plan
    public = PoissonCohorts(range(trials), plan.probability, chosen.seed)
    attacked = phase.cohorts if has_secret else public
    present = np.random.default_rng(seed).random(trials) < 0.5
    score, turns = np.zeros(trials), np.zeros(trials, int)
    for number in range(1, rounds + 1):
        sent = np.zeros(trials, np.float32)
        sent[phase.cohorts.draw(number)] = 1.0
        sent[~present] = 0.0
        total = in_steps(sent, 1.0, RELEASE.step) if phase.work.step else sent
        mean = phase.aggregation.mean(total, int(sent.sum()), number, 1.0)
        known = attacked.draw(number)
        score[known] += mean[known] * plan.clients_per_round
        turns[known] += 1
    seen = turns >= 4  # the attacker picks clients that it takes for drawn so often
    score = score[seen] / (np.sqrt(turns[seen]) * plan.noise_multiplier)
    return {
        "seed": seed,
        "clients": int(seen.sum()),
        "stated": Ledger(plan).tight_epsilon(rounds),
        "proved": _proved(score[present[seen]], score[~present[seen]], plan.delta),
    }


def _proved(with_it: np.ndarray, without: np.ndarray, delta: float) -> float:
    """Epsilon at 99.9% from hits and alarms above a threshold that was chosen beforehand."""
    hits, alarms = ((int((each >= 2.2).sum()), len(each)) for each in (with_it, without))
    least = beta.ppf(0.0005, hits[0], hits[1] - hits[0] + 1) if hits[0] else 0.0
    most = beta.ppf(1 - 0.0005, alarms[0] + 1, alarms[1] - alarms[0])
    return max(0.0, math.log((least - delta) / most)) if least > delta else 0.0
