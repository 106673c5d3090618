"""How a round's cost grows: with examples per client, clients per round, words, actions and threads.

Points of a curve take turns, and each is the smallest CPU time of its rounds, so that a busy machine bends no curve.
"""

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import workloads

sys.path.insert(0, str(Path(__file__).parent / "peers"))
import ours

CURVES: dict[str, dict[str, Any]] = {
    "examples per client": {"key": "examples", "values": [16, 64, 256, 1024], "base": {}},
    "clients per round": {
        "key": "clients",
        "values": [16, 64, 256, 1024],
        "base": {"examples": 64},
    },
    "words": {"key": "words", "values": [1_000, 10_000, 100_000], "base": {}},
    "actions": {
        "key": "actions",
        "values": [10, 100, 1_000, 10_000],
        "base": {"words": 1_000, "clients": 16},
    },
    "threads": {"key": "threads", "values": [1, 2, 4], "base": {}},
}
SHORT = {"examples per client": 3, "clients per round": 3, "words": 3, "actions": 3, "threads": 2}


def measure(rounds: int = 5, short: bool = False) -> dict[str, list[dict[str, float]]]:
    """For every curve its points: value, seconds of wall and CPU a round."""
    return {name: _curve(name, rounds, short) for name in CURVES}


def _curve(name: str, rounds: int, short: bool) -> list[dict[str, float]]:
    curve = CURVES[name]
    values = curve["values"][: SHORT[name]] if short else curve["values"]
    points = []
    for value in values:
        settings = {"threads": 2, **curve["base"], curve["key"]: value}
        threads = settings.pop("threads")
        folder = workloads.texts(**settings)
        points.append(
            ours.BanditRounds(
                ours.experiment(ours.dataset(folder), settings.get("clients")), threads
            )
        )
        points[-1]()  # compiled and warm
    taken: list[list[tuple[float, float]]] = [[] for _ in points]
    for _ in range(rounds):
        for play, times in zip(points, taken, strict=True):
            wall, cpu = time.perf_counter(), time.process_time()
            play()
            times.append((time.perf_counter() - wall, time.process_time() - cpu))
    print(
        f"  {name}: {', '.join(f'{v:,}: {min(c for _, c in t):.3f}' for v, t in zip(values, taken, strict=True))}"
    )
    return [
        {
            "value": value,
            "wall": float(np.median([w for w, _ in times])),
            "cpu": min(c for _, c in times),
        }
        for value, times in zip(values, taken, strict=True)
    ]
