"""Draw what to use in which situation, from the committed results of bake-off (a).

    python scripts/decision_picture.py docs/results/bakeoff/a*/summary.json docs/images/which-algorithm.png

One panel for each regime: every contender's reward beside tuned softmax with FedAvg, in per cent of
it, with the simultaneous 95% interval of the paired difference.
"""

import json
import sys
from pathlib import Path
from typing import Any

REGIMES = {
    "scratch": "No initial model",
    "init": "A good initial model,\nnothing changes",
    "init-shift": "An initial model of\nanother time or reward",
    "drift": "The world changes\nhalf-way",
}
REFERENCE = ("softmax", "regression", "fedavg-adam")


def _label(cell: dict[str, Any]) -> str:
    parts = [cell["rule"], cell["objective"].replace("regression", ""), cell["algorithm"]]
    return ", ".join(part for part in parts if part)


def draw(summaries: list[Path], to: Path) -> None:
    """Write the picture of all regimes that the summaries hold."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cells = [cell for path in summaries for cell in json.loads(path.read_text())["cells"]]
    regimes = [name for name in REGIMES if any(cell["regime"] == name for cell in cells)]
    labels = list(dict.fromkeys(_label(cell) for cell in cells))
    means = dict.fromkeys(labels, 0.0)
    figure, axes = plt.subplots(
        1, len(regimes), figsize=(3.6 + 2.3 * len(regimes), 5), sharey=True, layout="constrained"
    )
    panels = {}
    for regime in regimes:
        mine = [cell for cell in cells if cell["regime"] == regime]
        base = next(c for c in mine if (c["rule"], c["objective"], c["algorithm"]) == REFERENCE)
        panels[regime] = (mine, base["reward"])
        for cell in mine:
            means[_label(cell)] += (cell["reward"] / base["reward"] - 1) / len(regimes)
    labels.sort(key=means.__getitem__)
    for axis, regime in zip([axes] if len(regimes) == 1 else axes, regimes, strict=True):
        mine, unit = panels[regime]
        best = max(cell["reward"] for cell in mine)
        for cell in mine:
            place = labels.index(_label(cell))
            gain = 100 * (cell["reward"] / unit - 1)
            colour = "#2a5d9f" if "newton" in cell["algorithm"] else "#c44e52"
            if cell["low"] is not None:
                ends = [100 * cell["low"] / unit, 100 * cell["high"] / unit]
                axis.plot(ends, [place, place], color=colour, lw=2, alpha=0.5)
            size = 110 if cell["reward"] == best else 34
            axis.scatter([gain], [place], s=size, color=colour, zorder=3)
        axis.axvline(0, color="#888888", lw=0.8)
        axis.set_title(REGIMES[regime], fontsize=10)
        axis.set_xlabel("% of softmax, FedAvg", fontsize=8)
        axis.grid(axis="y", alpha=0.25)
        axis.set_yticks(range(len(labels)), labels, fontsize=8)
        axis.tick_params(axis="x", labelsize=8)
    figure.suptitle("Reward of tuned contenders; the large dot is the best", fontsize=10)
    to.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(to, dpi=130)


if __name__ == "__main__":
    *given, picture = map(Path, sys.argv[1:])
    draw(given, picture)
