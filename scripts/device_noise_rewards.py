"""Rewards of noise from the devices, of noise of the server and of none, with 2,560 clients a round.

    python scripts/device_noise_rewards.py scripts/results/device_noise_rewards.json

Both kinds of noise at the same epsilon; the devices' allows for 20% drop-out and 10% colluders. At
the first epsilon noise is cheap. At the second that of the server costs a part of the reward that
cannot be overlooked, so that the devices' larger noise could show. The data are drawn here: 5,120
clients with five contexts each, of 40 features, whose best of ten actions a linear teacher knows.
All shares of a round's noise are drawn at once.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from fedbandit import Config, simulate
from fedbandit.core.ragged import Ragged
from fedbandit.data.dataset import FederatedDataset, Header, Split
from fedbandit.privacy.accounting import Ledger
from fedbandit.privacy.reporting import towards_server

EPSILONS = (2.0, 0.5)
CLIENTS, EACH, FEATURES, ACTIONS = 5120, 5, 40, 10


def data() -> FederatedDataset:
    """Contexts of length one, labelled by the teacher."""
    rng = np.random.default_rng(0)
    teacher = rng.standard_normal((FEATURES, ACTIONS))
    contexts = rng.standard_normal((CLIENTS * EACH, FEATURES)).astype(np.float32)
    best = (contexts @ teacher).argmax(axis=1)
    names = tuple(f"action {i}" for i in range(ACTIONS))
    counts = tuple(int(count) for count in np.bincount(best, minlength=ACTIONS))
    header = Header("teacher", "dense", (FEATURES,), names, counts, fingerprint="teacher")
    ids = np.array([f"c{i:05d}" for i in range(CLIENTS)], dtype=bytes)
    labels = Ragged.from_rows([[int(label)] for label in best])
    offsets = EACH * np.arange(CLIENTS + 1)
    return FederatedDataset(header, Split(ids, offsets, contexts, labels))


def config(noise: str | None, epsilon: float, seed: int) -> Config:
    """A run whose clients have a turn in every second round; without noise where there is none."""
    privacy = {"sampling": "min-separation", "separation": 2}
    if noise is not None:
        privacy |= {"mechanism": "dp-fedavg", "epsilon": epsilon, "noise": noise}
    return Config.build(
        {
            "scenario": "scratch",
            "seed": seed,
            "rounds": 60,
            "deploy_every": 10,
            "clients_per_round": 2560,
            "policy": {"name": "softmax", "beta": 0.1},
            "client": {"learning_rate": 0.5},
            "server": {"optimizer": "sgd", "learning_rate": 4.0},
            "clipping": {"norm": 0.5},
            "privacy": privacy,
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--epsilons", type=float, nargs="+", default=EPSILONS)
    given = parser.parse_args()
    dataset = data()

    def rewards(noise: str | None, epsilon: float = 0.0) -> tuple[list[float], Ledger | None]:
        found = []
        for seed in range(given.seeds):
            run = simulate(config(noise, epsilon, seed), dataset)
            found.append(list(run)[-1]["running_reward"])
            print(noise or "none", epsilon, seed, found[-1], flush=True)
        return found, run.experiment.privacy

    without, _ = rewards(None)
    rows = []
    for epsilon in given.epsilons:
        (system, _), (devices, ledger) = rewards("system", epsilon), rewards("devices", epsilon)
        assert ledger is not None
        rows.append(
            {
                "epsilon": epsilon,
                "system": system,
                "devices": devices,
                "system_of_none": float(np.mean(system) / np.mean(without)),
                "devices_of_system": float(np.mean(devices) / np.mean(system)),
                "noise_multiplier": ledger.plan.noise_multiplier,
                "towards_server": towards_server(ledger, ledger.plan.rounds),
            }
        )
    text = json.dumps({"clients_per_round": 2560, "none": without, "at": rows}, indent=1)
    given.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
