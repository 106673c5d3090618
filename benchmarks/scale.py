"""A population as large as Stack Overflow's: does a data set of 342,477 users open at once and cost no more a round?

`python -m benchmarks.scale` makes two data sets of the same kind, 100 times apart, and plays the same rounds on both,
in turns and each in a process of its own.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.workloads import FOLDER

SMALL, LARGE = 3_400, 342_477


def data_folder(users: int) -> Path:
    """The generated data set of so many users, made if it is not there yet."""
    from fedbandit.data.embedded.topics import generate

    folder = FOLDER / f"topics-{users}"
    if not (folder / "header.json").exists():
        print(f"  making {users:,} users", flush=True)
        generate(folder, users=users, test_fraction=0.0)
    return folder


def play(folder: Path, mode: str, rounds: int) -> dict[str, float]:
    """Open the data and play rounds: seconds to open, median CPU seconds of early and of late rounds, peak memory."""
    from fedbandit import Config
    from fedbandit.data import FederatedDataset
    from fedbandit.simulation import simulate

    started = time.perf_counter()
    dataset = FederatedDataset.open(folder)
    opened = time.perf_counter() - started
    settings = {
        "scenario": "scratch",
        "mode": mode,
        "rounds": rounds,
        "deploy_every": max(2, rounds // 12),
    }
    client = (
        {"learning_rate": 1.0, "max_examples": 256} if mode == "simple" else {"learning_rate": 1.0}
    )
    config = Config.build({**settings, "client": client, "threads": 2, "evaluate_every": 10**9})
    costs, events = [], []
    cpu = time.process_time()
    for metrics in simulate(config, dataset):
        now = time.process_time()
        costs.append(now - cpu)
        cpu = now
        events.append(metrics["events"])
    third = rounds // 3
    return {
        "clients": dataset.train.num_clients,
        "sentences": dataset.train.num_examples,
        "open_seconds": opened,
        "early_round_cpu": float(np.median(costs[1:third])),
        "middle_round_cpu": float(np.median(costs[third:-third])),
        "late_round_cpu": float(np.median(costs[-third:])),
        "events_per_round": float(np.mean(events)),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def measure(
    large: int = LARGE, rounds: int = 60, repeats: int = 2
) -> dict[str, list[dict[str, float]]]:
    """Both sizes in both modes, in turns."""
    folders = [data_folder(users) for users in (SMALL, large)]
    results: dict[str, list[dict[str, float]]] = {}
    for _ in range(repeats):
        for mode in ("simple", "population"):
            for folder in folders:
                command = [
                    sys.executable,
                    "-m",
                    "benchmarks.scale",
                    "--play",
                    str(folder),
                    mode,
                    str(rounds),
                ]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                results.setdefault(f"{mode}, {folder.name}", []).append(json.loads(done.stdout))
    return results


def report(results: dict[str, list[dict[str, float]]]) -> None:
    """Print what was measured; costs per event too, since random users differ in how much they write."""
    for name, tries in results.items():
        best = {key: min(one[key] for one in tries) for key in tries[0]}
        per_event = best["late_round_cpu"] / best["events_per_round"] * 1e6
        print(
            f"{name:32s} {best['clients']:>8,.0f} clients {best['sentences']:>11,.0f} sentences"
            f"  open {best['open_seconds']:.3f} s  CPU a round {best['early_round_cpu']:.4f} early"
            f" {best['late_round_cpu']:.4f} late ({per_event:.2f} us an event)  peak {best['peak_mb']:.0f} MB"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--play", nargs=3, metavar=("FOLDER", "MODE", "ROUNDS"), help=argparse.SUPPRESS
    )
    parser.add_argument("--users", type=int, default=LARGE)
    chosen = parser.parse_args()
    if chosen.play:
        print(json.dumps(play(Path(chosen.play[0]), chosen.play[1], int(chosen.play[2]))))
    else:
        measured = measure(chosen.users)
        report(measured)
        (Path(__file__).parent / "scale.json").write_text(json.dumps(measured, indent=2) + "\n")
