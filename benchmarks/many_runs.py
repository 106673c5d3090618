"""What many short runs cost beside their rounds: start-up, imports, compilation, evaluation, files.

`python -m benchmarks.many_runs` runs a sweep of text runs on two cores and compares it with its rounds alone, in turns
and each in processes of their own. CPU time means something on a busy machine too; wall time does not.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks import COMPILED

PRESET = "so-scratch-softmax"


def rounds_alone(rounds: int, seeds: int) -> float:
    """CPU seconds of so many rounds, the median over seeds; the first run of the process is not counted."""
    from fedbandit import open_dataset, preset
    from fedbandit.simulation.simulate import simulate

    dataset, found = open_dataset("topics"), []
    for seed in range(seeds + 1):
        # One round more, in which it evaluates: that is not counted.
        changes = {"rounds": rounds + 1, "seed": seed, "threads": 1, "evaluate_every": rounds + 1}
        simulation = simulate(preset(PRESET).with_values(changes), dataset)
        started = time.process_time()
        for metrics in simulation:
            if metrics["round"] == rounds:
                found.append(time.process_time() - started)
    return float(np.median(found[1:]))


def sweep(folder: Path, runs: int, rounds: int, workers: int) -> None:
    """So many runs side by side, as `fedbandit sweep` and figures have them."""
    from fedbandit import preset
    from fedbandit.runs.local_runner import Job, LocalRunner

    os.environ.pop(COMPILED)  # its workers start as users' do
    configs = [preset(PRESET).with_values({"rounds": rounds, "seed": seed}) for seed in range(runs)]
    jobs = [Job(config, folder / str(number)) for number, config in enumerate(configs)]
    assert {ended.status for ended in LocalRunner(workers).run(jobs)} == {"finished"}


def measure(runs: int, rounds: int, workers: int, repeats: int) -> dict[str, float]:
    """The overhead over the rounds' CPU, by CPU time and by wall time: medians of `repeats` turns."""
    alone, cpu, wall = [], [], []
    for _ in range(repeats):
        said = subprocess.run(_command("--alone", rounds, 5), capture_output=True, text=True, check=True).stdout
        alone.append(json.loads(said))
        with tempfile.TemporaryDirectory() as folder:
            before, started = _children_cpu(), time.perf_counter()
            subprocess.run(_command("--sweep", folder, runs, rounds, workers), check=True)
            wall.append(time.perf_counter() - started)
            cpu.append(_children_cpu() - before)
    whole = runs * float(np.median(alone))
    return {
        "runs": runs,
        "rounds": rounds,
        "CPU seconds of a run's rounds": whole / runs,
        "CPU seconds of a run in the sweep": float(np.median(cpu)) / runs,
        "overhead by CPU": float(np.median(cpu)) / whole - 1,
        "overhead by wall": workers * float(np.median(wall)) / whole - 1,
        "load": os.getloadavg()[0],
    }


def _command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "benchmarks.many_runs", *map(str, arguments)]


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--alone", nargs=2, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--sweep", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=1)
    chosen = parser.parse_args()
    if chosen.alone:
        print(json.dumps(rounds_alone(*chosen.alone)))
    elif chosen.sweep:
        sweep(Path(chosen.sweep[0]), *map(int, chosen.sweep[1:]))
    else:
        print(json.dumps(measure(chosen.runs, chosen.rounds, chosen.workers, chosen.repeats), indent=2))
