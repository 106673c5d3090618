"""The benchmark: `python -m benchmarks.run` (all of it), `--quick` (under three minutes, no peers but plain torch).

Contestants take turns on the same data; the medians of their rounds are compared, as ratios. Writes results.json and
charts beside this file.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import charts, dense, growth, many_runs, startup, workloads
from benchmarks.contestants import HERE, VENVS, Contestant, Measured, take_turns

sys.path.insert(0, str(HERE / "peers"))
import sgemm

RESULTS = HERE / "results.json"
PEERS = {"pfl": "pfl_loop.py", "fedjax": "fedjax_loop.py", "flower": "flower_loop.py"}
OURS, TRAINING = "fedbandit, bandit round", "fedbandit, training only"
TWO_THREADS = "plain torch, 2 threads"
KINDS = {"bandit": "bandit round", "train": "training only"}
FORMS = [
    ("sparse", "bandit"),
    ("sparse", "train"),
    ("dense", "train"),
]  # of texts; dense bags only train


def contestants(folder: Path, peers: bool) -> list[Contestant]:
    """Everybody who plays on this workload: in whole bandit rounds and in training alone; texts sparse and dense."""
    where = str(folder)
    found = [
        Contestant(OURS, "ours.py", (where, "bandit", "2")),
        Contestant(TRAINING, "ours.py", (where, "train", "2")),
    ]
    loops = [
        ("plain torch, 1 thread", "plain_torch.py", "1", None),
        (TWO_THREADS, "plain_torch.py", "2", None),
    ]
    if peers:
        loops += [
            ("pfl 0.6.0, 1 thread", "pfl_loop.py", "1", "pfl"),
            ("pfl 0.6.0, 2 threads", "pfl_loop.py", "2", "pfl"),
            ("FedJAX 0.0.17", "fedjax_loop.py", "2", "fedjax"),
            ("Flower 1.41.0 + Ray, 2 workers", "flower_loop.py", "2", "flower"),
        ]
    images = (folder / "images.npy").exists()
    for form, kind in FORMS if not images else [("dense", "bandit"), ("dense", "train")]:
        suffix = "" if images else f", {form}"
        found += [
            Contestant(
                f"{name}{suffix}, {KINDS[kind]}", script, (where, form, kind, threads), environment
            )
            for name, script, threads, environment in loops
        ]
    return found


def best_of(rows: dict[str, Any], kind: str) -> tuple[str, dict[str, Any]] | None:
    """The fastest of the others in whole bandit rounds, or in training alone, if any of them was measured so."""
    others = {
        name: row
        for name, row in rows.items()
        if "error" not in row and not name.startswith("fedbandit") and name.endswith(KINDS[kind])
    }
    return min(others.items(), key=lambda item: float(item[1]["wall"]), default=None)


def install_peers() -> dict[str, str]:
    """An environment of its own for each peer, with pinned versions; what goes wrong is reported, not hidden."""
    outcome = {}
    for name in PEERS:
        environment = VENVS / name
        if not (environment / "installed").exists():
            print(f"  installing {name}", flush=True)
            requirements = HERE / "peers" / f"requirements-{name}.txt"
            steps = [
                [sys.executable, "-m", "venv", str(environment)],
                [str(environment / "bin" / "pip"), "install", "--quiet", "-r", str(requirements)],
            ]
            for step in steps:
                done = subprocess.run(step, capture_output=True, text=True)
                if done.returncode:
                    outcome[name] = (done.stderr.strip().splitlines() or ["failed"])[-1]
                    break
            else:
                (environment / "installed").touch()
        outcome.setdefault(name, "installed")
    return outcome


def comparison(name: str, folder: Path, rounds: int, peers: bool, examples: int) -> dict[str, Any]:
    """All contestants on one workload, beside the machine's own speed in the same turns."""
    print(f"\n{name}: {examples:,} examples a round", flush=True)
    machine = [Contestant(f"sgemm, {n}", "sgemm.py", (str(n),)) for n in (1, 2)]
    found = take_turns([*contestants(folder, peers), *machine], rounds, HERE / ".data" / "logs")
    one, two = (found.pop(contestant.name) for contestant in machine)
    # The fastest turn, not the median: a peak is what the machine can do. By CPU time it holds on a busy machine, too.
    peak = {"1": sgemm.FLOP / min(one.wall) / 1e9, "2": 2 * sgemm.FLOP / min(two.wall) / 1e9}
    peak["per CPU second"] = 2 * sgemm.FLOP / min(two.cpu) / 1e9
    rows = {contestant: _row(measured) for contestant, measured in found.items()}
    return {"examples": examples, "peak_gflops": peak, "rows": rows}


def _row(measured: Measured) -> dict[str, Any]:
    if measured.error or not measured.wall:
        return {"error": measured.error or "no rounds"}
    return {
        "wall": float(np.median(measured.wall)),
        "wall_best": min(measured.wall),
        "cpu": float(np.median(measured.cpu)),
        "load": float(np.median(measured.load)),
        "memory_mb": measured.memory / 2**20,
        "rounds": len(measured.wall),
    }


