"""What many short runs cost beside their rounds: start-up, imports, compilation, evaluation, files.

`python -m benchmarks.many_runs` runs a sweep of text runs on two cores and compares it with the rounds that its runs
timed themselves, without their evaluations and checkpoints. Both come from the same minutes of the same machine.
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

from benchmarks import COMPILED

PRESET = "so-scratch-softmax"
_BESIDE = ("evaluate", "checkpoint")  # parts of a round's time that are no part of the round


def sweep(folder: Path, runs: int, rounds: int, workers: int) -> None:
    """So many runs side by side, as `fedbandit sweep` and figures have them."""
    from fedbandit import preset
    from fedbandit.runs.local_runner import Job, LocalRunner

    os.environ.pop(COMPILED)  # its workers start as users' do
    configs = [preset(PRESET).with_values({"rounds": rounds, "seed": seed}) for seed in range(runs)]
    jobs = [Job(config, folder / str(number)) for number, config in enumerate(configs)]
    assert {ended.status for ended in LocalRunner(workers).run(jobs)} == {"finished"}


def rounds_alone(folder: Path) -> float:
    """Seconds that all runs of a sweep spent in their rounds; a run has one thread, and a core for itself."""
    lines = [
        line
        for path in folder.glob("*/timings.jsonl")
        for line in path.read_text().splitlines()[1:]  # behind the run's id
    ]
    rounds = [json.loads(line) for line in lines]
    return sum(one["seconds"] - sum(one.get(part, 0.0) for part in _BESIDE) for one in rounds)


def measure(runs: int, rounds: int, workers: int) -> dict[str, float]:
    """The overhead over the rounds, by CPU time and by wall time."""
    with tempfile.TemporaryDirectory() as folder:
        before, started = _children_cpu(), time.perf_counter()
        arguments = ("--sweep", folder, runs, rounds, workers)
        command = [sys.executable, "-m", "benchmarks.many_runs", *map(str, arguments)]
        subprocess.run(command, check=True)
        wall, cpu = time.perf_counter() - started, _children_cpu() - before
        alone = rounds_alone(Path(folder))
    return {
        "runs": runs,
        "rounds": rounds,
        "seconds of a run's rounds": alone / runs,
        "overhead by CPU": cpu / alone - 1,
        "overhead by wall": workers * wall / alone - 1,
        "load": os.getloadavg()[0],
    }


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    chosen = parser.parse_args()
    if chosen.sweep:
        sweep(Path(chosen.sweep[0]), *map(int, chosen.sweep[1:]))
    else:
        print(json.dumps(measure(chosen.runs, chosen.rounds, chosen.workers), indent=2))
