"""Pictures of runs. The same policy has the same colour everywhere, and the colours are safe for the colour-blind."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

# Okabe and Ito's palette.
COLOURS = {
    "softmax": "#0072B2",
    "falcon": "#D55E00",
    "epsilon-greedy": "#009E73",
    "greedy": "#CC79A7",
    "baseline": "#595959",
}
OTHER_COLOURS = ("#E69F00", "#56B4E9", "#000000", "#8C6D31", "#7B4173")
_DASHES = {"baseline": (4, 2)}


def colour_of(label: str, position: int = 0) -> str:
    """The colour of a policy by its name or a label that starts or ends with it."""
    for name in sorted(COLOURS, key=len, reverse=True):  # "epsilon-greedy" before "greedy"
        if label == name or label.endswith(f"-{name}") or label.startswith(f"{name} "):
            return COLOURS[name]
    return OTHER_COLOURS[position % len(OTHER_COLOURS)]


def draw_curves(
    curves: Mapping[str, np.ndarray],
    path: Path,
    *,
    title: str,
    ylabel: str = "running average reward",
    deploy_every: int | None = None,
    note: str = "",
) -> Path:
    """Mean and band (± one standard deviation over seeds) of curves [seeds, rounds], saved by the path's suffix."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for position, (label, values) in enumerate(curves.items()):
        _band(axes, label, np.atleast_2d(values), position)
    rounds = max(np.atleast_2d(values).shape[1] for values in curves.values())
    if deploy_every and rounds // deploy_every <= 40:
        for deployed in range(deploy_every, rounds, deploy_every):
            axes.axvline(deployed, color="#d0d0d0", linewidth=0.7, zorder=0)
    axes.set(xlabel="round (grey lines: deployments)" if deploy_every else "round", ylabel=ylabel)
    axes.set_title(f"{title}\n" if note else title, loc="left")
    if note:
        axes.text(0, 1.02, note, transform=axes.transAxes, fontsize=8, color="#595959")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlim(1, rounds)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def _band(axes: Any, label: str, values: np.ndarray, position: int) -> None:
    rounds = np.arange(1, values.shape[1] + 1)
    mean, spread = values.mean(axis=0), values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(values.shape[1])
    colour = colour_of(label, position)
    axes.plot(rounds, mean, label=label, color=colour, linewidth=1.6, dashes=_DASHES.get(label, (None, None)))
    if len(values) > 1:
        axes.fill_between(rounds, mean - spread, mean + spread, color=colour, alpha=0.18, linewidth=0)
