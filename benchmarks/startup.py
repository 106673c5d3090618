"""How long a command line takes to answer, and a run to reach its first round."""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import as_users_have_it

Seconds = dict[str, float]


def measure(repeats: int = 3) -> dict[str, Seconds]:
    """The best of some tries, wall and CPU: `--help`, and a run of one round from its command to its end.

    The first run also makes the embedded data, and finds nothing compiled, as on a new machine.
    """
    command = [sys.executable, "-m", "fedbandit.cli.app"]
    answers = [_seconds([*command, "--help"]) for _ in range(repeats)]
    with tempfile.TemporaryDirectory() as scratch:
        own = {
            "FEDBANDIT_CACHE": str(Path(scratch) / "cache"),
            "NUMBA_CACHE_DIR": str(Path(scratch) / "kernels"),
        }
        environment = {**as_users_have_it(), **own}
        run = [*command, "run", "so-scratch-softmax", "--rounds", "1", "--quiet"]
        runs = [
            _seconds([*run, "--out", str(Path(scratch) / str(i))], environment)
            for i in range(repeats + 1)
        ]
    return {
        "--help": _best(answers),
        "run of one round, the first": runs[0],
        "run of one round, later": _best(runs[1:]),
    }


def _seconds(command: list[str], environment: dict[str, str] | None = None) -> Seconds:
    wall, cpu = time.perf_counter(), _children_cpu()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return {"wall": time.perf_counter() - wall, "cpu": _children_cpu() - cpu}


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _best(tries: list[Seconds]) -> Seconds:
    return {key: min(one[key] for one in tries) for key in tries[0]}


if __name__ == "__main__":
    print(json.dumps(measure(), indent=2))
