"""What noise from the devices earns beside noise of the server, with 2,560 clients a round.

    python scripts/device_noise_rewards.py scripts/results/device_noise_rewards.json

Both at the same epsilon; the devices' allows for 20% drop-out and 10% colluders. The data are drawn
here: 5,120 clients with five contexts each, of 40 features, whose best of ten actions a linear
teacher knows. All shares of a round's noise are drawn at once.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from fedbandit import Config, simulate
from fedbandit.core.ragged import Ragged
from fedbandit.data.dataset import FederatedDataset, Header, Split
from fedbandit.privacy.reporting import towards_server

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


def config(noise: str, seed: int) -> Config:
    """A run at epsilon 2, whose clients have a turn in every second round."""
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
            "privacy": {
                "mechanism": "dp-fedavg",
                "epsilon": 2.0,
                "sampling": "min-separation",
                "separation": 2,
                "noise": noise,
            },
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    dataset = data()
    found: dict[str, object] = {}
    for noise in ("system", "devices"):
        rewards = []
        for seed in range(given.seeds):
            run = simulate(config(noise, seed), dataset)
            rewards.append(list(run)[-1]["running_reward"])
            print(noise, seed, rewards[-1], flush=True)
        found[noise] = rewards
        ledger = run.experiment.privacy
    found["devices_of_system"] = float(np.mean(found["devices"]) / np.mean(found["system"]))
    found["noise_multiplier"] = ledger.plan.noise_multiplier
    found["towards_server"] = towards_server(ledger, ledger.plan.rounds)
    given.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
