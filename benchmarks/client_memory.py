"""FedDyn's cost beside FedAvg's on `topics`: `python -m benchmarks.client_memory [PAIRS] [ROUNDS]`.

Runs the FedDyn of `docs/algorithms.md` and FedAvg by turns, each as a command of its own, and
writes CPU seconds (start included), their ratio and the size of the clients' memory to
`client_memory.json`.
"""

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "algorithms.md"


def cpu_seconds(folder: Path, rounds: int, *settings: str) -> float:
    """User and system seconds of `fedbandit run` with these settings, in that folder."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = ["fedbandit", "run", "so-scratch-softmax", "-o", "run", "--rounds", str(rounds)]
    chosen = ["clipping.enabled=false", "threads=1", *settings]
    options = [part for setting in chosen for part in ("--set", setting)]
    environment = os.environ | {"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}
    subprocess.run(
        [*command, *options], cwd=folder, check=True, capture_output=True, env=environment
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(pairs: int = 3, rounds: int = 450) -> None:
    """Measure, print and write."""
    found = re.search(r"<!-- file: my_feddyn.py -->\n```python\n(.*?)```", PAGE.read_text(), re.S)
    assert found is not None
    rows, sizes = [], []
    for pair in range(pairs + 1):
        seconds = []
        for settings in ((), ("algorithm.name=my_feddyn:FedDyn",)):
            with tempfile.TemporaryDirectory() as kept:
                folder = Path(kept)
                (folder / "my_feddyn.py").write_text(found[1])
                seconds.append(cpu_seconds(folder, rounds, *settings))
                memory = folder / "run" / "memory.sqlite"
                sizes += [memory.stat().st_size / 1e6] if settings else []
        if pair:  # the first pair fills numba's cache
            rows.append(seconds)
            print(f"FedAvg {seconds[0]:.2f} s, FedDyn {seconds[1]:.2f} s of CPU", flush=True)
    result = {
        "rounds": rounds,
        "cpu_seconds_fedavg_feddyn": [[round(one, 2) for one in row] for row in rows],
        "median_ratio": round(median(dyn / avg for avg, dyn in rows), 2),
        "largest_ratio": round(max(dyn / avg for avg, dyn in rows), 2),
        "memory_megabytes": round(max(sizes), 1),
    }
    print(json.dumps(result))
    (HERE / "client_memory.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
