"""What each private mechanism earns at one epsilon, by the server's optimiser: a table, and a picture.

    python scripts/private_rewards.py so-like private-rewards

The data set is made by `fedbandit data generate topics --clients 342477 --like stackoverflow --out so-like`. Run it
again to resume.
"""

import argparse
from pathlib import Path

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
import matplotlib.pyplot as plt

from fedbandit import Config, compare, preset

MECHANISMS = {
    "clipping alone": {"mechanism": "none"},
    "dp-fedavg, Poisson": {"mechanism": "dp-fedavg"},
    "banded-mf, cyclic Poisson": {"mechanism": "banded-mf", "sampling": "cyclic-poisson"},
    "blt": {"mechanism": "blt"},
    "banded-mf, min-separation": {"mechanism": "banded-mf", "sampling": "min-separation"},
    "dp-ftrl": {"mechanism": "dp-ftrl"},
}
SERVERS = {"Adam, 0.01": ("adam", 0.01), "SGD, 1.0": ("sgd", 1.0)}
COLOURS = ("#555555", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#7b2cbf")


def members(epsilon: float) -> dict[str, Config]:
    """Every mechanism with every server, by name."""
    found = {}
    for server, (optimizer, rate) in SERVERS.items():
        for name, settings in MECHANISMS.items():
            budget = {} if settings["mechanism"] == "none" else {"epsilon": epsilon}
            changes = {
                "privacy": {**settings, **budget},
                "server": {"optimizer": optimizer, "learning_rate": rate},
            }
            found[f"{name}, {server}"] = preset("so-dp-0.7").with_values(changes)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data")
    parser.add_argument("out", type=Path)
    parser.add_argument("--epsilon", type=float, default=4.0)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1600)
    given = parser.parse_args()
    changes = {"data.source": given.data, "rounds": given.rounds}
    results = compare(
        members(given.epsilon), given.out, seeds=given.seeds, set=changes, progress=True
    )
    figure, axes = plt.subplots(1, len(SERVERS), figsize=(11, 4.2), sharey=True)
    for column, (axis, server) in enumerate(zip(axes, SERVERS, strict=True)):
        for row, (mechanism, colour) in enumerate(zip(MECHANISMS, COLOURS, strict=True)):
            first = (column * len(MECHANISMS) + row) * given.seeds
            curves = np.atleast_2d(results[first : first + given.seeds]["running_reward"])
            rounds, style = (
                np.arange(1, curves.shape[1] + 1),
                "--" if mechanism == "clipping alone" else "-",
            )
            axis.plot(rounds, curves.mean(axis=0), style, color=colour, label=mechanism)
            axis.fill_between(
                rounds, curves.min(axis=0), curves.max(axis=0), color=colour, alpha=0.15, lw=0
            )
            print(f"{server}; {mechanism}: " + ", ".join(f"{value:.3f}" for value in curves[:, -1]))
        axis.set_title(f"server: {server}", loc="left", fontsize=11)
        axis.set_xlabel("round")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("running average reward")
    axes[-1].legend(frameon=False, fontsize=9, loc="lower right")
    figure.tight_layout()
    figure.savefig(given.out / "private-rewards.png", dpi=110)


if __name__ == "__main__":
    main()
