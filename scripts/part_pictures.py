"""Pictures of the pages about policies, objectives and algorithms: probabilities over time.

    python scripts/part_pictures.py docs/images      policies, objectives, algorithms, linucb-regret

A linear world with noise: 200 users, 6 numbers a context, 5 actions. Every panel is one run; a
colour is the probability of the best action, of the second best and so on, averaged over 400
contexts that nobody trained on.
"""

import sys
import tempfile
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from fedbandit import Config, import_frame, simulate
from fedbandit.core.contexts import Contexts
from fedbandit.environments import Met

USERS, EACH, NUMBERS, ACTIONS = 200, 40, 6, 5
COLOURS = ("#1b7837", "#7fbf7b", "#d9d9d9", "#c2a5cf", "#762a83")
LINEAR = {"name": "linear", "strength": 0.4, "noise": 0.2}
NOISY = {"name": "linear", "strength": 0.1, "noise": 0.5}  # for regret: gaps well below the noise
SURE = {"name": "statistics"}
SLOW = {"client": {"learning_rate": 0.3}, "server": {"optimizer": "sgd", "learning_rate": 1.0}}
POLICIES = {
    "greedy": {"name": "greedy"},
    "epsilon-greedy": {"name": "epsilon-greedy", "epsilon": 0.2},
    "decaying-epsilon": {"name": "decaying-epsilon", "half": 500.0},
    "softmax": {"name": "softmax", "beta": 0.1},
    "falcon": {"name": "falcon", "mu": 5.0, "gamma": 50.0},
    "falcon-schedule": {"name": "falcon-schedule"},
    "squarecb": {"name": "squarecb", "scale": 1.0},
    "ucb, floor 0.1": {"name": "ucb", "alpha": 1.0, "floor": 0.1},
    "thompson": {"name": "thompson"},
}
OBJECTIVES = {
    "regression": {"name": "regression"},
    "weighted-regression": {"name": "weighted-regression"},
    "weighted, limit 10": {"name": "weighted-regression", "limit": 10.0},
    "doubly-robust": {"name": "doubly-robust"},
    "doubly-robust, limit 10": {"name": "doubly-robust", "limit": 10.0},
}
ALGORITHMS = ("fedavg", "fedprox", "scaffold", "diag-newton", "statistics")


def world(folder: Path) -> str:
    """A data set of contexts alone: what actions pay is the environment's to say."""
    rng = np.random.default_rng(0)
    rows = USERS * EACH
    frame = pd.DataFrame(
        rng.normal(size=(rows, NUMBERS)), columns=[f"x{i}" for i in range(NUMBERS)]
    )
    frame["user"] = np.repeat([f"u{i}" for i in range(USERS)], EACH)
    frame["label"] = [f"action {i % ACTIONS}" for i in range(rows)]
    import_frame(frame, folder, client="user", labels="label", test_fraction=0.05)
    return str(folder)


def configured(source: str, **parts: object) -> Config:
    base = {
        "scenario": "scratch", "rounds": 40, "deploy_every": 1, "clients_per_round": 5, "threads": 1,
        "data": {"source": source}, "environment": LINEAR, "client": {"max_examples": 10},
    }  # fmt: skip
    for name, value in parts.items():
        base[name] = {**base.get(name, {}), **value} if isinstance(value, dict) else value
    return Config.build(base)


def shares(config: Config) -> np.ndarray:
    """For each round the mean probability of the best action, of the second best, ...: [rounds, K]."""
    simulation = simulate(config)
    work, split = simulation.experiment.bandit.work, simulation.experiment.dataset.test
    rows = np.arange(min(400, split.num_examples))
    contexts, zeros = Contexts(split.contexts(rows).shared), np.zeros(len(rows), np.int64)
    labels = simulation.experiment.dataset.test.labels.take(rows)
    met = Met(0, contexts, labels, zeros, zeros + 1, rows, work.num_actions)
    order = np.argsort(-np.asarray(work.world.expected(met)), axis=1)
    found = []
    for _ in simulation:
        version = simulation.state.deployed[max(simulation.state.deployed)]
        _, probabilities = work.actor(version).distribution(contexts)
        found.append(np.take_along_axis(probabilities, order, axis=1).mean(axis=0))
    return np.array(found)


