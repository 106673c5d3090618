"""What delay costs: reward against the rounds between deployments, `python -m benchmarks.delay_cost --data so-questions`.

400 rounds on real questions, softmax, seeds 0 and 1, into `delay_cost.json`. With `--pictures FOLDER` the
two pictures of docs/learning-per-event.md are drawn from what is stored, and nothing is run.
"""

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.peers.vw_loop import best_runs

KEPT = Path(__file__).with_suffix(".json")
EVERY = (1, 2, 5, 10, 20, 50, 100, 200, 400)
SEEDS, ROUNDS = (0, 1), 400
CONTENDERS: dict[str, dict[str, Any]] = {
    "diag-newton with width": {
        "algorithm.name": "diag-newton",
        "policy.alpha": 0.1,
        "policy.beta": 0.02,
    },
    "diag-newton": {"algorithm.name": "diag-newton"},
    "fedavg": {},
}


def measure(data: str) -> None:
    """Every contender at every period; what stands in the file is not run again."""
    from fedbandit import open_dataset, preset, simulate

    dataset = open_dataset(data)
    results = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for every in EVERY:
        for name, settings in CONTENDERS.items():
            row = results.setdefault(name, {})
            if str(every) in row:
                continue
            fixed = {"rounds": ROUNDS, "deploy_every": every, "evaluate_every": 10**6, "threads": 1}
            rewards = []
            for seed in SEEDS:
                config = preset("so-scratch-softmax").with_values(
                    {**settings, **fixed, "seed": seed}
                )
                rewards.append(round(list(simulate(config, dataset))[-1]["running_reward"], 4))
            row[str(every)] = rewards
            KEPT.write_text(json.dumps(results, indent=1) + "\n")
            print(name, every, rewards, flush=True)


def draw(folder: Path) -> None:
    """The strip of all tuned settings, and the cost of delay."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = {"vw": "#777777", "fedavg": "#c44e52", "diag-newton": "#8fb0d8"}
    colours["diag-newton with width"] = "#2a5d9f"
    found = json.loads((KEPT.parent / "learning_per_event.json").read_text())["questions"]
    figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
    for place, name in enumerate(reversed(colours)):
        tried = [runs[0][0] for runs in found[name]["tuning"].values()]
        axes.scatter(tried, [place] * len(tried), s=26, alpha=0.45, color=colours[name], lw=0)
        seeds = [reward for reward, _ in best_runs(found[name])]
        axes.plot([mean(seeds)], [place], "|", ms=26, mew=3, color=colours[name])
    axes.set_yticks(range(len(colours)), [_label(name) for name in reversed(colours)])
    axes.set_ylim(-0.5, len(colours) - 0.5)
    axes.set_xlabel("mean reward of the first 33 rounds")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(folder / "learning-per-event.png", dpi=150)

    figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
    for name, row in json.loads(KEPT.read_text()).items():
        every, rewards = zip(*((int(e), mean(r)) for e, r in row.items()), strict=True)
        axes.plot(every, rewards, "o-", color=colours[name], label=_label(name))
    axes.set_xscale("log")
    axes.set_xticks(EVERY, [str(e) for e in EVERY])
    axes.minorticks_off()
    axes.set_xlabel("rounds between deployments")
    axes.set_ylabel("mean reward of 400 rounds")
    axes.set_ylim(0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(folder / "cost-of-delay.png", dpi=150)


def _label(name: str) -> str:
    return {"vw": "Vowpal Wabbit", "fedavg": "FedAvg with Adam"}.get(name, name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="so-questions", help="the folder of imported questions")
    parser.add_argument("--pictures", type=Path, help="draw into this folder, and run nothing")
    asked = parser.parse_args()
    if asked.pictures:
        draw(asked.pictures)
    else:
        measure(asked.data)
