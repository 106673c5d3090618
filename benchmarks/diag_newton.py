"""Diagonal Newton with its default setting beside FedAvg, `python -m benchmarks.diag_newton --data so-questions`.

Running averages of the reward with the rules below, seeds 0 to 4, in `diag_newton.json`. The setting (rate, prior,
epsilon, gamma) was chosen on seeds 10 to 19 of the first measurement; FedAvg has the published rates and rules.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from fedbandit import open_dataset, preset, simulate

KEPT = Path(__file__).with_suffix(".json")
SEEDS = range(5)
RULES: dict[str, dict[str, float]] = {
    "epsilon-greedy": {"policy.epsilon": 0.02},
    "softmax": {"policy.beta": 0.05},
    "falcon": {"policy.gamma": 1000.0},
}
DRIFT = {"scenario": "drift", "drift.at": (100,), "drift.fraction": 1.0}
MEASUREMENTS: dict[str, dict[str, Any]] = {
    "33 rounds, deploying every round": {"rounds": 33, "deploy_every": 1},
    "200 rounds, deploying every round": {"rounds": 200, "deploy_every": 1},
    "1600 rounds, deploying every 200": {"rounds": 1600, "deploy_every": 200},
    "after a permutation, rounds 181 to 200": {"rounds": 200, "deploy_every": 1, **DRIFT},
    "the same with keep = 0.97": {
        "rounds": 200,
        "deploy_every": 1,
        "algorithm.keep": 0.97,
        **DRIFT,
    },
}


def measured(data: Any, rule: str, seed: int, settings: Mapping[str, Any]) -> float:
    """The running average at the end; after a change the mean of the last 20 rounds."""
    chosen = preset(f"so-scratch-{rule}").with_values({**settings, "seed": seed})
    lines = list(simulate(chosen, data))
    if "drift.at" in settings:
        return mean(line["reward"] for line in lines[-20:])
    return float(lines[-1]["running_reward"])


def summary(values: list[float]) -> dict[str, Any]:
    """Mean and standard error over seeds, and the values themselves."""
    rounded = [round(value, 4) for value in values]
    error = stdev(values) / len(values) ** 0.5
    return {"mean": round(mean(values), 4), "error": round(error, 4), "seeds": rounded}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--data", default="so-questions", help="the folder of the imported questions"
    )
    parser.add_argument(
        "--only", nargs="*", default=list(MEASUREMENTS), help="some of the measurements"
    )
    asked = parser.parse_args()
    questions = open_dataset(asked.data)
    results = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for name in asked.only:
        settings = MEASUREMENTS[name]
        for rule, parameters in RULES.items():
            newton = {"algorithm.name": "diag-newton", **settings, **parameters}
            plain = {k: v for k, v in settings.items() if not k.startswith("algorithm")}
            rows = results.setdefault(name, {}).setdefault(rule, {})
            for algorithm, values in (("diag-newton", newton), ("fedavg", plain)):
                rows[algorithm] = summary([measured(questions, rule, s, values) for s in SEEDS])
            print(name, rule, json.dumps(rows), flush=True)
            KEPT.write_text(json.dumps(results, indent=1) + "\n")
