"""Diagonal Newton with its default setting beside FedAvg, `python -m benchmarks.diag_newton --data so-questions`.

Running averages of the reward with the rules below, seeds 0 to 4, in `diag_newton.json`. The setting (rate, prior,
bias, epsilon, gamma, alpha) was chosen on seeds 10 to 19 of the first measurements, keep and alpha after a permutation
on seeds 10 to 12. FedAvg has the published rates and the same rules; what stands in the file is not run again.
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
SHORT, LONGER = {"rounds": 33, "deploy_every": 1}, {"rounds": 200, "deploy_every": 1}
WIDTH = {"policy.alpha": 0.1}
MEASUREMENTS: dict[str, dict[str, Any]] = {
    "33 rounds, deploying every round": SHORT,
    "33 rounds, with width": SHORT | WIDTH,
    "200 rounds, deploying every round": LONGER,
    "200 rounds, with width": LONGER | WIDTH,
    "after a permutation, rounds 181 to 200": LONGER | DRIFT,
    "after a permutation, keep = 0.9, alpha = 0.5": {
        **LONGER,
        **DRIFT,
        "algorithm.keep": 0.9,
        "policy.alpha": 0.5,
    },
    "200 rounds, keep = 0.9, alpha = 0.5": LONGER | {"algorithm.keep": 0.9, "policy.alpha": 0.5},
    "1600 rounds, deploying every 200": {"rounds": 1600, "deploy_every": 200},
    "1600 rounds, with width": {"rounds": 1600, "deploy_every": 200, **WIDTH},
}


def measured(data: Any, rule: str, seed: int, settings: Mapping[str, Any]) -> float:
    """The running average at the end; after a change the mean of the last 20 rounds."""
    fixed = {"seed": seed, "threads": 1, "evaluate_every": 10**6}
    chosen = preset(f"so-scratch-{rule}").with_values({**settings, **fixed})
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
            newton = {"algorithm.name": "diag-newton", **parameters, **settings}
            if rule == "softmax" and "policy.alpha" in settings:
                newton["policy.beta"] = 0.02  # widths explore already
            contenders = {"diag-newton": newton}
            if not any(key.startswith(("algorithm", "policy")) for key in settings):
                contenders["fedavg"] = settings
            rows = results.setdefault(name, {}).setdefault(rule, {})
            for algorithm in contenders.keys() - rows.keys():
                values = contenders[algorithm]
                rows[algorithm] = summary([measured(questions, rule, s, values) for s in SEEDS])
            print(name, rule, json.dumps(rows), flush=True)
            KEPT.write_text(json.dumps(results, indent=1) + "\n")