def print_table(name: str, result: dict[str, Any]) -> None:
    """Ratios to a whole bandit round of ours; for images also the share of the machine's peak."""
    rows, base = result["rows"], result["rows"][OURS]
    if "error" in base:
        print(f"{OURS}: {base['error']}")
        return
    images = name.startswith("E")
    print(f"\n{name} (1.00 = a whole bandit round of fedbandit)")
    print(
        f"{'':48s} {'wall':>7s} {'CPU':>7s} {'memory':>8s} {'load':>6s}{'  of sgemm peak: wall, CPU' if images else ''}"
    )
    for contestant, row in rows.items():
        if "error" in row:
            print(f"{contestant:48s} not measured: {row['error'][:80]}")
            continue
        line = f"{contestant:48s} {row['wall'] / base['wall']:7.2f} {row['cpu'] / base['cpu']:7.2f}"
        line += f" {row['memory_mb']:5.0f} MB {row['load']:6.1f}"
        if images:
            acts = contestant.endswith(KINDS["bandit"])
            flop = workloads.FLOP_TRAINING + (workloads.FLOP_FORWARD if acts else 0)
            threads = "1" if "1 thread" in contestant else "2"
            work, peak = flop * result["examples"] / 1e9, result["peak_gflops"]
            row["of_peak"], row["of_peak_cpu"] = (
                work / row["wall"] / peak[threads],
                work / row["cpu"] / peak["per CPU second"],
            )
            line += f" {100 * row['of_peak']:16.0f}% {100 * row['of_peak_cpu']:4.0f}%"
        print(line)
    for kind in KINDS:
        if (fastest := best_of(rows, kind)) is not None:
            name, row = fastest
            print(
                f"the fastest of the others, {KINDS[kind]}: {row['wall'] / base['wall']:.2f} ({name})"
            )
    print(
        f"a bandit round: {base['wall']:.3f} s wall, {base['cpu']:.3f} s CPU, {1 / base['wall']:.1f} rounds a second"
    )
    if images:
        one, two, cpu = result["peak_gflops"].values()
        print(
            f"sgemm in the same turns: {one:.0f} GFLOP/s on one core, {two:.0f} on two, {cpu:.0f} per CPU second"
        )


def busy_neighbour(folder: Path, rounds: int) -> dict[str, float]:
    """How much a round slows down when another process keeps one core busy: 1.5 is a fair share on two cores."""
    print("\nwith another process busy on one core", flush=True)
    some = [
        c
        for c in contestants(folder, peers=False)
        if c.name in (OURS, f"{TWO_THREADS}, {KINDS['train']}")
    ]
    quiet = take_turns(some, rounds, HERE / ".data" / "logs")
    core = sorted(os.sched_getaffinity(0))[0]
    endless = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    neighbour = subprocess.Popen([sys.executable, "-c", endless])
    try:
        busy = take_turns(some, rounds, HERE / ".data" / "logs")
    finally:
        neighbour.kill()
        neighbour.wait()
    slowdown = {
        name: float(np.median(busy[name].wall) / np.median(quiet[name].wall)) for name in quiet
    }
    for name, factor in slowdown.items():
        print(f"{name:34s} {factor:.2f} times as long")
    return slowdown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="under three minutes, no peers but the plain torch loop",
    )
    parser.add_argument("--rounds", type=int, help="turns of each contestant")
    parser.add_argument(
        "--only", choices=("E", "S"), help="this workload alone; the rest of results.json stays"
    )
    parser.add_argument(
        "--clients", type=int, help="clients of workload E, for a shorter look than 64"
    )
    chosen = parser.parse_args()
    quick = chosen.quick
    rounds = chosen.rounds or (2 if quick else 5)
    machine = {
        "processor": platform.processor(),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg(),
    }
    result: dict[str, Any] = {"quick": quick, "machine": machine}
    if chosen.only:
        kept = json.loads(RESULTS.read_text())
        result = {name: value for name, value in kept.items() if name != chosen.only} | result
    if not quick:
        result["peers"] = install_peers()
    images, texts = workloads.images(chosen.clients or (8 if quick else 64)), workloads.texts()
    for name, folder in (("E", images), ("S", texts)):
        if chosen.only in (None, name):
            examples = int(np.load(folder / "offsets.npy")[-1])
            result[name] = comparison(name, folder, rounds, not quick, examples)
            RESULTS.write_text(json.dumps(result, indent=2) + "\n")  # what comes next may fail
    if not quick and chosen.only != "S":
        result["busy_neighbour"] = busy_neighbour(
            workloads.images(min(16, chosen.clients or 16)), rounds
        )
    if not chosen.only:
        print("\ngrowth of a round (CPU seconds)")
        result["growth"] = growth.measure(rounds=3 if quick else 7, short=quick)
        result["startup"] = startup.measure(2 if quick else 5)
    if not chosen.only and not quick:
        result["tables"] = dense.measure_on_one_core()
        result["many runs"] = many_runs.measure(runs=200, rounds=200, workers=2)
    for name in ("E", "S"):
        print_table(
            f"{name}: {'the FedAvg CNN on images' if name == 'E' else 'a linear model on text'}",
            result[name],
        )
    start = result["startup"]
    print("\nfrom command to answer, seconds of wall and of CPU:")
    for what, seconds in start.items():
        print(f"{what:34s} {seconds['wall']:7.2f} {seconds['cpu']:7.2f}")
    if "tables" in result:
        print("\ntables, multiples of fedbandit's CPU time:")
        dense.report(result["tables"])
        print(f"\nmany short runs: {json.dumps(result['many runs'], indent=2)}")
    result["machine"]["load_after"] = os.getloadavg()
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    for path in charts.draw(result, HERE):
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
