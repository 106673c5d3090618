"""Attacks on private releases in full counts: what they find, as a committed JSON file.

    python scripts/privacy_attacks.py scripts/results/privacy_attacks.json

Three attackers, each with all that is public: one looks for the whole number that leaves a float32
as the noise of a published figure; one for weights that float32 could not have come to with a
client's update in them; one recomputes the cohorts of a `system` run from its configuration and
adds up a planted client's coordinate over the turns it finds. Tests run samples of the same.
"""

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
from network_builders import a_deployment, values
from release_attacks import (
    PRIVACY,
    figures_of_a_deployment,
    impossible_with,
    most_without,
    planted_client,
    possible_sums,
)

from fedbandit.deploy.server.private_metrics import RoundNoise
from fedbandit.federated.pipeline import add_steps


def figures(mechanism: str, rounds: int, streams: int) -> dict[str, Any]:
    """How many of `rounds` noised figures, over several streams, give their exact sum away."""
    with tempfile.TemporaryDirectory() as folder:
        each = rounds // streams
        given = {"noise_multiplier": 6.0, "figures_share": 0.1, **PRIVACY[mechanism]}
        chosen = {"rounds": each, "clients_per_round": 60, "privacy": given}
        rules = values(population=180, max_events=100) | chosen
        deployment = a_deployment(Path(folder), rules)
        plan, bounds, rng = (
            deployment.ledger.plan,
            deployment.rules.bounds,
            np.random.default_rng(0),
        )
        single, recovered = 0, 0
        for _ in range(streams):
            memory: dict[int, np.ndarray] = {}
            for number in range(1, each + 1):
                noise = RoundNoise(plan, number, memory, deployment.noise)
                noise.weights.update(number, np.zeros(1, np.float32))
                true = int(rng.integers(0, 601))
                noised = noise.figures(np.full(3, true), bounds)
                unit = noised.deviations[0] / math.sqrt(plan.noise_variances[0, number - 1])
                possible = possible_sums(noised.sums[0], unit, 600)
                single += len(possible) == 1
                recovered += possible == [true]
                memory = noise.memory
        real = figures_of_a_deployment(Path(folder) / "devices", mechanism, 6, 60)
        found = sum(possible_sums(sum_, unit, 600) == [true] for sum_, unit, true in real)
    return {
        "mechanism": mechanism,
        "rounds": streams * each,
        "one_candidate_left": single,
        "recovered": recovered,
        "guessed_by_chance": streams * each / 601,
        "coordinator_rounds": len(real),
        "coordinator_recovered": found,
    }


def weights(noise: float, size: int) -> dict[str, Any]:
    """The share of releases, without and with a client, that float32 could not make with it."""
    with tempfile.TemporaryDirectory() as folder:
        given = {"mechanism": "dp-fedavg", "noise_multiplier": noise, "sampling": "fixed"}
        chosen = {"rounds": 4, "clients_per_round": 4, "privacy": given}
        deployment = a_deployment(Path(folder), values(population=4) | chosen)
        shares, like = [], np.zeros(size, np.float32)
        for update in (0.0, 1.0):
            server = deployment.server(deployment.noise(0, {}))
            total = np.zeros(like.shape, np.int64)
            add_steps(total, np.full_like(like, update), 1.0, deployment.grid.step)
            released = server.aggregation.mean(total, 1, 1, 1.0)
            shares.append(float(impossible_with(released, 4, 1.0).mean()))
    return {
        "noise_multiplier": noise,
        "without": shares[0],
        "with": shares[1],
        "most_without": most_without(shares[1], noise),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, default=20)
    chosen = parser.parse_args()
    found = {
        "figures": [figures(name, chosen.rounds, 10) for name in PRIVACY],
        "weights": [weights(noise, 10**6) for noise in (1.0, 2.0, 4.0)],
        "planted_client": [planted_client(seed) for seed in range(chosen.seeds)],
        "who_has_the_secret": [planted_client(seed, True) for seed in range(3)],
    }
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