def draw(panels: dict[str, np.ndarray], columns: int, path: Path) -> None:
    """One stacked area a panel, best action at the bottom."""
    rows = -(-len(panels) // columns)
    size = (3.1 * columns, 2.1 * rows + 0.3)
    figure, axes = plt.subplots(
        rows, columns, figsize=size, sharex=True, sharey=True, squeeze=False
    )
    for axis in axes.ravel()[len(panels) :]:
        axis.set_visible(False)
    for axis, (name, found) in zip(axes.ravel(), panels.items(), strict=False):
        axis.stackplot(np.arange(1, len(found) + 1), found.T, colors=COLOURS)
        axis.set_title(name, fontsize=10)
        axis.set_xlim(1, len(found))
        axis.set_ylim(0, 1)
    for axis in axes[:, 0]:
        axis.set_ylabel("probability")
    for axis in axes[-1]:
        axis.set_xlabel("round")
    names = ["best action", "2nd", "3rd", "4th", "worst"]
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS]
    figure.legend(handles, names, loc="lower center", ncols=5, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.25 / size[1], 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def regret(source: str, path: Path) -> None:
    """Exact cumulative regret on the linear world beside sqrt(T), both axes logarithmic."""
    rules = {
        "LinUCB (ucb, alpha 0.5)": {"name": "ucb", "alpha": 0.5},
        "linear Thompson sampling": {"name": "thompson", "scale": 0.5},
        "epsilon-greedy, 0.1": {"name": "epsilon-greedy", "epsilon": 0.1},
        "uniform": {"name": "uniform"},
    }
    figure, axis = plt.subplots(figsize=(6.4, 4.2))
    colours = ("#1b7837", "#2166ac", "#b2182b", "#969696")
    for colour, (name, rule) in zip(colours, rules.items(), strict=True):
        sums, times = [], None
        for seed in range(3):
            parts = {"policy": rule, "algorithm": SURE, "environment": NOISY}
            config = configured(source, **parts, rounds=400, seed=seed)
            lines = list(simulate(config))
            times = np.cumsum([line["events"] for line in lines])
            sums.append(np.cumsum([line["regret"] * line["events"] for line in lines]))
        mean = np.mean(sums, axis=0)
        late = times >= times[-1] // 10
        slope = np.polyfit(np.log(times[late]), np.log(mean[late]), 1)[0]
        print(f"{name}: regret {mean[-1]:.1f} after {times[-1]:,} events, exponent {slope:.2f}")
        axis.loglog(times, mean, color=colour, label=f"{name}: T^{slope:.2f}")
        if name.startswith("LinUCB"):
            axis.loglog(times, mean[-1] * np.sqrt(times / times[-1]), "k--", lw=1, label="sqrt(T)")
    axis.set_xlabel("events T")
    axis.set_ylabel("cumulative regret")
    axis.legend(frameon=False, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        source = world(Path(folder) / "world")
        rules = {
            name: shares(configured(source, policy=rule, algorithm=SURE))
            for name, rule in POLICIES.items()
        }
        heads = {
            "model": {"name": "linear-heads", "heads": 10},
            "policy": {"name": "bagging"},
            **SLOW,
        }
        rules["bagging (10 heads)"] = shares(configured(source, **heads))
        draw(rules, 5, out / "policies.png")
        explored = {"name": "softmax", "beta": 0.2}
        losses = {
            name: shares(configured(source, policy=explored, objective=one, **SLOW))
            for name, one in OBJECTIVES.items()
        }
        draw(losses, 5, out / "objectives.png")
        near = {"name": "softmax", "beta": 0.1}
        ways = {
            name: shares(configured(source, policy=near, algorithm={"name": name}, **SLOW))
            for name in ALGORITHMS
        }
        draw(ways, 5, out / "algorithms.png")
        regret(source, out / "linucb-regret.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
