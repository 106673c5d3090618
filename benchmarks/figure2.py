"""Figure 2 of the paper on a population of Stack Overflow's size, `python -m benchmarks.figure2`.

Generates 342,477 users (64 million sentences, 6 GB; kept for the next time), then makes the four panels at full
length with the published rates: 95 runs, two at a time, opening, drawing, evaluating and files included.
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

from benchmarks import as_users_have_it

HERE = Path(__file__).parent
CLIENTS = 342_477


def generate(folder: Path) -> dict[str, float]:
    """Seconds and peak memory of making the population."""
    command = [
        "data",
        "generate",
        "topics",
        "--clients",
        str(CLIENTS),
        "--like",
        "stackoverflow",
        "--out",
        str(folder),
    ]
    seconds = _timed(command)
    return {
        "seconds": seconds,
        "peak_mb": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024,
    }


def figure(data: Path, seeds: int, workers: int, scale: float) -> dict[str, float]:
    """Seconds of all four panels, and how many runs there were."""
    with tempfile.TemporaryDirectory() as out:
        command = ["figure", "fig2", "--data", str(data), "--out", out, "--workers", str(workers)]
        started = os.getloadavg()[0]
        seconds = _timed([*command, "--seeds", str(seeds), "--scale", str(scale)])
        runs = len(list(Path(out).rglob("summary.json")))
    return {
        "runs": runs,
        "seconds": seconds,
        "scale": scale,
        "load_before": started,
        "load_after": os.getloadavg()[0],
    }


def _timed(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "fedbandit.cli.app", *command], env=as_users_have_it(), check=True
    )
    return time.perf_counter() - began


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--data", type=Path, default=HERE / ".data" / "so-like", help="the population's folder"
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--scale", type=float, default=1.0, help="shorten the rounds, for a quick look"
    )
    chosen = parser.parse_args()
    kept = HERE / "figure2.json"
    result = json.loads(kept.read_text()) if kept.exists() else {}
    if not (chosen.data / "header.json").exists():
        result["generating"] = generate(chosen.data)
    result["figure 2"] = figure(chosen.data, chosen.seeds, chosen.workers, chosen.scale)
    kept.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
